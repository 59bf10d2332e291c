"""Batches that cross from loader processes in one block are those that were put together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from frameworm.data.batches.one_block import Block, InOneBlock
from frameworm.data.loader import OptimizedDataLoader


def images() -> Tensor:
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


class Boxes:
    def __init__(self) -> None:
        self.corners = torch.ones(3)


BATCHES: list[Any] = [
    {"ids": torch.arange(7), "mask": torch.tensor([True, False, True]), "n": 3, "text": "words"},
    ((torch.randn(3, 2), torch.arange(4).reshape(2, 2)), torch.tensor(1.5, dtype=torch.float64)),
    [images(), torch.randn(3, 5).bfloat16(), torch.empty(0, 4), [torch.ones(1, dtype=torch.complex64)]],
    (torch.arange(12).reshape(3, 4).t(), torch.arange(10)[::2], torch.ones(1, 3).expand(4, 3)),
]


def leaves(item: Any) -> Iterator[Any]:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else None
    if parts is None:
        yield item
    else:
        for part in parts:
            yield from leaves(part)


@pytest.mark.parametrize("batch", BATCHES)
def test_what_is_opened_is_what_was_put_in(batch: Any) -> None:
    block = InOneBlock(lambda rows: rows)(batch)
    assert type(block) is Block
    opened = block.open()
    assert type(opened) is type(batch)
    for found, expected in zip(leaves(opened), leaves(batch), strict=True):
        if not isinstance(expected, Tensor):
            assert found is expected
            continue
        assert torch.equal(found, expected)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.is_contiguous(memory_format=torch.channels_last) or expected.dim() != 4
        assert found._base is None, "the compiler would look at what it is a view of"


def test_a_tensor_that_comes_twice_still_does() -> None:
    tensor = torch.arange(3)
    opened = InOneBlock(lambda rows: rows)({"ids": tensor, "labels": tensor, "more": torch.ones(2)}).open()
    assert opened["ids"] is opened["labels"]


def test_what_cannot_lie_in_a_block_crosses_as_it_did() -> None:
    boxes = Boxes()
    sparse = torch.ones(2, 2).to_sparse()
    learned = torch.nn.Parameter(torch.ones(2))
    together = InOneBlock(lambda rows: rows)
    opened = together([boxes, sparse, learned, torch.ones(2), torch.zeros(3)]).open()
    assert opened[0] is boxes
    assert opened[1] is sparse
    assert opened[2] is learned
    for alone in (torch.ones(3), [torch.ones(3), "text"], OrderedDict(a=torch.ones(1), b=torch.ones(1)), None):
        assert together(alone) is alone


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> Any:
        return {"ids": torch.full((5,), place), "label": torch.tensor(place % 2), "name": f"text {place}"}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_processes_yields_the_same_batches(persistent: bool) -> None:
    epochs = []
    for workers in (0, 2):
        loader = OptimizedDataLoader.create(Texts(), 4, num_workers=workers, seed=3, persistent_workers=persistent)
        epochs.append([batch for _ in range(2) for batch in loader])
        loader.close()
    for one, other in zip(*epochs, strict=True):
        assert one["name"] == other["name"]
        assert torch.equal(one["ids"], other["ids"])
        assert torch.equal(one["label"], other["label"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_block_is_page_locked_as_one() -> None:
    loader = OptimizedDataLoader.create(Texts(), 4, num_workers=1, pin_memory=True)
    for batch in loader:
        assert batch["ids"].is_pinned()
        assert batch["label"].is_pinned()
    loader.close()
