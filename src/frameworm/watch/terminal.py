"""The table of runs, or one run, in a terminal: for machines that no browser can reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from frameworm.records.printable import printable
from frameworm.report.kit import tables
from frameworm.watch import view
from frameworm.watch.alerts import Alerts
from frameworm.watch.catalogue import Catalogue

TICK_S = 1.0
_MOST_ROWS = 40
_MOST_EVENTS = 6


def show(root: Path, console: Console, targets: Sequence[str] = ()) -> None:
    """Draw the runs, every second until interrupted; only once if the output is not a terminal.

    Args:
        root: Folder of runs, or one run.
        console: Where to draw.
        targets: Receivers of alerts.
    """
    catalogue = Catalogue(root)
    if targets:
        Alerts(catalogue, list(targets)).start()
    if not console.is_terminal:
        console.print(_drawn(catalogue))
        return
    with Live(_drawn(catalogue), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(TICK_S)
                live.update(_drawn(catalogue), refresh=True)
        except KeyboardInterrupt:
            pass


def _drawn(catalogue: Catalogue) -> RenderableType:
    rows = catalogue.rows()
    if not catalogue.is_run:
        return _table(catalogue)
    head = view.head_of(catalogue, rows[0].id) if rows else None
    return Text("the run is gone") if head is None else _run(head)


def _table(catalogue: Catalogue) -> RenderableType:
    rows = catalogue.rows()
    if not rows:
        return Text("no runs yet")
    lines = []
    for row in rows[:_MOST_ROWS]:
        figures = (
            "" if row.steps is None else f"{row.steps:,}",
            "" if row.loss is None else tables.number(row.loss),
            "" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
        )
        words = (row.name, row.status, *figures, (row.verdict or "").replace("_", " "), row.model or "")
        lines.append([printable(word) for word in words])
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(("run", "status", "steps", "loss", "samples/s", "verdict", "model")):
        figure = 2 <= place <= 4
        # A truncated number would be wrong; words may be truncated.
        least = max(len(name), *(len(line[place]) for line in lines)) if figure else 8
        table.add_column(name, justify="right" if figure else "left", no_wrap=True, min_width=least)
    for line in lines:
        table.add_row(*map(Text, line))
    more = len(rows) - _MOST_ROWS
    return Group(table, Text(f"and {more} more")) if more > 0 else table


def _run(head: dict[str, Any]) -> RenderableType:
    about = " · ".join([head["status"], *head["about"]])
    figures = Table(box=None, pad_edge=False, show_header=False)
    for item in head["figures"]:
        figures.add_row(Text(item["label"], style="dim"), Text(printable(item["value"])))
    lines: list[RenderableType] = [Text(printable(f"{head['title']} · {about}"), style="bold"), figures]
    if head["verdict"]:
        lines.append(Text(printable(f"verdict: {head['verdict']}"), style="bold"))
    for finding in head["findings"]:
        lines.append(Text(printable(f"  {finding['code'].replace('_', ' ')}: {finding['evidence']}")))
        lines += [Text(printable(f"    try: {remedy}")) for remedy in finding["remedies"]]
    for event in head["events"][:_MOST_EVENTS]:
        place = "" if event["step"] is None else f"step {event['step']:,}: "
        lines.append(Text(printable(f"  {place}{event['text']}"), style="dim"))
    return Group(*lines)
