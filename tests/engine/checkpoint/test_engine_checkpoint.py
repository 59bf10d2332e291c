"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import fill, make_store, save_on_two, share, values
from torch import nn

from frameworm.engine.checkpoint import rank_writer as share_writing
from frameworm.engine.checkpoint import store as writing
from frameworm.engine.checkpoint.file_writer import write_file
from frameworm.engine.checkpoint.load import check_same_model, list_checkpoints, load_newest
from frameworm.engine.checkpoint.snapshot import spread
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import loaded


def _newest(folder: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    found = load_newest(folder, said.append)
    assert found is not None
    for name, expected in values(found[0].step).items():
        assert torch.equal(found[1].shared["model"][name].read(), expected)
    return found[0].step, said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_prunes_and_points_to_the_newest(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / ".step-00000001.tmp").mkdir()  # of a run that was killed
    store = make_store(tmp_path, keep=2, asynchronous=asynchronous)
    for step in (1, 2, 3, 4):
        store.save(step, share(step))
    store.close()
    assert [item.step for item in list_checkpoints(tmp_path)] == [3, 4]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"
    assert sorted(str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")) == [
        "latest",
        "step-00000003",
        "step-00000003/manifest.json",
        "step-00000003/rank-00000.safetensors",
        "step-00000004",
        "step-00000004/manifest.json",
        "step-00000004/rank-00000.safetensors",
    ]
    assert _newest(tmp_path) == (4, [])
    assert store.count == 4


def test_a_step_that_is_saved_again_takes_the_old_ones_place(tmp_path: Path) -> None:
    fill(tmp_path, (1, 2))
    fill(tmp_path, (2,))
    assert [item.path.name for item in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002.1"]
    assert (tmp_path / "latest").read_text() == "step-00000002.1\n"
    assert _newest(tmp_path) == (2, [])


def test_two_ranks_write_a_share_each_and_any_rank_reads_all(tmp_path: Path) -> None:
    ranks = save_on_two(tmp_path, 7, [share(7, rank, 2) for rank in range(2)])
    assert [(item.count, item.problem) for item in ranks] == [(1, None)] * 2
    assert _newest(tmp_path) == (7, [])
    (stored,) = list_checkpoints(tmp_path)
    sizes = [file.stat().st_size for file in sorted(stored.path.glob("*.safetensors"))]
    assert len(sizes) == 2
    assert min(sizes) < 500 < 12_000 < max(sizes)  # a tensor is written once
    assert [item["own"].tolist() for item in loaded(stored.read().ranks)] == [[0, 7], [1, 7]]


def test_shares_are_of_like_size() -> None:
    sizes = {f"{number}": 10 + number for number in range(40)}
    writers = spread(sizes, 4)
    loads = [sum(size for name, size in sizes.items() if writers[name] == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 20
    assert spread(dict(reversed(sizes.items())), 4) == writers


def test_a_rank_whose_disk_is_full_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_on_two(tmp_path, 1, [share(1, rank, 2) for rank in range(2)])

    def full(path: Path, parts: Any, **how: Any) -> Any:
        if path.name == "rank-00001.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_file(path, parts, **how)

    monkeypatch.setattr(share_writing, "write_file", full)
    with caplog.at_level(logging.WARNING, "frameworm"):
        ranks = save_on_two(tmp_path, 2, [share(2, rank, 2) for rank in range(2)])
    expected = "checkpoint of step 2 could not be written: rank 1: No space left on device"
    assert [(item.count, item.problem) for item in ranks] == [(0, expected)] * 2
    assert "stays the latest" in caplog.text
    assert sorted(item.name for item in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert _newest(tmp_path) == (1, [])


def test_ranks_that_hold_different_states_write_none(tmp_path: Path) -> None:
    shares = [share(1, rank, 2) for rank in range(2)]

    def forgetful(staging: Any, settle: Any) -> Any:
        snapshot = shares[1](staging, settle)
        del snapshot.pieces["model/small"]
        return snapshot

    ranks = save_on_two(tmp_path, 1, [shares[0], forgetful])
    assert all("no rank wrote model/small" in str(item.problem) for item in ranks)
    assert list_checkpoints(tmp_path) == []


def test_storage_that_is_not_shared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(path: Path, parts: Any, **how: Any) -> Any:
        return write_file(tmp_path / path.name if path.name == "rank-00001.safetensors" else path, parts, **how)

    monkeypatch.setattr(share_writing, "write_file", elsewhere)
    monkeypatch.setattr(writing, "_VISIBLE_S", 0.2)
    ranks = save_on_two(tmp_path / "run", 1, [share(1, rank, 2) for rank in range(2)])
    assert all("storage that all machines share" in str(item.problem) for item in ranks)


def test_what_is_no_plain_data_is_named_and_training_goes_on(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, share(1, schedule={"fn": [Path("x")]}))
    assert "schedule/fn/0 is a pathlib" in str(store.problem)
    assert store.count == 0


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "tuple": (1, "a", None, True),
        "numbers": {3: 0.1, -1: float("inf")},
        "$odd": {"$tensor": "no tensor"},
        "bytes": b"\x00\xff",
        "dtype": torch.bfloat16,
        "set": {1, 2},
        "nested": [{"half": torch.ones(2, 2, dtype=torch.bfloat16)}, torch.tensor(3), torch.empty(0, 3)],
        "turned": torch.arange(6).reshape(2, 3).t(),
    }
    make_store(tmp_path).save(1, share(1, schedule=state))
    found = loaded(list_checkpoints(tmp_path)[-1].read().shared["schedule"])
    tensors = [*state.pop("nested"), state.pop("turned")]  # type: ignore[misc]
    again = [*found.pop("nested"), found.pop("turned")]
    assert found == state
    assert torch.equal(again[0]["half"], tensors[0]["half"])
    assert again[0]["half"].dtype is torch.bfloat16
    for first, second in zip(tensors[1:], again[1:]):
        assert torch.equal(first, second)


def test_rows_are_read_from_the_files_that_hold_them(tmp_path: Path) -> None:
    save_on_two(tmp_path, 1, [share(1, rank, 2) for rank in range(2)])
    (stored,) = list_checkpoints(tmp_path)
    tensor = stored.read().shared["model"]["small"]
    assert tensor.read(1, 3).tolist() == [2, 3, 4]
    assert tensor.read(5, 0).tolist() == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_snapshot_shares_nothing_with_what_trains(tmp_path: Path, asynchronous: bool) -> None:
    """The weights change in the moment in which save returns; the writer cannot even have started by then."""
    model = nn.Linear(300, 200)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    store = make_store(tmp_path, asynchronous=asynchronous)
    for step in (1, 2):  # the second finds the memory of the first
        state = {name: item.detach() for name, item in model.named_parameters()}
        store.save(step, share(step, schedule=state))
        with torch.no_grad():
            for item in model.parameters():
                item.fill_(7)
        store.wait()
        found = loaded(list_checkpoints(tmp_path)[-1].read().shared["schedule"])
        assert all(torch.equal(found[name], item) for name, item in before.items())
        before = {name: torch.full_like(item, 7) for name, item in before.items()}
    store.close()


def test_a_disk_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = make_store(blocked / "checkpoints")
    store.save(1, share(1))
    assert store.problem is not None
    assert "step 1" in store.problem
    assert store.count == 0


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
