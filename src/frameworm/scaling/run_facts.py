"""Reads what a scaling analysis needs from one stored run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworm.config.model_sections import PYTHON_WORKLOAD
from frameworm.config.source import stored_values
from frameworm.errors import RunFolderError
from frameworm.records.estimate import known
from frameworm.records.schema import EpochRecord, RunRecord
from frameworm.records.store import RunFolder
from frameworm.scaling.points import Measurement, Mode, Point

# Settings that change the work of a sample or how it is computed; other settings may differ within a curve.
WORK_SETTINGS = (
    "workload",
    "data.dataset",
    "data.limit",
    "data.batching",
    "data.balance",
    "data.pad_to",
    "data.vocab_size",
    "training.optimizer",
    "gpu.mixed_precision",
    "gpu.compile_model",
    "gpu.compile_mode",
    "gpu.use_flash_attention",
    "gpu.deterministic",
    "gpu.capture",
    "gpu.tf32",
    "memory.activation_checkpointing",
)
# Settings of communication, which are irrelevant for a run on one device.
SENDING_SETTINGS = (
    "parallel.strategy",
    "parallel.backend",
    "parallel.compression",
    "parallel.sync_every",
    "parallel.bucket_cap_mb",
    "parallel.offload_optimizer",
)
# What the run was measured on; another kind of device or another torch makes another curve.
PLACE_FACTS = ("device", "torch")
_IGNORED_MODEL_KEYS = {"init_from", "script"}

Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, its comparison keys and its measurement."""

    name: str  # its folder, relative to the root of the search
    title: str  # the name in its config
    status: str
    dataset: str
    record: RunRecord
    config: Mapping[str, Any]
    measurement: Measurement
    work: Key
    sending_settings: Key
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.record.batch.world_size

    @property
    def global_batch(self) -> int | None:
        """Samples per step over all processes."""
        return self.record.batch.global_

    @property
    def device_batch(self) -> int | None:
        """Samples per step on one device."""
        return None if self.global_batch is None else self.global_batch // self.world_size

    @property
    def work_key(self) -> str:
        """Equal for runs that do the same work per sample on the same kind of device."""
        return repr((self.dataset, self.work))

    @property
    def sending_key(self) -> str:
        """Equal for runs that communicate in the same way."""
        return repr(self.sending_settings)

    @property
    def sending(self) -> str:
        """The kind of communication in a word or two."""
        values = dict(self.sending_settings)
        words = [values.get("parallel.strategy"), values.get("parallel.compression")]
        return " ".join(str(word) for word in words if word and word != "off")

    def point(self, name: str, mode: Mode, measurements: Sequence[Measurement]) -> Point:
        """Return the point of this run's world size, measured by several runs like it."""
        record = self.record
        model = self.config.get("model") or {}
        compression = record.communication.compression
        sent = record.communication.bytes_per_step
        if compression is not None and compression.plain_bytes_per_step:
            sent = compression.plain_bytes_per_step
        on_cpu = (record.environment or {}).get("device") == "cpu"
        cpus = (record.environment or {}).get("cpus_usable")
        hosts = len({rank.host for rank in record.ranks}) or 1
        length = model.get("max_seq_len")
        return Point(
            dataset=self.dataset,
            world_size=self.world_size,
            measurements=tuple(measurements),
            name=name,
            mode=mode,
            micro_batch=record.batch.micro,
            accumulation=record.batch.accumulation,
            global_batch=self.global_batch,
            parameters=record.parameters,
            sequence_length=length if isinstance(length, int) else None,
            gradient_bytes=sent or None,
            model=model,
            device=record.device,
            strategy=record.strategy,
            precision=record.precision,
            cpus=cpus * hosts if on_cpu and cpus else None,
            threads=(record.environment or {}).get("torch_threads") if on_cpu else None,
            launches_steps=not on_cpu and not record.captured_steps,
        )


def read_run(folder: RunFolder, name: str, warmup: int) -> RunFacts:
    """Read one run.

    Args:
        folder: Its folder.
        name: Its name in lists.
        warmup: Number of epochs to ignore at the beginning.

    Raises:
        RunFolderError: Its summary or its table of epochs is damaged.
    """
    record = folder.read_summary()
    if not isinstance(record.batch.world_size, int) or record.batch.world_size < 1:
        raise RunFolderError(f"{folder.summary_json} does not say how many processes there were")
    if not isinstance(record.batch.global_, int | None):
        raise RunFolderError(f"{folder.summary_json} has {record.batch.global_} as its global batch")
    config = _read_config(folder)
    epochs = folder.read_epochs() if folder.epochs_csv.exists() else record.epochs
    for epoch in epochs:
        if (known(epoch.epoch_time_s) or 0.0) <= 0:
            raise RunFolderError(f"{folder.path}: epoch {epoch.epoch} has {epoch.epoch_time_s} as epoch_time_s")
    counted, notes = _drop_warmup(epochs, warmup)
    return RunFacts(
        name=name,
        title=str(config.get("name") or record.name),
        status=record.status,
        dataset=dataset_of(config, record),
        record=record,
        config=config,
        measurement=measurement_of(record, counted, str(folder.path)),
        work=_work_of(config, record),
        sending_settings=tuple((key, _setting(config, key)) for key in SENDING_SETTINGS),
        notes=tuple(notes),
    )


def measurement_of(record: RunRecord, epochs: Sequence[EpochRecord], run: str | None = None) -> Measurement:
    """Return the measurement of a run.

    Args:
        record: Its record.
        epochs: Those that count; if there are none, the speed comes from the run's steps.
        run: Its folder.
    """
    times = [epoch.epoch_time_s for epoch in epochs if epoch.epoch_time_s]
    samples = [
        float(round(epoch.samples_per_s * epoch.epoch_time_s))
        for epoch in epochs
        if epoch.samples_per_s and epoch.epoch_time_s
    ]
    epoch_s = math.fsum(times) / len(times) if times else None
    epoch_samples = math.fsum(samples) / len(samples) if samples and len(samples) == len(times) else None
    speed = epoch_samples / epoch_s if epoch_s and epoch_samples else known(record.throughput.samples_per_s)
    phases = {name: seconds for name, phase in record.phases.items() if (seconds := known(phase.mean_s)) is not None}
    spread = record.throughput.step_s
    return Measurement(
        epoch_s=epoch_s,
        step_s=None if spread is None else known(spread.mean),
        samples_per_s=speed,
        tokens_per_s=known(record.throughput.tokens_per_s),
        epoch_samples=epoch_samples,
        epochs_s=tuple(times),
        phases=phases,
        communication_s=known(record.communication.total_s),
        exposed_s=known(record.communication.exposed_s),
        rank_wait_s=known(record.communication.rank_wait_s),
        data_wait_s=known(phases.get("data_wait")),
        train_loss=known(record.quality.train_loss),
        val_loss=known(record.quality.val_loss),
        val_accuracy=known(record.quality.val_accuracy),
        run=run,
    )


def dataset_of(config: Mapping[str, Any], record: RunRecord) -> str:
    """Return the data set, or a substitute: a custom workload brings its own data."""
    workload = str(config.get("workload") or "")
    if workload == PYTHON_WORKLOAD:
        script, name = _setting(config, "model.script"), str(_setting(config, "model.class_name") or "")
        return f"{Path(str(script or record.name)).stem} {name.rpartition('.')[2]}".strip()
    if ":" in workload:
        return str(config.get("name") or workload.rpartition(":")[2])
    dataset = str(_setting(config, "data.dataset") or "") or record.name
    return dataset.removeprefix("hf:").replace("/", "_")


def differences(left: RunFacts, right: RunFacts) -> list[str]:
    """Describe what makes two runs incomparable, setting by setting."""
    mine, other = dict(left.work), dict(right.work)
    if left.world_size > 1 and right.world_size > 1:
        mine, other = {**mine, **dict(left.sending_settings)}, {**other, **dict(right.sending_settings)}
    return [
        f"{key} is {mine.get(key)}, where the others have {other.get(key)}"
        for key in dict.fromkeys([*mine, *other])
        if mine.get(key) != other.get(key)
    ]


def _drop_warmup(epochs: Sequence[EpochRecord], warmup: int) -> tuple[list[EpochRecord], list[str]]:
    counted = [epoch for epoch in epochs if epoch.epoch > warmup]
    if counted or not epochs:
        return counted, []
    count = f"{len(epochs)} epoch{'s' if len(epochs) > 1 else ''}"
    return list(epochs), [f"it has {count}, none beyond the {warmup} of warm-up: the warm-up counts"]


def _work_of(config: Mapping[str, Any], record: RunRecord) -> Key:
    model = config.get("model") or {}
    facts = {key: _setting(config, key) for key in WORK_SETTINGS}
    facts |= {f"model.{key}": value for key, value in sorted(model.items()) if key not in _IGNORED_MODEL_KEYS}
    environment = record.environment or {}
    facts |= {key: environment.get(key) for key in PLACE_FACTS}
    facts["precision"] = record.precision
    if config.get("workload") == PYTHON_WORKLOAD:
        facts["parameters"] = record.parameters  # one class may make models of many sizes
    return tuple(facts.items())


def _read_config(folder: RunFolder) -> dict[str, Any]:
    """The stored config as plain values; empty for a run without one (attached to a script)."""
    return stored_values(folder.config, folder.read_config()) if folder.config.exists() else {}


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
