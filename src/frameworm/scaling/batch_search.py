"""Search for the largest batch that fits in few trials, and the search's result; no device is used here."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

TOLERANCE = 0.03
MOST_TRIALS = 8
AS_FAST = 0.98  # of the best rate: a smaller batch is worth losing the rest

Outcome = Literal["fits", "cuda_oom", "host_oom", "killed", "hang", "error"]
Purpose = Literal["search", "verify", "speed"]

# A planner is mostly right within a few percent and seldom wrong by a third: small steps first, then larger ones.
_UP, _DOWN = (1.12, 1.4, 2.0, 4.0), (0.89, 0.745, 0.5, 0.25)
_PREDICTIONS = 2
_SHY = 0.99  # try slightly below a prediction, because a trial that fits tells more


class BatchSearch:
    """Decides which size to try next; memory use must not decrease with size.

    Without a guess, sizes double from the first one. Once a size that fits and one that does not are known, the
    interval between them is bisected until the largest that fits is known within a tolerance.

    Args:
        candidates: Sizes that may be tried, ascending.
        guess: A planner's estimate of the largest that fits; None if there is none.
        tolerance: How far below the true maximum the answer may be, as a fraction of it.
    """

    def __init__(self, candidates: Sequence[int], guess: int | None = None, tolerance: float = TOLERANCE) -> None:
        assert candidates, "there must be a size to try"
        self._candidates = candidates
        self._guess = guess
        self._tolerance = tolerance
        self._told: dict[int, bool] = {}
        self._predicted: float | None = None
        self._predictions = 0
        self._climbs = 0

    @property
    def largest(self) -> int | None:
        """The largest size known to fit, below all that do not."""
        low, _ = self._bracket()
        return None if low < 0 else self._candidates[low]

    @property
    def ends_below(self) -> int | None:
        """The smallest size known not to fit; None if all have fitted so far."""
        _, high = self._bracket()
        return None if high == len(self._candidates) else self._candidates[high]

    def tell(self, size: int, fits: bool, predicted: float | None = None) -> None:
        """Record the result of a trial; a later result for the same size replaces an earlier one.

        Args:
            size: The size tried.
            fits: True if it fits.
            predicted: The maximum extrapolated from the measured memory.
        """
        self._told[size] = fits
        if predicted is not None:
            self._predicted = predicted

    def forget(self, size: int) -> None:
        """Forget that a size did not fit; sizes known to fit are kept."""
        if self._told.get(size) is False:
            del self._told[size]

    def next(self) -> int | None:
        """Return the next size to try; None if the answer is known."""
        low, high = self._bracket()
        sizes = self._candidates
        if high - low <= 1 or (low >= 0 and sizes[low] >= (1 - self._tolerance) * sizes[high - 1]):
            return None
        nearest = self._nearest(self._target(low, high))
        return sizes[min(max(nearest, low + 1), high - 1)]

    def _bracket(self) -> tuple[int, int]:
        """Indices of the largest that fits and the smallest that does not; outside the list if unknown."""
        failed = [size for size, fits in self._told.items() if not fits]
        high = bisect.bisect_left(self._candidates, min(failed)) if failed else len(self._candidates)
        fitting = [place for place in map(self._place, self._fitting()) if place < high]
        return max(fitting, default=-1), high

    def _fitting(self) -> Iterable[int]:
        return (size for size, fits in self._told.items() if fits)

    def _place(self, size: int) -> int:
        return bisect.bisect_left(self._candidates, size)

    def _target(self, low: int, high: int) -> float:
        sizes, known_high = self._candidates, high < len(self._candidates)
        if low < 0 and not known_high:
            return sizes[0] if self._guess is None else self._guess
        if low < 0:
            tried = sum(not fits for fits in self._told.values())
            return sizes[high] * self._step(_DOWN, tried)
        if known_high:
            return math.sqrt(sizes[low] * sizes[high])
        if self._predicted is not None and self._predictions < _PREDICTIONS:
            self._predictions += 1
            # If the prediction says that this is the end, the next size beyond the tolerance proves it.
            return max(self._predicted * _SHY, math.floor(sizes[low] / (1 - self._tolerance)) + 1)
        self._climbs += 1
        return sizes[low] * self._step(_UP, self._climbs)

    def _step(self, factors: tuple[float, ...], tried: int) -> float:
        if self._guess is None:
            return 2.0 if factors is _UP else 0.5
        return factors[min(tried, len(factors)) - 1]

    def _nearest(self, target: float) -> int:
        place = bisect.bisect_left(self._candidates, target)
        if place == len(self._candidates):
            return place - 1
        below = max(place - 1, 0)
        return below if target - self._candidates[below] < self._candidates[place] - target else place


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, ascending."""
    found = {size for one in range(1, math.isqrt(number) + 1) if number % one == 0 for size in (one, number // one)}
    return sorted(size for size in found if most is None or size <= most)


@dataclass(frozen=True)
class BatchTrial:
    """One trial.

    Attributes:
        micro_batch: The size tried.
        purpose: `search`, `verify` (more steps, for the winning size) or `speed` (smaller sizes).
        outcome: How it ended; anything but `fits` means that this size cannot be used.
        samples_per_s: Over all ranks, with the accumulation that keeps the global batch; including the longest samples.
        step_s: The corresponding step time.
        peak_bytes: Peak memory of a rank: of torch's allocator on a GPU, else resident memory.
        steps: Number of optimizer steps.
        took_s: Wall time, including starting the processes.
        message: What went wrong.
        rank: Rank on which it went wrong.
    """

    micro_batch: int
    purpose: Purpose
    outcome: Outcome
    samples_per_s: float | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    steps: int | None = None
    took_s: float | None = None
    message: str | None = None
    rank: int | None = None

    @property
    def fits(self) -> bool:
        """True if the trial ran to its end."""
        return self.outcome == "fits"


@dataclass
class BatchSizeReport:
    """The result of a batch-size search.

    Attributes:
        largest: The largest micro-batch that fits; None if none does.
        verified: True if it passed the long trial.
        fastest: The smallest micro-batch within 2% of the best rate.
        ends_below: The smallest size that did not fit; None if the search ended at its upper end.
        upper_end: The largest size allowed.
        global_batch: Kept constant by adjusting accumulation; None if it grows with the micro-batch.
        world_size: Ranks of each trial.
        limit_bytes: Memory that a process could use; None if unknown.
        limit_name: What sets that limit.
        guess: The planner's estimate of the largest.
        trials: All of them, in order.
        seconds: Total time.
    """

    name: str
    device: str
    world_size: int
    global_batch: int | None
    upper_end: int
    largest: int | None = None
    verified: bool = False
    fastest: int | None = None
    ends_below: int | None = None
    limit_bytes: int | None = None
    limit_name: str | None = None
    guess: int | None = None
    trials: list[BatchTrial] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def accumulation(self, micro_batch: int) -> int:
        """Micro-batches per step that keep the global batch."""
        return 1 if self.global_batch is None else self.global_batch // (micro_batch * self.world_size)

    @property
    def search_trials(self) -> int:
        """Number of trials used to find and verify the largest."""
        return sum(trial.purpose != "speed" for trial in self.trials)

    def choose_fastest(self) -> None:
        """Set `fastest` from the measured rates; the last measurement of a size counts."""
        rates = {
            trial.micro_batch: trial.samples_per_s
            for trial in self.trials
            if trial.fits and trial.samples_per_s is not None and trial.micro_batch <= (self.largest or 0)
        }
        best = max(rates.values(), default=None)
        if best is not None:
            self.fastest = min(size for size, rate in rates.items() if rate >= AS_FAST * best)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        sizes = {name: getattr(self, name) for name in ("largest", "fastest")}
        return {
            **asdict(self),
            "search_trials": self.search_trials,
            "set": {
                name: None
                if size is None
                else {"training.micro_batch": size, "training.accumulation": self.accumulation(size)}
                for name, size in sizes.items()
            },
        }
