"""Whether a change that does other mathematics learns as well: both sides trained for longer, seed by seed.

The two sides are paired by their seeds, and the candidate has to be shown not worse: the upper end of a one-sided 97.5%
interval (Student's t) of the mean difference must lie within a margin. The margin is what another seed does: two
standard deviations between the seeds of the config before the change, within which 19 of 20 of its trainings end. It is
never more than a twentieth of what was learned, so that a check in which chance outweighs learning decides nothing, and
at least a thousandth of it, as no two trainings are alike to the last digit.

How often a change is accepted, with looks at 4, 8 and 12 seeds (simulated; first for sides that have nothing but their
quality in common, then for sides that are nine tenths alike): one that does nothing 98% and 100%, one as bad as the
margin 8% and 30% (the margin is itself an estimate), half as bad again less than 1% and 3%, twice as bad never. What is
not accepted stays open, unless the lower end of the interval lies beyond the margin: then it is shown to be worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from frameworm.records.estimate import quantile

FEWEST_SEEDS = 3
_DEVIATIONS = 2.0
_LEAST_OF_FALL = 0.001
_MOST_OF_FALL = 0.05
# Answers are counted: what hangs on a few of them is no difference.
_LEAST_OF_ACCURACY = 0.002
# The last, short step of an epoch may come sooner on one side.
_SAME_SAMPLES = 0.01


@dataclass(frozen=True, slots=True)
class SeedEnd:
    """One longer training.

    Attributes:
        start_loss: Training loss of its first step, before any update.
        loss: Validation loss at its end.
        accuracy: Validation accuracy at its end; None: there is none.
        samples: Samples it took; None: not known.
    """

    start_loss: float
    loss: float
    accuracy: float | None = None
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """A longer check: how both sides ended, with the same seeds in the same order, each after so many steps."""

    baseline: Sequence[SeedEnd]
    candidate: Sequence[SeedEnd]
    steps: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Quality:
        """The check that `to_json` wrote."""
        baseline, candidate = ([SeedEnd(**item) for item in values[side]] for side in ("baseline", "candidate"))
        return cls(baseline, candidate, values["steps"])


class Judgement(NamedTuple):
    """Whether the candidate learns as well (None: not shown), what that rests on, and whether more seeds may show."""

    passed: bool | None
    detail: str
    open: bool = False


def judge_quality(quality: Quality) -> Judgement:
    """Whether the candidate was shown not worse in validation loss, and in accuracy where there is one."""
    pairs = [(one, other) for one, other in zip(quality.baseline, quality.candidate) if math.isfinite(one.loss)]
    length = f"{quality.steps} steps"
    if any(not math.isfinite(other.loss) for _, other in pairs):
        return Judgement(False, f"a training of {length} ended with a loss that is not finite")
    if len(pairs) < FEWEST_SEEDS:
        return Judgement(None, f"a longer check needs {FEWEST_SEEDS} seeds", open=True)
    unlike = next((pair for pair in pairs if not _as_many(*pair)), None)
    if unlike is not None:
        return Judgement(None, f"the two sides took {unlike[0].samples} and {unlike[1].samples} samples in {length}")
    before, after = [one.loss for one, _ in pairs], [other.loss for _, other in pairs]
    starts = [one.start_loss for one, _ in pairs]
    fall, error = _mean_and_error([start - end for start, end in zip(starts, before)])
    if not fall - error > 0:
        went = f"its loss went from {_mean(starts):.4g} to {_mean(before):.4g}"
        return Judgement(None, f"the config itself learned nothing measurable in {length}: {went}")
    loss = _not_worse(before, after, _LEAST_OF_FALL * fall, _MOST_OF_FALL * fall)
    verdicts = [loss.passed]
    told = f"validation loss {_mean(before):.4g} before, {_mean(after):.4g} after, {loss.told(1, '.2g', '')}"
    right, right_after = ([pair[side].accuracy for pair in pairs] for side in (0, 1))
    known = [(one, other) for one, other in zip(right, right_after) if one is not None and other is not None]
    if len(known) == len(pairs):
        wrong, wrong_after = ([1 - pair[side] for pair in known] for side in (0, 1))
        answers = _not_worse(wrong, wrong_after, _LEAST_OF_ACCURACY, math.inf)
        verdicts.append(answers.passed)
        shares = f"{1 - _mean(wrong):.2%} before, {1 - _mean(wrong_after):.2%} after"
        told += f"; accuracy {shares}, {answers.told(100, '.2f', ' points')}"
    told += f"; {len(pairs)} seeds of {length}"
    if False in verdicts:
        return Judgement(False, told)
    return Judgement(None if None in verdicts else True, told, open=None in verdicts)


class _Difference(NamedTuple):
    """How much worse the candidate is, between what and what, and how much it may be."""

    passed: bool | None
    least: float
    most: float
    margin: float

    def told(self, factor: float, form: str, unit: str) -> str:
        """In words; `least` is what counts once it is shown to be worse."""
        margin = f"{factor * self.margin:{form}}{unit}"
        if self.passed is False:
            return f"worse by {factor * self.least:{form}}{unit} at least, where another seed does {margin}"
        if self.most < 0:
            return f"better by {-factor * self.most:{form}}{unit} at least"
        return f"worse by {factor * self.most:{form}}{unit} at most, where another seed does {margin}"


def _not_worse(before: Sequence[float], after: Sequence[float], least: float, most: float) -> _Difference:
    """Whether lower figures were shown not to have risen beyond the margin, which lies between two bounds."""
    centre = _mean(before)
    spread = math.sqrt(math.fsum((value - centre) ** 2 for value in before) / (len(before) - 1))
    margin = min(max(_DEVIATIONS * spread, least), most)
    worse, error = _mean_and_error([other - one for one, other in zip(before, after)])
    passed = True if worse + error <= margin else False if worse - error > margin else None
    return _Difference(passed, worse - error, worse + error, margin)


def _as_many(one: SeedEnd, other: SeedEnd) -> bool:
    if one.samples is None or other.samples is None:
        return True
    return abs(one.samples - other.samples) <= _SAME_SAMPLES * one.samples


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and how far it may be off, to either side, in 39 of 40 cases."""
    mean, count = _mean(values), len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, quantile(count - 1) * math.sqrt(variance / count)
