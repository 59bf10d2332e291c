"""What is shown while a run goes on."""

from __future__ import annotations

import io

import pytest

from frameworm.records.schema import Batch, EpochRecord, RunRecord, StepRecord
from frameworm.report import progress
from frameworm.report.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RECORD = RunRecord("name", "completed", {}, Batch(4, 1, 2, 8))


def _step(number: int) -> StepRecord:
    return StepRecord(number, 1, 0.0, 0.1, 2.0, 0.1, 4, 4.0, phases={"data_wait": 0.05, "forward": 0.05})


def _run(stream: io.StringIO, steps: int = 4) -> str:
    line = ProgressLine(10, 3, world_size=2, stream=stream)
    line.on_run_start(RECORD)
    for number in range(1, steps + 1):
        line.on_step(_step(number))
    line.on_epoch(EpochRecord(1, 1.0, 1.5, 1.25, 0.875, 100.0))
    line.on_run_end(RECORD)
    return stream.getvalue()


def test_plain_lines_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    lines = _run(io.StringIO()).splitlines()
    assert lines[0].startswith("epoch 1/3  step 1/10  loss 2.0000  80 samples/s  50% waiting for data  about ")
    assert lines[-1] == "epoch 1/3  loss 1.5  val loss 1.25  accuracy 87.50%  100 samples/s  1.00 s"
    assert "\x1b" not in "".join(lines)


def test_plain_lines_are_few() -> None:
    assert len(_run(io.StringIO(), steps=500).splitlines()) == 1


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    shown = _run(Terminal())
    assert "50% waiting for data" in shown
    assert "epoch 1/3" in shown
    assert "4/10" in shown
    assert "accuracy 87.50%" in shown


def test_an_unknown_length_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    stream = io.StringIO()
    line = ProgressLine(None, 1, world_size=1, stream=stream)
    line.on_run_start(RECORD)
    line.on_step(_step(1))
    assert "left" not in stream.getvalue()
    assert "step 1 " in stream.getvalue()
