"""Checkpoints move between strategies and numbers of processes, and training continues as if nothing had happened."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_cases import largest_difference, make, make_optimizer, train
from torch.distributed.tensor.debug import CommDebugMode

from frameworm.engine.checkpoint.load import list_checkpoints
from frameworm.engine.checkpoint.manifest import Manifest
from frameworm.engine.checkpoint.shard_reader import _FileTensor
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.parallel.named_state import holds_state, names_in_groups, to_names, to_numbers

ALL = ("ddp", "zero1", "zero2", "zero3")
HALF, WHOLE = 7, 11  # 52 samples in steps of 8: an epoch has 7 steps, and a run that is told to stop ends its epoch
SETTINGS: dict[str, Any] = {"kind": "tied", "clip_norm": 0.05, "scheduler": True}
DEADLINE_S = 100.0


def _half(folder: Path, strategy: str, world_size: int) -> None:
    train(strategy, world_size=world_size, max_steps=HALF, folder=folder / f"{strategy}-{world_size}", **SETTINGS)


def _rest(folder: Path, source: str, strategy: str, rank: int, world_size: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Go on with a copy of a run that was left halfway."""
    copy = folder / f"{source}-to-{strategy}-{world_size}"
    if rank == 0:
        shutil.copytree(folder / source, copy)
    if world_size > 1:
        torch.distributed.barrier()
    values, record, losses = train(
        strategy, world_size=world_size, max_steps=WHOLE, folder=copy, resume=True, **SETTINGS
    )
    assert (record.steps, len(losses)) == (WHOLE, WHOLE - HALF), copy.name
    return copy.name, values


def _run(
    rank: int, world_size: int, folder: str, halves: list[str], rests: list[tuple[str, str]]
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    for strategy in halves:
        _half(Path(folder), strategy, world_size)
    return [_rest(Path(folder), source, strategy, rank, world_size) for source, strategy in rests]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, torch.Tensor]:
    """What one process ends with that was never stopped."""
    values, record, _ = train("single", world_size=1, max_steps=WHOLE, **SETTINGS)
    assert record.steps == WHOLE
    return values


def _check(results: list[tuple[str, dict[str, torch.Tensor]]], expected: dict[str, torch.Tensor]) -> None:
    differences = {name: largest_difference(values, expected) for name, values in results}
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
def test_checkpoints_move_between_strategies(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    rests = [(f"{source}-2", to) for source, to in zip(ALL, (*ALL[1:], ALL[0]))]
    rests += [("zero3-2", "zero1"), ("ddp-2", "zero3"), ("zero1-2", "zero1")]
    for results in run_ranks(_run, 2, (str(tmp_path), list(ALL), rests), timeout_s=DEADLINE_S):
        assert len(results) == 7
        _check(results, uninterrupted)


@pytest.mark.slow
def test_checkpoints_of_two_processes_go_on_in_one(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    run_ranks(_run, 2, (str(tmp_path), ["ddp", "zero1", "zero2", "zero3"], []), timeout_s=DEADLINE_S)
    _check([_rest(tmp_path, f"{strategy}-2", "single", 0, 1) for strategy in ALL], uninterrupted)
    rests = [("ddp-2", "zero3"), ("zero3-2", "zero1"), ("zero1-2", "zero2")]
    _check(run_ranks(_run, 1, (str(tmp_path), [], rests), timeout_s=DEADLINE_S)[0], uninterrupted)


@pytest.mark.slow
@pytest.mark.long
def test_a_checkpoint_of_one_process_goes_on_in_two(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    _half(tmp_path, "single", 1)
    run_ranks(_run, 1, (str(tmp_path), ["zero3"], []), timeout_s=DEADLINE_S)
    rests = [*(("single-1", strategy) for strategy in ALL), ("zero3-1", "zero2")]
    for results in run_ranks(_run, 2, (str(tmp_path), [], rests), timeout_s=DEADLINE_S):
        _check(results, uninterrupted)


def _shares(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """How much of the state passes through this rank when it is saved and when it is read."""
    with CommDebugMode() as communication:
        torch.distributed.all_reduce(torch.ones(1))
        torch.distributed.all_gather_object([None] * world_size, rank)
    assert communication.get_comm_counts(), "what is sent would not be noticed"
    sent: list[dict[Any, int]] = []
    copied: list[int] = []
    read: list[int] = []
    capture, restore, read_rows = TrainingState.capture, TrainingState.restore, _FileTensor.read

    def watched_capture(self: TrainingState, staging: Any, settle: Any) -> Any:
        settle()
        with CommDebugMode() as communication:
            snapshot = capture(self, staging)
        sent.append(dict(communication.get_comm_counts()))
        # What is a rank's own (random numbers) outweighs so small a model.
        copied.append(sum(piece.size_bytes for name, piece in snapshot.pieces.items() if not name.startswith("rank-")))
        return snapshot

    def watched_restore(self: TrainingState, *args: Any) -> Any:
        with CommDebugMode() as communication:
            notes = restore(self, *args)
        sent.append(dict(communication.get_comm_counts()))
        return notes

    def watched_read(self: Any, *args: Any) -> torch.Tensor:
        tensor = read_rows(self, *args)
        if not self._name.startswith("rank-"):
            read.append(tensor.nbytes)
        return tensor

    TrainingState.capture, TrainingState.restore = watched_capture, watched_restore  # type: ignore[method-assign]
    _FileTensor.read = watched_read  # type: ignore[method-assign]
    train("zero3", kind="gpt", max_steps=2, folder=Path(folder), every_steps=1)
    tensors = _manifest(folder).tensors.items()
    whole = 4 * sum(math.prod(entry.shape) for name, entry in tensors if not name.startswith("rank-"))
    train("zero3", kind="gpt", max_steps=3, folder=Path(folder), resume=True)
    files = [file.size_bytes for file in _manifest(folder).files.values()]
    return {"whole": whole, "sent": sent, "copied": copied, "read": sum(read), "files": files}


def _manifest(folder: str) -> Manifest:
    return list_checkpoints(Path(folder) / "checkpoints")[-1].check()


@pytest.mark.slow
@pytest.mark.long
def test_no_rank_holds_the_whole_state_of_zero3(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for found in run_ranks(_shares, 2, (str(tmp_path / "run"),), timeout_s=DEADLINE_S):
        assert len(found["copied"]) >= 3
        assert all(0.3 * found["whole"] < size < 0.7 * found["whole"] for size in found["copied"]), found
        assert 0.3 * found["whole"] < found["read"] < 0.7 * found["whole"], found
        assert max(found["files"]) < 1.5 * min(found["files"])
        assert not any(found["sent"]), found["sent"]  # this model has no buffers: nobody is asked for anything


def test_a_checkpoint_holds_names(tmp_path: Path) -> None:
    values, _, _ = train("single", world_size=1, max_steps=2, folder=tmp_path / "run", **SETTINGS)
    saved = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].read().shared
    assert "embedding.weight" in saved["optimizer"]["state"]
    assert "embedding.weight" in saved["optimizer"]["param_groups"][0]["params"]
    assert set(saved["optimizer"]["state"]) == set(values) - {"head.weight"}  # tied: it has one name
    assert saved["model"]["head.weight"] is saved["model"]["embedding.weight"]


def test_names_stand_for_numbers() -> None:
    model, data = make("plain")
    optimizer = make_optimizer("adamw", model)
    assert not holds_state(optimizer)
    assert not holds_state(make_optimizer("adagrad", model))
    model(data[0][0][None]).sum().backward()
    optimizer.step()
    assert holds_state(optimizer)
    names = names_in_groups(model.named_parameters(), optimizer.param_groups)
    numbered = optimizer.state_dict()
    named = to_names(numbered, names)
    again = to_numbers(named, names)
    assert again["param_groups"] == numbered["param_groups"]
    assert all(again["state"][number] is numbered["state"][number] for number in numbered["state"])
    # The same names in another order are the same parameters.
    turned = to_numbers(named, [list(reversed(group)) for group in names])
    last = len(names[0]) - 1
    assert turned["state"][last] is numbered["state"][0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["a", "b"]], "it has 2 parameter groups, this one 1"),
        ([["a"], ["c"]], "group 0 has 2 parameters, this one 1"),
        ([["a", "x"], ["c"]], "group 0 has no x"),
    ],
)
def test_another_optimizer_is_refused(names: list[list[str]], message: str) -> None:
    saved = {"state": {}, "param_groups": [{"params": ["a", "b"]}, {"params": ["c"]}]}
    with pytest.raises(ValueError, match=message):
        to_numbers(saved, names)
