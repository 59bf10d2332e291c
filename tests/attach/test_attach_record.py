"""From step files to a record, and one folder for several ranks."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from frameworm.attach import ranks as attach_ranks
from frameworm.attach.ranks import SharedFolder
from frameworm.attach.record import Surroundings, judge_record, judge_stored, judged_run, record_of, stored_record
from frameworm.attach.script import without_own_frames
from frameworm.errors import EnvironmentSetupError, RunFolderError
from frameworm.launch.environment import ProcessInfo
from frameworm.records import writer
from frameworm.records.reading import read_lines
from frameworm.records.schema import Compilation, StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line


def write_steps(folder: Path, rank: int, phases: dict[str, float], count: int = 20, **metrics: float) -> None:
    step_s = sum(phases.values())
    lines = [
        step_line(
            StepRecord(
                step=number,
                epoch=1,
                time=float(number),
                step_s=step_s,
                loss=None,
                lr=0.1,
                samples=8,
                count=8.0,
                phases=dict(phases),
                communication_s=phases.get("communication_exposed"),
                metrics=metrics,
            )
        )
        for number in range(1, count + 1)
    ]
    (folder / f"steps-rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_record_of_one_rank(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, {"data_wait": 0.03, "forward": 0.01, "backward": 0.02}, fetches=2.0, checkpoints=3.0)
    compilation = Compilation(time_s=2.0, graphs=1, recompilations=0)
    facts = {"precision": "bf16", "parameters": 7}
    around = Surroundings("profile-x", "completed", facts=facts, compilation=compilation)
    record, series = record_of(RunFolder(tmp_path), around)
    assert record.source == "attached"
    assert (record.steps, record.precision, record.parameters) == (20, "bf16", 7)
    assert (record.batch.micro, record.batch.accumulation, record.batch.global_) == (4, 2, 8)
    assert record.throughput.samples_per_s == pytest.approx(8 / 0.06)
    assert record.phases["data_wait"].share == pytest.approx(0.5)
    assert record.unseen == ["optimizer"]
    assert record.checkpoint.count == 20  # three files in one step are one checkpoint
    assert record.compilation is compilation
    assert len(series) == 20
    judge_record(record, RunFolder(tmp_path))
    assert record.verdict == "input_bound"
    assert RunFolder.open(tmp_path).path == tmp_path


def test_record_names_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, {"forward": 0.01, "backward": 0.01, "communication_exposed": 0.05, "optimizer": 0.01})
    write_steps(tmp_path, 1, {"forward": 0.05, "backward": 0.01, "communication_exposed": 0.01, "optimizer": 0.01})
    around = Surroundings("profile-x", "completed", world_size=2, facts={"gradient_bytes": 100})
    record, _ = record_of(RunFolder(tmp_path), around)
    assert record.communication.slowest_rank == 1
    assert record.communication.rank_wait_s == pytest.approx(0.04)
    assert record.communication.bytes_per_step == 100
    assert [rank.rank_wait_s for rank in record.ranks] == pytest.approx([0.04, 0.0])
    assert record.throughput.samples_per_s == pytest.approx(16 / 0.08)
    assert record.unseen == ["data_wait"]


def test_a_run_without_summary_is_judged_from_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 0, {"data_wait": 0.03, "forward": 0.01, "backward": 0.02, "optimizer": 0.01})
    expected = stored_record(RunFolder(tmp_path))
    judge_stored(expected, RunFolder(tmp_path))
    read: list[Path] = []

    def counted(path: Path) -> Iterator[bytes]:
        read.append(path)
        return read_lines(path)

    monkeypatch.setattr(writer, "read_lines", counted)
    record = judged_run(RunFolder(tmp_path))
    assert (record.verdict, record.findings) == (expected.verdict, expected.findings)
    assert record.verdict == "input_bound"
    assert read == [tmp_path / "steps-rank0.jsonl"]


def test_speed_from_samples_of_unequal_size_is_that_of_all_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        write_steps(tmp_path, rank, {"forward": 0.01, "backward": 0.02, "optimizer": 0.01}, count=5_000)
    folder = RunFolder(tmp_path)
    shares = [reader.share for reader in folder.step_readers(2**20).values()]
    assert shares[0] == pytest.approx(3 * shares[1], rel=1e-4)
    record = stored_record(folder, 2**20)
    assert record.throughput.samples_per_s == pytest.approx(4 * 8 / 0.04, rel=0.05)
    assert f"{sum(shares) / 4:.2%} of the steps" in judged_run(folder, 2**20).notes[-1]


def test_checkpoints_in_a_sample_of_the_steps_stand_for_all(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, {"forward": 0.01, "checkpoint": 0.02}, count=5_000, checkpoints=1.0)
    folder = RunFolder(tmp_path)
    assert folder.step_readers(2**17)[0].share < 0.2
    checkpoint = stored_record(folder, 2**17).checkpoint
    assert checkpoint.count == pytest.approx(5_000, rel=0.05)
    assert checkpoint.stall_s == pytest.approx(5_000 * 0.02, rel=0.05)


def test_record_says_what_is_missing(tmp_path: Path) -> None:
    record, series = record_of(RunFolder(tmp_path), Surroundings("profile-x", "failed", world_size=2))
    assert record.steps == 0
    assert record.throughput.samples_per_s is None
    assert not series
    assert "no training step was seen" in record.notes[0]
    write_steps(tmp_path, 0, {"forward": 0.01})
    record, _ = record_of(RunFolder(tmp_path), Surroundings("profile-x", "completed", world_size=2))
    assert record.unseen == ["data_wait", "backward", "optimizer", "communication_exposed"]
    assert record.communication.exposed_s is None
    assert "no steps of rank 1" in record.notes[0]


def test_damaged_steps_are_left_out(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, {"forward": 0.01}, count=3)
    with (tmp_path / "steps-rank0.jsonl").open("a") as file:
        file.write('{"step": 4, "epo')
    record, _ = record_of(RunFolder(tmp_path), Surroundings("profile-x", "completed"))
    assert record.steps == 3


def test_ranks_meet_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = [ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2) for rank in range(2)]
    found: list[Path] = []
    second = SharedFolder(process[1], tmp_path / "run", "profile-x")
    waiting = threading.Thread(target=lambda: found.append(second.find().path))
    waiting.start()
    time.sleep(0.05)
    assert not found
    first = SharedFolder(process[0], tmp_path / "run", "profile-x")
    waiting.join(60)
    assert found == [first.find().path] == [tmp_path / "run"]
    assert first.wait_for_ranks(0.05) == [1]
    second.done()
    assert first.wait_for_ranks(0.05) == []
    # Neither the note nor the marks are left.
    private = tmp_path / f"frameworm-{os.getuid()}"
    assert set(tmp_path.iterdir()) == {tmp_path / "run", private}
    assert list(private.iterdir()) == []
    assert private.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "run").iterdir()) == []


def test_rank_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(attach_ranks, "WAIT_FOR_FOLDER_S", 0.05)
    with pytest.raises(RunFolderError, match="rank 1 found no run folder"):
        SharedFolder(ProcessInfo(rank=1, world_size=2), None, "profile-x").find()
    # Notes are not looked for in a folder of another user, nor in one that others can write to.
    (tmp_path / f"frameworm-{os.getuid()}").chmod(0o777)
    with pytest.raises(EnvironmentSetupError, match="only you can open"):
        SharedFolder(ProcessInfo(rank=1, world_size=2), None, "profile-x")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(EnvironmentSetupError, match="only you can open"):
        SharedFolder(ProcessInfo(rank=1, world_size=2), None, "profile-x")
    SharedFolder(ProcessInfo(), tmp_path / "alone", "profile-x")  # which needs no notes


def test_other_machines_take_the_folder_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = ProcessInfo(rank=2, world_size=4, local_world_size=2, node_rank=1, num_nodes=2)
    assert SharedFolder(process, tmp_path / "run", "profile-x").find().path == tmp_path / "run"
    with pytest.raises(RunFolderError, match="the same --out"):
        SharedFolder(process, None, "profile-x").find()


def test_frames_of_others_stay_in_a_traceback() -> None:
    def fail() -> None:
        raise ValueError("mine")

    try:
        fail()
    except ValueError as error:
        without_own_frames(error)
        trace = error.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_frame.f_code.co_name == "fail"
