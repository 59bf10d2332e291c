"""Error feedback on an ill-conditioned quadratic: with it compression reaches the plain loss, without it does not.

The same check must catch a codec that is broken, or it shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compression_cases import FakeBucket, Holder
from torch import Tensor

from frameworm.parallel.compression.hook import CompressionHook
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.sparse import TopK

Ranks = Callable[..., list[Any]]

COUNT = 700
# Without feedback int4 needs many steps to fall behind; int8 hardly would.
STEPS = {"int8": 200, "int4": 500, "topk": 400}
# Top-k sends a value every hundred steps or so: what it owes meanwhile must be small against what a step moves.
LEARNING_RATES = {"int8": (0.1, 2), "int4": (0.1, 2), "topk": (0.02, 1)}  # the first one, and how it falls to zero


class DropsResidual(Quantizer):
    """Encodes with the residual and forgets to write the new one."""

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, draw: Any = None) -> None:
        super().encode(values, payload, None if residual is None else residual.zero_(), draw)
        if residual is not None:
            residual.zero_()


class Biased(Quantizer):
    """Decodes a little too much, which no residual knows of."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        super().decode(payload, out)
        out.add_(0.05)


class DropsLeftOut(TopK):
    """Forgets what it did not send."""

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, draw: Any = None) -> None:
        super().encode(values, payload, residual, draw)
        if residual is not None:
            residual.zero_()


SABOTAGED: dict[str, tuple[str, Callable[[], Any]]] = {
    "int4 drops the residual": ("int4", lambda: DropsResidual(4)),
    "int4 is biased": ("int4", lambda: Biased(4)),
    "topk drops the residual": ("topk", DropsLeftOut),
}


def _final_loss(method: str, feedback: bool | None, codec: Any = None) -> float:
    """SGD on the mean of the ranks' quadratics, whose own gradients do not vanish where the mean's does.

    The plain loss (feedback None) needs no collective: what keeps the ranks apart cancels out in their mean.
    """
    draw = torch.Generator().manual_seed(3)
    curvature = torch.logspace(-2, 0, COUNT)[torch.randperm(COUNT, generator=draw)]
    target = torch.randn(COUNT, generator=draw)
    apart = 0.3 * torch.randn(COUNT, generator=draw) * (-1) ** dist.get_rank()
    model = Holder((COUNT,))
    (point,) = model.parameters()
    hook = CompressionHook(method, model=model, feedback=bool(feedback))
    if codec is not None:
        hook._codecs[method] = codec()
    (first, power), steps = LEARNING_RATES[method], STEPS[method]
    for step in range(steps):
        mean = curvature * (point.detach() - target)
        if feedback is not None:
            mean = hook(None, FakeBucket(mean + apart, [point])).wait()
        point.data.sub_(mean, alpha=first * (1 - step / steps) ** power)
    hook.close()
    return float((curvature * (point.detach() - target).square()).sum())


def _reaches_plain_loss(excess: float) -> bool:
    return excess < 1.2


def _excesses(rank: int, world_size: int) -> dict[str, float]:
    """Losses in terms of the plain one."""
    plain = {method: _final_loss(method, None) for method in STEPS}
    found = {}
    for method in plain:
        for feedback in (True,) if method == "int8" else (True, False):
            found[f"{method} {feedback}"] = _final_loss(method, feedback) / plain[method]
    for name, (method, codec) in SABOTAGED.items():
        found[name] = _final_loss(method, True, codec=codec) / plain[method]
    return found


@pytest.mark.slow
def test_feedback_reaches_the_plain_loss_and_sabotage_does_not(run_ranks: Ranks) -> None:
    excesses, others = run_ranks(_excesses, timeout_s=110)
    assert excesses == others
    for method in ("int8", "int4", "topk"):
        assert _reaches_plain_loss(excesses[f"{method} True"]), excesses
    for name in ("int4 False", "topk False", *SABOTAGED):
        assert not _reaches_plain_loss(excesses[name]), (name, excesses)
