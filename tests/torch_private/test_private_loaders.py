"""torch's DataLoader from inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from frameworm.torch_private import loaders


@pytest.fixture
def loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]


def test_iterators(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    assert isinstance(iterator, loaders.any_iterator())
    assert loaders.dataset_of(iterator) is loader.dataset
    assert loaders.collate_of(iterator) is loader.collate_fn
    assert loaders.order_of(iterator) is loader.batch_sampler
    assert (loaders.workers_of(iterator), loaders.is_pinned(iterator)) == (0, False)
    unmarked = loaders.unmarked_next(iterator)
    assert unmarked is not None
    assert unmarked().tolist() == [0, 1]
    assert next(iterator).tolist() == [2, 3]
    assert loaders.unmarked_next([]) is None
    loaders.set_source(iterator, "data", "collate", "order")
    assert (loaders.dataset_of(iterator), loaders.collate_of(iterator), loaders.order_of(iterator)) == (
        "data", "collate", "order",
    )  # fmt: skip


def test_map_fetcher_reads_batches(loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(loaders.map_fetcher(), "fetch", lambda _self, places: asked.append(places))
    list(loader)
    assert asked == [[0, 1], [2, 3], [4, 5]]


def test_patches_meet_what_torch_calls(loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = loaders.OPENS_ITERATOR
    opened: list[Any] = []
    monkeypatch.setattr(owner, name, lambda loader: opened.append(loader) or iter(()))
    iter(loader)
    assert opened == [loader]
    owner, name = loaders.NEXT_OF_WORKERS
    assert issubclass(owner, loaders.any_iterator())
    assert callable(getattr(owner, name))


def test_live_iterator_lasts_until_end_workers() -> None:
    loader: Any = DataLoader(torch.arange(2), batch_size=1, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    assert loaders.live_iterator(loader) is None
    loaders.end_workers(loader)
    list(loader)
    assert loaders.live_iterator(loader) is not None
    workers = loaders.live_iterator(loader)._workers
    loaders.end_workers(loader)
    assert loaders.live_iterator(loader) is None
    assert not any(worker.is_alive() for worker in workers)
    loaders.forget_iterator(loader)
    assert set(loaders.LIVE_ATTRIBUTES) <= vars(loader).keys()


class Share(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 6, 1 if info is None else info.num_workers))


def test_worker_info_is_what_data_sets_ask() -> None:
    before = loaders.worker_info()
    assert before is None
    loaders.set_worker_info(loaders.make_worker_info(1, 2, 7, None))
    try:
        assert list(Share()) == [1, 3, 5]
    finally:
        loaders.set_worker_info(before)
    assert list(Share()) == [0, 1, 2, 3, 4, 5]


def test_pin_memory_calls_a_batch_of_ones_own() -> None:
    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    assert loaders.pin_memory(Batch()) == "pinned"
