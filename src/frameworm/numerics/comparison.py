"""How far the outputs of one step lie apart when it is computed in several ways from the same state.

Outputs are what is linear in the gradient: the loss, the gradient of every parameter before clipping, and what the step
adds to floating-point buffers. An optimizer's update is not among them: Adam turns the sign of a vanishing gradient
into a full step, so rounding would look like a change there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from frameworm.guard.agreement import OutputErrors

Sketches = Mapping[str, torch.Tensor]


def errors_of(
    reference: Sketches,
    baseline: Sketches,
    expected: Sketches,
    candidate: Sketches,
    noise: Mapping[str, float],
    counts: Mapping[str, int],
) -> list[OutputErrors]:
    """Compare one step that was computed in several ways.

    Args:
        reference: Sketches of the outputs in higher precision.
        baseline: The same of the config before the change.
        expected: The same of an eager step in the candidate's precision.
        candidate: The same of the config after the change.
        noise: How far each output of the baseline moves under perturbations as small as its rounding.
        counts: Elements of each output.
    """
    found = []
    for name, true in reference.items():
        size = _length(true)
        other = candidate.get(name)
        if other is None or name not in baseline or name not in expected:
            continue
        shift = float((other - expected[name]) @ true) / (size * size) if size else 0.0
        found.append(
            OutputErrors(
                name,
                counts[name],
                size,
                _length(baseline[name] - true),
                _length(expected[name] - true),
                noise.get(name, 0.0),
                _length(other - true),
                shift,
            )
        )
    return found


def noise_of(baseline: Sketches, moved: Sequence[Sketches]) -> dict[str, float]:
    """How far each output of a step moved, as the root of the mean square over some repetitions."""
    found = {}
    for name, value in baseline.items():
        squares = [_length(item[name] - value) ** 2 for item in moved if name in item]
        found[name] = (sum(squares) / len(squares)) ** 0.5 if squares else 0.0
    return found


def _length(values: torch.Tensor) -> float:
    return float(values.norm())
