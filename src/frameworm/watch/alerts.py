"""Tells a command or a web address what somebody should know about the runs below a folder.

A run ended badly, its verdict changed, a rank holds the others up, it has become slow, its loss is no number, the disk
is nearly full: each is told once, until it is over and comes again.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import shutil
import statistics
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from frameworm.errors import EnvironmentSetupError
from frameworm.records.printable import printable
from frameworm.watch.catalogue import RUNNING, UNFINISHED, Catalogue, Row

log = logging.getLogger("frameworm")

LOOK_S = 5.0
_WINDOW_S = 60.0
_WINDOWS, _LEAST_WINDOWS = 30, 5
_SLOW = 0.7  # of the usual steps per second
_BADLY = ("failed", UNFINISHED)
_FULL = 0.95
_COMMAND_S, _WEB_S = 30.0, 10.0


@dataclass(frozen=True, slots=True)
class Alert:
    """What is told, as JSON: on the command's standard input, or as the body of a POST.

    Attributes:
        kind: ended, verdict, straggler, slow, loss or disk.
        run: Name of the run; None: it is about the folder.
        text: In words.
        step: How far the run had got, where that is known.
    """

    kind: str
    run: str | None
    text: str
    step: int | None = None


@dataclass
class _Seen:
    """What was known of a run at the last look."""

    status: str
    verdict: str | None = None
    window: tuple[float, int] | None = None  # when it began, and at which step
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    told: set[str] = field(default_factory=set)


class Alerts:
    """Looks at runs from time to time.

    Args:
        catalogue: The runs.
        targets: Each a web address, or a command with its arguments.

    Raises:
        EnvironmentSetupError: There is no such command.
    """

    def __init__(self, catalogue: Catalogue, targets: list[str]) -> None:
        self._catalogue = catalogue
        self._send = [_sender(target) for target in targets]
        self._runs: dict[str, _Seen] = {}
        self._is_full = False

    def start(self) -> None:
        """Look on from now, beside whatever else this process does."""
        threading.Thread(target=self._go, name="alerts", daemon=True).start()

    def _go(self) -> None:
        while True:
            try:
                self.tell(self.look(time.monotonic()))
            except Exception as error:  # a page that stays up is worth more than an alert
                log.warning("alerts: %s: %s", type(error).__name__, printable(error))
            time.sleep(LOOK_S)

    def tell(self, alerts: list[Alert]) -> None:
        """Send alerts; one that does not get through costs a line."""
        for alert in alerts:
            for send in self._send:
                try:
                    send(json.dumps(asdict(alert)))
                except (OSError, subprocess.SubprocessError, ValueError) as error:
                    log.warning("an alert did not get through (%s): %s", printable(error), printable(alert.text))

    def look(self, now: float) -> list[Alert]:
        """What is new since the last look.

        Args:
            now: By a clock that does not jump.
        """
        rows = self._catalogue.rows()
        found = [alert for row in rows for alert in self._of_run(row, now)]
        known = {row.id for row in rows}
        self._runs = {key: value for key, value in self._runs.items() if key in known}
        return [*found, *self._of_disk()]

    def _of_run(self, row: Row, now: float) -> Iterator[Alert]:
        seen = self._runs.get(row.id)
        if seen is None:
            self._runs[row.id] = _Seen(row.status, row.verdict)  # what was so before is no news
            return
        if row.status != seen.status:
            if seen.status == RUNNING and row.status in _BADLY:
                words = "has written nothing for a minute" if row.status == UNFINISHED else "failed"
                yield Alert("ended", row.name, f"{row.name} {words}", row.steps)
            seen.status, seen.window = row.status, None
            seen.rates.clear()
        if row.verdict is not None and row.verdict != seen.verdict:
            if seen.verdict is not None:
                words = f"{_plain(seen.verdict)} before, now {_plain(row.verdict)}"
                yield Alert("verdict", row.name, f"{row.name}: {words}", row.steps)
            seen.verdict = row.verdict
        if row.status != RUNNING:
            return
        lost = row.loss is not None and not math.isfinite(row.loss)
        yield from self._once(seen, "loss", row, f"the loss is {row.loss}" if lost else None)
        yield from self._once(seen, "straggler", row, self._straggler(row))
        slow = self._slowness(seen, row, now)
        if slow is not None:
            yield from self._once(seen, "slow", row, slow or None)

    def _once(self, seen: _Seen, kind: str, row: Row, text: str | None) -> Iterator[Alert]:
        if text is None:
            seen.told.discard(kind)
        elif kind not in seen.told:
            seen.told.add(kind)
            yield Alert(kind, row.name, f"{row.name}: {text}", row.steps)

    def _straggler(self, row: Row) -> str | None:
        found = self._catalogue.record(row.id)
        findings = [] if found is None else found[1].findings
        held = next((item for item in findings if item.code == "straggler"), None)
        return None if held is None else "one rank holds the others up"

    def _slowness(self, seen: _Seen, row: Row, now: float) -> str | None:
        """Words where the last minute was slow, none (an empty text) where it was not; None: no minute has ended."""
        if row.steps is None:
            return None
        if seen.window is None:
            seen.window = (now, row.steps)
        began, first = seen.window
        if now - began < _WINDOW_S:
            return None
        rate = max(0, row.steps - first) / (now - began)
        seen.window = (now, row.steps)
        usual = statistics.median(seen.rates) if len(seen.rates) >= _LEAST_WINDOWS else None
        if usual is None or rate >= _SLOW * usual:
            seen.rates.append(rate)
            return ""
        return f"{rate:.3g} steps per second in the last minute, usually {usual:.3g}"

    def _of_disk(self) -> Iterator[Alert]:
        try:
            usage = shutil.disk_usage(self._catalogue.root)
        except OSError:
            return
        is_full = usage.used > _FULL * usage.total
        if is_full and not self._is_full:
            yield Alert("disk", None, f"the disk of the runs is {usage.used / usage.total:.1%} full")
        self._is_full = is_full


def _plain(code: str) -> str:
    return code.replace("_", " ")


def _sender(target: str) -> Callable[[str], Any]:
    if target.startswith(("http://", "https://")):
        return lambda text: _post(target, text)
    try:
        command = shlex.split(target)
    except ValueError as error:
        raise EnvironmentSetupError(f"--alert {target}: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise EnvironmentSetupError(
            f"--alert {target}: there is no such command; give one that reads JSON from its standard input, or an "
            "address that begins with http:// or https://"
        )
    return lambda text: subprocess.run(
        command, input=text, text=True, timeout=_COMMAND_S, check=True, stdout=subprocess.DEVNULL
    )


def _post(address: str, text: str) -> None:
    request = urllib.request.Request(address, text.encode(), {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=_WEB_S):
        pass
