"""The content of reports as rows of text and numbers; `text` and `html` lay them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from frameworm.diagnose.rules.places import place_text
from frameworm.diagnose.targets import grade_targets
from frameworm.records.observations import Target
from frameworm.records.schema import PHASES, Batch, EpochRecord, Finding, Remedy, RunRecord

UNKNOWN = "unknown"

PHASE_LABELS = {name: name.replace("_", " ") for name in PHASES} | {"communication_exposed": "exposed communication"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its label."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of the mean step."""

    name: str
    label: str
    mean_s: float
    share: float


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding as text."""

    code: str
    severity: str
    share: str
    evidence: str
    remedies: tuple[str, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One target: its name and goal, the value reached, and met, missed or unknown."""

    name: str
    goal: str
    value: str
    grade: str


def plain(text: object) -> str:
    """One line without control characters, so that a name or note cannot send terminal escape codes."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)).strip()


def number(value: float | None, digits: int = 4) -> str:
    """A number with a few significant digits, without exponents for common magnitudes."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """A time in a suitable unit."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{value * 1e6:.3g} us"
    if size < 0.9995:
        return f"{_three_digits(value * 1e3)} ms"
    if size < 59.95:
        return f"{_three_digits(value)} s"
    whole = round(size)
    sign = "-" if value < 0 else ""
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{sign}{hours} h {minutes:02d} min" if hours else f"{sign}{minutes} min {rest:02d} s"


def data_size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes any size")


def flop_rate(value: float | None) -> str:
    """FLOP/s in a suitable unit."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{_three_digits(value)} {unit}FLOP/s"
        value /= 1000
    raise AssertionError("the last unit takes any rate")


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value * 100:.1f}%"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def batch_text(batch: Batch) -> str:
    """The global batch as the product of its factors."""
    micro = UNKNOWN if batch.micro is None else str(batch.micro)
    whole = UNKNOWN if batch.global_ is None else str(batch.global_)
    factors = f"micro-batch {micro} x accumulation {batch.accumulation} x world size {batch.world_size}"
    return f"global batch {whole} = {factors}"


def title_parts(record: RunRecord) -> list[str]:
    """Name, status and how the run was trained, without unknown parts."""
    parts = (record.name, record.status, record.device, record.strategy, record.precision, _framework(record))
    return [plain(part) for part in parts if part]


def _framework(record: RunRecord) -> str | None:
    """The library and class whose loop a script runs; None if the loop is the script's own."""
    found = record.framework
    if found is None or found.loop is None:
        return None
    of = "" if found.loop.lower() == found.name else f" of {found.name}"
    return f"{found.loop}{of}{f' {found.version}' if found.version else ''}"


def phase_rows(record: RunRecord) -> list[PhaseRow]:
    """The phases of the mean step, in the order of a step."""
    order = [*(name for name in PHASES if name in record.phases), *(n for n in record.phases if n not in PHASES)]
    return [
        PhaseRow(name, PHASE_LABELS.get(name, plain(name)), record.phases[name].mean_s, record.phases[name].share)
        for name in order
    ]


def quality_figures(record: RunRecord) -> list[Figure]:
    """Training quality; the first three values are always shown, followed by the user's metrics."""
    quality = record.quality
    usual = [
        Figure("train loss", number(quality.train_loss)),
        Figure("validation loss", number(quality.val_loss)),
        Figure("validation accuracy", share(quality.val_accuracy)),
    ]
    return usual + [Figure(plain(name), number(value)) for name, value in quality.metrics.items()]


def place_rows(record: RunRecord) -> list[tuple[str, str, str]]:
    """Where a script spent time outside of phases: place, kind of work, fraction of the step; empty if negligible."""
    other = record.phases.get("other")
    if record.other_time is None or other is None or other.share < _WORTH_A_PLACE:
        return []
    return [(plain(place_text(place)), plain(place.work), share(place.share)) for place in record.other_time.places]


def speed_figures(record: RunRecord) -> list[Figure]:
    """Training speed; measures that do not apply to the run are omitted."""
    throughput = record.throughput
    figures = [Figure("samples/s", number(throughput.samples_per_s))]
    if throughput.tokens_per_s is not None:
        figures.append(Figure("tokens/s", number(throughput.tokens_per_s)))
    step_s = throughput.step_s
    figures.append(Figure("step p50", seconds(step_s.p50 if step_s else None)))
    figures.append(Figure("step p95", seconds(step_s.p95 if step_s else None)))
    if record.mfu is not None:
        figures.append(Figure("MFU", share(record.mfu)))
    flops = record.flops
    if flops is not None and flops.per_s is not None:
        figures.append(Figure("model", flop_rate(flops.per_s)))
        if flops.achievable_per_s:
            figures.append(Figure("of achievable", share(flops.per_s / flops.achievable_per_s)))
    if record.padding_waste is not None:
        figures.append(Figure("padding", share(record.padding_waste)))
    return figures


def roofline_rows(record: RunRecord) -> list[tuple[str, float]]:
    """Parts of the step on the GPU and their fractions, from a trace; empty without one."""
    found = record.roofline
    return [] if found is None else [(plain(name.replace("_", " ")), part) for name, part in found.shares.items()]


def ceiling_rows(record: RunRecord) -> list[str]:
    """The largest possible gain of each part of the step, with the settings that affect it; without small parts.

    A watched script has no such settings.
    """
    own = record.source == "engine"
    return [
        f"{item.part.replace('_', ' ')} {share(item.share)}: at most {item.speedup:.2f}x"
        + (f" ({', '.join(item.knobs)})" if own and item.knobs else "")
        for item in ([] if record.roofline is None else record.roofline.ceilings)
        if item.share >= _WORTH_A_PLACE
    ]


def run_figures(record: RunRecord) -> list[Figure]:
    """Size and duration of the run, as far as known."""
    figures = [Figure("steps", f"{record.steps:,}")]
    if record.epochs:
        figures.append(Figure("epochs", str(len(record.epochs))))
    if record.wall_s is not None:
        figures.append(Figure("wall time", seconds(record.wall_s)))
    if record.parameters is not None:
        figures.append(Figure("parameters", f"{record.parameters:,}"))
    if record.skipped_steps:
        figures.append(Figure("skipped steps", f"{record.skipped_steps:,}"))
    compilation = record.compilation
    if compilation is not None and compilation.time_s:
        figures.append(Figure("compile time", seconds(compilation.time_s)))
        if compilation.recompilations:
            figures.append(Figure("recompilations", f"{compilation.recompilations:,}"))
    return figures


def memory_text(record: RunRecord) -> str:
    """Peak memory, as part of the total if that is known."""
    memory = record.memory
    text = f"peak {data_size(memory.peak_bytes)}"
    if memory.peak_bytes is not None and memory.total_bytes:
        text += f" of {data_size(memory.total_bytes)} ({share(memory.peak_bytes / memory.total_bytes)})"
    if memory.reserved_bytes is not None:
        text += f", reserved {data_size(memory.reserved_bytes)}"
    if memory.host_peak_bytes not in (None, memory.peak_bytes):  # they are the same on a CPU
        text += f", host peak {data_size(memory.host_peak_bytes)}"
    return text


def checkpoint_text(record: RunRecord) -> str:
    """Number of checkpoints and how long they blocked the loop."""
    checkpoint = record.checkpoint
    if checkpoint.count == 0:
        return "none written"
    text = f"{checkpoint.count} written, stall {seconds(checkpoint.stall_s)}"
    if checkpoint.save_s is not None:
        text += f", {seconds(checkpoint.save_s / checkpoint.count)} each until durable"
    if checkpoint.largest_gap_steps is not None:
        text += f", largest gap {checkpoint.largest_gap_steps:,} steps ({seconds(checkpoint.largest_gap_s)})"
    return text


def verdict_text(record: RunRecord) -> str | None:
    """The verdict, or None if the run has not been diagnosed."""
    judged = record.findings or any(note.startswith("inconclusive: ") for note in record.notes)
    if record.verdict == "inconclusive" and not judged:
        return None
    return plain(record.verdict).replace("_", " ")


def target_rows(record: RunRecord) -> list[TargetRow]:
    """The run's targets, or the default ones for older runs; empty if no value is known."""
    targets = record.targets or grade_targets(record)
    if all(target.value is None for target in targets):
        return []
    return [TargetRow(target.label, target.goal, target_value(target), target.grade) for target in targets]


def target_value(target: Target) -> str:
    """The value that the run reached."""
    show = {"s": seconds, "%": share}.get(target.unit, number)
    return UNKNOWN if target.value is None else show(target.value)


def finding_rows(record: RunRecord) -> list[FindingRow]:
    """The findings as text; config settings are only named if the run has a config."""
    own = record.source == "engine"
    return [_finding_row(finding, own) for finding in record.findings]


def _finding_row(finding: Finding, own: bool) -> FindingRow:
    return FindingRow(
        plain(finding.code),
        plain(finding.severity),
        _share_text(finding),
        evidence_text(finding.evidence),
        tuple(_remedy_text(remedy, own) for remedy in finding.remedies),
        _expected_text(finding),
    )


def _expected_text(finding: Finding) -> str:
    """The expected gain of removing the cause; in words if the estimate is too uncertain for a number."""
    speedup = finding.expected_speedup
    if speedup is not None:
        return f"{speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}, {plain(speedup.basis)})"
    if finding.share is None or finding.severity == "info":
        return ""
    limit = _LIMITS.get(finding.code)
    return "too uncertain for a figure" + (f": {limit}" if limit else "")


def _share_text(finding: Finding) -> str:
    """The fraction with its 95% interval, if known."""
    low, high = finding.evidence.get("share_low"), finding.evidence.get("share_high")
    if finding.share is None or low is None or high is None:
        return share(finding.share)
    return f"{share(finding.share)}, {share(low)} to {share(high)}"


def _remedy_text(remedy: Remedy, own: bool) -> str:
    """What to do, with the config setting that does it, if there is one."""
    text = plain(remedy.text)
    return f"{text} ({plain(remedy.knob)}: {plain(remedy.value)})" if own and remedy.knob else text


def evidence_text(evidence: dict[str, Any]) -> str:
    """A finding's evidence in readable form; the unit follows from the name of each value."""
    return ", ".join(_evidence(plain(key), value) for key, value in evidence.items() if key not in _OF_THE_SHARE)


def _evidence(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for ending, word, show in _UNITS:
            if name.endswith(ending):
                return f"{name.removesuffix(ending).replace('_', ' ')} {show(value)}{word}"
        if name in _SHARES:
            return f"{name.replace('_', ' ')} {share(value)}"
    return f"{name.replace('_', ' ')} {cell(value)}"


# What limits the speed of a step, for findings without an estimate.
_LIMITS = {
    "input_bound": "the step is limited by how fast batches come",
    "transfer_bound": "the step is limited by copies to the device",
    "host_bound": "the step is limited by how fast the host launches work, not by what the GPU computes",
    "communication_bound": "the step is limited by the network between the ranks",
    "straggler": "the step is limited by the slowest rank",
    "sync_stall": "the step is limited by the host's waits for the device",
    "checkpoint_stall": "training stands still while it is saved",
    "logging_stall": "the step is limited by work other than training",
    "small_batch": "the step is limited by kernels that are nearly empty",
    "precision_unused": "the step is limited by arithmetic in fp32",
    "padding_waste": "the step is limited by arithmetic on padding",
    "recompilation": "the run is limited by compilation",
    "negative_scaling": "the ranks are slower together than fewer were",
    "throttled": "the step is limited by the GPU's clock",
    "cpu_oversubscribed": "the step is limited by the cores",
}

# Rates first, because their names also end in "_s".
_UNITS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("_bytes_per_s", "/s", data_size),
    ("_per_s", "/s", number),
    ("_bytes_per_step", " per step", data_size),
    ("_bytes", "", data_size),
    ("_share", "", share),
    ("_s", "", seconds),
)
_SHARES = {"gpu_busy", "cpu_busy", "cpu_waiting", "cpu_stolen", "io_wait", "mfu", "pageable_copies", "trace_gpu_busy"}
_WORTH_A_PLACE = 0.02
# Shown together with the fraction itself.
_OF_THE_SHARE = {"share_low", "share_high", "measured_steps"}

EPOCH_HEADER = ("epoch", "time", "train loss", "val. loss", "val. accuracy", "samples/s")


def epoch_header(epochs: list[EpochRecord]) -> tuple[str, ...]:
    """The columns of `epoch_rows`."""
    return (*EPOCH_HEADER, *(plain(name) for name in _metrics_of(epochs)))


def epoch_rows(epochs: list[EpochRecord]) -> list[tuple[str, ...]]:
    """One row of text per epoch; unmeasured values are empty cells."""
    metrics = _metrics_of(epochs)
    return [
        (
            str(epoch.epoch),
            seconds(epoch.epoch_time_s),
            "" if epoch.train_loss is None else number(epoch.train_loss),
            "" if epoch.val_loss is None else number(epoch.val_loss),
            "" if epoch.val_accuracy is None else share(epoch.val_accuracy),
            "" if epoch.samples_per_s is None else number(epoch.samples_per_s),
            *("" if name not in epoch.metrics else number(epoch.metrics[name]) for name in metrics),
        )
        for epoch in epochs
    ]


def _metrics_of(epochs: list[EpochRecord]) -> list[str]:
    return list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))


def environment_rows(environment: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The fingerprint as names and values, with nested names joined by dots."""
    rows: list[tuple[str, str]] = []
    for key, value in environment.items():
        name = f"{prefix}{plain(key)}"
        if isinstance(value, dict) and value:
            rows.extend(environment_rows(value, f"{name}."))
        else:
            rows.append((name, cell(value)))
    return rows


def cell(value: Any) -> str:
    """Any JSON value as one line."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{plain(key)} {cell(item)}" for key, item in value.items()) or "none"
    return plain(value)
