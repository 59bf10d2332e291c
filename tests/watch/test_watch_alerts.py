"""Alerts: what is told, how often, and to whom."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.watch.alerts import MOST_AT_ONCE, REST_S, Alert, Alerts
from frameworm.watch.catalogue import Row

ROW = Row("id", "run", "running", "gpt", 0.0, 0, 2.0, 100.0, "healthy")


class Runs:
    """In place of a catalogue."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.row = ROW
        self.others: list[Row] = []
        self.codes: list[str] = []
        self.severity = "warning"

    def rows(self) -> list[Row]:
        return [self.row, *self.others]

    def find(self, run_id: str) -> None:
        return None

    def record(self, run_id: str) -> tuple[str, Any]:
        findings = [SimpleNamespace(code=code, severity=self.severity) for code in self.codes]
        return self.row.status, SimpleNamespace(findings=findings, communication=SimpleNamespace(slowest_rank=3))

    def becomes(self, **changes: Any) -> None:
        self.row = replace(self.row, **changes)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def alerts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Alerts:
    monkeypatch.setattr(
        "frameworm.watch.alerts.shutil.disk_usage", lambda path: SimpleNamespace(total=100, used=50, free=50)
    )
    made = Alerts(runs, [])  # type: ignore[arg-type]
    assert made.look(0.0) == [], "what was so before is no news"
    return made


def _kinds(alerts: Alerts, now: float = 0.0) -> list[str]:
    return [alert.kind for alert in alerts.look(now)]


@pytest.mark.parametrize(("status", "told"), [("failed", ["ended"]), ("unfinished", ["ended"]), ("completed", [])])
def test_a_run_that_ends_badly(status: str, told: list[str], runs: Runs, alerts: Alerts) -> None:
    runs.becomes(status=status)
    assert _kinds(alerts) == told
    assert _kinds(alerts) == []


def test_a_verdict_that_changes(runs: Runs, alerts: Alerts) -> None:
    runs.becomes(verdict="input_bound", steps=7)
    (alert,) = alerts.look(0.0)
    assert alert == Alert("verdict", "run", "run: healthy before, now input bound", 7)
    assert _kinds(alerts) == []
    runs.becomes(verdict=None)
    assert _kinds(alerts) == []


def test_a_loss_that_is_no_number_is_told_once_until_it_is_over(runs: Runs, alerts: Alerts) -> None:
    nan = float("nan")
    for now, loss, told in ((0, nan, ["loss"]), (5, nan, []), (10, 1.0, []), (REST_S, float("inf"), ["loss"])):
        runs.becomes(loss=loss)
        assert _kinds(alerts, now) == told


def test_a_rank_that_holds_the_others_up(runs: Runs, alerts: Alerts) -> None:
    runs.codes, runs.severity = ["straggler"], "info"
    assert _kinds(alerts) == []
    runs.severity = "critical"
    (alert,) = alerts.look(0.0)
    assert (alert.kind, alert.text) == ("straggler", "run: rank 3 holds the others up")
    assert _kinds(alerts) == []


def test_what_comes_and_goes_is_told_every_ten_minutes_at_most(runs: Runs, alerts: Alerts) -> None:
    told: list[tuple[int, str]] = []
    for now in range(0, 1_300, 5):
        flips = now % 10 == 0
        runs.codes = ["straggler"] if flips else []
        runs.becomes(verdict="input_bound" if flips else "healthy", loss=float("nan") if flips else 1.0)
        told += [(now, kind) for kind in _kinds(alerts, now)]
    assert [now for now, kind in told if kind == "loss"] == [0, 600, 1_200]
    assert [now for now, kind in told if kind == "straggler"] == [0, 600, 1_200]
    assert len([now for now, kind in told if kind == "verdict"]) == 3


def test_a_change_that_came_too_soon_is_told_later_if_it_stays(runs: Runs, alerts: Alerts) -> None:
    runs.becomes(verdict="input_bound")
    assert _kinds(alerts, 0) == ["verdict"]
    runs.becomes(verdict="straggler")
    assert [_kinds(alerts, 5), _kinds(alerts, REST_S)] == [[], ["verdict"]]


def test_a_first_verdict_is_no_change(runs: Runs, alerts: Alerts) -> None:
    runs.others = [replace(ROW, id="new", name="new", verdict="inconclusive")]
    assert _kinds(alerts) == []
    runs.others = [replace(ROW, id="new", name="new", verdict="compute_bound")]
    assert _kinds(alerts) == []
    runs.others = [replace(ROW, id="new", name="new", verdict="inconclusive")]
    assert _kinds(alerts) == []
    runs.others = [replace(ROW, id="new", name="new", verdict="healthy")]
    assert _kinds(alerts) == ["verdict"]


def test_two_hundred_runs_that_end_at_once_are_ten_alerts(runs: Runs, alerts: Alerts) -> None:
    runs.others = [replace(ROW, id=str(number), name=str(number)) for number in range(200)]
    assert _kinds(alerts) == []
    runs.others = [replace(row, status="unfinished") for row in runs.others]
    told = alerts.look(0.0)
    assert len(told) == MOST_AT_ONCE
    assert told[-1] == Alert("more", None, "191 more alerts at the same time: 191 x ended")
    assert _kinds(alerts) == []


def test_a_run_that_came_and_failed_between_two_looks(runs: Runs, alerts: Alerts) -> None:
    runs.others = [replace(ROW, id="new", name="new", status="failed")]
    assert [_kinds(alerts), _kinds(alerts)] == [["ended"], []]


def test_a_run_that_becomes_slow(runs: Runs, alerts: Alerts) -> None:
    steps, told = 0, []
    for minute, rate in enumerate([100] * 8 + [40, 40] + [100] * 9 + [30]):
        told.append(_kinds(alerts, 61.0 * minute))
        steps += rate
        runs.becomes(steps=steps)
    told.append(_kinds(alerts, 61.0 * 20))
    assert [minute for minute, kinds in enumerate(told) if kinds] == [9, 20]
    assert {kind for kinds in told for kind in kinds} == {"slow"}


def test_a_disk_that_is_nearly_full(alerts: Alerts, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=100, used=97, free=3)
    monkeypatch.setattr("frameworm.watch.alerts.shutil.disk_usage", lambda path: usage)
    assert [_kinds(alerts), _kinds(alerts)] == [["disk"], []]


def test_what_a_disk_keeps_for_root_is_not_free(alerts: Alerts, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=100, used=90, free=4)
    monkeypatch.setattr("frameworm.watch.alerts.shutil.disk_usage", lambda path: usage)
    assert [alert.text for alert in alerts.look(0.0)] == ["the disk of the runs is 95.7% full"]


def test_a_command_gets_it_on_its_standard_input(runs: Runs, tmp_path: Path) -> None:
    script = tmp_path / "take.py"
    script.write_text(f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.read())")
    made = Alerts(runs, [f"{sys.executable} {script}"])  # type: ignore[arg-type]
    made.tell([Alert("ended", "a 'run'; rm -rf /", "failed", 3)])
    assert json.loads((tmp_path / "told").read_text())["run"] == "a 'run'; rm -rf /"


@pytest.fixture
def web() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_address_gets_it_by_post(runs: Runs, web: tuple[str, list[bytes]]) -> None:
    address, bodies = web
    Alerts(runs, [address]).tell([Alert("disk", None, "full")])  # type: ignore[arg-type]
    assert json.loads(bodies[0]) == {"kind": "disk", "run": None, "text": "full", "step": None}


def test_a_target_that_cannot_be_reached_costs_a_line(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Alerts(runs, ["http://127.0.0.1:9/", f"test -e {tmp_path / 'there'}"])  # type: ignore[arg-type]
    logging.getLogger("frameworm").propagate = True
    with caplog.at_level(logging.WARNING, logger="frameworm"):
        for _ in range(3):
            made.tell([Alert("disk", None, "full"), Alert("ended", "a", "failed")])
        assert len([line for line in caplog.messages if "did not get through" in line]) == 2
        (tmp_path / "there").touch()
        made.tell([Alert("disk", None, "full")])
        assert caplog.messages[-1] == "alerts get through again; 6 did not"


@pytest.mark.parametrize("target", ["no-such-command-at-all", "", "'open"])
def test_a_command_that_is_not_there_is_refused(target: str, runs: Runs) -> None:
    with pytest.raises(EnvironmentSetupError, match="--alert"):
        Alerts(runs, [target])  # type: ignore[arg-type]
