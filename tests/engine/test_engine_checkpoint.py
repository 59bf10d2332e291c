"""Checkpoints are whole or not there."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.engine.checkpoint import CheckpointStore, check_same_model, list_checkpoints, load_newest, snapshot
from frameworm.errors import CheckpointError


def _store(folder: Path, keep: int = 3, asynchronous: bool = False) -> CheckpointStore:
    return CheckpointStore(folder, keep=keep, asynchronous=asynchronous)


def _fill(folder: Path, steps: tuple[int, ...]) -> None:
    store = _store(folder, keep=10)
    for step in steps:
        store.save(step, {"value": torch.full((1000,), float(step))})


def _newest(folder: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    found = load_newest(folder, said.append)
    assert found is not None
    assert torch.equal(found[1]["value"], torch.full((1000,), float(found[0].step)))
    return found[0].step, said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_prunes_and_points_to_the_newest(tmp_path: Path, asynchronous: bool) -> None:
    store = _store(tmp_path, keep=2, asynchronous=asynchronous)
    for step in (1, 2, 3, 4):
        store.save(step, {"value": torch.full((1000,), float(step))})
    store.wait()
    assert [item.step for item in list_checkpoints(tmp_path)] == [3, 4]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "latest",
        "step-00000003.json",
        "step-00000003.pt",
        "step-00000004.json",
        "step-00000004.pt",
    ]
    assert _newest(tmp_path) == (4, [])
    assert store.count == 4


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "bit flip", "missing"])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, damage: Any) -> None:
    _fill(tmp_path, (1, 2, 3))
    damage(tmp_path / "step-00000003.pt")
    step, said = _newest(tmp_path)
    assert step == 2
    assert len(said) == 1
    assert "step-00000003.pt" in said[0]


def test_a_torn_manifest_does_not_count(tmp_path: Path) -> None:
    _fill(tmp_path, (1, 2))
    (tmp_path / "step-00000002.json").write_text('{"step": 2, "by')
    assert _newest(tmp_path) == (1, [])


def test_all_damaged_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    assert load_newest(tmp_path, lambda text: None) is None
    _fill(tmp_path, (1,))
    _flip(tmp_path / "step-00000001.pt")
    with pytest.raises(CheckpointError, match="start afresh"):
        load_newest(tmp_path, lambda text: None)


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_a_pickle_with_a_payload_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"format": 1, "value": Payload()}, buffer)
    content = buffer.getvalue()
    (tmp_path / "step-00000001.pt").write_bytes(content)
    manifest = {"step": 1, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "step-00000001.json").write_text(json.dumps(manifest))
    said: list[str] = []
    with pytest.raises(CheckpointError):
        load_newest(tmp_path, said.append)
    assert "read safely" in said[0]
    assert not (tmp_path / "pwned").exists()


def test_a_disk_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = _store(blocked / "checkpoints")
    store.save(1, {"value": torch.zeros(1)})
    assert store.problem is not None
    assert "step 1" in store.problem
    assert store.count == 0


def test_a_snapshot_shares_nothing_and_keeps_ties() -> None:
    weight = torch.ones(3)
    copied = snapshot({"a": weight, "b": [weight, 1], "none": None, "empty": torch.empty(0)})
    weight.fill_(7)
    assert torch.equal(copied["a"], torch.ones(3))
    assert copied["a"] is copied["b"][0]


def test_another_model_is_refused_by_its_first_difference() -> None:
    model = nn.Linear(3, 2)
    saved = dict(model.state_dict())
    check_same_model(saved, model, "x")
    with pytest.raises(CheckpointError, match=r"weight has shape \(2, 4\) there and \(2, 3\) here"):
        check_same_model({**saved, "weight": torch.zeros(2, 4)}, model, "x")
    with pytest.raises(CheckpointError, match="no bias"):
        check_same_model({"weight": saved["weight"]}, model, "x")
    with pytest.raises(CheckpointError, match="more is unknown"):
        check_same_model({**saved, "more": torch.zeros(1)}, model, "x")
