"""Storage that refuses, is slow, hangs or lies, and a writing process that dies: the last good checkpoint stays."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import make_store, share, values

from frameworm.engine.checkpoint import commit as committing
from frameworm.engine.checkpoint import file_writer as shard_writing
from frameworm.engine.checkpoint import manifest as manifests
from frameworm.engine.checkpoint import rank_writer as share_writing
from frameworm.engine.checkpoint import store as checkpoint_store
from frameworm.engine.checkpoint.commit import Retention, prune
from frameworm.engine.checkpoint.load import list_checkpoints, load_newest
from frameworm.engine.checkpoint.store import CheckpointStore, file_system_of
from frameworm.launch.reports import RankReports
from frameworm.parallel.shards import loaded


def _newest(folder: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    found = load_newest(folder, said.append)
    assert found is not None
    for name, expected in values(found[0].step).items():
        assert torch.equal(found[1].shared["model"][name].read(), expected)
    return found[0].step, said


def _raise(error: int) -> Callable[..., Any]:
    def fail(*args: Any, **more: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def _short(descriptor: int, content: Any) -> int:
    return REAL_WRITE(descriptor, bytes(content)[:7])


def _nothing(descriptor: int, content: Any) -> int:
    return 0


def _late(error: int) -> Callable[[int, Any], int]:
    """Fails after the first bytes have gone in."""
    calls = [0]

    def write(descriptor: int, content: Any) -> int:
        calls[0] += 1
        return REAL_WRITE(descriptor, content) if calls[0] < 3 else _raise(error)()

    return write


def _flip(descriptor: int, content: Any) -> int:
    """A disk that stores something else than it was given."""
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 4
    return REAL_WRITE(descriptor, changed)


REAL_WRITE = os.write
# How the disk fails, what is patched in the modules that write, and what is said of it (None: seen when it is read).
FAULTS: dict[str, tuple[str, str, Any, str | None]] = {
    "disk full": ("os", "write", _late(errno.ENOSPC), "No space left on device"),
    "input/output error": ("os", "write", _late(errno.EIO), "Input/output error"),
    "error on sync": ("os", "fsync", _raise(errno.EIO), "Input/output error"),
    "read-only": ("os", "open", _raise(errno.EROFS), "Read-only file system"),
    "takes nothing": ("os", "write", _nothing, "took nothing"),
    "rename fails": ("Path", "rename", _raise(errno.ESTALE), os.strerror(errno.ESTALE)),
    "bit flip": ("os", "write", _flip, None),
    "writes a little at a time": ("os", "write", _short, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_while_writing_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    where, name, broken, said = FAULTS[fault]
    store = make_store(tmp_path)
    store.save(1, share(1))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "frameworm"):
        if where == "Path":
            patch.setattr(Path, name, broken)
        else:
            patch.setattr(shard_writing.os, name, broken)
        store.save(2, share(2))
    if said == "":
        assert (store.problem, store.count, _newest(tmp_path)) == (None, 2, (2, []))
    elif said is None:
        step, passed_over = _newest(tmp_path)
        assert step == 1
        assert "is corrupt" in passed_over[0]
    else:
        assert said in str(store.problem)
        assert said in caplog.text
        assert store.all_notes() == [store.problem]
        left = {".step-00000002.tmp"} if fault == "read-only" else set()  # where nothing can be removed either
        assert {path.name for path in tmp_path.iterdir()} - left == {"latest", "step-00000001"}
        assert _newest(tmp_path) == (1, [])
    store.save(3, share(3))
    store.close()
    assert _newest(tmp_path)[0] == 3


@pytest.mark.parametrize("fault", ["torn", "full"])
def test_a_manifest_that_is_not_written_whole_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store = make_store(tmp_path)
    store.save(1, share(1))
    dump = manifests.Manifest.dump
    if fault == "torn":  # a file system that lost its end
        monkeypatch.setattr(manifests.Manifest, "dump", lambda self: dump(self)[:200])
    else:
        monkeypatch.setattr(committing, "replacing", _raise(errno.ENOSPC))
    store.save(2, share(2))
    monkeypatch.undo()
    store.close()
    step, said = _newest(tmp_path)
    assert step == 1
    assert ("only half of one" in said[0]) if fault == "torn" else (said == [] and "No space" in str(store.problem))


def _writer_of(store: CheckpointStore) -> int:
    process = store._writer.process_id
    assert process is not None
    return process


def _ended(process: int) -> bool:
    """Whether a process that is nobody's child here any more is gone."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def _ignores(process: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(line for line in lines if line.startswith("SigIgn"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_training_survives_the_death_of_the_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path, asynchronous=True)
    store.save(1, share(1))
    store.wait()
    os.kill(_writer_of(store), signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "frameworm"):
        store.save(2, share(2))
        store.wait()
        assert _newest(tmp_path) == (2, [])
        store.save(3, share(3))  # nobody is left to write beside: it is there when save returns
    assert _newest(tmp_path) == (3, [])
    assert caplog.text.count("signal 9") == 1
    assert "training writes them itself" in store.all_notes()[0]
    assert (store.count, store.problem) == (3, None)
    store.close()


def test_a_writer_that_cannot_start_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    store = make_store(tmp_path / "run", asynchronous=True)
    store.save(1, share(1))
    store.close()
    assert _newest(tmp_path / "run") == (1, [])
    assert "cannot be started" in store.all_notes()[0]


def test_the_writer_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where another child of the parent, such as a loader's worker, holds the pipe open."""
    code = (
        "import os, sys, time\n"
        "from frameworm.engine.checkpoint.writer_client import ProcessWriter, SharedMemory\n"
        "memory = SharedMemory(); memory.grow(1); writer = ProcessWriter(memory); writer.start()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(300); os._exit(0)\n"
        "print(writer.process_id, child, flush=True); time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    writer, other = (int(word) for word in parent.stdout.readline().split())
    try:
        deadline = time.monotonic() + 60
        while not _ignores(writer, signal.SIGTERM):
            assert time.monotonic() < deadline, "it never came to ignore signals"
            time.sleep(0.02)
        os.kill(writer, signal.SIGTERM)  # not meant for it
        time.sleep(0.3)
        assert not _ended(writer)
        parent.kill()
        parent.wait(60)
        deadline = time.monotonic() + 60
        while not _ended(writer) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _ended(writer)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        os.kill(other, signal.SIGKILL)


def test_the_writer_ends_when_told_whoever_holds_its_pipe() -> None:
    code = (
        "import os, signal, time\n"
        "import frameworm.engine.checkpoint.writer_client\n"
        "from frameworm.engine.checkpoint.writer_client import ProcessWriter, SharedMemory\n"
        "frameworm.engine.checkpoint.writer_client._END_S = 40  # told while it still starts, it may take over 5 s\n"
        "memory = SharedMemory(); memory.grow(1); writer = ProcessWriter(memory); writer.start()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(120); os._exit(0)\n"
        "process = writer._process; writer.close(); os.kill(child, signal.SIGKILL)\n"
        "print(process.returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.strip() == "0", "it ended by itself and had not to be killed"


def _slow_store(folder: Path, released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store whose writer waits until it is let go."""
    store = make_store(folder, asynchronous=True)
    perform = store._writer.perform

    def slow(order: dict[str, Any], *more: Any) -> dict[str, Any]:
        if "write" in order:
            assert released.wait(60)
        return perform(order, *more)

    monkeypatch.setattr(store._writer, "perform", slow)
    return store


def _on_waiting(store: CheckpointStore, call: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `call` told how long training will wait, whenever it begins to wait for the memory of the copies."""
    acquire = store._staging_free.acquire

    def watched(blocking: bool = True, timeout: float | None = None) -> bool:
        if blocking:
            assert timeout is not None
            call(timeout)
        return acquire(blocking, timeout)

    monkeypatch.setattr(store._staging_free, "acquire", watched)


def test_slow_storage_holds_training_back_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_store, "_WORTH_SAYING_S", 0.2)
    released = threading.Event()
    store = _slow_store(tmp_path, released, monkeypatch)
    _on_waiting(store, lambda _: threading.Timer(0.5, released.set).start(), monkeypatch)
    with caplog.at_level(logging.WARNING, "frameworm"):
        store.save(1, share(1))
        first_s = store.stall_s
        assert first_s < 30  # had it waited for storage, it would have for 60
        store.save(2, share(2))
        assert store.stall_s > first_s + 0.3  # waiting is lost time, and is counted
        released.clear()
        threading.Timer(0.2, released.set).start()
        store.save(3, share(3))
        store.close()
    assert _newest(tmp_path) == (3, [])
    assert store.count == 3
    assert caplog.text.count("training waits for it") == 1
    assert len(store.all_notes()) == 1


def test_storage_that_hangs_costs_checkpoints_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "PATIENCE_S", 0.2)
    released = threading.Event()
    store = _slow_store(tmp_path, released, monkeypatch)
    settled: list[int] = []
    waits_s: list[float] = []
    _on_waiting(store, waits_s.append, monkeypatch)
    for step in (1, 2, 3, 4):
        store.save(step, share(step), lambda step=step: settled.append(step))  # type: ignore[misc]
    assert settled == [1, 2, 3, 4]  # what ranks do together they do
    assert store.failed == 3
    assert waits_s == [0.2], "training waits for it once"
    assert "has not reached storage" in str(store.problem)
    released.set()
    store.wait()
    store.save(5, share(5))
    store.close()
    assert [item.step for item in list_checkpoints(tmp_path)] == [1, 5]
    assert "(3 could not be written)" in store.all_notes()[-1]


def test_an_end_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    store = _slow_store(tmp_path, released, monkeypatch)
    store.save(1, share(1))
    begin = time.monotonic()
    store.close(0.3)
    assert time.monotonic() - begin < 40  # storage takes 60
    assert "could not be written: storage has not accepted it" in str(store.problem)
    released.set()


def test_after_a_failure_ranks_end_before_their_launcher_ends_them() -> None:
    from torch.distributed import HashStore

    from frameworm.launch.torchrun import launch_workers

    grace_s = inspect.signature(launch_workers).parameters["failure_grace_s"].default
    for world_size, most_s in ((1, 30.0), (2, grace_s - 2.0)):
        store = make_store(Path("unused"), reports=RankReports(HashStore(), 0, world_size, 20))
        waits_s: list[float] = []
        store.close = waits_s.append  # type: ignore[method-assign, assignment]
        store.abandon()
        assert 10 < waits_s[0] <= most_s


def test_a_rank_that_skips_makes_all_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "PATIENCE_S", 0.5)
    from torch.distributed import HashStore

    hash_store = HashStore()
    released = threading.Event()
    ranks = [make_store(tmp_path, asynchronous=True, reports=RankReports(hash_store, rank, 2, 60)) for rank in (0, 1)]
    perform = ranks[1]._writer.perform

    def slow(order: dict[str, Any], *more: Any) -> dict[str, Any]:
        assert released.wait(60)
        return perform(order, *more)

    monkeypatch.setattr(ranks[1]._writer, "perform", slow)
    for step in (1, 2):
        for rank, store in enumerate(ranks):
            store.save(step, share(step, rank, 2))
    released.set()
    for store in ranks:
        store.close()
    assert [item.step for item in list_checkpoints(tmp_path)] == [1]
    assert [store.count for store in ranks] == [1, 1]
    assert all("step 2 could not be written: an earlier one" in str(store.problem) for store in ranks)


def test_fast_storage_first(tmp_path: Path) -> None:
    fast, run = tmp_path / "fast", tmp_path / "run"
    store = make_store(run, asynchronous=True, fast=fast)
    for step in (1, 2):
        store.save(step, share(step))
    store.close()
    assert _newest(run) == (2, [])
    assert list(fast.iterdir()) == []  # moved, not copied
    assert store.all_notes() == []


def test_fast_storage_that_refuses_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("in the way")
    store = make_store(tmp_path / "run", fast=tmp_path / "fast")
    store.save(1, share(1))
    store.close()
    assert _newest(tmp_path / "run") == (1, [])
    assert "refuses" in store.all_notes()[0]


def test_what_changed_on_the_fast_storage_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shard_writing.copy_file

    def damaged(source: Path, target: Path, expected: Any) -> None:
        content = bytearray(source.read_bytes())
        content[-1] ^= 1
        source.write_bytes(content)
        copy(source, target, expected)

    monkeypatch.setattr(share_writing, "copy_file", damaged)
    store = make_store(tmp_path / "run", fast=tmp_path / "fast")
    store.save(1, share(1))
    store.close()
    assert "has changed since it was written" in str(store.problem)
    assert list_checkpoints(tmp_path / "run") == []


def test_places_that_do_not_last_are_known() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nnas:/x /data\\040one nfs4 rw 0 0\n"
    assert file_system_of(Path("/dev/shm/run/checkpoints"), mounts) == "tmpfs"
    assert file_system_of(Path("/home/run"), mounts) == "ext4"
    assert file_system_of(Path("/data one/run"), mounts) == "nfs4"


def _epoch_end(step: int, figure: float | None) -> Any:
    epochs = [{"epoch": 1, "val_loss": figure, "val_accuracy": figure, "train_loss": figure}]
    return share(step, progress={"step": step, "step_in_epoch": 0, "epochs": epochs})


@pytest.mark.parametrize(("metric", "best"), [("val_loss", [2, 3]), ("val_accuracy", [1, 4])])
def test_the_best_and_the_newest_stay(tmp_path: Path, metric: str, best: list[int]) -> None:
    retention = Retention(1, 2, metric, highest=metric == "val_accuracy")
    store = CheckpointStore(tmp_path, retention=retention, asynchronous=False)
    for step, figure in enumerate([0.9, 0.2, 0.3, 0.8, None, float("nan")], 1):
        store.save(step, _epoch_end(step, figure))
    store.save(7, share(7, progress={"step": 7, "step_in_epoch": 2, "epochs": []}))
    store.close()
    assert [item.step for item in list_checkpoints(tmp_path)] == [*best, 7]


def test_pruning_finishes_what_a_killed_one_began(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    store.save(1, share(1))
    (tmp_path / "step-00000001" / "manifest.json").unlink()  # where the kill came
    (tmp_path / "step-notes").mkdir()  # not ours
    store.save(2, share(2))
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-notes"]


def test_the_newest_is_never_pruned(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    store.save(9, share(9))  # of a run that went on from step 3, with another one behind it
    store.save(4, share(4))
    store.close()
    names = [item.path.name for item in list_checkpoints(tmp_path)]
    assert "step-00000004" in names
    prune(tmp_path, tmp_path / "step-00000004", Retention(1))
    assert (tmp_path / "step-00000004").exists()


@pytest.mark.parametrize("compression", ["zstd", "auto"])
def test_compressed_files_are_read_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    zstandard = pytest.importorskip("zstandard", reason="needs zstandard, which is an extra")
    monkeypatch.setattr(shard_writing, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(manifests, "CHUNK_BYTES", 2**16)
    from frameworm.engine.checkpoint import compressed_files

    monkeypatch.setattr(compressed_files, "CHUNK_BYTES", 2**16)
    # So that to compress pays, whatever this machine's disk: an answer in place of a measurement.
    monkeypatch.setattr(share_writing, "pays", lambda *args: (True, 0.1, 1e9))
    state = {"long": torch.arange(400_000).reshape(1000, 400), "one": torch.tensor(2.5), "none": torch.empty(0, 3)}
    store = make_store(tmp_path, compression=compression)
    for step in (1, 2):  # the first one shows how fast the disk is
        store.save(step, share(step, schedule=state))
    store.close()
    assert store.problem is None
    (path,) = (tmp_path / "step-00000002").glob("rank-*")
    assert path.name == "rank-00000.safetensors.zst"
    stored = list_checkpoints(tmp_path)[-1]
    found = stored.read().shared["schedule"]
    assert torch.equal(found["long"].read(513, 100), state["long"][513:613])
    assert all(torch.equal(loaded(found)[name], item) for name, item in state.items())
    with path.open("rb") as file:
        plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    from safetensors.torch import load

    assert torch.equal(load(plain)["schedule/long"], state["long"])  # `zstd -d` gives a plain safetensors file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert _newest(tmp_path)[0] == 1
    if compression == "auto":
        assert "compressed (zstd) to 10%" in store.all_notes()[0]


def test_to_compress_pays_on_a_slow_disk_only() -> None:
    parts = [memoryview(bytes(2**20)), memoryview(os.urandom(2**20))]

    def compress(content: bytes) -> bytes:
        time.sleep(0.02)
        return content[: len(content) // 2]

    assert shard_writing.pays(parts, compress, 1e4)[0]  # whatever a busy machine adds to those 20 ms
    assert not shard_writing.pays(parts, compress, 1e10)[0]
    assert not shard_writing.pays(parts, lambda content: content, 1e6)[0]


def test_without_zstd_the_install_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    store = make_store(tmp_path, compression="zstd")
    store.save(1, share(1))
    assert "pip install 'frameworm[zstd]'" in str(store.problem)
    automatic = make_store(tmp_path, compression="auto")
    automatic.save(2, share(2))
    for each in (store, automatic):
        each.close()
    assert automatic.problem is None
    assert _newest(tmp_path) == (2, [])
