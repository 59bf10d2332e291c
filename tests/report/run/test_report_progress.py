"""What is shown while a run goes on."""

from __future__ import annotations

import io
import re

import pytest

from frameworm.records.schema import Batch, EpochRecord, RunRecord, StepRecord
from frameworm.report.run import progress
from frameworm.report.run.progress import Live, ProgressLine, phase_shares_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class CellOutput(Terminal):
    """As ipykernel's stdout, which some notebooks make look like a terminal."""

    __module__ = "ipykernel.iostream"


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


def test_a_notebook_gets_plain_lines_on_stdout_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    stream = CellOutput()
    assert "\x1b" not in _run(stream)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not progress.somebody_watches()
    cell = CellOutput()
    monkeypatch.setattr("sys.stdout", cell)
    assert progress.somebody_watches()
    ProgressLine(10, 3, world_size=1).on_epoch(EpochRecord(1, 1.0, 1.5, 1.25, 0.875, 100.0))
    assert cell.getvalue().startswith("epoch 1/3  loss 1.5")


def test_mfu_is_shown_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    stream, asked = io.StringIO(), []

    def mfu(samples: float, tokens: float | None, squared: float | None, seconds: float) -> float | None:
        asked.append((samples, tokens, squared, seconds))
        return 0.42 if len(asked) > 1 else None

    line = ProgressLine(10, 3, world_size=2, stream=stream, mfu=mfu)
    line.on_run_start(RECORD)
    line.on_step(_step(1))
    second = _step(2)
    second.tokens = 12
    line.on_step(second)
    first, then = stream.getvalue().splitlines()
    assert "MFU" not in first
    assert "80 samples/s  MFU 42%" in then
    assert asked == [(4, None, None, 0.1), (4, 12, 36.0, 0.1)]


def test_plain_lines_are_few() -> None:
    assert len(_run(io.StringIO(), steps=500).splitlines()) == 1


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = _run(Terminal())
    assert "data 50% · forward 50%" in shown
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


SHARES = {"other": 0.07, "backward": 0.55, "communication_exposed": 0.04, "forward": 0.31, "data_wait": 0.03}


def test_phases_are_shown_in_the_order_of_a_step() -> None:
    assert phase_shares_text(SHARES, 80) == "data 3% · forward 31% · backward 55% · network 4% · other 7%"


def test_the_largest_phases_get_the_room_there_is() -> None:
    assert phase_shares_text(SHARES, 38) == "forward 31% · backward 55% · other 7%"
    assert phase_shares_text(SHARES, 12) == "backward 55%"
    assert phase_shares_text(SHARES, 11) == ""


def test_a_phase_that_rounds_to_nothing_is_left_out() -> None:
    assert phase_shares_text({"forward": 0.999, "transfer": 0.001, "backward": float("nan")}, 80) == "forward 100%"


@pytest.mark.parametrize("columns", [30, 60, 80, 100, 140])
def test_the_live_line_stays_one_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    live = Live(1000, stream)
    live.start()
    stream.seek(0)
    stream.truncate()
    live.update(512, "epoch 1/3", "loss 0.1234  10,000 samples/s", SHARES)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).strip()
    live.stop()
    assert "\n" not in drawn
    assert len(drawn) <= columns
    assert ("backward 55%" in drawn) == (columns >= 80)
    assert ("data 3%" in drawn) == (columns >= 140)


def test_the_live_line_is_drawn_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    live = Live(1000, stream)
    live.start()
    live.update(1, "epoch 1/3", "loss", SHARES)
    before = stream.getvalue()
    live.update(1, "epoch 1/3", "loss", dict(SHARES))
    assert stream.getvalue() == before
    live.update(1, "epoch 1/3", "loss", {"forward": 1.0})
    assert stream.getvalue() != before
    live.stop()
