"""Did two trainings compute the same, on a device that may not compute the same bits twice?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

MOST_NOISE = 3.0  # captured steps may be so many times further from unrecorded ones than these are from themselves


@dataclass
class Outcome:
    """What one training led to."""

    losses: list[float | None]
    weights: dict[str, torch.Tensor]

    def equals(self, other: Outcome) -> bool:
        return self.losses == other.losses and not self.unlike(other)

    def unlike(self, other: Outcome) -> list[str]:
        """Names of the weights that differ in any bit."""
        return [name for name, value in self.weights.items() if not torch.equal(value, other.weights[name])]

    def distance(self, other: Outcome) -> float:
        """Norm of the difference of all weights, relative to that of the weights."""
        apart = sum(float((value.double() - other.weights[name].double()).square().sum()) for name, value in self._held)
        return math.sqrt(apart / (sum(float(value.double().square().sum()) for _, value in self._held) or 1.0))

    @property
    def _held(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self.weights.items() if value.is_floating_point()]


def judge_equality(
    captured: Outcome, unrecorded: Outcome, again: Outcome | None = None
) -> tuple[bool, str, dict[str, Any]]:
    """Judge whether captured steps are the unrecorded ones.

    Some kernels add in whatever order their threads arrive, so a GPU does not always compute the same bits twice. Then
    two unrecorded trainings differ as well, and captured steps may differ by about as much.

    Args:
        captured: Of replayed steps.
        unrecorded: Of the same steps without capture.
        again: The same as `unrecorded`, once more; needed only if the first two differ.

    Returns:
        Whether they are, the reason and the evidence.
    """
    unlike = captured.unlike(unrecorded)
    evidence: dict[str, Any] = {
        "losses": len(captured.losses),
        "losses_equal": captured.losses == unrecorded.losses,
        "tensors": len(captured.weights),
        "tensors_that_differ": unlike,
    }
    if captured.equals(unrecorded):
        return True, f"all losses and all {len(captured.weights)} tensors are equal", evidence
    what = f"{len(unlike)} of {len(captured.weights)} tensors differ" if unlike else "losses differ"
    if again is None or again.equals(unrecorded):
        return False, f"{what}, and two unrecorded trainings are equal", evidence
    apart, noise = captured.distance(unrecorded), again.distance(unrecorded)
    evidence |= {"distance": apart, "distance_of_two_unrecorded": noise}
    text = f"{what}: by {apart:.2g} of the weights, where two unrecorded trainings differ by {noise:.2g} themselves"
    return apart <= MOST_NOISE * noise, text, evidence
