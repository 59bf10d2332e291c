"""What is padding in a batch, told by masks and ignored labels, and nothing by tensors that only look like them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from frameworm.attach.hooks import install
from frameworm.attach.padding import MOST_VALUES, Tokens, rows_of, tokens_of, trimmed
from frameworm.attach.watch import Watch
from frameworm.numerics.sample_hash import batch_hash
from frameworm.records.schema import StepRecord

LENGTHS = (6, 2, 3)
WIDTH = 6
PADDED = Tokens(18, 7, 0)


def texts(lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH, left: bool = False) -> tuple[torch.Tensor, ...]:
    """Ids that are never the id of padding, and a mask of the real ones."""
    ids = torch.arange(10, 10 + len(lengths) * width).reshape(len(lengths), width)
    places = torch.arange(width).flip(0) if left else torch.arange(width)
    mask = (places[None] < torch.tensor(lengths)[:, None]).long()
    return torch.where(mask == 1, ids, 0), mask


IDS, MASK = texts()
LABELS = torch.where(MASK == 1, IDS, -100)


class Named(NamedTuple):
    words: torch.Tensor
    key_padding_mask: torch.Tensor


@dataclass
class Sample:
    ids: torch.Tensor
    mask: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "attention_mask": MASK},
        {"input_ids": IDS, "attention_mask": MASK.bool()},
        {"input_ids": IDS.int(), "token_type_ids": torch.zeros_like(IDS), "attention_mask": MASK},
        {"input_ids": IDS, "attention_mask": MASK, "labels": torch.where(torch.rand(3, WIDTH) < 0.9, -100, IDS)},
        {"x": {"tokens": IDS, "mask": MASK.float()}, "y": torch.zeros(3)},
        (IDS, MASK, torch.zeros(3, dtype=torch.long)),
        [IDS, ~MASK.bool()],
        Named(IDS, MASK == 0),
        Sample(IDS, MASK),
        (dict(zip(("input_ids", "attention_mask"), texts(left=True))), torch.zeros(3)),
        {"input_values": torch.randn(3, WIDTH), "attention_mask": MASK},
        {"inputs_embeds": torch.randn(3, WIDTH, 4), "attention_mask": MASK},
        {"input_ids": IDS, "labels": LABELS},
        (IDS, LABELS),
        # The prompt's labels are ignored too, and are no padding.
        (IDS, torch.where(torch.arange(WIDTH) < 2, -100, LABELS)),
    ],
)
def test_padding_is_found(batch: Any) -> None:
    assert tokens_of(batch) == PADDED


def test_padding_beyond_the_longest_sample_is_told_apart() -> None:
    ids, mask = texts((4, 2, 3))
    assert tokens_of({"input_ids": ids, "attention_mask": mask}) == Tokens(18, 9, 6)


def test_both_sides_of_a_pair_count() -> None:
    batch = {"chosen_input_ids": IDS, "chosen_attention_mask": MASK}
    ids, mask = texts((1, 1, 1), 3)
    batch |= {"rejected_input_ids": ids, "rejected_attention_mask": mask}
    assert tokens_of(batch) == Tokens(18 + 9, 7 + 6, 6)


SENTENCES = torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)
FULL = torch.arange(20, 38).reshape(3, 6)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"input_ids": FULL, "attention_mask": torch.ones(3, 6)}, Tokens(18, 0, 0)),
        ((FULL, SENTENCES), None),  # which sentence a word belongs to
        ((FULL, torch.zeros_like(FULL)), None),
        # The tag of a word that is the same wherever it stands.
        ((FULL.masked_fill(SENTENCES.roll(1, 1) == 1, 5), SENTENCES.roll(1, 1)), None),
        ({"input_ids": FULL, "special_tokens_mask": torch.tensor([[1, 0, 0, 0, 1, 1]] * 3)}, None),
        ({"image": torch.randn(3, 3, 6, 6), "mask": torch.randint(0, 2, (3, 6, 6))}, None),
        ({"features": torch.randn(3, 6), "mask": MASK}, None),
        # Words to guess: the labels of all others are ignored.
        ((FULL, torch.where(torch.eye(3, 6) > 0, FULL, -100)), Tokens(18, 0, 0)),
        # Every text ends with the same mark, whose label is ignored.
        ((FULL.index_fill(1, torch.tensor([5]), 2), FULL.index_fill(1, torch.tensor([5]), -100)), Tokens(18, 0, 0)),
        ((FULL, FULL), None),
        (torch.randn(3, 6), None),
        (["words", ("more", 3)], None),
        (None, None),
        ({"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")}, None),
        ({"input_ids": torch.ones(2, MOST_VALUES), "attention_mask": torch.ones(2, MOST_VALUES)}, None),
    ],
)
def test_what_only_looks_like_it_is_none(batch: Any, found: Tokens | None) -> None:
    assert tokens_of(batch) == found


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ((torch.randn(8, 32), torch.zeros(8, dtype=torch.long)), 8),
        ({"input_ids": torch.zeros(8, 100, dtype=torch.long)}, 800),
        (torch.randn(4, 50, 16), 200),
        (torch.randn(4), 4),
        (torch.tensor(1.0), None),
        ("text", None),
    ],
)
def test_rows_are_told_by_shapes(batch: Any, rows: int | None) -> None:
    assert rows_of(batch) == rows


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int) -> None:
        self._count, self._length = count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = texts((self._length if index % 2 else WIDTH,))
        return {"input_ids": ids[0], "attention_mask": mask[0]}


@pytest.fixture
def observed() -> Iterator[tuple[Watch, list[StepRecord]]]:
    steps: list[StepRecord] = []
    watch = Watch(steps.append)
    patches = install(watch)
    yield watch, steps
    watch.stop()
    patches.remove()


def test_steps_know_the_padding_they_train_on_and_not_that_of_validation(
    observed: tuple[Watch, list[StepRecord]],
) -> None:
    watch, steps = observed
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train()
        for index, batch in enumerate(DataLoader(Texts(280, 2), 4)):
            model(batch["input_ids"]).sum().backward()
            if index % 2:
                optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(Texts(8, 6), 4):
                model(batch["input_ids"])
    watch.finish()
    assert len(steps) == 70
    early = steps[:32]
    assert [(step.tokens, step.padded_tokens) for step in early] == [(32, 48)] * 32  # of two batches
    assert early[3].metrics["padding_tokens"] == 16
    assert early[3].metrics["rows"] == 48
    assert [step.step for step in steps[33:] if step.tokens is not None] == [66]  # then few


def test_a_batch_that_cannot_be_read_ends_the_reading_only(
    observed: tuple[Watch, list[StepRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("no such batch")

    monkeypatch.setattr("frameworm.attach.watch.tokens_of", fail)
    watch, steps = observed
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Texts(40, 2), 4):
        model(batch["input_ids"]).sum().backward()
        optimizer.step()
    watch.finish()
    assert len(steps) == 10
    assert [note for note in watch.notes if "no such batch" in note] == [
        "padding is not measured: RuntimeError: no such batch"
    ]


def padded_batch(lengths: tuple[int, ...], width: int, *, left: bool = False) -> dict[str, Any]:
    ids, mask = texts(lengths, width, left)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask == 1, ids, -100),
        "kind": torch.ones(2),
    }


@pytest.mark.parametrize("left", [False, True])
def test_columns_that_only_pad_are_cut(left: bool) -> None:
    batch = padded_batch((9, 13), 40, left=left)
    cut = trimmed(batch)
    assert {name: tuple(item.shape) for name, item in cut.items()} == {
        "input_ids": (2, 16),
        "attention_mask": (2, 16),
        "labels": (2, 16),
        "kind": (2,),
    }
    for row in (0, 1):
        kept, before = cut["attention_mask"][row] == 1, batch["attention_mask"][row] == 1
        assert cut["input_ids"][row][kept].tolist() == batch["input_ids"][row][before].tolist()
    assert batch_hash(cut) == batch_hash(batch)


def test_batches_stay_where_nothing_or_too_much_depends_on_their_width() -> None:
    full = padded_batch((40, 3), 40)
    assert trimmed(full) is full
    square = {**padded_batch((9, 13), 40), "pairs": torch.ones(2, 40, 40)}
    assert trimmed(square) is square
    plain = {"pixels": torch.ones(2, 40), "labels": torch.ones(2)}
    assert trimmed(plain) is plain
    unmasked = {"input_ids": torch.ones(2, 40, dtype=torch.long), "labels": torch.full((2, 40), -100)}
    assert trimmed(unmasked) is unmasked


def test_tuples_are_cut_as_well() -> None:
    batch = padded_batch((9, 13), 40)
    ids, mask, labels = trimmed((batch["input_ids"], batch["attention_mask"], torch.tensor([0, 1])))
    assert ids.shape == mask.shape == (2, 16)
    assert labels.shape == (2,)


@pytest.mark.parametrize("left", [False, True])
def test_ignored_labels_over_one_id_tell_as_well(left: bool) -> None:
    batch = padded_batch((9, 13), 40, left=left)
    pair = (batch["input_ids"], batch["labels"])
    cut = trimmed(pair)
    assert [item.shape for item in cut] == [(2, 16)] * 2
    assert [item.tolist() for item in trimmed(cut)] == [item.tolist() for item in cut], "once is enough"
    for before, after in zip(pair, cut):
        assert [row[row > 0].tolist() for row in after] == [row[row > 0].tolist() for row in before]
    words = torch.arange(80).view(2, 40) + 1
    hidden = (words, torch.where(words % 40 > 12, -100, words))
    assert trimmed(hidden) is hidden, "words whose labels are ignored are no padding"
