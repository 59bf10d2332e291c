"""Lengths that a collate function shows: bucketed batches for data sets that declare nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import Dataset, Subset

from frameworm.data.batches import found_lengths as found_lengths_module
from frameworm.data.batches.found_lengths import lengths_of, look_at_padding
from frameworm.data.loader import OptimizedDataLoader
from frameworm.errors import ConfigError

COUNT = 200
LENGTHS = np.random.default_rng(0).integers(1, 30, COUNT)


class Words(Dataset[Any]):
    """Token ids of many lengths, with nothing said about them."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"ids": torch.full((int(LENGTHS[index]),), index), "label": index % 2}


class Batch(NamedTuple):
    ids: Tensor
    mask: Tensor
    labels: Tensor
    names: list[str]


def padded(samples: list[dict[str, Any]]) -> Batch:
    ids = pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=-1)
    return Batch(ids, ids >= 0, torch.tensor([sample["label"] for sample in samples]), ["a"] * len(samples))


def in_eights(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Time first, and to a multiple of eight."""
    ids = pad_sequence([sample["ids"] for sample in samples], padding_value=-1)
    return {"ids": nn.functional.pad(ids, (0, 0, 0, -len(ids) % 8), value=-1)}


def two_sided(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A source and a target of other lengths."""
    sides = [sample["ids"] for sample in samples], [sample["ids"][: 1 + len(sample["ids"]) % 7] for sample in samples]
    return dict(zip(("source", "target"), (pad_sequence(list(side), batch_first=True) for side in sides)))


def joined(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As for graphs: nodes of all samples end to end."""
    return {"nodes": torch.cat([sample["ids"] for sample in samples]), "labels": torch.zeros(len(samples))}


def to_the_most(samples: list[dict[str, Any]]) -> Tensor:
    return torch.stack([nn.functional.pad(sample["ids"], (0, 30 - len(sample["ids"]))) for sample in samples])


def cut_at_random(samples: list[dict[str, Any]]) -> Tensor:
    return pad_sequence([sample["ids"][: int(torch.randint(1, 30, ()))] for sample in samples], batch_first=True)


def test_lengths_are_the_widths_of_batches_of_one() -> None:
    data = Words()
    assert lengths_of(data, padded).tolist() == LENGTHS.tolist()
    reads = data.reads
    assert lengths_of(data, padded).tolist() == LENGTHS.tolist()
    assert data.reads == reads  # kept
    assert lengths_of(data, in_eights).tolist() == (-(-LENGTHS // 8) * 8).tolist()
    assert lengths_of(data, two_sided).tolist() == (LENGTHS + 1 + LENGTHS % 7).clip(max=2 * LENGTHS).tolist()
    part = Subset(data, [5, 3, 8])
    assert lengths_of(part, padded).tolist() == LENGTHS[[5, 3, 8]].tolist()


@pytest.mark.parametrize("collate", [padded, in_eights])
def test_bucketed_batches_hold_every_sample_and_less_padding(collate: Any) -> None:
    def read(**options: Any) -> list[Any]:
        loader = OptimizedDataLoader.create(Words(), 8, num_workers=0, seed=3, collate_fn=collate, **options)
        loader.shard(0, 1, 2)
        return [batch["ids"] if isinstance(batch, dict) else batch.ids for batch in loader]

    plain, bucketed = read(), read(batching="bucketed", mixed_lengths=True)
    for batches in (plain, bucketed):
        assert sorted({int(value) for batch in batches for value in batch.unique()} - {-1}) == list(range(COUNT))
    assert sum(batch.numel() for batch in bucketed) < 0.85 * sum(batch.numel() for batch in plain)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (None, "no collate function of its own"),
        (joined, "join their samples"),
        (lambda samples: pack_sequence([sample["ids"] for sample in samples], enforce_sorted=False), "join"),
        (to_the_most, "of one length"),
        (cut_at_random, "another length"),
        (lambda samples: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_refused_in_words(collate: Any, words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"^batching bucketed: Words .*{words}.*token_lengths"):
        OptimizedDataLoader.create(Words(), 8, batching="bucketed", collate_fn=collate)
    assert torch.equal(before, torch.get_rng_state())


def test_a_set_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_lengths_module, "LONGEST_S", 1e-6)
    data = Words()
    with pytest.raises(ConfigError, match="sample by sample"):
        OptimizedDataLoader.create(data, 8, batching="bucketed", collate_fn=padded)
    assert data.reads < 100


def test_the_look_reads_a_handful() -> None:
    data = Words()
    assert look_at_padding(data, padded).places == [("['ids']", 1)]
    assert data.reads < 100
