"""Quality check: whether a change of the numerics learns as well, by training both sides from the same seeds.

The two sides are paired by seed. The result is the mean difference at equal samples with its interval (Student's t over
the pairs). A change passes only if the whole interval is within a fixed margin: by default the validation loss may end
higher by 0.3% of its decrease, and the accuracy lower by 0.2 points. The margin does not depend on how much seeds
differ, so noisy trainings widen the interval and never excuse a loss of quality.

A check may be judged several times while seeds come in. Each interim analysis gets an equal part of the error
(Bonferroni), so that a change exactly as bad as the margin passes in at most 1 of 40 checks, however many analyses
there are. A change counts as worse only at a stricter level, 1 of 1,000 for all analyses and both metrics. Everything
else stays open.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from frameworm.errors import ConfigError
from frameworm.records.estimate import student_quantile

FEWEST_SEEDS = 3
# When each training is validated, as fractions of its steps.
CURVE = (0.5, 0.75, 1.0)
# One-sided error rates over a whole check: that something as bad as the margin passes, or that it counts as worse.
_PASS_ERROR = 0.025
_WORSE_ERROR = 0.001
# The short last step of an epoch may come earlier on one side.
_SAME_SAMPLES = 0.01
# Limit of the extrapolation.
_MOST_TIMES = 2.0
# More seeds are hopeless if the interval would be too wide even with this fraction of the spread seen so far.
_HOPEFUL_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class Margin:
    """What a change may cost and still be accepted without asking.

    Attributes:
        loss: Increase of the final validation loss, as a fraction of the loss's decrease (start minus end).
        accuracy: Decrease of the accuracy, as a fraction of all answers.
    """

    loss: float = 0.003
    accuracy: float = 0.002

    def __str__(self) -> str:
        return f"{100 * self.loss:g}% of the loss's fall, {100 * self.accuracy:g} points of accuracy"


def parse_margin(text: str) -> Margin:
    """Parse a margin such as `0.5%`, `0.3 points` or `0.5%,0.3 points`; a missing part keeps its default.

    Raises:
        ConfigError: The text is not a margin.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|points?|pt)\s*", part.lower())
        name = "loss" if match and match[2] == "%" else "accuracy"
        if match is None or name in found or float(match[1]) > 100:
            raise ConfigError(
                f"--max-quality-loss {text}: give a percentage of the loss's fall, points of accuracy, or both with a "
                "comma between, such as 0.5% or 0.5%,0.3points"
            )
        found[name] = float(match[1]) / 100
    return Margin(**found)


@dataclass(frozen=True, slots=True)
class SeedEnd:
    """The result of one training in a quality check.

    Attributes:
        start_loss: Training loss of its first step, before any update.
        loss: Final validation loss.
        accuracy: Final validation accuracy; None if there is none.
        samples: Samples it used; None if unknown.
        curve: Validation loss during training: (samples, loss), in increasing samples, including the end.
    """

    start_loss: float
    loss: float
    accuracy: float | None = None
    samples: int | None = None
    curve: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """A quality check: how both sides ended, with the same seeds in the same order.

    Attributes:
        baseline: Trainings before the change.
        candidate: Trainings after it.
        steps: Steps of each training.
        looks: Planned numbers of seeds after which it is judged; empty: once, with all of them.
    """

    baseline: Sequence[SeedEnd]
    candidate: Sequence[SeedEnd]
    steps: int
    looks: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Quality:
        """Read the check that `to_json` returned."""
        baseline, candidate = ([seed_end(item) for item in values[side]] for side in ("baseline", "candidate"))
        return cls(baseline, candidate, values["steps"], tuple(values.get("looks", ())))


def seed_end(values: Mapping[str, Any]) -> SeedEnd:
    """Read one training from plain values."""
    return SeedEnd(**{**values, "curve": tuple((point[0], point[1]) for point in values.get("curve", ()))})


class Difference(NamedTuple):
    """How much worse the candidate is: the mean over pairs, its interval, and the margin."""

    worse: float
    low: float
    high: float
    margin: float
    passed: bool | None


class LossVerdict(NamedTuple):
    """The result of a quality check.

    Attributes:
        passed: True: within the margin. False: worse. None: neither was shown.
        detail: In words.
        open: True if more seeds may still decide.
        loss: Difference in validation loss; None if there is nothing to compare.
        accuracy: Decrease of the accuracy as a fraction; None if there is none.
        seeds_needed: Approximate number of seeds to show equality; None if unknown, or if the candidate looks worse.
    """

    passed: bool | None
    detail: str
    open: bool = False
    loss: Difference | None = None
    accuracy: Difference | None = None
    seeds_needed: int | None = None


def judge_quality(quality: Quality, margin: Margin = Margin()) -> LossVerdict:
    """Decide whether the candidate ends within the margin in validation loss, and in accuracy if it is known."""
    pairs = [(one, other) for one, other in zip(quality.baseline, quality.candidate) if math.isfinite(one.loss)]
    length = f"{quality.steps} steps"
    if any(not math.isfinite(other.loss) for _, other in pairs):
        return LossVerdict(False, f"a training of {length} ended with a loss that is not finite")
    if len(pairs) < FEWEST_SEEDS:
        return LossVerdict(None, f"a quality check needs {FEWEST_SEEDS} seeds", open=True)
    unlike = next((pair for pair in pairs if not _as_many(*pair)), None)
    if unlike is not None:
        return LossVerdict(None, f"the two sides took {unlike[0].samples} and {unlike[1].samples} samples in {length}")
    starts, ends = [one.start_loss for one, _ in pairs], [one.loss for one, _ in pairs]
    fall, error = _mean_and_error([start - end for start, end in zip(starts, ends)])
    if not fall - student_quantile(_PASS_ERROR, len(pairs) - 1) * error > 0:
        went = f"its loss went from {_mean(starts):.4g} to {_mean(ends):.4g}"
        return LossVerdict(None, f"the config itself learned nothing measurable in {length}: {went}")
    looks = len(quality.looks) or 1
    loss = _difference([other.loss - one.loss for one, other in pairs], margin.loss * fall, looks)
    told = f"validation loss {_mean(ends):.4g} → {_mean([other.loss for _, other in pairs]):.4g}: "
    told += _told(loss, 1, ".2g", "", "rise")
    answers = [(one.accuracy, other.accuracy) for one, other in pairs]
    known = [(one, other) for one, other in answers if one is not None and other is not None]
    accuracy = None
    if len(known) == len(pairs):
        accuracy = _difference([one - other for one, other in known], margin.accuracy, looks)
        means = (_mean([pair[side] for pair in known]) for side in (0, 1))
        told += f"; accuracy {' → '.join(f'{mean:.2%}' for mean in means)}: "
        told += _told(accuracy, -100, ".2f", " points", "fall")
    told += f"; {len(pairs)} paired seeds of {length}"
    found = [loss] if accuracy is None else [loss, accuracy]
    if any(item.passed is False for item in found):
        return LossVerdict(False, told, False, loss, accuracy)
    if all(item.passed for item in found):
        return LossVerdict(True, told, False, loss, accuracy)
    needed: int | None = max(_seeds_needed(item, len(pairs), looks) for item in found)
    if needed is not None and (needed <= len(pairs) or any(item.low > item.margin for item in found)):
        needed = None  # it looks worse, and more seeds would hardly show otherwise
    most = max(quality.looks, default=len(pairs))
    hopeful = max(_seeds_needed(item, len(pairs), looks, _HOPEFUL_SPREAD) for item in found) <= most
    return LossVerdict(None, told, hopeful and len(pairs) < most, loss, accuracy, needed)


def samples_to_same_loss(quality: Quality) -> float | None:
    """Return how many times the baseline's samples the candidate needs to reach the baseline's final validation loss.

    It is read from the candidate's mean curve, extrapolated along its last segment if it ends above that loss. None if
    it is unknown, or more than twice as many.
    """
    ends = [end for end in quality.candidate if math.isfinite(end.loss) and end.samples]
    if not ends or len({len(end.curve) for end in ends}) != 1 or len(ends[0].curve) < 2:
        return None
    target = _mean([end.loss for end in quality.baseline if math.isfinite(end.loss)])
    points = [
        (_mean([point[0] / (end.samples or 1) for point, end in zip(at, ends)]), _mean([point[1] for point in at]))
        for at in zip(*(end.curve for end in ends))
    ]
    times = points[0][0]
    for (start, high), (stop, low) in itertools.pairwise(points):
        if high <= target:
            return times
        if high <= low:
            times = math.inf  # until it falls again
        else:
            times = start + (stop - start) * (high - target) / (high - low)
            if low <= target:
                return times
    return times if times <= _MOST_TIMES else None


def _difference(worse: Sequence[float], margin: float, looks: int) -> Difference:
    """Mean of paired differences, its interval at the level of one analysis, and the conclusion."""
    mean, error = _mean_and_error(worse)
    reach = student_quantile(_PASS_ERROR / looks, len(worse) - 1) * error
    strict = student_quantile(_WORSE_ERROR / (2 * looks), len(worse) - 1) * error
    passed = True if mean + reach <= margin else False if mean - strict > margin else None
    return Difference(mean, mean - reach, mean + reach, margin, passed)


def _seeds_needed(found: Difference, seeds: int, looks: int, spread: float = 1.0) -> int:
    """Approximate number of seeds that would bring the interval within the margin if the sides were equal."""
    if found.margin <= 0:
        return seeds if found.high <= 0 else 10**9
    per_seed = spread * (found.high - found.worse) / student_quantile(_PASS_ERROR / looks, seeds - 1) * math.sqrt(seeds)
    count = FEWEST_SEEDS
    while student_quantile(_PASS_ERROR / looks, count - 1) * per_seed / math.sqrt(count) > found.margin:
        count = math.ceil(1.1 * count)
    return count


def _told(found: Difference, factor: float, form: str, unit: str, verb: str) -> str:
    low, high = sorted((factor * found.low, factor * found.high))
    shown = f"{factor * found.worse:+{form}}{unit} ({low:+{form}} to {high:+{form}})"
    return f"{shown}, may {verb} by {abs(factor) * found.margin:{form}}"


def _as_many(one: SeedEnd, other: SeedEnd) -> bool:
    if one.samples is None or other.samples is None:
        return True
    return abs(one.samples - other.samples) <= _SAME_SAMPLES * one.samples


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean, count = _mean(values), len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
