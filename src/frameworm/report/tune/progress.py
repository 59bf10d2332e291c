"""Progress of a search: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from frameworm.report.kit.tables import plain

_COLOURS = {"accepted": "green", "rejected": "dim", "failed": "red", "inconclusive": "yellow"}
_LONGEST_REASON = 90
_LONGEST_LABEL = 60
_MOST_ROWS = 15
_BEGINNINGS = ("trying", "proving", "checking")


class TuneProgress:
    """Shows the attempts of a search, the best result so far and the remaining budget.

    Args:
        budget_s: Most seconds; None: no limit.
        budget_trials: Most trials and proofs; None: no limit.
        stream: Where to write; a terminal gets the table.
    """

    def __init__(
        self, budget_s: float | None = None, budget_trials: int | None = None, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._budget_s = budget_s
        self._budget_trials = budget_trials
        self._told: dict[int, tuple[str, str]] = {}
        self._doing = "looking at the machine and the data"
        self._since = monotonic()
        self._result: Mapping[str, Any] = {}
        self._live: Live | None = None
        if self._stream.isatty():
            console = Console(file=self._stream)
            self._live = Live(get_renderable=self._draw, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> TuneProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, doing: str, result: Mapping[str, Any]) -> None:
        """Show that something begins or has ended; `result` is the current content of `tune.json`."""
        self._result = result
        if doing.startswith(_BEGINNINGS):
            self._doing, self._since = doing, monotonic()
        if self._live is None:
            self._print_news(doing)

    def _print_news(self, doing: str) -> None:
        for number, attempt in enumerate(self._result.get("attempts", ())):
            if attempt["status"] == "skipped" or _is_open(attempt):
                continue
            state = (attempt["status"], attempt["reason"])
            if self._told.get(number) != state:
                self._told[number] = state
                label = _short(attempt["label"], _LONGEST_LABEL)
                self._line(f"{label}: {attempt['status']}, {_short(attempt['reason'])}")
        if doing.startswith(_BEGINNINGS):
            self._line(_short(doing, _LONGEST_LABEL + 8).removesuffix("...") + " ...")

    def _line(self, text: str) -> None:
        print(f"[{self._spent()}] {plain(text)}", file=self._stream, flush=True)

    def _spent(self) -> str:
        parts = []
        spent_s, trials = self._result.get("spent_s") or 0.0, self._result.get("trials") or 0
        if self._budget_s is not None:
            parts.append(f"{spent_s:.0f} of {self._budget_s:.0f} s")
        if self._budget_trials is not None:
            parts.append(f"{trials} of {self._budget_trials} trials")
        return ", ".join(parts) or f"{spent_s:.0f} s"

    def _draw(self) -> Group:
        result = self._result
        now_s = monotonic() - self._since
        left = ""
        if self._budget_s is not None:
            left = f", {max(0.0, self._budget_s - (result.get('spent_s') or 0.0) - now_s):.0f} s of the budget left"
        head = Text(f"{plain(_short(self._doing, _LONGEST_LABEL + 8))} ({now_s:.0f} s{left})", style="bold")
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("change", "outcome", "gain or reason"):
            table.add_column(name, overflow="ellipsis", no_wrap=True)
        shown = [item for item in result.get("attempts", ()) if item["status"] != "skipped"]
        for item in shown[-_MOST_ROWS:]:
            status = "to be proved" if _is_open(item) else item["status"]
            told = "" if item["reason"] is None else _short(item["reason"])
            label = plain(_short(item["label"], _LONGEST_LABEL))
            table.add_row(Text(label), Text(plain(status), style=_COLOURS.get(item["status"], "")), Text(plain(told)))
        return Group(head, Text(self._best()), table)

    def _best(self) -> str:
        changes = self._result.get("changes") or {}
        before, after = _sample_s(self._result.get("baseline")), _sample_s(self._result.get("final"))
        if before is None or after is None:
            return "best so far: not known yet"
        if not changes:
            return f"best so far: the config as it is, {1 / before:,.0f} samples/s"
        names = ", ".join(f"{key}={item['after']}" for key, item in changes.items())
        return f"best so far: {before / after:.2f} x, {1 / after:,.0f} samples/s with {plain(names)}"


def _sample_s(trial: Any) -> float | None:
    windows = sorted((trial or {}).get("seconds_per_sample") or ())
    return windows[len(windows) // 2] if windows else None


def _is_open(attempt: Mapping[str, Any]) -> bool:
    """Whether a proof of the attempt may still follow."""
    return attempt["status"] == "inconclusive" and attempt.get("proof") is None and attempt.get("gain") is None


def _short(text: str, longest: int = _LONGEST_REASON) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= longest else line[: longest - 3].rstrip(" ,") + "..."
