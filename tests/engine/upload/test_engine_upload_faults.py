"""Storage that is lost, slow or refuses, beside a training that goes on; kills; several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from upload_cases import STEPS, names, train

from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.upload.beside import Uploads
from frameworm.engine.upload.once import upload_run
from frameworm.engine.upload.service import Task
from frameworm.engine.upload.uploader import Ownership, Uploader
from frameworm.errors import RunFolderError, StorageError
from frameworm.records.events import Listener
from frameworm.records.objects.place import Place
from frameworm.records.objects.runs import whole_checkpoints
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def proxy(object_storage: Any, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The network between this test and the server."""
    with object_storage.module.Proxy(object_storage.port) as found:
        for name, value in object_storage.variables(found.port).items():
            monkeypatch.setenv(name, value)
        yield found


class At(Listener):
    """Does something after a step."""

    def __init__(self, **actions: Any) -> None:
        self._actions = actions

    def on_step(self, step: StepRecord) -> None:
        self._actions.get(f"step_{step.step}", lambda: None)()


def wait_until(there: Any, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_network_costs_one_line_and_what_was_missed_is_uploaded(
    s3: str, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = train(None)

    def lost() -> bool:
        return any("training continues, and the upload is tried again" in line for line in caplog.messages)

    def back() -> bool:
        return any("is back after" in line for line in caplog.messages)

    url = f"{s3}/x"
    actions = At(
        step_3=lambda: wait_until(lambda: "checkpoints/latest" in names(url)),
        step_4=proxy.cut,
        step_8=lambda: wait_until(lost),
        step_9=proxy.mend,
        step_10=lambda: wait_until(back),
    )
    record, weights = train(url, callbacks=[actions])
    assert torch.equal(weights, expected)
    assert record.storage is not None
    assert record.storage.uploaded
    assert sum("the upload is tried again" in line for line in caplog.messages) == 1
    assert sum("is back after" in line for line in caplog.messages) == 1
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


@pytest.mark.slow
def test_a_network_that_stays_away_is_said_in_the_summary_with_what_to_do(
    s3: str, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{s3}/x"
    _, expected = train(None)
    before = time.monotonic()
    record, weights = train(url, callbacks=[At(step_1=proxy.cut)], wait_s=1.0)
    assert time.monotonic() - before < 150  # not the 300 s that are usual
    assert torch.equal(weights, expected)
    assert record.status == "completed"
    assert record.storage is not None
    assert not record.storage.uploaded
    (note,) = [note for note in record.notes if "not all of this run is at" in note]
    assert f"frameworm upload runs/x {url}" in note
    assert RunFolder("runs/x").read_summary().storage == record.storage
    proxy.mend()
    upload_run("runs/x", url)
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]
    stored = RunFolder("runs/x").read_summary()
    assert stored.storage is not None
    assert stored.storage.uploaded
    assert not [note for note in stored.notes if "not all of this run" in note]


@pytest.mark.slow
def test_a_server_that_is_away_at_the_start_stops_nothing(s3: str, proxy: Any, caplog: Any) -> None:
    url = f"{s3}/x"
    proxy.cut()
    record, _ = train(url, callbacks=[At(step_2=proxy.mend)])
    assert sum("training starts all the same" in line for line in caplog.messages) == 1
    assert record.storage is not None
    assert record.storage.uploaded
    proxy.cut()
    with pytest.raises(StorageError, match="cannot be reached"):
        train(f"{s3}/y", resume="auto")  # there might be a run to go on with
    assert not Path("runs/y").exists()
    # What is here of a run is enough to go on with it.
    record, _ = train(url, resume="auto", epochs=3, callbacks=[At(step_14=proxy.mend)])
    assert record.steps == STEPS + 6
    assert record.storage is not None
    assert record.storage.uploaded


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_an_error_before_the_first_step(s3: str) -> None:
    steps: list[int] = []
    with pytest.raises(StorageError, match="bucket does not exist"):
        train("s3://no-such-bucket/x", callbacks=[At(step_1=lambda: steps.append(1))])
    assert not steps
    assert not Path("runs").exists()


@pytest.mark.slow
def test_refusals_during_training_are_survived(s3: str, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder in storage that cannot be written to for a while."""
    url, far = f"file://{machine}/far/x", machine / "far" / "x" / "checkpoints"

    def block() -> None:
        wait_until(lambda: (far / "latest").exists())
        far.rename(far.with_name("away"))
        far.write_text("in the way")

    def unblock() -> None:
        wait_until(lambda: any("the upload is tried again" in line for line in caplog.messages))
        far.unlink()
        far.with_name("away").rename(far)

    record, _ = train(url, callbacks=[At(step_3=block, step_7=unblock)])
    assert record.storage is not None
    assert record.storage.uploaded
    assert whole_checkpoints(Place(url)) == ["step-00000010", "step-00000012"]


def filled(folder: Path, *steps: int) -> RunFolder:
    """A run folder with checkpoints of a training."""
    train(folder, epochs=2, keep=6)
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name[5:]) not in steps:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    return RunFolder(folder)


class Recorded(Place):
    """A place that notes in which order objects come and go, and may fail."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[tuple[str, str]] = []
        self.fail_at: int | None = None

    def _note(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        if self.fail_at is not None and len(self.calls) >= self.fail_at:
            raise StorageError("gone", unreachable=True)

    def write(self, name: str, content: bytes) -> None:
        self._note("write", name)
        super().write(name, content)

    def put(self, source: Path, name: str, progress: Any = lambda: None) -> None:
        self._note("write", name)
        super().put(source, name, progress)

    def remove(self, name: str) -> None:
        self._note("remove", name)
        super().remove(name)


def owned(url: str) -> Ownership:
    return Ownership(url, run="r", owner="o")


@pytest.mark.slow
def test_manifests_come_last_and_go_first(machine: Path) -> None:
    folder = filled(machine / "run", 4, 8, 12)
    url = f"file://{machine}/far/x"
    place = Recorded(url)
    Uploader(folder.path, place, owned(url), Retention(keep=3)).work(records=True, without=())
    written = [name for what, name in place.calls if what == "write" and "/" in name]
    assert written == [
        "checkpoints/step-00000012/rank-00000.safetensors",
        "checkpoints/step-00000012/manifest.json",
        "checkpoints/latest",  # the newest first, and older ones do not move it back
        "checkpoints/step-00000008/rank-00000.safetensors",
        "checkpoints/step-00000008/manifest.json",
        "checkpoints/step-00000004/rank-00000.safetensors",
        "checkpoints/step-00000004/manifest.json",
    ]
    order = [name for _, name in place.calls]
    # The records of the steps up to a checkpoint are there before it counts.
    assert order.index("steps-rank0.jsonl") < order.index("checkpoints/step-00000012/manifest.json")
    assert order[-1].startswith("summary")
    place.calls.clear()
    Uploader(filled(machine / "other", 10, 12).path, place, owned(url), Retention(keep=1)).work(records=False)
    removed = [name for what, name in place.calls if what == "remove"]
    assert removed[:3] == [
        "checkpoints/step-00000012/manifest.json",  # another checkpoint takes its place
        "checkpoints/step-00000004/manifest.json",
        "checkpoints/step-00000004/rank-00000.safetensors",
    ]


@pytest.mark.slow
def test_an_upload_cut_at_any_call_leaves_only_whole_checkpoints(machine: Path) -> None:
    folder = filled(machine / "run", 8, 12)
    number = 0
    while True:
        number += 1
        url = f"file://{machine}/far/{number}"
        place = Recorded(url)
        place.fail_at = number
        try:
            Uploader(folder.path, place, owned(url), Retention(keep=1)).work(records=True, without=())
        except StorageError:
            pass
        else:
            break
        whole = whole_checkpoints(Place(url))
        assert set(whole) <= {"step-00000012"}
        for name in whole:
            assert f"checkpoints/{name}/rank-00000.safetensors" in names(url)
        if "checkpoints/latest" in names(url):
            assert whole == ["step-00000012"]
        # Whoever goes on has it all in the end.
        Uploader(folder.path, Place(url), owned(url), Retention(keep=1)).work(records=True, without=())
        assert whole_checkpoints(Place(url)) == ["step-00000012"]
    assert number > 8


def test_a_former_owner_writes_nothing_over(machine: Path) -> None:
    """It still has a checkpoint to upload that its successor has uploaded too, and records."""
    folder = filled(machine / "run", 8, 12)
    newest, away = folder.checkpoints / "step-00000012", machine / "away"
    newest.rename(away)
    url = f"file://{machine}/far/x"
    place = Place(url)
    former = Uploader(folder.path, place, owned(url), Retention())
    former.work(records=True)
    place.write("owner.json", json.dumps({"run": "r", "owner": "successor"}).encode())
    of_successor = ("checkpoints/step-00000012/rank-00000.safetensors", "checkpoints/step-00000012/manifest.json")
    for name in (*of_successor, "steps-rank0.jsonl"):
        place.write(name, b"of the successor")
    folder.steps(0).write_text("of the former\n")
    for _ in range(2):  # without a new checkpoint, and with one
        with pytest.raises(RunFolderError, match="another process has resumed"):
            former.work(records=True, without=())
        for name in (*of_successor, "steps-rank0.jsonl"):
            assert place.read(name, 2**20) == b"of the successor", name
        if away.exists():
            away.rename(newest)


def test_what_is_replaced_does_not_count_meanwhile(machine: Path) -> None:
    folder = filled(machine / "run", 12)
    url, name = f"file://{machine}/far/x", "checkpoints/step-00000012"
    place = Recorded(url)
    place.write("owner.json", json.dumps({"run": "r", "owner": "o"}).encode())
    place.write(f"{name}/manifest.json", b"of another checkpoint of this step")
    place.calls.clear()
    Uploader(folder.path, place, owned(url), Retention()).work(records=False)
    assert [call for call in place.calls if call[1].startswith(name)] == [
        ("remove", f"{name}/manifest.json"),
        ("write", f"{name}/rank-00000.safetensors"),
        ("write", f"{name}/manifest.json"),
    ]


def test_a_folder_is_not_uploaded_into_itself(machine: Path) -> None:
    folder = filled(machine / "run", 12)
    url = f"file://{folder.path}"
    before = {path.name: path.stat().st_mtime_ns for path in folder.path.iterdir() if path.is_file()}
    with pytest.raises(RunFolderError, match="is the run folder itself"):
        upload_run(folder.path, url)
    assert {path.name: path.stat().st_mtime_ns for path in folder.path.iterdir() if path.is_file()} == before


def test_pruning_here_does_not_take_files_from_under_an_upload(machine: Path) -> None:
    folder = filled(machine / "run", 12)
    url = f"file://{machine}/far/x"

    class Pruned(Recorded):
        def put(self, source: Path, name: str, progress: Any = lambda: None) -> None:
            for path in (folder.checkpoints / "step-00000012").glob("*"):
                path.unlink()
            super().put(source, name, progress)

    Uploader(folder.path, Pruned(url), owned(url), Retention(keep=3)).work(records=False)
    assert whole_checkpoints(Place(url)) == ["step-00000012"]
    assert not (folder.path / ".uploading").exists()


def test_the_process_that_uploads_may_be_killed(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = filled(machine / "run", 12)
    url = f"file://{machine}/far/x"
    uploads = Uploads(Task(str(folder.path), owned(url), Retention(), 30.0))
    assert uploads._process is not None
    uploads._process.kill()
    assert not uploads.finish(30, (), lambda: False)
    assert "has ended" in (uploads.problem or "")
    uploads.close()
    assert sum("nothing more is uploaded" in line for line in caplog.messages) == 1


def test_waiting_ends_when_somebody_is_tired_of_it(machine: Path) -> None:
    folder = filled(machine / "run", 12)
    url = f"file://{machine}/far/x"
    (machine / "far").write_text("in the way")
    uploads = Uploads(Task(str(folder.path), owned(url), Retention(), 30.0), own_process=False)
    tired = threading.Event()
    threading.Timer(0.5, tired.set).start()
    before = time.monotonic()
    assert not uploads.finish(60, (), tired.is_set)
    assert time.monotonic() - before < 20
    uploads.close()


def test_silence_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that hangs gives no error for many minutes."""
    monkeypatch.setattr("frameworm.engine.upload.service._SILENT_S", 0.3)
    folder = filled(machine / "run", 12)
    url = f"file://{machine}/far/x"
    answer = threading.Event()
    real = Place.put

    def hanging(self: Place, *given: Any) -> None:
        assert answer.wait(60)
        real(self, *given)

    monkeypatch.setattr(Place, "put", hanging)
    uploads = Uploads(Task(str(folder.path), owned(url), Retention(), 30.0), own_process=False)
    wait_until(lambda: uploads.problem is not None)
    assert "has not answered" in (uploads.problem or "")
    answer.set()
    assert uploads.finish(60, (), lambda: False)
    assert uploads.problem is None
    uploads.close()
    assert [line for line in caplog.messages if "is back after" in line]


def frameworm(*arguments: str, where: Path, code: int = 0, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "frameworm", *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(where.parent / "tmp"), **more},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


QUICK = ("--set", "training.epochs=1", "--set", "checkpoint.every_steps=20", "--set", "data.limit=1280")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.long
def test_two_ranks_upload_one_run_and_a_single_one_goes_on(strategy: str, s3: str, machine: Path) -> None:
    url, config = f"{s3}/x", str(ROOT / "configs" / "quickstart.yaml")
    pair = ("--distributed", "--nproc-per-node", "2", "--set", f"parallel.strategy={strategy}")
    said = frameworm("train", "--config", config, "--out", url, *pair, *QUICK, where=machine / "here")
    assert f"uploaded    {url}" in said
    newest = whole_checkpoints(Place(url))[-1]
    assert {f"checkpoints/{newest}/rank-0000{rank}.safetensors" for rank in (0, 1)} <= set(names(url))
    assert "steps-rank1.jsonl" in names(url)
    (machine / "there").mkdir()
    more = ("--set", "training.epochs=2", "--set", "data.limit=1280")
    said = frameworm("train", "--config", config, "--out", url, "--resume", "auto", *more, where=machine / "there")
    assert "resumed runs/x after step 20" in said
    assert "steps 40" in said.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.slow
@pytest.mark.long
def test_the_verbs_read_a_url(s3: str, machine: Path) -> None:
    url, config, here = f"{s3}/x", str(ROOT / "configs" / "quickstart.yaml"), machine / "here"
    frameworm("train", "--config", config, "--out", url, *QUICK, where=here)
    there = machine / "there"
    there.mkdir()
    (listed,) = json.loads(frameworm("runs", s3, "--json", where=there))
    assert (listed["run"], listed["status"]) == (url, "completed")
    assert url in frameworm("diagnose", url, where=there)
    assert f"{url}, step 20" in frameworm("evaluate", url, where=there)
    frameworm("export", url, "--out", "m.safetensors", where=there)
    assert (there / "m.safetensors").exists()
    assert "settings" in frameworm("compare", url, str(here / "runs" / "x"), where=there)
    frameworm("report", "--root", s3, "--out", "plots", where=there, code=3)  # one world size alone
    assert (there / "plots" / "report.html").exists()
    guarded = frameworm("guard", url, "--baseline", str(here / "runs" / "x"), where=there, code=3)
    assert "too short" in guarded
    assert "cannot be read" not in frameworm("predict", url, "--bandwidth-gbps", "10", "--latency-us", "5", where=there)
    assert "holds no run" in frameworm("diagnose", f"{s3}/nothing", where=there, code=2)


@pytest.mark.slow
def test_no_secret_is_written_down(s3: str, machine: Path) -> None:
    here = machine / "here"
    config = str(ROOT / "configs" / "quickstart.yaml")
    frameworm(
        "train", "--config", config, "--out", f"{s3}/x", *QUICK, where=here, AWS_SECRET_ACCESS_KEY="hunter2hunter2"
    )
    for path in here.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path
