"""A scaling report as one self-contained HTML file that opens offline, without scripts.

Charts have tooltips, and check boxes that hide and show configurations and world sizes; both are plain HTML and CSS.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from frameworm.report.kit.page_templates import load_template
from frameworm.report.kit.tables import share
from frameworm.report.scaling import charts as charts_scaling
from frameworm.report.scaling import text as scaling_text
from frameworm.report.scaling.table import LOSSES, Configuration, DatasetTable, ScalingReport


@dataclass(frozen=True, slots=True)
class Box:
    """A check box; curves with the class `hides` are hidden if it is not checked."""

    id: str
    label: str
    css_class: str
    hides: str


@dataclass(frozen=True, slots=True)
class ConfigurationView:
    """One configuration: its table, and for each row beyond the base an explanation."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    advice: tuple[tuple[str, str, str, str], ...]  # size, status, cause, recommendation
    serial: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DatasetView:
    """One data set as the page shows it."""

    id: str
    name: str
    also: str
    configurations: tuple[ConfigurationView, ...]
    boxes: tuple[Box, ...]
    size_boxes: tuple[Box, ...]
    charts: tuple[tuple[Markup, str], ...]  # over world sizes, with captions
    epoch_charts: tuple[tuple[Markup, str], ...]
    epoch_keys: tuple[tuple[str, str], ...]
    bars: tuple[tuple[int, str, Markup], ...]
    losses: tuple[tuple[str, ...], ...]


def render_scaling_page(report: ScalingReport) -> str:
    """Render the whole page."""
    return load_template("scaling.html.j2").render(
        root=report.root,
        taken=scaling_text.taken_text(report),
        header=scaling_text.HEADER,
        datasets=[_view(index, table) for index, table in enumerate(report.datasets)],
        left_out=report.left_out,
        notes=report.notes,
        loss_keys=[
            (charts_scaling.LOSS_CLASSES[name], charts_scaling.LOSS_LABELS.get(name, "used"))
            for name in ("used", *LOSSES)
        ],
        loss_header=("world size", *(charts_scaling.LOSS_LABELS[name] for name in LOSSES)),
        intervals=scaling_text.intervals_text(report),
        status=scaling_text.STATUS_TEXT,
    )


def _view(index: int, table: DatasetTable) -> DatasetView:
    over_sizes = (
        (charts_scaling.speedup_chart(table), "Speedup; the plain line is ideal."),
        (charts_scaling.efficiency_chart(table), "Efficiency; lines at 0.85 (excellent), 0.7 (good) and 0.5 (fair)."),
        (charts_scaling.throughput_chart(table), "Throughput."),
    )
    quality, quality_chart = charts_scaling.quality_chart(table)
    warmup = (
        "" if not table.warmup else f" Warm-up, not measured: {scaling_text.warmup_text(table.warmup)} of each run."
    )
    over_epochs = (
        (charts_scaling.epoch_chart(table), f"Time of each epoch, mean of the runs.{warmup}"),
        (quality_chart, f"{quality.capitalize()} after each epoch, mean of the runs."),
    )
    return DatasetView(
        id=f"data-{index}",
        name=table.name,
        also="" if table.name == table.dataset else table.dataset,
        configurations=tuple(_configuration(table, item) for item in table.configurations),
        boxes=tuple(
            Box(f"data-{index}-series-{place}", item.label, charts_scaling.curve_class(place), f"series-{place}")
            for place, item in enumerate(table.configurations)
        ),
        size_boxes=tuple(Box(f"data-{index}-size-{size}", str(size), "", f"size-{size}") for size in table.world_sizes),
        charts=tuple(item for item in over_sizes if item[0]),
        epoch_charts=tuple(item for item in over_epochs if item[0]),
        epoch_keys=tuple(
            (charts_scaling.curve_class(place), table.curve_label(curve)) for place, curve in enumerate(table.curves)
        ),
        bars=tuple(charts_scaling.loss_bars(table)),
        losses=tuple(_losses(table)),
    )


def _configuration(table: DatasetTable, item: Configuration) -> ConfigurationView:
    return ConfigurationView(
        item.title,
        tuple(scaling_text.row_cells(row) for row in item.rows),
        tuple(
            (
                scaling_text.size_text(table, row),
                row.status,
                scaling_text.sentence(row.cause),
                scaling_text.sentence(row.recommendation),
            )
            for row in item.rows
            if row.cause or row.recommendation
        ),
        "" if item.serial_fraction is None else scaling_text.serial_text(item.serial_fraction),
        item.notes,
    )


def _losses(table: DatasetTable) -> list[tuple[str, ...]]:
    rows = []
    for item in table.configurations:
        for row in item.rows[1:]:
            if row.losses:
                label = scaling_text.size_text(table, row)
                label += f", {item.label}" if len(table.configurations) > 1 else ""
                rows.append((label, *(share(row.losses.get(name)) for name in LOSSES)))
    return rows
