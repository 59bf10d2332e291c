"""What is read from disk, with bytes that nobody meant: refused in words or read; no traceback, no hang, no write.

`CAMPAIGN=1` tries many times as often (`make campaign`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import fill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frameworm.engine.checkpoint.load import load_newest
from frameworm.errors import CheckpointError, FramewormError
from frameworm.guard.divergence import first_divergence
from frameworm.guard.run_metrics import read_run
from frameworm.parallel.shards import loaded
from frameworm.records.store import RunFolder
from frameworm.records.writer import read_steps
from frameworm.report.run.page import page_of
from frameworm.scaling.network import NetworkModel

TIMES = 40 if os.environ.get("CAMPAIGN") else 1
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
STEP = {"step": 1, "epoch": 1, "time": 1.0, "step_s": 0.1, "loss": 0.5, "lr": 0.1, "samples": 4, "count": 4.0}
NETWORK = {
    "version": 1,
    "world_size": 2,
    "backend": "gloo",
    "points": [{"collective": "all_reduce", "bytes": 1024, "mean_s": 1e-3, "min_s": 1e-3, "repetitions": 3}],
}
few = settings(
    max_examples=40 * TIMES,
    derandomize=TIMES == 1,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def changed(known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Known data with some of it replaced or taken away, or anything at all."""

    def put(pair: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
        return {key: value for key, value in {**known, **pair[0]}.items() if key not in pair[1]}

    keys = st.sampled_from(list(known))
    return JSON | st.tuples(st.dictionaries(keys, JSON, max_size=3), st.lists(keys, max_size=2)).map(put)


def lines(known: dict[str, Any]) -> st.SearchStrategy[bytes]:
    line = changed(known).map(lambda data: json.dumps(data).encode()) | st.binary(max_size=40)
    return st.lists(line, max_size=8).map(b"\n".join)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def refused_or_done(action: Callable[[], object]) -> None:
    with contextlib.suppress(FramewormError):
        action()


@pytest.mark.slow
@few
@given(steps=lines(STEP), summary=changed({"name": "x", "status": "completed", "environment": {}, "batch": {}}))
def test_a_run_folder_of_anything(tmp_path: Path, steps: bytes, summary: Any) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    outside.mkdir(exist_ok=True)
    (outside / "kept").write_text("as it was")
    run.mkdir()
    (run / "steps-rank0.jsonl").write_bytes(steps)
    (run / "summary.json").write_text(json.dumps(summary))
    before = contents(tmp_path)
    folder = RunFolder(run)
    for action in (
        lambda: read_steps(run / "steps-rank0.jsonl"),
        lambda: folder.read_summary(),
        lambda: read_run(folder),
        lambda: first_divergence(folder, folder),
        lambda: page_of(folder),
    ):
        refused_or_done(action)
    assert contents(tmp_path) == before
    refused_or_done(lambda: folder.truncate_steps(0, 3))
    assert (outside / "kept").read_text() == "as it was"


@few
@given(changed(NETWORK).map(lambda data: json.dumps(data).encode()) | st.binary(max_size=60))
def test_a_network_file_of_anything(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "network.json"
    file.write_bytes(content)
    refused_or_done(lambda: NetworkModel.load(file))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    fill(folder, (3,))
    return folder


@few
@given(data=st.data())
def test_a_checkpoint_with_bytes_changed_is_refused_or_the_same(checkpoint: Path, tmp_path: Path, data: Any) -> None:
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder, symlinks=True)
    files = sorted(path for path in folder.glob("step-*/*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["change", "cut", "insert", "replace"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "change":
        content[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[place : place + data.draw(st.integers(1, 200))]
    elif kind == "insert":
        content[place:place] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        content = bytearray(data.draw(st.binary(max_size=80)))
    file.write_bytes(content)
    before = contents(tmp_path)
    try:
        newest = load_newest(folder, lambda text: None)
    except CheckpointError:
        newest = None
    if newest is not None:  # a manifest may be written in more than one way
        assert float(loaded(newest[1].shared["model"])["large"].sum()) == 9000.0
    assert contents(tmp_path) == before
