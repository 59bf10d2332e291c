"""The table of a scaling report as files: CSV with full precision, TeX with rounded numbers."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterator

from frameworm.records.estimate import OpenInterval
from frameworm.records.printable import csv_cell
from frameworm.report.scaling.table import LOSSES, Configuration, DatasetTable, Row, ScalingReport
from frameworm.report.scaling.text import warmup_text

_MEASURES = (
    "epoch_time_s",
    "samples_per_s",
    "speedup",
    "efficiency",
    "val_accuracy",
    "val_loss",
    "train_loss",
)

CSV_COLUMNS = (
    "dataset",
    "configuration",
    "mode",
    "world_size",
    "status",
    "runs",
    "measured_epochs",
    "warmup_epochs",
    "global_batch",
    "micro_batch",
    "accumulation",
    *(f"{name}{end}" for name in _MEASURES for end in ("", "_low", "_high")),
    "interval_over",
    "serial_fraction",
    *(f"lost_to_{name}" for name in LOSSES),
    "cause",
    "recommendation",
    "run_folders",
)


def render_csv(report: ScalingReport) -> str:
    """One line per configuration and world size; unrounded numbers, empty if missing."""
    text = io.StringIO()
    table = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    table.writeheader()
    for dataset, configuration, row in rows_of(report):
        table.writerow(_csv_row(dataset, configuration, row))
    return text.getvalue()


def rows_of(report: ScalingReport) -> Iterator[tuple[DatasetTable, Configuration, Row]]:
    """Every row with its data set and configuration."""
    for dataset in report.datasets:
        for configuration in dataset.configurations:
            for row in configuration.rows:
                yield dataset, configuration, row


def _csv_row(dataset: DatasetTable, configuration: Configuration, row: Row) -> dict[str, object]:
    values: dict[str, object] = {
        "dataset": dataset.dataset,
        "configuration": configuration.label,
        "mode": configuration.mode,
        "world_size": row.world_size,
        "status": row.status,
        "runs": len(row.runs),
        "measured_epochs": row.epochs,
        "warmup_epochs": dataset.warmup,
        "global_batch": row.global_batch,
        "micro_batch": row.micro_batch,
        "accumulation": row.accumulation,
        "interval_over": row.interval_over,
        "serial_fraction": row.serial_fraction,
        "cause": row.cause,
        "recommendation": row.recommendation,
        "run_folders": ";".join(str(csv_cell(run)) for run in row.runs),
    }
    for name in _MEASURES:
        measure: OpenInterval | None = getattr(row, name)
        if measure is not None:
            values |= {name: measure.value, f"{name}_low": measure.low, f"{name}_high": measure.high}
    values |= {f"lost_to_{name}": row.losses.get(name) for name in LOSSES}
    return {name: "" if value is None else csv_cell(value) for name, value in values.items()}


TEX_COLUMNS = (
    "Data set",
    "Configuration",
    "World size",
    "Epoch time (s)",
    "Samples/s",
    "Speedup",
    "Efficiency",
    "Accuracy",
    "Status",
)


def render_tex(report: ScalingReport) -> str:
    r"""A table for \input into a paper that loads booktabs."""
    lines = [
        r"% \usepackage{booktabs} in the preamble, then \input{summary_table} where the table shall stand.",
        r"\begin{table*}[t]",
        r"  \centering",
        r"  \scriptsize\setlength{\tabcolsep}{3pt}",
        r"  % With graphicx loaded, a table that is wider than the page is made to fit.",
        r"  \ifdefined\resizebox",
        r"    \def\fitted#1{\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{#1}}",
        r"  \else\def\fitted#1{#1}\fi",
        rf"  \caption{{{_tex(_caption(report))}}}",
        r"  \label{tab:scaling}",
        r"  \fitted{\begin{tabular}{@{}llrrrrrrl@{}}",
        r"    \toprule",
        f"    {' & '.join(TEX_COLUMNS)} \\\\",
        r"    \midrule",
    ]
    before: DatasetTable | None = None
    for dataset, configuration, row in rows_of(report):
        if before is not None and dataset is not before:
            lines.append(r"    \midrule")
        lines.append(f"    {' & '.join(_tex_row(dataset, configuration, row))} \\\\")
        before = dataset
    lines += [r"    \bottomrule", r"  \end{tabular}}", r"\end{table*}", ""]
    return "\n".join(lines)


def _caption(report: ScalingReport) -> str:
    dropped = f"; {warmup_text(report.warmup)} of each run left out" if report.warmup else ""
    return f"Scaling: means with 95% intervals in brackets{dropped}."


def _tex_row(dataset: DatasetTable, configuration: Configuration, row: Row) -> list[str]:
    return [
        _tex(dataset.name),
        _tex(configuration.label),
        str(row.world_size),
        _tex_measure(row.epoch_time_s, "{:.4g}"),
        _tex_measure(row.samples_per_s, "{:,.1f}"),
        _tex_measure(row.speedup, "{:.2f}"),
        _tex_measure(row.efficiency, "{:.3f}"),
        _tex_measure(row.val_accuracy, "{:.4f}"),
        _tex(row.status.replace("_", " ")),
    ]


def _tex_measure(measure: OpenInterval | None, form: str) -> str:
    if measure is None:
        return "--"
    text = form.format(measure.value)
    if measure.low is not None and measure.high is not None:
        text += f" [{form.format(measure.low)}, {form.format(measure.high)}]"
    return text


_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
}


def _tex(text: str) -> str:
    """Escape text for TeX; characters outside ASCII lose their accents, so that any engine can set them."""
    ascii_only = unicodedata.normalize("NFKD", text.replace("×", "x")).encode("ascii", "ignore").decode()
    return "".join(_TEX.get(letter, letter) for letter in ascii_only)
