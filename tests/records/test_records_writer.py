"""The writer keeps what it can and counts what it cannot; the reader takes what a crash leaves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from frameworm.errors import RunFolderError
from frameworm.records import writer as writer_module
from frameworm.records.events import Events
from frameworm.records.schema import StepRecord
from frameworm.records.writer import JsonLinesWriter, StepReader, read_steps, step_line


def make_step(number: int, loss: float | None = 0.5) -> StepRecord:
    return StepRecord(
        number, 1, 1.0e9 + number, 0.01, loss, 1e-3, 8, 8.0, 100, None, None, False, {"forward": 0.004, "other": 0.006}
    )


def test_steps_come_back_in_order_and_equal(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = [make_step(number) for number in range(1, 301)]
    writer = JsonLinesWriter(path)
    for step in steps:
        writer.write(step)
    assert writer.close()
    assert (writer.lost, writer.problem) == (0, None)
    assert read_steps(path) == steps
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == list(StepRecord.__dataclass_fields__)
    assert first["padded_tokens"] is None


def test_non_finite_losses_are_valid_json_and_come_back() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        data = json.loads(step_line(make_step(1, loss)), parse_constant=lambda word: pytest.fail(word))
        assert data["loss"] == str(loss)
        assert str(StepRecord.from_dict(data).loss) == str(loss)


def test_a_line_holds_every_value_and_times_to_the_nanosecond() -> None:
    draw = random.Random(3)
    names = ["forward", "100%", 'a "b"', "ünï", "%.9f", "other"]
    for number in range(1, 200):
        record = make_step(number, draw.choice([None, draw.gauss(0, 1), 1e-300]))
        record.time = 1.7e9 + draw.random()
        record.step_s = draw.random()
        record.phases = {name: draw.random() * 10 ** draw.randint(-6, 3) for name in draw.sample(names, 3)}
        record.metrics = draw.choice([{}, {"sync_s": draw.random(), "sy%ncs": 3}])
        record.skipped = draw.choice([None, True, False])
        record.count = draw.choice([8, 8.5])
        record.grad_norm, record.rank_wait_s = draw.choice([None, draw.random()]), draw.choice([None, draw.random()])
        found = dataclasses.asdict(StepRecord.from_dict(json.loads(step_line(record))))
        planted = dataclasses.asdict(record)
        assert found.pop("time") == pytest.approx(planted.pop("time"), abs=1e-6)
        assert found.pop("step_s") == pytest.approx(planted.pop("step_s"), abs=1e-9)
        assert found.pop("phases") == pytest.approx(planted.pop("phases"), abs=1e-9)
        assert found == planted


@pytest.mark.parametrize("field", ["time", "step_s", "count", "grad_norm"])
def test_a_number_that_json_lacks_does_not_break_the_line(field: str) -> None:
    record = make_step(1)
    setattr(record, field, math.inf)
    record.phases = {"forward": math.nan}
    data = json.loads(step_line(record), parse_constant=lambda word: pytest.fail(word))
    assert (data[field], data["phases"]) == ("inf", {"forward": "nan"})


def test_flush_makes_steps_visible_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    writer = JsonLinesWriter(path)
    for number in range(1, 6):
        writer.write(make_step(number))
        assert writer.flush()
        assert len(read_steps(path)) == number
    assert writer.close()
    assert writer.flush()


def test_the_writer_listens_to_events(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "steps.jsonl")
    Events([writer]).on_step(make_step(7))
    assert writer.close()
    assert read_steps(writer.path) == [make_step(7)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_counted_and_named() -> None:
    writer = JsonLinesWriter("/dev/full")
    for number in range(40):
        writer.write(make_step(number))
    assert writer.close()
    assert writer.lost == 40
    assert writer.problem == f"/dev/full: {os.strerror(28)}"


def test_a_missing_folder_is_counted_and_named(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "absent" / "steps.jsonl")
    writer.write(make_step(1))
    assert writer.flush()
    assert writer.lost == 1
    assert writer.problem is not None
    assert "absent" in writer.problem
    (tmp_path / "absent").mkdir()
    writer.write(make_step(2))
    assert writer.close()
    assert writer.lost == 1
    assert [step.step for step in read_steps(writer.path)] == [2]


def test_a_folder_removed_during_the_run_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = JsonLinesWriter(folder / "steps.jsonl")
    writer.write(make_step(1))
    assert writer.flush()
    shutil.rmtree(folder)
    writer.write(make_step(2))
    assert writer.close()
    assert writer.lost == 1
    assert writer.problem is not None
    assert "deleted" in writer.problem


def test_a_partial_write_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(make_step(1))
    assert writer.flush()
    real_write = os.write
    calls = []

    def half_then_full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real_write(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "write", half_then_full)
        writer.write(make_step(2))
        assert writer.flush()
    writer.write(make_step(3))
    assert writer.close()
    assert len(calls) == 2
    assert writer.lost == 1
    reader = StepReader(path)
    assert [step.step for step in reader] == [1, 3]
    assert (reader.broken, reader.torn) == (0, False)


def test_a_full_queue_loses_and_counts_but_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    entered = threading.Event()
    real_write = os.write

    def hang(descriptor: int, data: memoryview) -> int:
        entered.set()
        gate.wait(120)
        return real_write(descriptor, data)

    monkeypatch.setattr(writer_module.os, "write", hang)
    writer = JsonLinesWriter(tmp_path / "steps.jsonl", max_pending=10)
    writer.write(make_step(0))
    assert not writer.flush(timeout_s=0.01)
    assert entered.wait(60)
    for number in range(1, 26):
        writer.write(make_step(number))
    assert writer.lost == 15
    assert not writer.close(timeout_s=0.05)
    gate.set()
    assert writer.close()
    assert [step.step for step in read_steps(writer.path)] == list(range(11))


def test_writing_after_close_is_counted(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "steps.jsonl")
    assert writer.close()
    writer.write(make_step(1))
    assert writer.lost == 1
    assert not writer.path.exists()


def test_a_torn_last_line_is_told_from_broken_ones(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [step_line(make_step(1)), '{"step": 2, "epo', "[1, 2]", '{"step": 3}', "", step_line(make_step(4)), '{"ste']
    path.write_text("\n".join(lines))
    reader = StepReader(path)
    assert [step.step for step in reader] == [1, 4]
    assert (reader.broken, reader.torn) == (3, True)
    path.write_bytes(b"\xff\xfe\n" + step_line(make_step(5)).encode())
    assert [step.step for step in reader] == [5]
    assert (reader.broken, reader.torn) == (1, False)


def test_appending_after_a_torn_line_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(step_line(make_step(1)) + "\n" + '{"step": 2, "ep')
    writer = JsonLinesWriter(path)
    writer.write(make_step(3))
    assert writer.close()
    assert [step.step for step in read_steps(path)] == [1, 3]


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"none\.jsonl"):
        read_steps(tmp_path / "none.jsonl")
