"""The step of one device, as input of a prediction: from a run's folder, a small JSON file, or numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frameworm.errors import ConfigError, RunFolderError
from frameworm.records.gradients import GradientTimes
from frameworm.records.reading import read_json
from frameworm.records.schema import RunRecord, StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.records.store import SAMPLE_BYTES, RunFolder
from frameworm.records.writer import StepReader
from frameworm.scaling.fabrics import Link, LinkNetwork
from frameworm.scaling.network import bus_share
from frameworm.scaling.simulate import StepProfile
from frameworm.scaling.traffic import Gradient

# Backward takes about twice as long as forward: two matrix products for each one.
FORWARD_SHARE = 1 / 3
_PIECES = 64
_NOT_COMPUTE = ("checkpoint", "validation", "communication_exposed")
_MOST_STEPS = 20_000
_CHUNKS = 10
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Source:
    """A step profile, its uncertainty and its origin.

    Attributes:
        uncertainty: Half the width of the 95% interval of the step time, as a fraction of it.
        overlap_measured: True if the times when gradients are ready were measured, not assumed.
        fixed_share: Fraction of forward and backward that a smaller batch does not shorten: typical, least, most; None
            if unknown.
        steps: Steps of the whole training, to compute its cost.
        samples: Samples per step on one device.
        world_size: World size of the measured run.
        unknown: What could not be determined, in words.
    """

    profile: StepProfile
    name: str = "by hand"
    uncertainty: float = 0.0
    overlap_measured: bool = True
    fixed_share: tuple[float, float, float] | None = None
    steps: int | None = None
    samples: int | None = None
    world_size: int = 1
    device: str | None = None
    on_cpu: bool = False
    unknown: tuple[str, ...] = ()
    sync: tuple[float, int] | None = None  # seconds to synchronise all gradients, and the number of ranks

    def on_one_device(self) -> Source:
        """Return the whole global batch on one device: the measured micro-batches of all ranks, one after the other."""
        profile = replace(self.profile, accumulation=self.profile.accumulation * self.world_size)
        samples = None if self.samples is None else self.samples * self.world_size
        return replace(self, profile=profile, samples=samples, world_size=1)


def load_run(path: str | Path) -> Source:
    """Load the profile of a stored run.

    Raises:
        RunFolderError: There is no such run, or it has no measured step.
    """
    folder = RunFolder.open(path)
    record = folder.read_summary()
    files = folder.step_files()
    times = _compute_times(StepReader(files[min(files)], SAMPLE_BYTES)) if files else []
    return from_record(record, GradientTimes.load(folder.path), times, str(folder.path))


def from_record(
    record: RunRecord, gradients: GradientTimes | None, times: Sequence[float] = (), name: str | None = None
) -> Source:
    """Make the profile of a run from its record.

    Args:
        record: Content of `summary.json`.
        gradients: Content of `gradients.json`, if there is one.
        times: Times of single steps, without validation, checkpoints and exposed communication.
        name: Name for messages.
    """
    unknown = []
    step_s = record.throughput.step_s
    phases = {key: item.mean_s for key, item in record.phases.items() if key not in _NOT_COMPUTE}
    level_s = math.fsum(times) / len(times) if times else math.fsum(phases.values())
    if not level_s and step_s is not None:
        level_s = step_s.mean
    if not level_s:
        raise RunFolderError(f"{name or record.name} has no measured step: train it for {DEFAULT_WARMUP + 10} or more")
    if not times:
        unknown.append("how much steps differ (no steps file): no time is added for the slowest rank")
    phases = _scaled(phases, level_s)
    if "backward" not in phases:
        unknown.append("the phases of its step: forward is taken to be a third of it, backward two thirds")
        phases = {"forward": level_s * FORWARD_SHARE, "backward": level_s * (1 - FORWARD_SHARE)}
    accumulation = max(1, record.batch.accumulation)
    backward_s = phases["backward"] / accumulation
    found, measured = _gradients(record, gradients, backward_s, unknown)
    profile = StepProfile(
        gradients=found,
        forward_s=phases.get("forward", 0.0) / accumulation,
        backward_s=backward_s,
        optimizer_s=phases.get("optimizer", 0.0),
        other_s=math.fsum(value for key, value in phases.items() if key not in ("forward", "backward", "optimizer")),
        accumulation=accumulation,
        step_times_s=tuple(times),
    )
    world_size = max(1, record.batch.world_size)
    on_cpu = (record.device or "").upper() == "CPU"
    return Source(
        profile,
        name=name or record.name,
        uncertainty=_uncertainty(times),
        overlap_measured=measured,
        steps=record.steps or None,
        samples=None if record.batch.global_ is None else record.batch.global_ // world_size,
        world_size=world_size,
        device=record.device,
        on_cpu=on_cpu,
        unknown=tuple(unknown),
    )


def _gradients(
    record: RunRecord, times: GradientTimes | None, backward_s: float, unknown: list[str]
) -> tuple[tuple[Gradient, ...], bool]:
    """Gradients with the times at which they are ready, and whether those were measured."""
    if times is not None and times.measured and times.backward_s:
        stretch = backward_s / times.backward_s  # scales the few measured steps to the mean of all
        return tuple(
            Gradient(
                item.size_bytes,
                min(backward_s, (item.ready_s or 0.0) * stretch),
                item.size_bytes // _FLOAT_BYTES if not item.shape else math.prod(item.shape),
                item.shape,
            )
            for item in times.gradients
        ), True
    buckets = record.communication.buckets
    if buckets:
        end_s = max(bucket.ready_s for bucket in buckets)
        stretch = min(1.0, backward_s / end_s) if end_s > 0 else 1.0
        unknown.append("when single gradients are ready: those of its buckets, as they were divided then")
        return tuple(Gradient.of(bucket.bytes, bucket.ready_s * stretch) for bucket in buckets), True
    if times is not None and times.gradients:
        why = times.note or "not seen"
        unknown.append(f"when gradients are ready ({why}): assumed to come evenly by their bytes, last layer first")
        sizes = [(item.size_bytes, item.shape) for item in reversed(times.gradients)]
    else:
        if not record.parameters:
            raise RunFolderError(f"{record.name} does not say how many parameters it has: give --gradient-mb")
        unknown.append("its gradients (an older run): float32, assumed to come evenly during backward")
        piece = max(1, record.parameters * _FLOAT_BYTES // _PIECES)
        sizes = [(piece, ()) for _ in range(_PIECES)]
    return spread_evenly(sizes, backward_s), False


def spread_evenly(sizes: Sequence[tuple[int, tuple[int, ...]]], backward_s: float) -> tuple[Gradient, ...]:
    """Place gradients in the order of backward, each taking time in proportion to its size."""
    total = sum(size for size, _ in sizes) or 1
    found, sent = [], 0
    for size, shape in sizes:
        sent += size
        values = math.prod(shape) if shape else size // _FLOAT_BYTES
        found.append(Gradient(size, backward_s * sent / total, values, shape))
    return tuple(found)


def all_at_the_end(profile: StepProfile) -> StepProfile:
    """Return the profile with all gradients ready at the end, so that nothing hides communication."""
    late = tuple(replace(item, ready_s=profile.backward_s) for item in profile.gradients)
    return replace(profile, gradients=late)


def _compute_times(steps: Iterable[StepRecord]) -> list[float]:
    found: list[float] = []
    for step in steps:
        if step.step > DEFAULT_WARMUP and len(found) < _MOST_STEPS:
            spent_s = step.step_s - sum(step.phases.get(name, 0.0) for name in _NOT_COMPUTE)
            if spent_s > 0 and math.isfinite(spent_s):
                found.append(spent_s)
    return found


def _scaled(phases: Mapping[str, float], level_s: float) -> dict[str, float]:
    total_s = math.fsum(phases.values())
    return {name: value * level_s / total_s for name, value in phases.items()} if total_s > 0 else {}


def _uncertainty(times: Sequence[float]) -> float:
    """Uncertainty from means over parts of the run, since neighbouring steps are correlated; 5% with too few steps."""
    if len(times) < 2 * _CHUNKS:
        return 0.05
    size = len(times) // _CHUNKS
    means = [math.fsum(times[index * size : (index + 1) * size]) / size for index in range(_CHUNKS)]
    mean = math.fsum(means) / _CHUNKS
    variance = math.fsum((value - mean) ** 2 for value in means) / (_CHUNKS - 1)
    return 2.26 * math.sqrt(variance / _CHUNKS) / mean  # Student's t at 9 degrees of freedom


_CASE_KEYS = {
    "name": "what to call it",
    "compute_ms": "the whole step on one device",
    "forward_ms": "forward of one micro-batch; a third of the step unless given",
    "backward_ms": "backward of one micro-batch",
    "optimizer_ms": "the optimizer",
    "accumulation": "micro-batches per step",
    "gradient_mb": "gradients of the whole model, in MB of 2**20 bytes",
    "gradients": "a list of {mb, ready}: size, and when it is there as a share of backward",
    "part_of_batch": "a share of the batch for which the time is known too",
    "part_ms": "forward and backward at that share, with the optimizer and the rest",
    "sync_ms": "what sending all gradients takes, instead of a network",
    "sync_world_size": "between so many ranks",
    "samples": "in one step",
    "steps": "of the whole training",
}


def load_case(path: Path) -> Source:
    """Load a profile from a JSON file written by hand.

    Raises:
        ConfigError: The file cannot be read, or a key is unknown or invalid.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the case {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold an object with keys such as compute_ms and gradient_mb")
    return from_figures({"name": path.stem, **data})


def from_figures(figures: Mapping[str, Any]) -> Source:
    """Make a profile from numbers given by hand; the keys are those of a case file.

    Raises:
        ConfigError: A key is unknown, missing or invalid.
    """
    unknown_keys = sorted(set(figures) - set(_CASE_KEYS))
    if unknown_keys:
        raise ConfigError(f"a case has no {unknown_keys[0]}; it may have {', '.join(_CASE_KEYS)}")
    try:
        accumulation = int(figures.get("accumulation", 1))
        optimizer_s = float(figures.get("optimizer_ms", 0.0)) / 1e3
        whole = figures.get("compute_ms")
        if whole is None:
            whole = accumulation * (float(figures["forward_ms"]) + float(figures["backward_ms"])) + optimizer_s * 1e3
        compute_s = float(whole) / 1e3
        micro_s = (compute_s - optimizer_s) / accumulation
        backward_s = float(figures.get("backward_ms", micro_s * 1e3 * (1 - FORWARD_SHARE))) / 1e3
        forward_s = float(figures.get("forward_ms", (micro_s - backward_s) * 1e3)) / 1e3
        gradients, measured = _case_gradients(figures, backward_s)
        fixed = _fixed_share(figures, compute_s)
        sync = None
        if "sync_ms" in figures:
            sync = (float(figures["sync_ms"]) / 1e3, int(figures["sync_world_size"]))
        profile = StepProfile(gradients, forward_s, backward_s, optimizer_s, 0.0, accumulation)
        profile = replace(profile, other_s=max(0.0, compute_s - profile.compute_s))
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing: give compute_ms and gradient_mb at least") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a case holds numbers: {error}") from error
    if not (compute_s > 0 and math.isfinite(compute_s) and profile.gradient_bytes > 0 and accumulation >= 1):
        raise ConfigError("compute_ms, gradient_mb and accumulation must be positive numbers")
    if min(forward_s, backward_s, optimizer_s) < 0:
        raise ConfigError("the parts of a step must not be longer than compute_ms")
    notes = ["how much steps differ: no time is added for the slowest rank"]
    if not measured:
        notes.append("when gradients are ready: assumed to come evenly during backward")
    return Source(
        profile,
        name=str(figures.get("name", "by hand")),
        overlap_measured=measured,
        fixed_share=fixed,
        steps=figures.get("steps"),
        samples=figures.get("samples"),
        unknown=tuple(notes),
        sync=sync,
    )


def network_of(source: Source) -> LinkNetwork | None:
    """Return links over which all gradients take as long as the source says; None if it does not say."""
    if source.sync is None:
        return None
    sync_s, world_size = source.sync
    if sync_s <= 0 or world_size < 2:
        raise ConfigError("sync_ms must be positive, and sync_world_size 2 or more")
    rate = bus_share("all_reduce", world_size) * source.profile.gradient_bytes / sync_s
    return LinkNetwork(Link("as synchronised", rate, 0.0, (1.0, 1.0, 1.0)))


def _case_gradients(figures: Mapping[str, Any], backward_s: float) -> tuple[tuple[Gradient, ...], bool]:
    if "gradients" in figures:
        found = [
            Gradient.of(round(float(item["mb"]) * 2**20), min(1.0, float(item["ready"])) * backward_s)
            for item in figures["gradients"]
        ]
        return tuple(found), True
    piece = max(_FLOAT_BYTES, round(float(figures["gradient_mb"]) * 2**20 / _PIECES))
    return spread_evenly([(piece, ())] * _PIECES, backward_s), False


def _fixed_share(figures: Mapping[str, Any], compute_s: float) -> tuple[float, float, float] | None:
    if "part_ms" not in figures or "part_of_batch" not in figures:
        return None
    share, part_s = float(figures["part_of_batch"]), float(figures["part_ms"]) / 1e3
    if not 0 < share < 1:
        raise ConfigError("part_of_batch must lie between 0 and 1")
    fixed = min(1.0, max(0.0, (part_s / compute_s - share) / (1 - share)))
    return fixed, fixed, fixed
