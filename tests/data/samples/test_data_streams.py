"""One rank's batches of a stream, put together without the other ranks."""

from __future__ import annotations

from typing import Any

import torch

from frameworm.data.samples.division import Division
from frameworm.data.samples.streams import Begin, StreamBatches
from frameworm.data.samples.workers import SharedEpoch
from stream_sets import Counting


def _noise(samples: list[Any]) -> float:
    return float(torch.rand(()))


def _drawn(rank: int, epoch: int = 0) -> list[float]:
    shared = SharedEpoch()
    shared.value = epoch
    division = Division(rank=rank, world_size=2, places=True)
    batches = StreamBatches(
        Counting(), 4, _noise, division=division, seed=3, epoch=shared, drop_last=False, begin=Begin(epoch)
    )
    return [item.batch for item in batches]


def test_a_collate_function_draws_its_own_on_every_rank_and_in_every_epoch() -> None:
    first, other, later = _drawn(0), _drawn(1), _drawn(0, epoch=1)
    assert len(first) >= 2
    assert len({*first, *other, *later}) == len(first) + len(other) + len(later)
    assert _drawn(0) == first, "and the same again"
