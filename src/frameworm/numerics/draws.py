"""Statistics of a model's random draws in training: many repetitions from one state, summarised in a few metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from frameworm.numerics.sketch import dense, sketch


def figures_of(losses: Sequence[float], drawn: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Summarise one side of `guard.agreement.Draws`.

    Args:
        losses: One per draw.
        drawn: Sketches of the gradients.

    Returns:
        `figures`: mean and deviation of the losses, and the spread of the gradients; `repeated`: number of repeated
        draws.
    """
    together = torch.stack(list(drawn))
    spread = float(((together - together.mean(0)).square().sum(1).sum() / max(len(drawn) - 1, 1)).sqrt())
    distinct = {tuple(row.tolist()) for row in together}
    loss = torch.tensor(losses, dtype=torch.float64)
    deviation = float(loss.std()) if len(losses) > 1 else 0.0
    return {"figures": [float(loss.mean()), deviation, spread], "repeated": len(drawn) - len(distinct)}


def draw_calls(
    call: Callable[[], Iterable[torch.Tensor]], parameters: Sequence[torch.nn.Parameter], count: int
) -> dict[str, Any] | None:
    """Call a model many times, and differentiate a fixed weighted sum of its outputs.

    Args:
        call: Calls the model and returns its output tensors.
        parameters: Parameters to differentiate by.
        count: Number of calls.

    Returns:
        See `figures_of`; None if no output is differentiable.
    """
    losses, drawn = [], []
    for _ in range(count):
        found = [item for item in call() if item.requires_grad and item.is_floating_point()]
        if not found:
            return None
        total = torch.stack([_weighed(item, place) for place, item in enumerate(found)]).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        losses.append(float(total))
        drawn.append(sketch(torch.cat([dense(item).float().flatten() for item in gradients if item is not None])))
    return figures_of(losses, drawn)


def _weighed(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Sum a tensor with weights that are the same in every process."""
    generator = torch.Generator().manual_seed(place)
    weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
    total: torch.Tensor = (tensor.float() * weights).sum() / math.sqrt(max(1, tensor.numel()))
    return total
