"""Runs that are uploaded beside their training: what is in storage afterwards, going on from there, and refusals."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from upload_cases import STEPS, names, train
from workbench import Steps, StopAfter

from frameworm.engine.checkpoint.load import list_checkpoints
from frameworm.engine.export import export_weights
from frameworm.engine.upload.once import upload_run
from frameworm.engine.upload.places import go_on_in
from frameworm.engine.upload.uploader import Ownership
from frameworm.errors import (
    CheckpointError,
    ConfigError,
    MissingPackageError,
    RunFolderError,
    StorageError,
    TrainingPreemptedError,
)
from frameworm.records.objects.place import Place
from frameworm.records.objects.runs import local_run, whole_checkpoints
from frameworm.records.store import RunFolder


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: a working folder, and a place for copies."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return another_machine(tmp_path, monkeypatch, "here")


def another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    return tmp_path / name


@pytest.fixture(params=["memory", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("file", "s3"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/x"
    return f"{request.param}://{tmp_path}/far/x"


def test_a_run_is_in_storage_when_training_has_ended(url: str) -> None:
    record, _ = train(url)
    folder = RunFolder("runs/x")
    assert record.run_dir == "runs/x"
    assert record.storage is not None
    assert (record.storage.url, record.storage.uploaded) == (url, True)
    assert record.storage.checkpoint == "step-00000012"
    assert folder.read_summary().storage == record.storage
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]  # keep: 2
    assert Place(url).read("checkpoints/latest", 99) == b"step-00000012\n"
    here = sorted(p.relative_to("runs/x").as_posix() for p in folder.path.rglob("*") if p.is_file())
    assert names(url) == sorted([*(name for name in here if not name.startswith(".")), "owner.json"])
    for name in names(url):
        if name != "owner.json":
            assert Place(url).read(name, 2**20) == (folder.path / name).read_bytes(), name
    assert RunFolder.open(local_run(url)).read_summary() == folder.read_summary()


@pytest.mark.slow
def test_a_fresh_machine_goes_on_bitwise(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = train(None)
    with pytest.raises(TrainingPreemptedError) as stopped:
        train(url, callbacks=[StopAfter(5, signal.SIGTERM)])
    assert stopped.value.record.storage.uploaded  # type: ignore[attr-defined]
    another_machine(tmp_path, monkeypatch, "there")
    steps = Steps()
    record, weights = train(url, resume="auto", callbacks=[steps])
    assert torch.equal(weights, expected)
    assert [step.step for step in steps.records] == list(range(6, STEPS + 1))
    lines = Path("runs/x/steps-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert record.status == "completed"
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


@pytest.mark.slow
def test_a_torn_upload_is_not_seen_and_is_removed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = train(None)
    train(url, epochs=1)
    place = Place(url)
    place.write("checkpoints/step-00000008/rank-00000.safetensors", b"half")
    another_machine(tmp_path, monkeypatch, "there")
    _, weights = train(url, resume=url, keep=1)
    assert torch.equal(weights, expected)
    assert [name for name in names(url) if name.startswith("checkpoints/step")] == [
        "checkpoints/step-00000012/manifest.json",
        "checkpoints/step-00000012/rank-00000.safetensors",
    ]


@pytest.mark.parametrize("damage", ["manifest", "truncated", "changed", "missing"])
@pytest.mark.slow
def test_a_damaged_checkpoint_leaves_the_one_before(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/far/x"
    _, expected = train(None)
    train(url, epochs=1)
    newest = tmp_path / "far" / "x" / "checkpoints" / "step-00000006"
    file = newest / ("manifest.json" if damage == "manifest" else "rank-00000.safetensors")
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "truncated" else content[:-9] + b"123456789")
    another_machine(tmp_path, monkeypatch, "there")
    steps = Steps()
    _, weights = train(url, resume="auto", callbacks=[steps])
    assert steps.records[0].step == 5
    assert torch.equal(weights, expected)
    assert "step-00000006" in caplog.text
    # What was damaged has been written again, or pruned.
    for name in whole_checkpoints(Place(url)):
        assert list_checkpoints(tmp_path / "far" / "x" / "checkpoints")[-1].read(), name
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


def test_nothing_whole_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/far/x"
    train(url, epochs=1)
    for file in (tmp_path / "far" / "x" / "checkpoints").glob("*/rank*"):
        file.write_bytes(b"")
    another_machine(tmp_path, monkeypatch, "there")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        train(url, resume="auto")


@pytest.mark.slow
def test_the_machine_that_has_the_run_goes_on_without_copying(url: str, caplog: pytest.LogCaptureFixture) -> None:
    _, expected = train(None)
    train(url, epochs=1)
    caplog.set_level("INFO", "frameworm")
    _, weights = train(None, resume=url)
    assert torch.equal(weights, expected)
    assert "copied" not in caplog.text
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


@pytest.mark.slow
def test_a_run_that_went_on_elsewhere_comes_back(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = train(None)
    with pytest.raises(TrainingPreemptedError):
        train(url, callbacks=[StopAfter(3, signal.SIGTERM)])
    another_machine(tmp_path, monkeypatch, "there")
    with pytest.raises(TrainingPreemptedError):
        train(url, resume="auto", callbacks=[StopAfter(7, signal.SIGTERM)])
    monkeypatch.chdir(tmp_path / "here")
    steps = Steps()
    _, weights = train(url, resume="auto", callbacks=[steps])
    assert steps.records[0].step == 8
    assert torch.equal(weights, expected)
    assert len(list(Path("runs").glob("x-before-*"))) == 1  # nothing is written over


def test_the_former_owner_uploads_nothing_more(url: str) -> None:
    train(url, epochs=1)
    place, note = Place(url), Ownership.read(Path("runs/x"))
    assert note is not None
    place.write("owner.json", json.dumps({"run": note.run, "owner": "another"}).encode())
    before = names(url)
    with pytest.raises(RunFolderError, match="another process has resumed"):
        upload_run("runs/x", url)
    assert names(url) == before


def test_a_training_whose_run_went_on_elsewhere_uploads_nothing_more(url: str) -> None:
    class TakeOver(Steps):
        def on_step(self, step: Any) -> None:
            if step.step == 7:
                mark = json.loads(Place(url).read("owner.json", 999))
                Place(url).write("owner.json", json.dumps({**mark, "owner": "another"}).encode())

    record, _ = train(url, callbacks=[TakeOver()])
    assert record.status == "completed"
    assert record.storage is not None
    assert not record.storage.uploaded
    assert "another process" in (record.storage.problem or "")
    assert "step-00000012" not in whole_checkpoints(Place(url))
    assert Path("runs/x/checkpoints/step-00000012/manifest.json").exists()


@pytest.mark.parametrize("how", ["upload", "resume"])
def test_starts_without_an_answer_from_storage_do_not_lose_the_place(url: str, how: str) -> None:
    """Each start notes an owner of its own, and storage hears of none of them."""
    train(url, epochs=1)
    folder = Path("runs/x")
    for _ in range(2):
        note = go_on_in(folder)
        assert note is not None
        note.write(folder)
    if how == "upload":
        upload_run(folder, url)
    else:
        train(url, resume="auto")
        assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]
    assert not list(Path("runs").glob("x-before-*"))
    mark, kept = json.loads(Place(url).read("owner.json", 999)), Ownership.read(folder)
    assert kept is not None
    assert mark["owner"] == kept.owner


@pytest.mark.slow
def test_a_run_that_went_back_replaces_what_it_does_again(tmp_path: Path) -> None:
    folder, root = RunFolder(tmp_path / "mine"), f"file://{tmp_path}/far"
    train(folder.path, url=root, keep=6)
    for path in folder.checkpoints.glob("step-*"):
        if int(path.name[5:]) > 6:
            shutil.rmtree(path)
    record, _ = train(folder.path, url=root, resume="auto", keep=6)
    assert record.storage is not None
    assert record.storage.uploaded
    place = Place(f"{root}/mine")
    assert whole_checkpoints(place) == [f"step-{step:08d}" for step in range(2, 13, 2)]
    for name in whole_checkpoints(place):
        here = (folder.checkpoints / name / "manifest.json").read_bytes()
        assert place.read(f"checkpoints/{name}/manifest.json", 2**20) == here, name


@pytest.mark.slow
def test_a_refused_upload_leaves_the_note_of_where_a_run_is(tmp_path: Path) -> None:
    first, second = (f"file://{tmp_path}/far/{name}" for name in ("x", "y"))
    train(first, epochs=1)
    train(second, epochs=1)
    with pytest.raises(RunFolderError, match="already holds a run"):
        upload_run("runs/x", second)
    note = Ownership.read(Path("runs/x"))
    assert note is not None
    assert note.url == first


def test_a_folder_does_not_decide_where_a_run_is_uploaded_to(url: str, caplog: pytest.LogCaptureFixture) -> None:
    train(url, epochs=1)
    before = names(url)
    record, _ = train(None, resume="runs/x")
    assert record.storage is None
    assert names(url) == before
    assert "unless you resume it by that URL" in caplog.text


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(url: str, machine: Path) -> None:
    train(url, epochs=1)
    for name in names(url):
        Place(url).remove(name)
    shutil.rmtree("runs/x/checkpoints")
    record, _ = train(url, resume="auto")
    assert record.steps == STEPS
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


def test_a_url_that_holds_a_run_is_not_written_over(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(url, epochs=1)
    with pytest.raises(RunFolderError, match="already holds a run"):
        train(url)
    another_machine(tmp_path, monkeypatch, "there")
    before = names(url)
    with pytest.raises(RunFolderError, match="already holds a run"):
        train(url)
    assert not Path("runs").exists()
    assert names(url) == before


def test_auto_starts_afresh_where_there_is_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "frameworm")
    record, _ = train(url, resume="auto")
    assert record.steps == STEPS
    assert f"no run at {url} to resume: starting afresh" in caplog.text
    with pytest.raises(StorageError, match="holds no run"):
        train(None, resume=f"{url}/nothing")


@pytest.mark.slow
def test_two_urls_with_the_same_last_part_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (f"file://{tmp_path}/far/{name}/run" for name in "ab")
    assert train(first, epochs=1)[0].run_dir == "runs/run"
    other = train(second, epochs=1)[0].run_dir
    assert other is not None
    assert other.startswith("runs/run-")
    assert train(second, resume="auto", epochs=2)[0].run_dir == other


@pytest.mark.slow
def test_a_config_mirrors_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"file://{tmp_path}/far/runs"
    _, expected = train(None)
    with pytest.raises(TrainingPreemptedError):
        train("auto", url=root, name="mine", callbacks=[StopAfter(5, signal.SIGTERM)])
    (folder,) = Path("runs").iterdir()
    assert whole_checkpoints(Place(f"{root}/{folder.name}"))[-1] == "step-00000005"
    another_machine(tmp_path, monkeypatch, "there")
    record, weights = train("auto", url=root, name="other", resume="auto")
    assert record.steps == STEPS  # one of another name is not gone on with
    record, weights = train("auto", url=root, name="mine", resume="auto")
    assert record.run_dir == f"runs/{folder.name}"
    assert torch.equal(weights, expected)


def test_a_local_folder_may_be_given_beside_a_url(tmp_path: Path) -> None:
    train(tmp_path / "mine", url=f"file://{tmp_path}/far", epochs=1)
    assert whole_checkpoints(Place(f"file://{tmp_path}/far/mine")) == ["step-00000004", "step-00000006"]


def test_the_best_stay_in_storage_too(url: str) -> None:
    train(url, keep=1, keep_best=1, metric="val_loss", epochs=3)
    local = sorted(path.name for path in Path("runs/x/checkpoints").glob("step-*"))
    assert whole_checkpoints(Place(url)) == local


def test_weights_are_exported_from_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(url, keep_best=1, metric="train_loss")
    another_machine(tmp_path, monkeypatch, "there")
    assert export_weights(url, "a.safetensors").step == 12
    assert export_weights(url, "b.safetensors", which="10").step == 10
    assert export_weights(url, "c.safetensors", which="best", metric="train_loss").step == 12
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 3; there are: 10, 12"):
        export_weights(url, "d.safetensors", which="3")


def test_a_run_without_a_copy_is_uploaded_later(url: str) -> None:
    train("runs/mine")
    assert upload_run("runs/mine", url) == {"url": url, "checkpoints": ["step-00000010", "step-00000012"]}
    record = RunFolder(local_run(url)).read_summary()
    assert record.storage is not None
    assert record.storage.uploaded
    before = {name: facts.stamp for name, facts in Place(url).find("checkpoints").items()}
    upload_run("runs/mine", url)
    after = {name: facts.stamp for name, facts in Place(url).find("checkpoints").items()}
    assert after == before


def test_a_missing_package_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    steps = Steps()
    pytest.importorskip("fsspec")
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=r"frameworm\[s3\]"):
        train("s3://bucket/x", callbacks=[steps])
    assert steps.records == []
    assert not Path("runs").exists()


def test_a_storage_url_that_is_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        train("auto", url="some/folder")


def test_links_and_hidden_files_are_not_uploaded(url: str, machine: Path) -> None:
    class Plant(Steps):
        def on_step(self, step: Any) -> None:
            if step.step == 1:
                (machine / "secret").write_text("secret")
                (machine / "runs/x/link.txt").symlink_to(machine / "secret")
                (machine / "runs/x/.hidden").write_text("hidden")
                (machine / "runs/x/notes.txt").write_text("mine")

    train(url, epochs=1, callbacks=[Plant()])
    assert "notes.txt" in names(url)
    assert not {"link.txt", ".hidden", ".storage.json"} & set(names(url))
    shutil.rmtree(machine / "runs")
