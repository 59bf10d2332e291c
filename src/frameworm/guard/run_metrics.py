"""The few numbers that the guard keeps of a run, enough to compare it with any other."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frameworm.config.observe_section import LOGGER_SETTINGS
from frameworm.config.source import stored_values
from frameworm.errors import BaselineError
from frameworm.guard.statistics import Level, mean_level, typical_level
from frameworm.records.account import RARE, StepAccount
from frameworm.records.estimate import Estimate, known
from frameworm.records.schema import RunRecord, StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP, percentile
from frameworm.records.store import RunFolder
from frameworm.records.writer import StepReader

BLOCK_LIMIT = 400
SAMPLE_BYTES = 4 * 2**20  # of the steps of a run; longer files are sampled
FEWEST_STEPS = 20
# In the first quarter of a compiled or captured run, steps slower than the median by this factor are compilations.
COMPILING = 3.0
# While cores are idle, other programs take nothing away.
CROWDED_FROM = 0.7

# Settings that say where things are or how the run is watched, not how it trains.
_UNTOLD = ("name", "data.cache_dir", "data.root", "observe.progress", *(f"observe.{name}" for name in LOGGER_SETTINGS))
_UNTOLD_SECTIONS = ("observe.targets.", "storage.", *(f"observe.{name}." for name in LOGGER_SETTINGS))


@dataclass(slots=True)
class Work:
    """The work of one step; None means unknown."""

    workload: str | None = None
    dataset: str | None = None
    global_batch: int | None = None
    parameters: int | None = None
    tokens_per_step: float | None = None  # without padding, over all ranks
    samples_per_step: float | None = None  # over all ranks


@dataclass(slots=True)
class RunMetrics:
    """One run as the guard sees it. Step times exclude warm-up, checkpoints and validation."""

    name: str
    status: str = "completed"
    started: str | None = None
    steps: int = 0
    measured_steps: int = 0
    world_size: int = 1
    steps_per_block: int = 1
    mean_s: list[float] = field(default_factory=list)  # mean step of each block of consecutive steps
    median_s: list[float] = field(default_factory=list)  # median step of each block
    phases: dict[str, Estimate] = field(default_factory=dict)  # seconds per step
    memory: dict[str, int] = field(default_factory=dict)  # device_bytes, host_bytes
    quality: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    work: Work = field(default_factory=Work)
    environment: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # the config, with dotted keys
    left_out: int = 0  # steps of warm-up, compilation and capture
    share: float = 1.0  # fraction of all steps behind the times, if they are a sample
    crowding: float | None = None  # fraction of the cores' time that other programs took while no core was idle

    @property
    def typical_s(self) -> float | None:
        """Median step time."""
        return percentile(sorted(self.median_s), 0.5) if self.median_s else None

    @property
    def mean_step_s(self) -> float | None:
        """Mean step time, including stalls."""
        return math.fsum(self.mean_s) / len(self.mean_s) if self.mean_s else None

    def typical(self) -> Level | None:
        """Return the level of the typical step; None for too few steps."""
        return typical_level(self.median_s) if self.measured_steps >= FEWEST_STEPS else None

    def mean(self) -> Level | None:
        """Return the level of the mean step; None for too few steps."""
        return mean_level(self.mean_s) if self.measured_steps >= FEWEST_STEPS else None

    def set_times(self, times: Sequence[float]) -> None:
        """Store the times of the measured steps, in at most `BLOCK_LIMIT` blocks."""
        self.measured_steps = len(times)
        size = max(math.ceil(len(times) / BLOCK_LIMIT), 1)
        self.steps_per_block = size
        # A shorter last block would weigh as much as the others.
        blocks = [times[begin : begin + size] for begin in range(0, len(times) // size * size, size)]
        self.mean_s = [math.fsum(block) / size for block in blocks]
        self.median_s = [percentile(sorted(block), 0.5) for block in blocks]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON-ready data; times have five digits."""
        data = dataclasses.asdict(self)
        data["mean_s"] = [_rounded(value) for value in self.mean_s]
        data["median_s"] = [_rounded(value) for value in self.median_s] if self.steps_per_block > 1 else None
        data["phases"] = {
            name: {"mean_s": _rounded(item.value), "error_s": _rounded(item.error)}
            for name, item in self.phases.items()
        }
        data["quality"] = {name: value if math.isfinite(value) else str(value) for name, value in self.quality.items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunMetrics:
        """Read what `to_dict` returned; other data raises ValueError, TypeError or KeyError."""
        names = {item.name for item in dataclasses.fields(cls)}
        values = {name: value for name, value in data.items() if name in names}
        for name in ("memory", "quality", "environment", "settings", "phases"):
            values[name] = dict(values.get(name) or {})
        values["mean_s"] = _times(values["mean_s"])
        values["median_s"] = _times(values.get("median_s") or values["mean_s"])
        values["phases"] = {
            name: Estimate(float(item["mean_s"]), float(item["error_s"])) for name, item in values["phases"].items()
        }
        values["quality"] = {name: float(value) for name, value in values["quality"].items()}
        values["memory"] = {name: int(value) for name, value in values["memory"].items()}
        known_work = {item.name for item in dataclasses.fields(Work)}
        work = {name: value for name, value in (values.get("work") or {}).items() if name in known_work}
        values["work"] = Work(**work)
        run = cls(**values)
        for name in ("steps", "measured_steps", "world_size", "steps_per_block"):
            if not isinstance(getattr(run, name), int):
                raise ValueError(f"{name} is not a whole number")
        return run


def read_run(folder: RunFolder, *, exact: bool = False) -> RunMetrics:
    """Read the metrics of a stored run; a run without a summary counts as `unfinished`.

    Args:
        folder: The run.
        exact: Read all steps of a long run instead of a sample.

    Raises:
        RunFolderError: Its files cannot be read.
    """
    record = folder.read_summary() if folder.summary_json.exists() else None
    run = RunMetrics(name=folder.path.resolve().name, status="unfinished" if record is None else record.status)
    run.settings = read_settings(folder)
    files = folder.step_files()
    if files:
        reader = StepReader(files[min(files)], None if exact else SAMPLE_BYTES)
        run.share = reader.share
        # A sample is small enough to keep in memory; otherwise the file is read twice.
        _read_steps(run, reader if exact else list(reader), compiled=record is not None and _compiles(record))
    if record is not None:
        _take_summary(run, record)
    # Every run of the Python API has the same workload, but its own model.
    names = [_text(run.settings.get(key)) for key in ("workload", "model.class_name")]
    run.work.workload = " ".join(name for name in names if name) or None
    run.work.dataset = _text(run.settings.get("data.dataset"))
    return run


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the config of a run with dotted keys; empty if there is none."""
    if not folder.config.exists():
        return {}
    flat: dict[str, Any] = {}
    _flatten(stored_values(folder.config, folder.read_config()), "", flat)
    return {
        name: value for name, value in flat.items() if not name.startswith(_UNTOLD_SECTIONS) and name not in _UNTOLD
    }


def read_runs(paths: Iterable[str], *, exact: bool = False) -> list[RunMetrics]:
    """Read the metrics of several runs.

    Args:
        paths: Their folders.
        exact: Read all steps of long runs instead of samples.

    Raises:
        RunFolderError: One of them is not a run.
        BaselineError: One is given twice: comparing a run with itself proves nothing.
    """
    folders = [RunFolder.open(path) for path in paths]
    places = [folder.path.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise BaselineError(f"{folders[index].path} is given twice; give each run once")
    return [read_run(folder, exact=exact) for folder in folders]


def _compiles(record: RunRecord) -> bool:
    return record.compilation is not None or bool(record.captured_steps)


def _read_steps(run: RunMetrics, reader: Iterable[StepRecord], *, compiled: bool) -> None:
    """Take times and phases from the measured steps; `reader` is iterated over twice."""
    times = array("d")
    for step in reader:
        times.append(_training_s(step))
    run.steps = round(len(times) / run.share)
    skipped = set(range(min(DEFAULT_WARMUP, len(times) // 2)))
    if compiled and len(times) > 2 * DEFAULT_WARMUP:
        usual_s = percentile(sorted(times[len(times) // 2 :]), 0.5)
        skipped |= {index for index in range(len(times) // 4) if times[index] > COMPILING * usual_s}
    account = StepAccount(warmup=0, share=run.share)
    samples = tokens = tokened = 0.0
    for index, step in enumerate(reader):
        if index in skipped or not 0 < times[index] < math.inf:
            continue
        account.add(step)
        samples += known(step.samples) or 0.0
        if step.tokens is not None:
            tokens += known(step.tokens) or 0.0
            tokened += 1
    kept = [value for index, value in enumerate(times) if index not in skipped and 0 < value < math.inf]
    run.left_out = len(skipped)
    run.set_times(kept)
    sums = account.sums()
    if sums.steps:
        run.phases = {name: item.scaled(sums.total_s / sums.steps) for name, item in sums.phases().items()}
    if kept:
        run.work.samples_per_step = samples / len(kept) or None
        run.work.tokens_per_step = tokens / tokened if tokened else None


def _training_s(step: StepRecord) -> float:
    rare_s = sum(known(step.phases.get(name)) or 0.0 for name in RARE) if step.phases else 0.0
    return float(step.step_s) - rare_s


def _take_summary(run: RunMetrics, record: RunRecord) -> None:
    run.started = record.started
    run.steps = record.steps or run.steps
    run.world_size = max(record.batch.world_size, 1)
    run.environment = dict(record.environment)
    run.work.global_batch = record.batch.global_
    run.work.parameters = record.parameters
    for name in ("samples_per_step", "tokens_per_step"):
        mine = getattr(run.work, name)
        setattr(run.work, name, None if mine is None else mine * run.world_size)
    run.crowding = _crowding(record)
    run.mfu = known(record.mfu)
    memory = record.memory
    if memory.host_peak_bytes is not None:
        run.memory["host_bytes"] = memory.host_peak_bytes
    if memory.peak_bytes is not None and memory.reserved_bytes is not None:  # only a device reserves
        run.memory["device_bytes"] = memory.peak_bytes
    for name in ("val_accuracy", "val_loss", "train_loss"):
        value = getattr(record.quality, name)
        if value is not None:
            with contextlib.suppress(TypeError, ValueError):
                run.quality[name] = float(value)


def _crowding(record: RunRecord) -> float | None:
    """Fraction taken by other programs; unknown with several ranks, because each would count the others."""
    system, cores = record.system, known(record.environment.get("cpus_usable"))
    if record.batch.world_size > 1 or system is None or not cores:
        return None
    if system.cpu_busy is None or system.cpu_process is None:
        return None
    return crowding(system.cpu_busy.mean, system.cpu_process.mean / cores)


def crowding(busy: float, own: float) -> float:
    """Fraction of the cores' time that other programs took, reduced if cores were idle.

    Args:
        busy: Fraction of the cores' time in which they were busy.
        own: Fraction of it in which they worked for the run.
    """
    saturation = min(max((busy - CROWDED_FROM) / (1 - CROWDED_FROM), 0.0), 1.0)
    return min(max(busy - own, 0.0), 0.99) * saturation


def _flatten(values: Mapping[Any, Any], prefix: str, flat: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            _flatten(value, f"{prefix}{key}.", flat)
        else:
            flat[f"{prefix}{key}"] = value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _times(values: Sequence[Any]) -> list[float]:
    times = [float(value) for value in values]
    if len(times) > BLOCK_LIMIT or not all(0 < value < math.inf for value in times):
        raise ValueError("its step times are not a list of positive numbers")
    return times
