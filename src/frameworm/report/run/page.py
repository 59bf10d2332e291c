"""The page of a stored run, built from its folder alone."""

from __future__ import annotations

import contextlib
import re

from frameworm.errors import RunFolderError
from frameworm.records.observations import SystemSample
from frameworm.records.outliers import SlowSteps
from frameworm.records.samples import read_samples
from frameworm.records.schema import RunRecord
from frameworm.records.series import Series, SeriesPoint
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.records.store import RunFolder
from frameworm.report.run.charts_system import thinned_samples
from frameworm.report.run.html import render_html

_SYSTEM_NAME = re.compile(r"system-rank(\d+)\.jsonl")


def page_of(folder: RunFolder, record: RunRecord | None = None) -> str:
    """The page of a run, as in `report.html`.

    Args:
        folder: The run. If files other than its summary are missing or unreadable, their part of the page is left out.
        record: A newer record than the summary on disk, for example after a new diagnosis.

    Raises:
        RunFolderError: `record` is not given and there is no readable summary.
    """
    record = folder.read_summary() if record is None else record
    series = _read_steps(folder, record)
    return render_html(record, series, _config_text(folder), samples_of(folder))


def samples_of(folder: RunFolder) -> dict[int, list[SystemSample]]:
    """The samples of all ranks, thinned to what a curve can show; unreadable files are skipped."""
    found = {}
    for path in folder.path.glob("system-rank*.jsonl"):
        match = _SYSTEM_NAME.fullmatch(path.name)
        if match is None:
            continue
        # TypeError: JSON that a sampler never writes, such as strings in place of numbers.
        with contextlib.suppress(RunFolderError, TypeError):
            found[int(match[1])] = thinned_samples(read_samples(path))
    return dict(sorted(found.items()))


def _read_steps(folder: RunFolder, record: RunRecord) -> list[SeriesPoint]:
    """The curves of the first rank; also fills in slow steps if the record has none."""
    readers = folder.step_readers()
    if not readers:
        return []
    series, slow = Series(), SlowSteps()
    with contextlib.suppress(RunFolderError):
        for position, step in enumerate(readers[min(readers)]):
            series.add(step)
            if position >= DEFAULT_WARMUP:
                slow.add(step)
    record.slow_steps = record.slow_steps or slow.steps()
    return series.points()


def _config_text(folder: RunFolder) -> str:
    try:
        return folder.read_config()
    except RunFolderError:
        return ""
