"""Loggers that fail, hang or are slow cost a line and nothing else."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from frameworm.observe.loggers.points import StepPoints
from frameworm.observe.loggers.protocol import LoggedRun
from frameworm.observe.loggers.run_loggers import Channel, NamedLogger, RunIds, RunLoggers
from frameworm.records.schema import Batch, EpochRecord, RunRecord, StepRecord

RECORD = RunRecord("a", "completed", {}, Batch(4, 1, 1, 4), steps=3)


class Recorder:
    """Keeps what it is told; fails or waits in the method it is told to."""

    def __init__(self, fails_in: str = "", waits_in: str = "", gate: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_in = fails_in
        self._waits_in = waits_in
        self._gate = gate

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == self._waits_in and self._gate is not None:
            self._gate.wait(60)
        if name == self._fails_in:
            raise ConnectionError("no route\nto host")

    def start(self, run: LoggedRun) -> str | None:
        self._called("start", run)
        return "id-1"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._called("log", step, dict(values))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self._called("finish", status, dict(summary))

    @property
    def steps(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "log" and "train/loss" in call[2]]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a logger hangs at until the test is over."""
    made = threading.Event()
    yield made
    made.set()


def loggers(*given: Any, run: LoggedRun | None = None, ids: RunIds | None = None) -> RunLoggers:
    run = run or LoggedRun("run", {"seed": 3}, close_s=60.0)

    def describe(known: str | None) -> LoggedRun:
        return LoggedRun(run.name, run.config, run.folder, known, run.step, run.seen_step, run.close_s)

    named = [NamedLogger(f"log{number}", logger) for number, logger in enumerate(given)]
    return RunLoggers(named, StepPoints(0.0), describe, ids)


def steps(found: RunLoggers, *numbers: int) -> None:
    for number in numbers:
        found.on_step(StepRecord(number, 1, float(number), 0.5, 1.0, 0.1, 4, 4.0))


def epoch(number: int) -> EpochRecord:
    return EpochRecord(number, 1.0, 1.0, 0.5, 0.75, 10.0)


def run_through(found: RunLoggers) -> None:
    found.on_run_start(RECORD)
    steps(found, 1, 2, 3)
    found.on_epoch(epoch(1))
    found.on_run_end(RECORD)


def test_a_logger_is_told_of_everything_in_order() -> None:
    logger = Recorder()
    found = loggers(logger)
    run_through(found)
    assert [call[0] for call in logger.calls] == ["start", "log", "log", "log", "log", "finish"]
    assert logger.calls[0][1].config == {"seed": 3}
    assert logger.steps == [1, 2, 3]
    assert logger.calls[4][1:] == (3, logger.calls[4][2])
    assert logger.calls[4][2]["epoch/val_accuracy"] == 0.75
    assert logger.calls[5][1] == "completed"
    assert logger.calls[5][2]["steps"] == 3
    assert found.notes == []


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_line(method: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Recorder(fails_in=method), Recorder()
    found = loggers(broken, whole)
    with caplog.at_level(logging.WARNING, "frameworm"):
        run_through(found)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "logger log0 is left out" in line
    assert line.endswith("ConnectionError: no route to host")
    assert [call[0] for call in broken.calls].count(method) == 1
    assert len(whole.calls) == 6
    assert found.notes == ["logger log0 was left out: ConnectionError: no route to host"]


def test_a_logger_that_tries_to_exit_is_left_out() -> None:
    class Exits(Recorder):
        def start(self, run: LoggedRun) -> str | None:
            raise SystemExit(3)

    found = loggers(Exits())
    run_through(found)
    assert found.notes == ["logger log0 was left out: SystemExit: 3"]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.slow
def test_a_logger_that_hangs_is_waited_for_until_the_deadline(
    method: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    # The last one must not wait for the time that the first one takes: it is done, and is not left out.
    hangs, whole = Recorder(waits_in=method, gate=gate), Recorder()
    found = loggers(hangs, whole, run=LoggedRun("run", {}, close_s=3.0))
    began = monotonic()
    with caplog.at_level(logging.WARNING, "frameworm"):
        run_through(found)
    assert monotonic() - began < 30
    assert [record.getMessage() for record in caplog.records] == [
        "logger log0 is left out, and training continues without it: it did not finish within 3 s of the run's end"
    ]
    assert len(whole.calls) == 6


def test_a_call_that_does_not_return_is_noticed_while_training_goes_on(gate: threading.Event) -> None:
    logger = Recorder(waits_in="log", gate=gate)
    channel = Channel("slow", logger, hung_s=0.05)
    channel.begin()
    channel.put(lambda: logger.log({}, 1))
    deadline = monotonic() + 50
    while not channel.notes and monotonic() < deadline:
        time.sleep(0.02)
        channel.put(lambda: logger.log({}, 2), may_lose=True)
    assert channel.notes == ["logger slow was left out: a call has not returned for 0 s"]
    gate.set()
    assert channel.wait(60)
    assert len(logger.calls) == 1  # what was queued is dropped


def test_a_slow_logger_loses_points_but_no_epoch(gate: threading.Event) -> None:
    logger = Recorder(waits_in="start", gate=gate)
    channel = Channel("slow", logger, most_pending=3)
    channel.begin()
    channel.put(lambda: logger.start(LoggedRun("run", {})))
    for number in range(1, 11):
        channel.put(lambda number=number: logger.log({}, number), may_lose=True)  # type: ignore[misc]
    channel.put(lambda: logger.log({}, 99))
    gate.set()
    channel.end()
    assert channel.wait(60)
    logged = [call[1] for call in logger.calls if call[0] == "log"]
    assert logged[-1] == 99
    assert 3 <= len(logged) <= 4  # `start` may have left the queue already when the first points came
    assert channel.notes == [f"logger slow was too slow for {11 - len(logged)} of its points; raise log_interval_s"]


def test_steps_taken_again_are_not_told_to_a_run_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text(json.dumps({"log0": "id-1"}))
    known, fresh = Recorder(), Recorder()
    found = loggers(known, fresh, run=LoggedRun("run", {}, tmp_path, None, 4, 6, 60.0), ids=RunIds(tmp_path))
    found.on_run_start(RECORD)
    found.on_epoch(epoch(1))  # of the checkpoint's step, and known
    steps(found, 5, 6)
    found.on_epoch(epoch(2))  # the run may have been stopped before this was told
    steps(found, 7)
    found.on_run_end(RECORD)
    assert [call[1].id for call in (known.calls[0], fresh.calls[0])] == ["id-1", None]
    assert (known.steps, fresh.steps) == ([7], [5, 6, 7])
    assert [call[1] for call in known.calls if call[0] == "log"] == [6, 7]
    assert [call[1] for call in fresh.calls if call[0] == "log"] == [4, 5, 6, 6, 7]
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"log0": "id-1", "log1": "id-1"}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"a": "../../b"}', '{"a": "' + "x" * 70000 + '"}'])
def test_a_file_of_ids_that_is_none_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text(content)
    assert RunIds(tmp_path).get("a") is None
