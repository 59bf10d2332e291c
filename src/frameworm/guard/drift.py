"""Whether two loss curves from the same weights and samples differ by rounding alone.

Rounding is a tiny push at every operation, and training amplifies pushes: after some hundred steps two curves that
differ in the last bit of one weight may differ visibly. How fast that goes depends on the model, so it is measured: the
reference is the baseline itself, trained again from weights that were each moved by one unit of rounding of the coarser
precision of both sides, and by what sums in another order differ by. What a candidate may differ by grows with what the
reference differs by. Once that has grown to the size of what a step's samples happen to cost, a curve proves nothing
any more, and later steps do not count: this is what keeps the check far below what another seed would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Half the distance between 1 and the next larger number.
ROUNDING_UNITS: dict[str, float] = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}

LEAST_STEPS = 8
# A reference is pushed once, a candidate at every operation.
_SAFETY = 4.0
# Sums of thousands of products in another order differ by more than one unit of fp32.
_ORDER_OF_SUMS = 64 * ROUNDING_UNITS["fp32"]
# Nor by one unit in what a layer computes; of that a push of the weights by so much more makes about as much.
_PUSH_OF_SUMS = 16 * ROUNDING_UNITS["fp32"]
# Where the allowance exceeds this share of the differences between steps, a curve proves nothing.
_POWERLESS = 0.5
_PROGRESS = 0.1
_MOST_OUTSIDE = 0.05
_FAR_OUTSIDE = 2.0


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Whether the curves agree; None: they cannot tell. `allowed` is what they may differ by at each step."""

    passed: bool | None
    detail: str
    counted_steps: int = 0
    worst: float | None = None  # largest difference, as a multiple of what is allowed there
    allowed: list[float] = field(default_factory=list)


def push_of(unit: float) -> float:
    """What the weights of a reference are moved by, relative to each, for a unit of rounding."""
    return unit + _PUSH_OF_SUMS


def step_noise(losses: Sequence[float]) -> float:
    """Standard deviation of what the samples of a step add to its loss, whatever the trend."""
    bends = [losses[i] - 2 * losses[i + 1] + losses[i + 2] for i in range(len(losses) - 2)]
    if not bends:
        return 0.0
    # The second difference of independent values has six times their variance; the median leaves spikes out.
    squares = sorted(bend * bend for bend in bends)
    return math.sqrt(squares[len(squares) // 2] / 0.455 / 6)


def allowed_drift(baseline: Sequence[float], references: Sequence[Sequence[float]], unit: float) -> list[float]:
    """What the loss of each step may differ by.

    Args:
        baseline: Losses per step.
        references: The baseline's losses again, each from weights moved by `push_of(unit)` times a random number in
            -1..1, relative to each weight. None: drift is taken to grow in proportion to the steps.
        unit: Unit of rounding of the coarser precision of both sides.
    """
    allowed = []
    largest = 0.0
    for step, loss in enumerate(baseline):
        own = (unit + _ORDER_OF_SUMS) * max(abs(loss), 1.0)
        if references:
            # One step ahead: where a curve crosses the other the difference is small by chance.
            for reference in references:
                for near in range(step, min(step + 2, len(reference), len(baseline))):
                    largest = max(largest, abs(reference[near] - baseline[near]))
            allowed.append(own + _SAFETY * largest)
        else:
            allowed.append(own * (1 + step))
    return allowed


def check_losses(
    baseline: Sequence[float], candidate: Sequence[float], references: Sequence[Sequence[float]], unit: float
) -> LossCheck:
    """Compare two loss curves from the same weights, samples and seed; see the module.

    Args:
        baseline: Losses per step.
        candidate: The same of the other side.
        references: See `allowed_drift`.
        unit: See `allowed_drift`.
    """
    steps = min(len(baseline), len(candidate))
    if len(baseline) != len(candidate):
        return LossCheck(False, f"{len(candidate)} steps were made where the baseline made {len(baseline)}")
    broken = [i for i in range(steps) if math.isfinite(baseline[i]) and not math.isfinite(candidate[i])]
    if broken:
        return LossCheck(False, f"the loss of step {broken[0]} is not finite")
    if not all(map(math.isfinite, baseline)):
        return LossCheck(None, "the baseline's own loss is not finite")
    allowed = allowed_drift(baseline, [item for item in references if all(map(math.isfinite, item))], unit)
    telling = _POWERLESS * max(
        step_noise(baseline), _PROGRESS * (max(baseline, default=0.0) - min(baseline, default=0.0))
    )
    counted = next((i for i in range(steps) if allowed[i] > telling), steps)
    ratios = [abs(candidate[i] - baseline[i]) / allowed[i] for i in range(counted)]
    worst = max(ratios, default=None)
    outside = [i for i, ratio in enumerate(ratios) if ratio > 1]
    if outside and (len(outside) > _MOST_OUTSIDE * counted or max(ratios) > _FAR_OUTSIDE):
        at = outside[0]
        detail = (
            f"at step {at} the loss is {candidate[at]:.6g} where the baseline has {baseline[at]:.6g}: "
            f"{ratios[at]:.1f} times what rounding explains"
        )
        return LossCheck(False, detail, counted, worst, allowed)
    if counted < LEAST_STEPS:
        detail = f"rounding hides differences from step {counted} on, which is too soon to tell"
        if counted == steps:
            detail = f"{steps} steps are too few to tell"
        return LossCheck(None, detail, counted, worst, allowed)
    return LossCheck(True, f"{counted} steps agree to rounding", counted, worst, allowed)
