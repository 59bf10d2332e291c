"""Counts the FLOPs of a training step while it runs, without changing what it computes."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from frameworm.observe.flops.formulas import Work, has_values, pairs_of, type_name, work_of
from frameworm.torch_private.names import COMPILER
from frameworm.torch_private.tensors import TorchDispatchMode, overload_packet, schema_of

_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax"})
FORWARD, BACKWARD, NEITHER = "forward", "backward", "neither"
# Libraries whose operations have a formula here, or no significant arithmetic.
_KNOWN = {
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "fsdp",
    "profiler",
    "inductor",
    "torchvision",
    "frameworm",
}


@dataclass
class FlopCount:
    """FLOPs of the steps that were counted.

    Attributes:
        products: Everything but attention kernels; grows with the tokens computed, including padding.
        attention: Attention, by pairs of tokens at the computed shapes.
        masked_attention: Attention whose lengths or mask excluded padding.
        by_type: Total by dtype of the multiplied numbers.
        shapes: FLOPs by batch, rows, inner width, columns and dtype of a matrix product.
        scores: By batch, rows and columns of softmax inputs: unmasked pairs, and all pairs.
        uncounted: Operations of other libraries without a formula.
        problem: The error of a formula that failed; the count must then not be used.
    """

    products: float = 0.0
    attention: float = 0.0
    masked_attention: float = 0.0
    by_type: Counter[str] = field(default_factory=Counter)
    shapes: Counter[tuple[int, int, int, int, str]] = field(default_factory=Counter)
    scores: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)
    problem: str | None = None

    @property
    def total(self) -> float:
        """All FLOPs, at the computed shapes."""
        return self.products + self.attention + self.masked_attention

    @property
    def main_type(self) -> str | None:
        """The dtype of most of the FLOPs."""
        return max(self.by_type, key=lambda name: self.by_type[name]) if self.by_type else None

    def add(self, work: Work) -> None:
        """Add one operation."""
        if not work.by_pairs:
            self.products += work.flops
        elif work.real:
            self.masked_attention += work.flops
        else:
            self.attention += work.flops
        self.by_type[work.dtype] += work.flops  # type: ignore[assignment]
        if work.product is not None:
            self.shapes[(*work.product, work.dtype)] += work.flops  # type: ignore[assignment]

    def merge(self, other: FlopCount) -> None:
        """Add another count; both must be settled."""
        self.products += other.products
        self.attention += other.attention
        self.masked_attention += other.masked_attention
        self.by_type.update(other.by_type)
        self.shapes.update(other.shapes)
        self.uncounted |= other.uncounted
        self.problem = self.problem or other.problem

    def settle(self) -> None:
        """Reclassify written-out attention: products whose shapes match the softmax scores between them."""
        for (batch, rows, inner, columns, _), flops in self.shapes.items():
            matrices = ((rows, columns), (rows, inner), (inner, columns))
            keys = [(batch, *sizes) for one in matrices for sizes in (one, one[::-1])]
            pairs = next((self.scores[key] for key in keys if key in self.scores), None)
            if pairs is not None and batch > 1:
                self.products -= flops
                if pairs[0] < pairs[1]:
                    self.masked_attention += flops * pairs[0] / pairs[1]
                else:
                    self.attention += flops
        self.scores.clear()


class FlopCounter(TorchDispatchMode):
    """Counts every operation that runs inside it without changing it, like torch's own FlopCounterMode.

    torch's counter decomposes operations to count them, and overcounts: causal attention in full, scores that attention
    recomputes in backward, the gradients of grouped convolutions many times, and recomputed activations. This one
    counts what the model's arithmetic needs. Formulas registered with torch's `register_flop_formula` are used too.

    Set `phase` to `forward` or `backward` while these run: operations of backward with gradients enabled are
    recomputation and are not counted.
    """

    supports_higher_order_operators = True

    def __new__(cls) -> FlopCounter:
        """Create a counter that the compiler skips, if the compiler is loaded; checking via torch would load it."""
        guarded = cls is FlopCounter and COMPILER in sys.modules
        return object.__new__(_guarded() if guarded else cls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see __new__

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = FlopCount()
        self.phase = FORWARD

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, or the compiler would permanently give up on every function that runs in here."""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.count.settle()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        recomputes = self.phase == BACKWARD and torch.is_grad_enabled()
        if not recomputes and self.phase != NEITHER:
            try:
                self._see(function, args, kwargs or {}, result)
            except Exception as error:  # a failed count must not stop the training
                self.count.problem = f"{function}: {type(error).__name__}: {error}"
        return result

    def _see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = schema_of(function)
        if schema is None:
            name, arguments = str(function.name()), dict(zip(("query", "key", "value"), args))
        else:
            name, arguments = schema.name, _named(schema, args, kwargs)
        if name in _SOFTMAX and self.phase == FORWARD:
            self._see_scores(args[0])
            return
        work = work_of(name, arguments, result)
        if work is None and name.partition("::")[0] not in _KNOWN:
            work = self._registered(function, name, args, kwargs, result)
        if work is not None:
            self.count.add(work)

    def _see_scores(self, scores: torch.Tensor) -> None:
        """Count the unmasked pairs of an attention that is written out as products and a softmax."""
        if scores.dim() < 3 or not has_values(scores):
            return
        rows, columns = scores.shape[-2:]
        key = (scores.numel() // max(rows * columns, 1), rows, columns)
        pairs, total = self.count.scores.get(key, (0.0, 0.0))
        self.count.scores[key] = pairs + pairs_of(scores), total + scores.numel()

    def _registered(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Work | None:
        """Use a formula that the user or a library has registered with torch."""
        from torch.utils.flop_counter import flop_registry  # late: it loads triton

        formula = flop_registry.get(overload_packet(function))
        if formula is None:
            self.count.uncounted.add(name)
            return None
        tensors = [item for item in args if isinstance(item, torch.Tensor) and item.is_floating_point()]
        flops = formula(*args, **kwargs, out_val=result)
        return Work(float(flops), type_name(tensors[0]) if tensors else "fp32")


@functools.cache
def _guarded() -> type[FlopCounter]:
    dispatch = torch.compiler.disable(FlopCounter.__torch_dispatch__)
    return type("GuardedFlopCounter", (FlopCounter,), {"__torch_dispatch__": dispatch})


def _named(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name; omitted ones keep their defaults, which no formula needs."""
    return {**{item.name: value for item, value in zip(schema.arguments, args)}, **kwargs}
