"""Ranks that pad to the longest text any of them has: batches of like shapes at every step."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from test_data_packed import texts_of

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.samples.sampling import MicroBatch, StepSampler
from frameworm.data.steps import StepSource

WORLD = 3


def loaders(batching: str, accumulation: int, **settings: object) -> list[OptimizedDataLoader]:
    texts = texts_of(np.random.default_rng(0).integers(1, 20, 101).tolist())
    made = []
    for rank in range(WORLD):
        loader = OptimizedDataLoader.create(texts, 4, num_workers=0, batching=batching, seed=1, **settings)  # type: ignore[arg-type]
        loader.shard(rank, WORLD, accumulation)
        made.append(loader)
    return made


def widths(loader: OptimizedDataLoader) -> list[int]:
    return [batch["input_ids"].shape[1] for batch in loader]


@pytest.mark.parametrize("batching", ["padded", "bucketed"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("most_widths", [None, 4])
def test_all_ranks_are_as_wide_as_the_widest(batching: str, accumulation: int, most_widths: int | None) -> None:
    apart = [widths(loader) for loader in loaders(batching, accumulation, most_widths=most_widths)]
    same = loaders(batching, accumulation, most_widths=most_widths, same_widths=True)
    together = [widths(loader) for loader in same]
    assert together == [np.max(apart, axis=0).tolist()] * WORLD
    if most_widths is None:
        assert apart[0] != apart[1]
    for loader, found in zip(same, together):
        assert loader.shapes_alike
        counts = [loader.step_shape(step) for step in range(loader.steps_per_epoch)]
        sizes = [len(batch["labels"]) for batch in loader]
        padded = [size * width for size, width in zip(sizes, found)]
        assert sum(shape.padded_tokens or 0 for shape in counts) == sum(padded)
    assert not loaders(batching, accumulation)[0].shapes_alike


def test_samples_stay_where_they_were() -> None:
    for plain, same in zip(loaders("padded", 2), loaders("padded", 2, same_widths=True)):
        assert [batch["labels"].tolist() for batch in plain] == [batch["labels"].tolist() for batch in same]


def test_what_is_packed_or_resident_is_alike_anyway() -> None:
    assert loaders("packed", 1)[0].shapes_alike
    source = StepSource(loaders("packed", 1)[1], accumulation=1, rank=1, world_size=WORLD)
    assert source.shapes_alike
    assert not StepSource(loaders("padded", 1)[1], accumulation=1, rank=1, world_size=WORLD).shapes_alike
    assert StepSource([1, 2, 3], accumulation=1).shapes_alike, "one rank is alike"


def test_a_micro_batch_reaches_a_worker_whole() -> None:
    sampler = StepSampler(20, 8, 2, rank=1, world_size=2, shuffle=False)
    sampler.lengths = np.arange(20)
    batches = list(sampler)
    assert [batch.longest for batch in batches[:2] if isinstance(batch, MicroBatch)] == [5, 7]
    again = pickle.loads(pickle.dumps(batches[0]))
    assert (list(again), again.longest) == (batches[0], 5)
