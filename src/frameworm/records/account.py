"""Where the time of one rank's steps went, kept in bounded memory as batches of consecutive steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from frameworm.records.estimate import LARGEST, Estimate, known, ratio, trend
from frameworm.records.schema import StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP

BIN_LIMIT = 64
MOST_BATCHES = 20
FEWEST_BATCHES = 8
STEPS_PER_BATCH = 5
SHORTEST_S = 1e-9  # shorter steps mean a clock that stood still

# Too rare to compare between batches: one occurrence would dominate its batch.
RARE = ("checkpoint", "validation")


class _Bin:
    """Sums over consecutive steps."""

    __slots__ = ("metrics", "phased_s", "phases", "steps", "training_s", "wait_s", "waited_s")

    def __init__(self) -> None:
        self.steps = 0
        self.training_s = 0.0  # excludes checkpoints and validation
        self.phased_s = 0.0  # time of the steps that have phases
        self.phases: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.wait_s = 0.0  # waiting for later ranks
        self.waited_s = 0.0  # time of the steps whose wait is known

    def join(self, other: _Bin) -> None:
        self.steps += other.steps
        self.training_s += other.training_s
        self.phased_s += other.phased_s
        self.wait_s += other.wait_s
        self.waited_s += other.waited_s
        for mine, theirs in ((self.phases, other.phases), (self.metrics, other.metrics)):
            for name, seconds in theirs.items():
                mine[name] = mine.get(name, 0.0) + seconds


class StepAccount:
    """Adds up the steps of one rank as they arrive; cheap enough for every step of a run of any length.

    The warm-up is excluded as in `records.statistics.StepAggregate`: `warmup` steps, but never more than half of the
    steps.

    Args:
        warmup: Steps to exclude at the start.
        share: Fraction of all steps that is added, if they are a sample.
        rare: Fraction of all time spent in each rare phase, if known from elsewhere.
    """

    def __init__(
        self, warmup: int = DEFAULT_WARMUP, share: float = 1.0, rare: Mapping[str, float] | None = None
    ) -> None:
        self._warmup = warmup
        self._share = share
        self._rare = rare
        self._head: list[StepRecord] | None = []
        self._sums = _Sums(share, rare)

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        if self._head is None:
            self._sums.add(step)
            return
        self._head.append(step)
        if len(self._head) >= 2 * self._warmup:
            self._sums = self.sums()
            self._head = None

    def extend(self, steps: Iterable[StepRecord]) -> StepAccount:
        """Add many steps."""
        for step in steps:
            self.add(step)
        return self

    def sums(self) -> _Sums:
        """Return the sums so far, without the warm-up."""
        if self._head is None:
            return self._sums
        sums = _Sums(self._share, self._rare)
        for step in self._head[min(self._warmup, len(self._head) // 2) :]:
            sums.add(step)
        return sums


class _Sums:
    """Totals of the measured steps, and bins that are joined in pairs when there are too many."""

    def __init__(self, share: float = 1.0, known_rare: Mapping[str, float] | None = None) -> None:
        self.share = share  # fraction of all steps that is summed
        self._known_rare = known_rare
        self.steps = 0
        self.total_s = 0.0
        self.samples = 0
        self.tokens = 0
        self.token_steps = 0  # steps with a known token count
        self.rare: dict[str, list[float]] = {}  # number, sum and sum of squares of the seconds
        self._bins: list[_Bin] = []
        self._current = _Bin()
        self._stride = 1

    def add(self, step: StepRecord) -> None:
        step_s = step.step_s if type(step.step_s) is float else known(step.step_s)
        if step_s is None or not SHORTEST_S <= step_s < LARGEST:
            return
        phases = step.phases or {}
        training_s = step_s
        for name in RARE:
            if name in phases:
                training_s -= self._add_rare(name, phases[name], training_s)
        self.steps += 1
        self.total_s += step_s
        if step.samples is not None:
            self.samples += int(known(step.samples) or 0)
        if step.tokens is not None:
            tokens = known(step.tokens)
            if tokens is not None:
                self.tokens += int(tokens)
                self.token_steps += 1
        current = self._current
        current.steps += 1
        current.training_s += training_s
        if phases:
            current.phased_s += training_s
            _add_up(current.phases, phases)
        if step.metrics:
            _add_up(current.metrics, step.metrics)
        wait_s = None if step.rank_wait_s is None else known(step.rank_wait_s)
        if wait_s is not None:
            current.wait_s += max(wait_s, 0.0)
            current.waited_s += training_s
        if current.steps >= self._stride:
            self._close_bin()

    def _add_rare(self, name: str, seconds: float, most_s: float) -> float:
        taken_s = min(max(known(seconds) or 0.0, 0.0), most_s)
        if not taken_s:
            return 0.0
        sums = self.rare.setdefault(name, [0.0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += taken_s
        sums[2] += taken_s * taken_s
        return taken_s

    def _close_bin(self) -> None:
        self._bins.append(self._current)
        self._current = _Bin()
        if len(self._bins) >= BIN_LIMIT:
            for left, right in zip(self._bins[::2], self._bins[1::2]):
                left.join(right)
            self._bins = self._bins[::2]
            self._stride *= 2

    def batches(self) -> list[_Bin]:
        """The steps as at most 20 batches, with at least 5 steps each if there are enough steps."""
        bins = [*self._bins, self._current] if self._current.steps else self._bins
        count = min(len(bins), max(FEWEST_BATCHES, min(MOST_BATCHES, self.steps // STEPS_PER_BATCH)))
        batches = []
        for index in range(count):
            batch = _Bin()
            for item in bins[index * len(bins) // count : (index + 1) * len(bins) // count]:
                batch.join(item)
            batches.append(batch)
        return batches

    @property
    def training_share(self) -> float:
        """Fraction of the time that was neither checkpoint nor validation."""
        if self._known_rare is not None:
            return max(1.0 - math.fsum(self._known_rare.values()), 0.0)
        rare_s = math.fsum(sums[1] for sums in self.rare.values())
        return max(1.0 - rare_s / self.total_s, 0.0) if self.total_s > 0 else 0.0

    def _of_all(self, found: Estimate) -> Estimate:
        """Convert a fraction of training time to a fraction of all time."""
        scaled = found.scaled(self.training_share)
        if self.share == 1 or self._known_rare is not None:
            return scaled
        error = math.hypot(*(self._rare_share(*sums).error for sums in self.rare.values()))
        return Estimate(scaled.value, math.hypot(scaled.error, found.value * error), scaled.freedom)

    @property
    def rows_per_step(self) -> float | None:
        """Tokens per step, or samples per step if no step knows its tokens; None if neither is known."""
        rows, steps = (self.tokens, self.token_steps) if self.token_steps else (self.samples, self.steps)
        return rows / steps if rows and steps else None

    def step_s(self) -> Estimate | None:
        """Mean step time without checkpoints and validation."""
        batches = self.batches()
        return ratio([item.training_s for item in batches], [float(item.steps) for item in batches])

    def drift(self) -> Estimate | None:
        """How much slower steps became over the run, relative to their mean."""
        return trend([item.training_s / item.steps for item in self.batches() if item.steps])

    def phases(self) -> dict[str, Estimate]:
        """Fraction of all step time in each phase; empty if no step has phases."""
        batches = self.batches()
        wholes = [item.phased_s for item in batches]
        shares: dict[str, Estimate] = {}
        for name in dict.fromkeys(name for item in batches for name in item.phases if name not in RARE):
            found = ratio([item.phases.get(name, 0.0) for item in batches], wholes)
            if found is not None:
                shares[name] = self._of_all(found)
        for name, sums in self.rare.items():
            shares[name] = self._rare_share(*sums)
        return shares

    def _rare_share(self, count: float, total_s: float, squares: float) -> Estimate:
        """Fraction of all time in a rare phase.

        The error comes from the spread between occurrences (at least half their mean if there are fewer than three)
        and, if the steps are a sample, from how many occurrences the sample happened to contain.
        """
        mean_s = total_s / count
        variance = max(squares / count - mean_s**2, 0.0) * count / max(count - 1, 1)
        each_s = max(math.sqrt(variance), mean_s / 2 if count < 3 else 0.0)
        met_s = mean_s * math.sqrt(1 - self.share)
        return Estimate(total_s / self.total_s, math.hypot(each_s, met_s) * math.sqrt(count) / self.total_s)

    def metrics(self) -> dict[str, Estimate]:
        """Time fraction of each metric measured in seconds within the phases."""
        batches = self.batches()
        wholes = [item.training_s for item in batches]
        shares: dict[str, Estimate] = {}
        for name in dict.fromkeys(name for item in batches for name in item.metrics if name.endswith("_s")):
            found = ratio([item.metrics.get(name, 0.0) for item in batches], wholes)
            if found is not None:
                shares[name] = self._of_all(found)
        return shares

    def counts(self) -> dict[str, float]:
        """Mean per step of each metric that is not in seconds."""
        totals: dict[str, float] = {}
        for item in self.batches():
            _add_up(totals, {name: value for name, value in item.metrics.items() if not name.endswith("_s")})
        return {name: total / self.steps for name, total in totals.items()} if self.steps else {}

    def rank_wait(self) -> Estimate | None:
        """Fraction of the time this rank waited for later ones."""
        batches = self.batches()
        found = ratio([item.wait_s for item in batches], [item.waited_s for item in batches])
        return None if found is None else self._of_all(found)


def _add_up(totals: dict[str, float], more: dict[str, float]) -> None:
    for name, seconds in more.items():
        if seconds is not None and 0 < seconds < LARGEST:
            if name in totals:
                totals[name] += seconds
            else:
                totals[name] = seconds
