"""How far the outputs of one step differ if it is computed in several ways from the same state.

Outputs are everything linear in the gradient: the loss, the gradient of every parameter before clipping, and what the
step adds to floating-point buffers. The optimizer's update is not included: Adam turns the sign of a vanishing gradient
into a full step, so rounding would look like a change there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from frameworm.guard.agreement import OutputErrors
from frameworm.numerics.sketch import sketch
from frameworm.numerics.state import StepTensors

Sketches = dict[str, torch.Tensor]


def outputs_of(
    loss: torch.Tensor, gradients: Mapping[str, torch.Tensor], tensors: StepTensors, before: Mapping[str, torch.Tensor]
) -> Sketches:
    """Sketch the outputs of a step.

    Args:
        loss: Its loss.
        gradients: By parameter, unscaled and before clipping.
        tensors: Contains the buffers after the step.
        before: The values of the tensors before the step.
    """
    found = {f"gradient of {name}": sketch(value) for name, value in gradients.items()}
    found["loss"] = sketch(loss.double())
    for name, buffer in tensors.buffers.items():
        held = before.get(f"buffer {name}")
        if held is not None and buffer.is_floating_point():
            found[f"change of {name}"] = sketch(buffer.double() - held.to(buffer.device).double())
    return found


def errors_of(
    reference: Mapping[str, torch.Tensor],
    baseline: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    candidate: Mapping[str, torch.Tensor],
    noise: Mapping[str, float],
    counts: Mapping[str, int],
) -> list[OutputErrors]:
    """Compare one step that was computed in several ways.

    Args:
        reference: Sketches of the outputs in higher precision.
        baseline: The same for the config before the change.
        expected: The same for an eager step in the candidate's precision.
        candidate: The same for the config after the change.
        noise: How far each output of the baseline moves under perturbations as small as its rounding.
        counts: Number of elements of each output.
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


def noise_of(baseline: Mapping[str, torch.Tensor], moved: Sequence[Sketches]) -> dict[str, float]:
    """Return how far each output of a step moved, as the root mean square over repetitions."""
    found = {}
    for name, value in baseline.items():
        squares = [_length(item[name] - value) ** 2 for item in moved if name in item]
        found[name] = (sum(squares) / len(squares)) ** 0.5 if squares else 0.0
    return found


def _length(values: torch.Tensor) -> float:
    return float(values.norm())
