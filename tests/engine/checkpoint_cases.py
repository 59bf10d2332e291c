"""A small state, and two ranks that are threads, to write checkpoints of it without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.checkpoint.snapshot import Snapshot, take_snapshot
from frameworm.engine.checkpoint.staging import Staging
from frameworm.engine.checkpoint.store import Capture, CheckpointStore
from frameworm.launch.reports import RankReports
from frameworm.parallel.shards import HeldState


def values(step: int) -> dict[str, torch.Tensor]:
    return {"large": torch.full((1000, 3), float(step)), "small": torch.arange(5) + step}


def share(step: int, rank: int = 0, world_size: int = 1, **common: Any) -> Capture:
    """What a rank writes of a model that all hold alike."""
    held = HeldState({"model": values(step), "optimizer": {"state": {}, "param_groups": []}})
    rest = {"schedule": {}, "precision": {}, "progress": {"step": step}, **common}

    def capture(staging: Staging | None, settle: Callable[[], None]) -> Snapshot:
        def late() -> tuple[dict[str, Any], dict[str, Any]]:
            settle()
            return rest, {"own": torch.tensor([rank, step])}

        if staging is None:
            settle()
            return Snapshot(problem="left out")
        return take_snapshot(held, {}, staging, rank, world_size, late)

    return capture


def make_store(folder: Path, keep: int = 3, asynchronous: bool = False, **more: Any) -> CheckpointStore:
    return CheckpointStore(folder, retention=Retention(keep), asynchronous=asynchronous, **more)


def fill(folder: Path, steps: tuple[int, ...]) -> None:
    store = make_store(folder, keep=10)
    for step in steps:
        store.save(step, share(step))
    store.close()
    assert store.problem is None


def save_on_two(folder: Path, step: int, shares: list[Capture], limit_s: float = 60.0) -> list[CheckpointStore]:
    """Two ranks save their shares at the same time."""
    store = HashStore()
    ranks = [make_store(folder, reports=RankReports(store, rank, 2, limit_s)) for rank in range(2)]
    threads = [threading.Thread(target=item.save, args=(step, own)) for item, own in zip(ranks, shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for item in ranks:
        item.close()
    return ranks
