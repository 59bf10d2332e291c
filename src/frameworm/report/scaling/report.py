"""Write the files of a scaling report: compute the table first, then render it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frameworm.errors import MissingPackageError, RunFolderError
from frameworm.records.atomic import write_atomic
from frameworm.records.schema import EpochRecord
from frameworm.records.store import RunFolder
from frameworm.report.scaling.build import build_report
from frameworm.report.scaling.files import render_csv, render_tex
from frameworm.report.scaling.page import render_scaling_page
from frameworm.report.scaling.plot_style import require_matplotlib
from frameworm.report.scaling.plots import draw_figures
from frameworm.report.scaling.table import ScalingReport
from frameworm.report.scaling.text import render_scaling
from frameworm.scaling.run_points import Collection, collect

DEFAULT_WARMUP = 1


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A report, and its files in the order they were written."""

    report: ScalingReport
    files: tuple[Path, ...]


def write_report(
    root: Path,
    out: Path,
    warmup: int = DEFAULT_WARMUP,
    datasets: Sequence[str] | None = None,
    *,
    tell: Callable[[ScalingReport], None] = lambda report: None,
) -> WrittenReport:
    """Write the report of all runs below a folder.

    Tables, text and page are written first, so that without matplotlib only the PNG files are missing. If no runs can
    be compared there are no plots, and the text says why each run was left out.

    Args:
        root: The folder with the runs, at any depth.
        out: Folder for the files; it is created if necessary, and files of an earlier report are replaced.
        warmup: Epochs at the start of each run that are not measured.
        datasets: Data sets to include, in any spelling; None: all.
        tell: Called with the report before anything is written.

    Returns:
        The report and its files.

    Raises:
        RunFolderError: There is no such folder or no run in it, or `out` cannot be written to.
        MissingPackageError: matplotlib is not installed; everything else has been written.
    """
    report = read_report(root, warmup, datasets)
    tell(report)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot make {out}: {error.strerror or error}; give another place with --out") from error
    texts = {
        "comprehensive_summary.csv": render_csv(report),
        "summary_table.tex": render_tex(report),
        "performance_report.txt": render_scaling(report),
        "report.html": render_scaling_page(report),
    }
    for name, text in texts.items():
        write_atomic(out / name, text)
    files = [out / name for name in texts]
    if report.datasets:
        try:
            require_matplotlib()
        except MissingPackageError as error:
            raise MissingPackageError(f"{error} (the tables and report.html are in {out})") from None
    for table in report.datasets:
        files += draw_figures(table, out)
    return WrittenReport(report, tuple(files))


def read_report(root: Path, warmup: int = DEFAULT_WARMUP, datasets: Sequence[str] | None = None) -> ScalingReport:
    """Build the report of these runs without writing it; arguments and errors as for `write_report`."""
    collection = collect(root, warmup, datasets)
    return build_report(str(root), warmup, collection, _epochs_of(collection))


def _epochs_of(collection: Collection) -> dict[str, list[EpochRecord]]:
    """All epochs of each run, including warm-up, which the points do not hold."""
    found: dict[str, list[EpochRecord]] = {}
    for point in collection.points:
        for run in point.measurements:
            if run.run is not None and run.run not in found:
                folder = RunFolder(run.run)
                with contextlib.suppress(RunFolderError):
                    found[run.run] = (
                        folder.read_epochs() if folder.epochs_csv.exists() else folder.read_summary().epochs
                    )
    return found
