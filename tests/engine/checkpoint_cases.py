"""A small state, and two ranks that are threads, to write checkpoints of it without a process group."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from frameworm.engine.checkpoint_store import CheckpointStore
from frameworm.engine.snapshot import Snapshot, take_snapshot
from frameworm.launch.reports import RankReports
from frameworm.parallel.shards import HeldState


def values(step: int) -> dict[str, torch.Tensor]:
    return {"large": torch.full((1000, 3), float(step)), "small": torch.arange(5) + step}


def share(step: int, rank: int = 0, world_size: int = 1, **common: Any) -> Snapshot:
    """What a rank writes of a model that all hold alike."""
    held = HeldState({"model": values(step), "optimizer": {"state": {}, "param_groups": []}})
    rest = {"schedule": {}, "precision": {}, "progress": {"step": step}, **common}
    return take_snapshot(held, rest, {"own": torch.tensor([rank, step])}, rank, world_size)


def make_store(folder: Path, keep: int = 3, asynchronous: bool = False) -> CheckpointStore:
    return CheckpointStore(folder, keep=keep, asynchronous=asynchronous)


def fill(folder: Path, steps: tuple[int, ...]) -> None:
    store = make_store(folder, keep=10)
    for step in steps:
        store.save(step, lambda step=step: share(step))  # type: ignore[misc]
    assert store.problem is None


def save_on_two(folder: Path, step: int, shares: list[Snapshot], limit_s: float = 20.0) -> list[CheckpointStore]:
    """Two ranks save their shares at the same time."""
    store = HashStore()
    ranks = [
        CheckpointStore(folder, keep=3, asynchronous=False, reports=RankReports(store, rank, 2, limit_s))
        for rank in range(2)
    ]
    threads = [threading.Thread(target=item.save, args=(step, lambda own=own: own)) for item, own in zip(ranks, shares)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return ranks
