"""Reports problems in the runs below a folder to a command or a URL.

A run ended badly, its verdict changed, a rank holds the others up, it has become slow, its loss is not finite, the disk
is nearly full: each is reported once until it is over and recurs, and at most every ten minutes.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any

from frameworm.errors import EnvironmentSetupError
from frameworm.records.printable import printable
from frameworm.watch.catalogue import RUNNING, UNFINISHED, Catalogue, Row

log = logging.getLogger("frameworm")

INCONCLUSIVE = "inconclusive"
LOOK_S = 5.0
_WINDOW_S = 60.0
_WINDOWS, _LEAST_WINDOWS = 30, 5
_SLOW = 0.7  # of the usual steps per second
_BADLY = ("failed", UNFINISHED)
_FULL = 0.95
_COMMAND_S, _WEB_S = 30.0, 10.0
REST_S = 600.0  # between two alerts of a kind about a run
MOST_AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, sent as JSON on the command's standard input or as the body of a POST request.

    Attributes:
        kind: ended, verdict, straggler, slow, loss, disk, or more: further alerts at the same moment.
        run: Name of the run; None: it is about the folder.
        text: The message.
        step: The run's step, if known.
    """

    kind: str
    run: str | None
    text: str
    step: int | None = None


@dataclass
class _Seen:
    """What was known about a run at the last check."""

    status: str
    verdict: str | None = None
    window: tuple[float, int] | None = None  # its start time and first step
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    told: set[str] = field(default_factory=set)  # ongoing conditions that were reported
    told_at: dict[str, float] = field(default_factory=dict)
    bad_step: int = -1  # the last step seen with a non-finite loss

    def may_tell(self, kind: str, now: float) -> bool:
        """Whether enough time has passed since the last alert of this kind; if so, record a new one."""
        if now - self.told_at.get(kind, -math.inf) < REST_S:
            return False
        self.told_at[kind] = now
        return True


class Alerts:
    """Checks runs at intervals.

    Args:
        catalogue: The runs.
        targets: URLs, or commands with their arguments.

    Raises:
        EnvironmentSetupError: A command does not exist.
    """

    def __init__(self, catalogue: Catalogue, targets: list[str]) -> None:
        self._catalogue = catalogue
        self._targets = [_Target(_sender(target)) for target in targets]
        self._runs: dict[str, _Seen] = {}
        self._looked = False
        self._folder = _Seen("")

    def start(self) -> None:
        """Start checking in a background thread."""
        threading.Thread(target=self._go, name="alerts", daemon=True).start()

    def _go(self) -> None:
        while True:
            try:
                self.tell(self.look(time.monotonic()))
            except Exception as error:  # keeping the page up matters more than an alert
                log.warning("alerts: %s: %s", type(error).__name__, printable(error))
            time.sleep(LOOK_S)

    def tell(self, alerts: list[Alert]) -> None:
        """Send alerts; an unreachable target is logged once until it can be reached again."""
        for alert in alerts:
            for target in self._targets:
                target.tell(alert)

    def look(self, now: float) -> list[Alert]:
        """The alerts since the last check.

        Args:
            now: Time of a monotonic clock.
        """
        rows = self._catalogue.rows()
        found = [alert for row in rows for alert in self._of_run(row, now)]
        known = {row.id for row in rows}
        self._runs = {key: value for key, value in self._runs.items() if key in known}
        found += self._of_disk(now)
        if not self._looked:  # conditions that existed before are not news
            self._looked = True
            return []
        if len(found) <= MOST_AT_ONCE:
            return found
        more = Counter(alert.kind for alert in found[MOST_AT_ONCE - 1 :])
        text = ", ".join(f"{count} x {kind}" for kind, count in more.items())
        return [*found[: MOST_AT_ONCE - 1], Alert("more", None, f"{more.total()} more alerts at the same time: {text}")]

    def _of_run(self, row: Row, now: float) -> Iterator[Alert]:
        seen = self._runs.get(row.id)
        if seen is None:
            # A run that started and failed between two checks was running in between.
            seen = self._runs[row.id] = _Seen(RUNNING if row.status == "failed" else row.status, row.verdict)
        if row.status != seen.status:
            if seen.status == RUNNING and row.status in _BADLY:
                if not seen.may_tell("ended", now):
                    return  # alert later, if it is still so
                words = "has written nothing for a minute" if row.status == UNFINISHED else "failed"
                yield Alert("ended", row.name, f"{row.name} {words}", row.steps)
            seen.status, seen.window = row.status, None
            seen.rates.clear()
        if row.verdict not in (None, INCONCLUSIVE, seen.verdict):
            if seen.verdict in (None, INCONCLUSIVE):  # a first verdict is not a change
                seen.verdict = row.verdict
            elif seen.may_tell("verdict", now):
                words = f"{_plain(seen.verdict)} before, now {_plain(row.verdict)}"
                yield Alert("verdict", row.name, f"{row.name}: {words}", row.steps)
                seen.verdict = row.verdict
        if row.status != RUNNING:
            return
        yield from self._once(seen, "loss", row, self._bad_loss(seen, row), now)
        if row.verdict is not None:  # only for runs that are judged anyway
            yield from self._once(seen, "straggler", row, self._straggler(row), now)
        slow = self._slowness(seen, row, now)
        if slow is not None:
            yield from self._once(seen, "slow", row, slow or None, now)

    def _once(self, seen: _Seen, kind: str, row: Row | None, text: str | None, now: float) -> Iterator[Alert]:
        if text is None:
            seen.told.discard(kind)
        elif kind not in seen.told and seen.may_tell(kind, now):
            seen.told.add(kind)
            yield Alert(kind, None, text) if row is None else Alert(kind, row.name, f"{row.name}: {text}", row.steps)

    def _bad_loss(self, seen: _Seen, row: Row) -> str | None:
        """A message if the loss is not finite now, or was not in a step since the last check."""
        if row.verdict is not None and (run := self._catalogue.find(row.id)) is not None:
            with run.lock:
                bad = [event for event in run.events if event.kind == "loss" and (event.step or 0) > seen.bad_step]
            if bad:
                seen.bad_step = bad[-1].step or 0
                return f"{bad[-1].text} in step {bad[-1].step:,}"
        return f"the loss is {row.loss}" if row.loss is not None and not math.isfinite(row.loss) else None

    def _straggler(self, row: Row) -> str | None:
        found = self._catalogue.record(row.id)
        if found is None or not any(item.code == "straggler" and item.severity != "info" for item in found[1].findings):
            return None
        slowest = found[1].communication.slowest_rank
        return f"{'one rank' if slowest is None else f'rank {slowest}'} holds the others up"

    def _slowness(self, seen: _Seen, row: Row, now: float) -> str | None:
        """A message if the last minute was slow, an empty text if it was not; None: no minute has ended."""
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

    def _of_disk(self, now: float) -> Iterator[Alert]:
        try:
            usage = shutil.disk_usage(self._catalogue.root)
        except OSError:
            return
        # Space reserved for root counts as used.
        share = 1 - usage.free / max(1, usage.free + usage.used)
        text = f"the disk of the runs is {share:.1%} full" if share > _FULL else None
        yield from self._once(self._folder, "disk", None, text, now)


class _Target:
    """A command or URL, and the number of alerts that did not get through."""

    def __init__(self, send: Callable[[str], Any]) -> None:
        self._send = send
        self._lost = 0

    def tell(self, alert: Alert) -> None:
        """Send an alert; if that fails, log it once."""
        try:
            self._send(json.dumps(asdict(alert)))
        except (OSError, subprocess.SubprocessError, ValueError, HTTPException) as error:
            if not self._lost:
                log.warning("an alert did not get through (%s): %s", printable(error), printable(alert.text))
            self._lost += 1
            return
        if self._lost:
            log.warning("alerts get through again; %d did not", self._lost)
        self._lost = 0


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
