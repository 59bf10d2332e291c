"""A scaling report as text: the status of each configuration, why, and what to do."""

from __future__ import annotations

from frameworm.records.estimate import OpenInterval
from frameworm.report.kit.layout import field, heading, table
from frameworm.report.kit.tables import number, plain
from frameworm.report.scaling.table import OVER_EPOCHS, Configuration, DatasetTable, Row, ScalingReport

WIDTH = 100
_TABLE_WIDTH = 200  # wide enough that a status is never wrapped
HEADER = ("world size", "runs", "batch", "epoch time", "samples/s", "speedup", "efficiency", "accuracy", "status")


def render_scaling(report: ScalingReport, width: int = WIDTH) -> str:
    """Render the whole text."""
    lines = heading(f"Scaling of the runs in {report.root}", width)
    lines += field("taken", taken_text(report), width)
    for dataset in report.datasets:
        lines.append("")
        lines += _dataset(dataset, width)
    if report.left_out:
        lines.append("")
        lines += heading("Not taken in", width)
        for item in report.left_out:
            lines.append(f"{plain(item.run)} ({item.kind})")
            lines += field("", plain(item.reason), width)
    if report.datasets:
        lines.append("")
        for note in report.notes:
            lines += field("note", note, width)
        lines += field("intervals", intervals_text(report), width)
        lines += field("status", STATUS_TEXT, width)
    return "\n".join(lines) + "\n"


STATUS_TEXT = (
    "by efficiency (speedup / growth of the world size): excellent from 0.85, good from 0.7, fair from 0.5, else poor; "
    "negative_scaling: slower than the baseline"
)


def taken_text(report: ScalingReport) -> str:
    """How many runs the report uses."""
    # Strong and weak scaling share their runs on one device.
    count = len({run for dataset in report.datasets for row in dataset.rows for run in row.runs})
    words = f"{count} run" + ("" if count == 1 else "s")
    if report.left_out:
        words += f", {len(report.left_out)} not taken in (listed below)"
    if report.warmup:
        words += f"; {warmup_text(report.warmup)} of each left out as warm-up"
    return words


def warmup_text(warmup: int) -> str:
    """The epochs that are left out."""
    return "the first epoch" if warmup == 1 else f"the first {warmup} epochs"


def intervals_text(report: ScalingReport) -> str:
    """How the intervals in brackets are computed."""
    rows = [row for dataset in report.datasets for row in dataset.rows]
    text = "95%, over the means of repeated runs"
    if any(row.interval_over == OVER_EPOCHS for row in rows):
        text += "; for a single run, over its epochs, which says less: two runs of one program differ too"
    return text


def _dataset(dataset: DatasetTable, width: int) -> list[str]:
    also = "" if dataset.name == dataset.dataset else f" ({dataset.dataset})"
    lines = heading(f"{dataset.name}{also}", width)
    for index, configuration in enumerate(dataset.configurations):
        if index:
            lines.append("")
        lines += _configuration(dataset, configuration, width)
    return lines


def _configuration(dataset: DatasetTable, configuration: Configuration, width: int) -> list[str]:
    lines = [configuration.title]
    lines += table([HEADER, *(row_cells(row) for row in configuration.rows)], _TABLE_WIDTH)
    for row in configuration.rows:
        if row.cause or row.recommendation:
            text = f"{row.status}. " + ". ".join(sentence(part) for part in (row.cause, row.recommendation) if part)
            lines += field(f"  {size_text(dataset, row)}", f"{text}.", width)
    if configuration.serial_fraction is not None:
        lines += field("  Amdahl", serial_text(configuration.serial_fraction), width)
    for note in configuration.notes:
        lines += field("  note", note, width)
    return lines


def sentence(text: str) -> str:
    """Capitalise the text, unless it begins with the name of a setting."""
    first = text.split(" ", 1)[0]
    return (text if "." in first else text[:1].upper() + text[1:]).rstrip(".")


def size_text(dataset: DatasetTable, row: Row) -> str:
    """The world size with a short unit."""
    unit = "GPU" if dataset.unit == "GPU" else "rank"
    return f"{row.world_size} {unit}{'' if row.world_size == 1 else 's'}"


def serial_text(serial: OpenInterval) -> str:
    """Amdahl's serial fraction as text."""
    text = f"serial part {serial.value:.1%}{interval(serial, '{:.1%}')}"
    if 0 < serial.value <= 1:
        text += f": no number of devices makes it more than {number(1 / serial.value, 3)} times faster"
    return text


def row_cells(row: Row) -> tuple[str, ...]:
    """One row of the table, in the order of `HEADER`."""
    accuracy = "" if row.val_accuracy is None else f"{row.val_accuracy.value:.2%}"
    return (
        str(row.world_size),
        str(len(row.runs)),
        "" if row.global_batch is None else str(row.global_batch),
        "" if row.epoch_time_s is None else f"{number(row.epoch_time_s.value)} s" + _plus_minus(row.epoch_time_s),
        "" if row.samples_per_s is None else number(row.samples_per_s.value) + _plus_minus(row.samples_per_s),
        "" if row.speedup is None else f"{row.speedup.value:.2f}{interval(row.speedup, '{:.2f}')}",
        "" if row.efficiency is None else f"{row.efficiency.value:.1%}",
        accuracy,
        row.status,
    )


def interval(measure: OpenInterval, form: str) -> str:
    """Both ends in brackets; empty if they are unknown."""
    if measure.low is None or measure.high is None:
        return ""
    high = "..." if measure.value > 0 and measure.high > 100 * measure.value else form.format(measure.high)
    return f" [{form.format(measure.low)}, {high}]"


def _plus_minus(measure: OpenInterval) -> str:
    """The upper half of the interval as a percentage of the mean."""
    if measure.high is None or measure.value <= 0:
        return ""
    part = (measure.high - measure.value) / measure.value
    return f" ±{part:.1%}" if part < 0.1 else f" ±{part:.0%}" if part < 1 else " ±>100%"
