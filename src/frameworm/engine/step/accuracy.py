"""Whether a model's output holds class scores, and how many of its answers are right.

Integer targets need not be classes: they may be counts to regress on, or groups of embeddings. The loss decides: if it
uses the target as an index into the scores, the target is a class. This is observed in the first validation batch, for
any loss.
"""

from __future__ import annotations

from typing import Any

import torch

from frameworm.torch_private.tensors import TorchDispatchMode

IGNORED_TARGET = -100
_aten = torch.ops.aten


def class_dimensions(scores: Any, target: Any) -> list[int]:
    """Return the dimensions that may hold the classes, by shape: dimension 1, as in torch's losses, or the last."""
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or not target.ndim:
        return []
    if target.is_floating_point() or target.dtype == torch.bool or scores.ndim != target.ndim + 1:
        return []
    shape = scores.shape
    found = []
    for dimension in dict.fromkeys((1, scores.ndim - 1)):
        if shape[:dimension] + shape[dimension + 1 :] == target.shape and shape[dimension] > 1:
            found.append(dimension)
    return found


def right_answers(
    scores: torch.Tensor, target: torch.Tensor, dimension: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the targets answered right, and all targets; on the device, so that the host does not wait."""
    asked = (target >= 0) & (target != ignored)
    return ((scores.argmax(dimension) == target) & asked).sum(), asked.sum()


class ClassLosses(TorchDispatchMode):
    """Observes operations that use a batch's target as an index into scores.

    Args:
        target: One integer per sample.

    Attributes:
        seen: The indexed scores, and the ignored target of each operation.
    """

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self.seen: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        if operation in (_aten.nll_loss_forward, _aten.nll_loss2d_forward):
            self._note(args[0], args[1], args[4])
        elif operation is _aten.multi_margin_loss:
            self._note(args[0], args[1])
        elif operation is _aten.gather and args[1] in (1, -1):
            self._note(args[0], args[2])
        elif operation is _aten.index and len(args[1]) == 2 and args[1][1] is not None:
            self._note(args[0], args[1][1])
        return func(*args, **(kwargs or {}))

    def _note(self, scores: torch.Tensor, index: torch.Tensor, ignored: int = IGNORED_TARGET) -> None:
        target = self._target
        if type(index) is not torch.Tensor or index.numel() != target.numel() or index.dtype == torch.bool:
            return
        if torch.equal(index.flatten().to(target.dtype), target):
            self.seen.append((scores.detach(), ignored))

    def ignored_target(self, scores: torch.Tensor) -> int | None:
        """Return the ignored target if the loss treated the others as classes of these scores; else None.

        The indexed tensor must rank the classes as the scores do, since a head inside the loss has other scores.
        """
        best = scores.argmax(1, keepdim=True)
        for indexed, ignored in self.seen:
            if indexed.shape != scores.shape:
                continue
            chosen = indexed.gather(1, best).flatten()
            if torch.equal(chosen, indexed.amax(1)) or torch.equal(chosen, indexed.amin(1)):
                return ignored
        return None
