"""How far a training will scale: from the step of one device and a network to a table for many.

An interval is the result with every input at its better and at its worse end: the spread of the measured steps (at best
the ranks are slow at the same time and none waits), of the network, and, if it was not measured when gradients are
ready, all of them at the end of backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from frameworm.errors import ConfigError
from frameworm.records.estimate import Interval
from frameworm.records.printable import Shown, speedup_in_words
from frameworm.scaling.fabrics import Network
from frameworm.scaling.profile import Source, all_at_the_end
from frameworm.scaling.simulate import Setting, StepProfile, Timeline, simulate_step
from frameworm.scaling.traffic import ONLY_ROUNDING

SCHEMA_VERSION = 1
MOST_RANKS = 65_536
EXCELLENT, GOOD, FAIR = 0.85, 0.7, 0.5
HELPS = 1.05  # a smaller gain does not justify a change
_WIDEST = 1e6  # search for bandwidths up to this factor of the present one
_HALVINGS = 60

# How much a smaller batch shortens a step is unknown: assume the middle, with an interval of everything possible.
_FIXED_SHARE = (0.5, 0.0, 1.0)


@dataclass(frozen=True)
class Row:
    """The prediction for one number of ranks."""

    world_size: int
    step_s: Interval[float]
    speedup: Interval[float]
    efficiency: Interval[float]
    compute_s: float
    communication_s: float
    exposed_s: float
    straggler_s: float
    sent_bytes: float  # by one rank per step
    samples_per_s: float | None
    global_batch: int | None
    gpu_hours: float | None  # for the whole training: as many samples as the run's
    cost: float | None

    @property
    def status(self) -> str:
        """The grade in one word."""
        if self.world_size > 1 and self.speedup.value < 1:
            return "negative_scaling"
        named = ((EXCELLENT, "excellent"), (GOOD, "good"), (FAIR, "fair"))
        return next((word for least, word in named if self.efficiency.value >= least), "poor")


@dataclass(frozen=True)
class Change:
    """A change to make, and its predicted speedup."""

    knob: str
    value: Any
    text: str
    gain: float
    kind: str  # same: same numerics; rounds; batch: another global batch; approximate; money


@dataclass(frozen=True)
class BreakEven:
    """The bandwidth, relative to the present one, at which this many ranks reach an efficiency; None if none does."""

    world_size: int
    efficiency: float
    bandwidth_factor: float | None
    text: str


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """The whole prediction; `to_dict` is what `--json` prints."""

    source: str
    scaling: str
    network: str
    strategy: str
    compression: str
    rows: tuple[Row, ...]
    break_even: tuple[BreakEven, ...] = ()
    reach: dict[str, int | None] = field(default_factory=dict)  # by grade, the most ranks that still have it
    changes: tuple[Change, ...] = ()
    cheapest: Change | None = None
    unknown: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def in_words(self) -> list[str]:
        """The speed-up and efficiency on each number of ranks."""
        lines = [f"Prediction: {self.strategy}, {self.scaling} scaling, over {self.network}"]
        for row in self.rows:
            gain, ranks = row.speedup, "1 rank" if row.world_size == 1 else f"{row.world_size} ranks"
            told = speedup_in_words(gain.value, gain.low, gain.high)
            lines.append(f"{ranks}: {told}, efficiency {row.efficiency.value:.0%}, {row.status}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data = dataclasses.asdict(self)
        for row, item in zip(self.rows, data["rows"]):
            item["status"] = row.status
        return data


class Predictor:
    """Predicts one source on one network.

    Args:
        source: The step of one device.
        network: The connection between the ranks.
        setting: How the ranks will work together.
        scaling: `strong`: the global batch is kept and divided. `weak`: every device keeps the measured batch, so the
            global batch grows.
        price_per_hour: Of one device.
    """

    def __init__(
        self,
        source: Source,
        network: Network,
        setting: Setting | None = None,
        scaling: str = "strong",
        price_per_hour: float | None = None,
    ) -> None:
        if scaling not in ("weak", "strong"):
            raise ConfigError(f"scaling is strong or weak, not {scaling}")
        self._source = source.on_one_device() if scaling == "strong" else source
        self._network = network
        self._setting = setting or Setting()
        self._scaling = scaling
        self._price = price_per_hour
        self._better, self._worse = network.bounds()

    def timeline(self, world_size: int) -> Timeline:
        """Simulate a step with this many ranks."""
        return simulate_step(self._profile(world_size), self._setting, self._network, world_size)

    def speedup(self, world_size: int, network: Network | None = None, setting: Setting | None = None) -> float:
        """Return the samples per second relative to one device."""
        return self._speedup(self._source.profile, world_size, network or self._network, setting or self._setting, 0)

    def row(self, world_size: int) -> Row:
        """Return the full prediction for this many ranks."""
        source, setting = self._source, self._setting
        timeline = self.timeline(world_size)
        low, high = (source.profile.stretched(1 + sign * source.uncertainty) for sign in (-1, 1))
        alike = replace(low, step_times_s=())  # at best all ranks are slow at the same time, and none waits
        late = high if source.overlap_measured else all_at_the_end(high)
        late_low = low if source.overlap_measured else all_at_the_end(low)
        quickest_s = simulate_step(self._divided(alike, world_size, 1), setting, self._better, world_size).step_s
        slowest_s = simulate_step(self._divided(late, world_size, 2), setting, self._worse, world_size).step_s
        speedup = self.speedup(world_size)
        # More compute hides more communication, and both sides have it, so the speedup's ends are not those of the
        # step.
        ends = [
            self._speedup(alike, world_size, self._better, setting, 1),
            self._speedup(replace(high, step_times_s=()), world_size, self._better, setting, 1),
            self._speedup(late_low, world_size, self._worse, setting, 2),
            self._speedup(late, world_size, self._worse, setting, 2),
        ]
        best, worst = max(speedup, *ends), min(speedup, *ends)
        hours = None
        if source.steps is not None:
            alone_s = source.steps * source.world_size * source.profile.compute_s
            hours = alone_s / 3600 / speedup * world_size
        per_step = None if source.samples is None else source.samples * self._samples_factor(world_size)
        return Row(
            world_size,
            Interval(timeline.step_s, min(timeline.step_s, quickest_s), max(timeline.step_s, slowest_s)),
            Interval(speedup, worst, best),
            Interval(speedup / world_size, worst / world_size, best / world_size),
            timeline.compute_s,
            timeline.communication_s,
            timeline.exposed_s,
            timeline.straggler_s,
            timeline.sent_bytes,
            None if per_step is None else per_step / timeline.step_s,
            per_step,
            hours,
            None if hours is None or self._price is None else hours * self._price,
        )

    def predict(self, world_sizes: Sequence[int]) -> Prediction:
        """Return the whole prediction.

        Raises:
            ConfigError: A world size is invalid.
        """
        if not world_sizes or not all(1 <= size <= MOST_RANKS for size in world_sizes):
            raise ConfigError(f"world sizes are numbers from 1 to {MOST_RANKS}, such as 1,2,4,8")
        sizes = sorted(set(world_sizes))
        rows = tuple(self.row(size) for size in sizes)
        changes = self.changes(sizes[-1]) if sizes[-1] > 1 else []
        return Prediction(
            source=self._source.name,
            scaling=self._scaling,
            network=self._network.describe(),
            strategy=self._setting.strategy,
            compression=self._setting.codec.method,
            rows=rows,
            break_even=tuple(self._break_even(size) for size in sizes if size > 1),
            reach={
                name: self._reach(least) for name, least in (("excellent", EXCELLENT), ("good", GOOD), ("fair", FAIR))
            },
            changes=tuple(changes),
            cheapest=cheapest(changes),
            unknown=self._unknown(),
        )

    def changes(self, world_size: int) -> list[Change]:
        """Return other settings at this many ranks with their gains, cheapest kind of change first."""
        now = self.speedup(world_size)
        setting, source, found = self._setting, self._source, []

        def add(knob: str, value: Any, text: str, kind: str, speedup: float) -> None:
            found.append(Change(knob, value, text, speedup / now, kind))

        for size in (1.0, 5.0, 100.0):
            if setting.strategy in ("ddp", "zero1") and size != setting.bucket_cap_mb:
                changed = replace(setting, bucket_cap_mb=size, first_bucket_mb=min(size, setting.first_bucket_mb))
                text = f"buckets of {size:g} MB"
                add("parallel.bucket_cap_mb", size, text, "same", self.speedup(world_size, setting=changed))
        methods = [*(name for name in ONLY_ROUNDING if name != "fp16"), "topk", "powersgd"]
        for method in methods:
            if setting.codec.method in ("off", "fp16") and setting.strategy == "ddp":
                changed = replace(setting, codec=replace(setting.codec, method=method))
                kind = "rounds" if method in ONLY_ROUNDING else "approximate"
                text = f"gradients compressed by {method}"
                add("parallel.compression", method, text, kind, self.speedup(world_size, setting=changed))
        for factor in (2, 4):
            larger = replace(source, profile=replace(source.profile, accumulation=source.profile.accumulation * factor))
            other = Predictor(larger, self._network, setting, self._scaling)
            alone = larger.profile.compute_s / (factor * source.profile.compute_s)  # of one device, per sample
            gained = other.speedup(world_size) / alone
            if self._scaling == "weak":
                text = f"{factor} times the global batch, by accumulation"
                add("training.accumulation", larger.profile.accumulation, text, "batch", gained)
            else:
                value = f"x{factor}" if source.samples is None else source.samples * factor
                add("training.global_batch", value, f"{factor} times the global batch", "batch", gained)
        for wider in (2.5, 10.0):
            text = f"links of {wider:g} times the bandwidth"
            add("network", wider, text, "money", self.speedup(world_size, self._network.faster(wider)))
        kinds = ("same", "rounds", "batch", "approximate", "money")
        return sorted(found, key=lambda change: kinds.index(change.kind))

    def _speedup(self, profile: StepProfile, world_size: int, network: Network, setting: Setting, end: int) -> float:
        divided = self._divided(profile, world_size, end)
        step_s = simulate_step(divided, setting, network, world_size).step_s
        return self._samples_factor(world_size) * profile.compute_s / step_s

    def _samples_factor(self, world_size: int) -> int:
        return world_size if self._scaling == "weak" else 1

    def _profile(self, world_size: int) -> StepProfile:
        return self._divided(self._source.profile, world_size, 0)

    def _divided(self, profile: StepProfile, world_size: int, end: int) -> StepProfile:
        """Work of each rank; `end` selects the typical (0), the better (1) or the worse (2) assumption."""
        if self._scaling == "weak" or world_size == 1:
            return profile
        if profile.accumulation >= world_size:  # fewer micro-batches each; a remainder costs one more
            return replace(profile, accumulation=math.ceil(profile.accumulation / world_size))
        share = profile.accumulation / world_size
        fixed = (self._source.fixed_share or _FIXED_SHARE)[end]
        return replace(profile.with_share_of_batch(share, fixed), accumulation=1)

    def _break_even(self, world_size: int) -> BreakEven:
        """Bandwidth for a speedup above 1 if there is none now, else for an efficiency of 0.85."""
        least = 1 / world_size if self.speedup(world_size) < 1 else EXCELLENT
        factor = _smallest(lambda value: self.speedup(world_size, self._network.faster(value)) / world_size >= least)
        goal = "to be faster than one" if least < EXCELLENT else "for an efficiency of 85%"
        if factor is None:
            text = f"no bandwidth is enough {goal}; what is left is latency, waiting and small batches"
        elif self._network.gbps is None:
            text = f"{factor:.3g} times this bandwidth {goal}"
        else:
            text = f"{factor * self._network.gbps:.3g} Gbit/s {goal}"
        return BreakEven(world_size, least, factor, text)

    def _reach(self, least: float) -> int | None:
        """Largest number of ranks, in powers of two, up to which the efficiency holds."""
        reached, size = None, 2
        while size <= MOST_RANKS and self.speedup(size) / size >= least:
            reached, size = size, size * 2
        return reached

    def _unknown(self) -> tuple[str, ...]:
        source, setting = self._source, self._setting
        found = list(source.unknown)
        method = setting.codec.method
        if not setting.codec.seconds_per_value:
            found.append("what compressing costs (no codec was measured): assumed zero, so gains are upper bounds")
        elif method != "off" and method not in setting.codec.seconds_per_value:
            found.append(f"what compressing by {method} costs: assumed to be zero")
        if self._scaling == "strong" and source.fixed_share is None:
            found.append("how much faster a smaller batch is: half is assumed to shrink, intervals allow for all of it")
        if self._scaling == "weak":
            found.append("what the larger global batch does to learning")
        found += [
            "whether the other devices are as fast as this one, and data arrives as fast for all",
            "whether the memory suffices (`frameworm memory` plans it)",
            "latency: its terms were never checked against links with added delay",
            "trees and in-network reduction (NCCL may beat a ring at many ranks), and traffic of others",
            "whether steps are slow on all ranks together: they are assumed to be slow independently",
        ]
        return tuple(found)


def cheapest(changes: Sequence[Change]) -> Change | None:
    """Return, of the first kind that helps, the smallest change with nearly all of that kind's gain."""
    for kind in dict.fromkeys(change.kind for change in changes):
        helping = [change for change in changes if change.kind == kind and change.gain >= HELPS]
        if helping:
            most = max(change.gain for change in helping)
            return next(change for change in helping if change.gain >= 1 + 0.8 * (most - 1))
    return None


def _smallest(holds: Callable[[float], bool]) -> float | None:
    """Find the smallest factor for which `holds` is true, if it is true for all larger ones."""
    if not holds(_WIDEST):
        return None
    low, high = -math.log(_WIDEST), math.log(_WIDEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(math.exp(middle)) else (middle, high)
    return math.exp(high)
