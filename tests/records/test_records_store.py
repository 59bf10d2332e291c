"""Run folders: new ones never cover old ones, files are whole or absent, resumes drop what was not saved."""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from pathlib import Path

import pytest

from frameworm.errors import RunFolderError
from frameworm.records import atomic
from frameworm.records.schema import Batch, EpochRecord, RunRecord, StepRecord
from frameworm.records.store import RunFolder, find_runs, unfinished_runs
from frameworm.records.writer import read_steps, step_line


def make_record(status: str = "completed", name: str = "run") -> RunRecord:
    return RunRecord(name, status, {}, Batch(1, 1, 1, 1))


def make_run(root: Path, folder: str, age: int, status: str | None, checkpoint: bool, name: str = "run") -> RunFolder:
    run = RunFolder(root / folder)
    run.path.mkdir(parents=True)
    run.write_config(f"name: {name}\n")
    if status is not None:
        run.write_summary(make_record(status, name))
    if checkpoint:
        (run.checkpoints / "step-00000001").mkdir(parents=True)
        (run.checkpoints / "step-00000001" / "manifest.json").write_text("{}")
    os.utime(run.config, (1_000_000 - age, 1_000_000 - age))
    return run


def step_text(*numbers: int) -> str:
    steps = (StepRecord(number, 1, 0.0, 0.1, 0.5, None, 1, 1.0) for number in numbers)
    return "".join(step_line(step) + "\n" for step in steps)


def test_files_are_named_as_promised() -> None:
    run = RunFolder("r")
    names = [run.config, run.steps(3), run.epochs_csv, run.summary_json, run.summary_txt, run.report_html]
    assert [path.name for path in [*names, run.checkpoints]] == [
        "config.yaml",
        "steps-rank3.jsonl",
        "epochs.csv",
        "summary.json",
        "summary.txt",
        "report.html",
        "checkpoints",
    ]


def test_folders_started_in_one_second_differ(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    runs = [RunFolder.create(None, "ag_news", root) for _ in range(4)]
    assert len({run.path for run in runs}) == 4
    assert all(run.path.is_dir() and run.path.name.startswith("ag_news-") for run in runs)
    assert all(run.run_name() == "ag_news" for run in runs)
    assert stat.S_IMODE(runs[0].path.stat().st_mode) & 0o022 == 0


def test_out_may_be_new_or_empty(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    assert RunFolder.create(new, "run").path == new
    assert RunFolder.create(new, "run").path.is_dir()
    assert list(new.iterdir()) == []


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "steps-rank1.jsonl", "checkpoints"])
def test_out_with_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(RunFolderError, match=r"already holds a run.*another --out.*--resume auto"):
        RunFolder.create(tmp_path, "run")
    assert (tmp_path / name).read_text() == "kept"


@pytest.mark.parametrize("name", [".launch", ".storage.json", ".config.yaml.0123456789abcdef.tmp"])
def test_out_with_what_a_kill_left_before_there_was_a_run_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("left")
    assert RunFolder.create(tmp_path, "run").path == tmp_path


def test_out_with_other_files_or_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    file.write_text("kept")
    with pytest.raises(RunFolderError, match=r"not empty.*thesis\.tex"):
        RunFolder.create(tmp_path, "run")
    with pytest.raises(RunFolderError, match="in the way"):
        RunFolder.create(file, "run")
    assert file.read_text() == "kept"


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for out, root in ((file / "run", Path("runs")), (None, file), (None, file / "deep" / "runs")):
        with pytest.raises(RunFolderError, match=r"cannot make a run folder at .*--out") as caught:
            RunFolder.create(out, "run", root)
        assert "\n" not in str(caught.value)


def test_a_folder_without_permission_is_refused() -> None:
    # Not under tmp_path, whose parents are closed to the user that root becomes here: root may write anywhere.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        try:
            for out in (folder, folder / "new"):
                with pytest.raises(RunFolderError, match="Permission denied"):
                    RunFolder.create(out, "run")
        finally:
            if was_root:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a\0b"])
def test_names_that_leave_the_root_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="name"):
        RunFolder.create(None, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_open_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        RunFolder.open(tmp_path)
    RunFolder(tmp_path).write_config("name: x\n")
    assert RunFolder.open(tmp_path) == RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="not a folder"):
        RunFolder.open(tmp_path / "config.yaml")


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "old", 20, "completed", True)
    make_run(tmp_path, "new", 10, None, False)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").touch()
    assert [run.path.name for run in find_runs(tmp_path)] == ["new", "old"]
    assert find_runs(tmp_path / "absent") == []


def test_the_newest_unfinished_run_of_a_name_is_found(tmp_path: Path) -> None:
    make_run(tmp_path, "completed", 1, "completed", True)
    make_run(tmp_path, "nothing-saved", 2, None, False)
    make_run(tmp_path, "other-name", 3, None, True, name="run2")
    killed = make_run(tmp_path, "killed", 4, None, True)
    preempted = make_run(tmp_path, "preempted", 5, "preempted", True)
    assert next(unfinished_runs(tmp_path, "run"), None) == killed
    killed.write_summary(make_record("completed"))
    assert next(unfinished_runs(tmp_path, "run"), None) == preempted
    preempted.summary_json.write_text("{broken")
    assert next(unfinished_runs(tmp_path, "run"), None) == preempted
    assert next(unfinished_runs(tmp_path, "absent"), None) is None


def test_summary_comes_back_and_broken_ones_are_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="does not exist"):
        run.read_summary()
    record = make_record()
    run.write_summary(record, "text\n")
    assert run.read_summary() == record
    assert run.status() == "completed"
    assert run.summary_txt.read_text() == "text\n"
    assert json.loads(run.summary_json.read_text())["schema_version"] == 1
    for text in ('{"name": "x"', "[]", "{}", '{"name": "x", "status": "failed", "environment": {}, "batch": 3}'):
        run.summary_json.write_text(text)
        with pytest.raises(RunFolderError, match=r"summary\.json"):
            run.read_summary()
        assert run.status() is None


def test_epochs_have_the_promised_header_and_come_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    epochs = [EpochRecord(1, 2.5, 0.1 + 0.2, None, None, 1e6 / 3), EpochRecord(2, 2.0, math.inf, 0.5, 0.25, None)]
    run.write_epochs(epochs)
    lines = run.epochs_csv.read_text().split("\n")
    assert lines[0] == "epoch,epoch_time_s,train_loss,val_loss,val_accuracy,samples_per_s"
    assert lines[2] == "2,2.0,inf,0.5,0.25,"
    assert run.read_epochs() == epochs
    run.write_epochs([])
    assert run.read_epochs() == []


@pytest.mark.parametrize("text", ["", "epoch,time\n1,2\n", None])
def test_a_table_that_is_none_is_named(tmp_path: Path, text: str | None) -> None:
    run = RunFolder(tmp_path)
    run.epochs_csv.write_text(
        "epoch,epoch_time_s,train_loss,val_loss,val_accuracy,samples_per_s\n1,x,,,,\n" if text is None else text
    )
    with pytest.raises(RunFolderError, match=r"epochs\.csv"):
        run.read_epochs()


def test_a_failed_write_keeps_the_old_file_and_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.write_config("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"config\.yaml: No space left"):
        run.write_config("new")
    assert run.config.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_written_files_can_be_read_by_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    before = os.umask(0o022)
    try:
        run.write_report("<html>")
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.report_html.stat().st_mode) == 0o644


def test_truncating_drops_later_and_broken_steps_only(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.truncate_steps(0, 5) == 0
    assert list(tmp_path.iterdir()) == []
    run.steps(0).write_text(step_text(1, 2) + "broken\n" + step_text(3, 4, 5) + '{"step": 6, "ep')
    run.steps(12).write_text(step_text(1))
    assert run.step_files() == {0: run.steps(0), 12: run.steps(12)}
    assert run.truncate_steps(0, 3) == 4
    assert run.steps(0).read_text() == step_text(1, 2, 3)
    assert run.truncate_steps(0, 3) == 0
    assert run.truncate_steps(0, 0) == 3
    assert read_steps(run.steps(0)) == []


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.steps(0).write_text(step_text(1, 2).rstrip("\n"))
    assert run.truncate_steps(0, 2) == 0
    assert run.steps(0).read_text() == step_text(1, 2)


def test_a_config_that_is_no_yaml_gives_no_name(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "named-20300101-000000-2")
    run.path.mkdir()
    run.config.write_text("name: [")
    assert run.run_name() == "named"
    assert RunFolder(tmp_path / "free").run_name() is None
