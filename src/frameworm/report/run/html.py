"""A run as one self-contained HTML file that opens offline, without scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from frameworm.records.observations import SystemSample
from frameworm.records.schema import Finding, RunRecord
from frameworm.records.series import SeriesPoint
from frameworm.report.kit import tables
from frameworm.report.kit.page_templates import load_template
from frameworm.report.run import charts, charts_ranks, charts_system
from frameworm.report.run.network_text import communication_text

_DOUBT = "inconclusive: "  # prefix of notes that say why there is no verdict
_GRADE_SIGNS = {"met": "✓", "missed": "✗"}


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding as the page shows it; each remedy is a sentence and the option that applies it, if any."""

    row: tables.FindingRow
    level: str  # critical, warning or soft
    remedies: tuple[tuple[str, str], ...]


def render_html(
    record: RunRecord,
    series: Sequence[SeriesPoint] = (),
    config_text: str = "",
    samples: Mapping[int, Sequence[SystemSample]] | None = None,
) -> str:
    """Render the whole page.

    Args:
        record: The run.
        series: Loss and step time over the run, as `StepAggregate.series` returns them.
        config_text: The resolved config, shown verbatim.
        samples: Samples of the machine, by rank.
    """
    notes = [tables.plain(note) for note in record.notes]
    series = charts.thinned(series)
    timeline = charts.step_timeline(record, series)
    bars = charts_ranks.rank_bars(record)
    overlap = charts_ranks.overlap(record)
    system = charts_system.system_charts(samples or {})
    return load_template("report.html.j2").render(
        title=tables.plain(record.name) or "run",
        subtitle=tables.title_parts(record)[1:],
        figures=_figures(record),
        verdict=tables.verdict_text(record),
        findings=finding_views(record),
        targets=[(row, _GRADE_SIGNS.get(row.grade, "?")) for row in tables.target_rows(record)],
        reasons=[note.removeprefix(_DOUBT) for note in notes if note.startswith(_DOUBT)],
        notes=[note for note in notes if not note.startswith(_DOUBT)],
        loss_chart=charts.loss_chart(record, series),
        has_validation=any(epoch.val_loss is not None for epoch in record.epochs),
        steps_per_point=series[0].steps if series else 1,
        time_chart=Markup("") if timeline is None else charts.timeline_chart(timeline),
        timeline=timeline,
        outliers=[_outlier_row(item) for item in charts.outliers(record)],
        phase_bar=charts.phase_bar(record),
        phases=[
            (charts.phase_class(row.name), row.label, tables.seconds(row.mean_s), tables.share(row.share))
            for row in tables.phase_rows(record)
        ],
        places=tables.place_rows(record),
        unseen=[charts.phase_label(name) for name in record.unseen],
        rank_chart=charts_ranks.rank_chart(bars),
        rank_header=RANK_HEADER,
        ranks=[_rank_row(bar, record) for bar in bars],
        hidden_ranks=len(record.ranks) - len(bars) if len(bars) == charts_ranks.MOST_RANKS else 0,
        rank_phases=_phases_of_ranks(bars),
        slowest_rank=record.communication.slowest_rank,
        overlap_chart=Markup("") if overlap is None else charts_ranks.overlap_chart(overlap),
        overlap=overlap,
        communication=communication_text(record),
        accumulation=record.batch.accumulation,
        system=[(item, charts_system.system_chart(item)) for item in system],
        epoch_header=tables.epoch_header(record.epochs),
        epochs=tables.epoch_rows(record.epochs),
        facts=_facts(record),
        environment=tables.environment_rows(record.environment),
        config_text=config_text,
    )


def finding_views(record: RunRecord) -> list[FindingView]:
    """The findings, each remedy with an option to copy; a watched script has no such options."""
    return [
        FindingView(
            row, row.severity if row.severity in ("critical", "warning") else "soft", _remedies(finding, record)
        )
        for finding, row in zip(record.findings, tables.finding_rows(record))
    ]


def _remedies(finding: Finding, record: RunRecord) -> tuple[tuple[str, str], ...]:
    own = record.source == "engine"
    return tuple(
        (tables.plain(remedy.text), set_option(remedy.knob, remedy.value) if own and remedy.knob else "")
        for remedy in finding.remedies
    )


def set_option(knob: str, value: Any) -> str:
    """The command-line option that sets a knob, quoted for the shell."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"--set {shlex.quote(tables.plain(f'{knob}={text}'))}"


RANK_HEADER = ("rank", "host", "step", "own work", "exposed", "waits")


def _rank_row(bar: charts_ranks.RankBar, record: RunRecord) -> tuple[str, ...]:
    exposed = [part.length_s for part in bar.parts if part.name == "communication_exposed"]
    mark = " (slowest)" if bar.rank == record.communication.slowest_rank else ""
    return (
        f"{bar.rank}{mark}",
        bar.host,
        tables.seconds(bar.step_s),
        tables.seconds(bar.work_s),
        tables.seconds(sum(exposed)) if exposed else "",
        "" if bar.wait_s is None else tables.seconds(bar.wait_s),
    )


def _phases_of_ranks(bars: Sequence[charts_ranks.RankBar]) -> list[tuple[str, str]]:
    """The colours in use, for the legend."""
    return list(dict.fromkeys((charts.phase_class(part.name), part.label) for bar in bars for part in bar.parts))


def _outlier_row(item: charts.Outlier) -> tuple[str, ...]:
    times = "" if item.times_typical is None else f"{item.times_typical:.1f}x"
    return f"{item.step:,}", str(item.epoch), tables.seconds(item.step_s), times, item.causes


def _figures(record: RunRecord) -> list[tables.Figure]:
    """The numbers at the top; for a watched script, which does not report quality, unknown ones are omitted."""
    found = [*tables.quality_figures(record), *tables.speed_figures(record), *tables.run_figures(record)]
    return [figure for figure in found if record.source == "engine" or figure.value != tables.UNKNOWN]


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    own = record.source == "engine"
    facts = [] if own else [("source", tables.plain(record.source))]
    if own or record.batch.micro is not None:
        facts.append(("batch", tables.batch_text(record.batch)))
    if own or record.memory.peak_bytes is not None:
        facts.append(("memory", tables.memory_text(record)))
    parts = [f"{label} {tables.share(part)}" for label, part in tables.roofline_rows(record) if part > 0]
    if parts:
        facts.append(("GPU time, from the trace", ", ".join(parts)))
        facts.append(("most that can be gained", "; ".join(tables.ceiling_rows(record))))
    communication = communication_text(record)
    if communication is not None:
        facts.append(("communication", communication))
    if own or record.checkpoint.count:
        facts.append(("checkpoints", tables.checkpoint_text(record)))
    if record.started is not None:
        facts.append(("started", tables.plain(record.started)))
    if record.run_dir is not None:
        facts.append(("run folder", tables.plain(record.run_dir)))
    return facts
