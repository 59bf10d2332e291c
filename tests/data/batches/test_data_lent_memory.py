"""Memory that loader processes use again holds what it held for as long as anybody reads it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from frameworm.data.batches import lent_memory
from frameworm.data.batches.lent_memory import Pieces, arrived, forget
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader

SAMPLES = 240


class Numbers(Dataset[Any]):
    """Samples whose size grows, so that pieces become too small."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> Any:
        return torch.full((1 + place * 20,), place), torch.tensor(place)


def joined(rows: list[Any]) -> Any:
    return torch.cat([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def is_right(batch: Any) -> bool:
    numbers, places = batch
    return torch.equal(numbers, torch.cat([Numbers()[int(place)][0] for place in places]))


def loader_of(**settings: Any) -> OptimizedDataLoader:
    return OptimizedDataLoader.create(
        Numbers(), 4, num_workers=2, collate_fn=joined, **{"persistent_workers": True, "shuffle": False, **settings}
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_are_held_stay_as_they_are(persistent: bool) -> None:
    loader = loader_of(persistent_workers=persistent)
    held = [batch for _ in range(2) for batch in loader]
    assert len(held) == 2 * SAMPLES // 4
    assert all(is_right(batch) for batch in held)
    loader.close()


def test_memory_is_used_again_where_batches_are_let_go() -> None:
    before = set(lent_memory._known)
    loader = loader_of(persistent_workers=True, shuffle=True)
    for _ in range(3):
        places = set()
        for batch in loader:
            assert is_right(batch)
            places.add(batch[0].data_ptr())
    assert len(places) < SAMPLES // 4 / 2, "by the last epoch most pieces are large enough"
    assert set(lent_memory._known) > before
    loader.close()
    gc.collect()
    assert set(lent_memory._known) <= before


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_is_left_in_the_middle_begins_again(persistent: bool) -> None:
    loader = loader_of(persistent_workers=persistent)
    for _ in range(4):
        for number, batch in enumerate(loader):
            assert is_right(batch)
            if number == 7:
                break
    loader.close()


def test_two_iterations_at_once_do_not_meet() -> None:
    loader = loader_of(persistent_workers=False)
    pairs = 0
    for one, other in zip(loader, loader):
        assert is_right(one)
        assert is_right(other)
        pairs += 1
    assert pairs == SAMPLES // 4
    loader.close()


def test_a_part_of_a_batch_keeps_all_of_it() -> None:
    loader = loader_of()
    labels = [batch[1] for batch in loader]
    assert torch.cat(labels).tolist() == list(range(SAMPLES))
    loader.close()


def test_a_process_that_was_forked_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces()
    pieces.begin()
    piece = pieces.take(10)
    assert piece is not None
    lent = arrived(pieces.use, 0, piece.memory)
    with monkeypatch.context() as patched:
        patched.setattr(lent_memory, "os", SimpleNamespace(getpid=lambda: -1))
        del lent
        gc.collect()
        assert piece.is_taken
    lent = arrived(pieces.use, 0, None)
    part = lent[lent_memory.HEAD_BYTES :].view(torch.int16)
    del lent
    assert piece.is_taken
    del part
    gc.collect()
    assert not piece.is_taken
    forget(pieces.use)


def test_no_more_than_a_few_pieces_are_lent() -> None:
    pieces = Pieces()
    taken = [pieces.take(100) for _ in range(lent_memory._MOST_PIECES + 1)]
    assert taken.pop() is None
    assert len({piece.number for piece in taken if piece is not None}) == lent_memory._MOST_PIECES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("times", [1, 40])
def test_what_the_device_has_yet_to_read_is_not_written_over(times: int) -> None:
    """The device is kept busy, so that copies wait in its queue while the host asks for one batch after another."""
    inner = OptimizedDataLoader.create(
        Numbers(), 4, num_workers=2, shuffle=False, pin_memory=True, collate_fn=lambda rows: joined(times * rows)
    )
    found = []
    for numbers, places in CudaDataLoader(inner, "cuda"):
        torch.cuda._sleep(20_000_000)
        found.append((numbers.clone(), places.clone()))
    for numbers, places in found:
        assert is_right((numbers.cpu(), places.cpu()))
    inner.close()
