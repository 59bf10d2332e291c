"""Packed batches: the same tokens as padded ones, in one shape, on the host and on the device."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from frameworm.data.batches import chunks as chunks_module
from frameworm.data.batches.chunks import ChunkPlan
from frameworm.data.batches.packed import PackedTexts, batches_of, packable, packing_of, round_capacity, spare_sequences
from frameworm.data.batches.resident import ResidentTexts, fits_device, resident_bytes
from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.corpora.cache import TokenStore
from frameworm.data.corpora.readers import find_corpus
from frameworm.data.corpora.text import TextDataset, TokenBlocks
from frameworm.data.corpora.tokenizer import load_tokenizer
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.samples.sampling import StepSampler
from frameworm.data.steps import StepSource
from frameworm.errors import ConfigError, DataError, DeviceError

MAX_SEQ_LEN = 12
PAD = 3
create = OptimizedDataLoader.create

many_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=60)  # beyond 12 they are cut


def store_of(lengths: list[int]) -> TokenStore:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = (100 + np.arange(offsets[-1])).astype(np.uint16)
    labels = (np.arange(len(lengths)) % 5).astype(np.int64)
    meta = {"num_classes": 5, "pad_id": PAD, "vocab_size": 60_000}
    return TokenStore(Path("nowhere"), tokens, offsets, labels, meta)


def texts_of(lengths: list[int], max_seq_len: int = MAX_SEQ_LEN) -> TextDataset:
    return TextDataset(store_of(lengths), max_seq_len)


def random_texts(size: int, seed: int = 0) -> TextDataset:
    return texts_of(np.random.default_rng(seed).integers(1, 20, size).tolist())


def samples_in(batch: dict[str, torch.Tensor]) -> list[tuple[int, list[int]]]:
    """Label and tokens of each sample of a packed batch, and nothing for missing ones."""
    offsets = batch["offsets"].tolist()
    found = []
    for index, label in enumerate(batch["labels"].tolist()):
        tokens = batch["input_ids"][offsets[index] : offsets[index + 1]].tolist()
        assert (label == -100) == (not tokens)
        if tokens:
            found.append((label, tokens))
    return found


def first_tokens(batch: dict[str, torch.Tensor]) -> list[int]:
    return [tokens[0] for _, tokens in samples_in(batch)]


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return (
        list(left) == list(right)
        and all(left[name].dtype == right[name].dtype for name in left)
        and all(torch.equal(left[name], right[name]) for name in left)
    )


@given(lengths=many_lengths, spare=st.integers(0, 40), data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_batch_is_its_samples_end_to_end(lengths: list[int], spare: int, data: Any) -> None:
    texts = texts_of(lengths)
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=10))
    batch_size = len(indices) + data.draw(st.integers(0, 3))
    used = int(texts.token_lengths[indices].sum())
    capacity = used + spare
    batch = PackedTexts(texts, batch_size, capacity).__getitems__(indices)
    assert [(name, str(tensor.dtype)) for name, tensor in batch.items()] == [
        ("labels", "torch.int64"),
        ("input_ids", "torch.int64"),
        ("positions", "torch.int64"),
        ("offsets", "torch.int32"),
    ]
    assert batch_size_of(batch) == batch_size
    assert samples_in(batch) == [(int(texts[i]["labels"]), texts[i]["input_ids"].tolist()) for i in indices]
    assert (batch["input_ids"][used:] == PAD).all()
    offsets = batch["offsets"].tolist()
    assert len(offsets) == batch_size + spare_sequences(capacity, MAX_SEQ_LEN) + 1
    assert (offsets[0], offsets[batch_size], offsets[-1]) == (0, used, capacity)
    sizes = np.diff(offsets)
    assert sizes.min() >= 0
    assert sizes.max() <= MAX_SEQ_LEN
    tail = sizes[batch_size:]
    assert (tail[: spare // MAX_SEQ_LEN] == MAX_SEQ_LEN).all(), "the padding is cut into full sequences first"
    expected = [position for size in sizes.tolist() for position in range(size)]
    assert batch["positions"].tolist() == expected


@given(lengths=many_lengths, data=st.data())
@settings(deadline=None, max_examples=150)
def test_the_device_makes_the_same_chunks(lengths: list[int], data: Any) -> None:
    texts = texts_of(lengths)
    batch_size = data.draw(st.integers(1, 6))
    sample = st.integers(0, len(lengths) - 1)
    batches = data.draw(st.lists(st.lists(sample, min_size=0, max_size=batch_size), min_size=1, max_size=5))
    rows = np.full((len(batches), batch_size), -1, dtype=np.int64)
    for row, batch in zip(rows, batches):
        row[: len(batch)] = batch
    most = max(int(texts.token_lengths[batch].sum()) for batch in batches)
    capacity = round_capacity(most) if data.draw(st.booleans()) else max(1, most)
    host = PackedTexts(texts, batch_size, capacity)
    chunk = host.chunk(rows)
    assert equal(ResidentTexts(packing_of(texts), "cpu").chunk(torch.from_numpy(rows), capacity), chunk)
    assert equal(host.chunk(batches), chunk)
    for batch, indices in zip(batches_of(chunk), batches):
        assert equal(batch, host.__getitems__(indices))


def test_a_subset_is_packed_too() -> None:
    texts = texts_of([5, 3, 9, 1, 4, 7])
    part = Subset(Subset(texts, [5, 4, 3, 2]), [0, 3])
    assert packable(part)
    assert not packable(TensorDataset(torch.ones(3)))
    batch = PackedTexts(part, 2, 32).__getitems__([1, 0])
    assert samples_in(batch) == samples_in(PackedTexts(texts, 2, 32).__getitems__([2, 5]))
    rows = torch.tensor([[1, 0]])
    assert equal(next(batches_of(ResidentTexts(packing_of(part), "cpu").chunk(rows, 32))), batch)
    # Only the stretch that holds these samples is kept.
    assert resident_bytes(packing_of(part)) < resident_bytes(packing_of(texts))


def test_too_much_for_a_batch_is_an_error() -> None:
    packed = PackedTexts(texts_of([5, 5, 5]), 2, 16)
    with pytest.raises(DataError, match="room for 2"):
        packed.__getitems__([0, 1, 2])
    with pytest.raises(DataError, match="20 tokens and has room for 16"):
        PackedTexts(texts_of([10, 10]), 2, 16).__getitems__([0, 1])
    with pytest.raises(IndexError):
        packed[3]
    assert samples_in(packed[-1]) == samples_in(packed[2])


@pytest.mark.parametrize(
    ("tokens", "capacity"), [(0, 16), (1, 16), (16, 16), (17, 32), (2047, 2048), (2048, 2048), (2049, 2112)]
)
def test_capacities_are_rounded_up(tokens: int, capacity: int) -> None:
    assert round_capacity(tokens) == capacity


@given(
    size=st.integers(1, 90),
    global_batch=st.integers(1, 24),
    micro=st.integers(1, 24),
    world=st.integers(1, 8),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
@pytest.mark.slow
def test_a_packed_epoch_on_any_number_of_ranks(
    size: int, global_batch: int, micro: int, world: int, drop_last: bool, shuffle: bool, data: Any
) -> None:
    drop_last = drop_last and size >= global_batch
    texts = random_texts(size)
    loaders = []
    for rank in range(world):
        loader = create(
            texts,
            micro,
            shuffle=shuffle,
            seed=4,
            global_batch=global_batch,
            drop_last=drop_last,
            batching="packed",
            epochs=2,
        )
        loader.shard(rank, world)
        loaders.append(loader)
    epoch = data.draw(st.integers(0, 2))
    per_rank = []
    for loader in loaders:
        loader.set_epoch(epoch)
        per_rank.append(list(loader))
        assert len(per_rank[-1]) == len(loader)
        assert len(loader) == sum(len(loader.step_shape(step).samples) for step in range(loader.steps_per_epoch))
    shapes = {tuple(tuple(tensor.shape) for tensor in batch.values()) for batches in per_rank for batch in batches}
    assert len(shapes) == 1, "one shape for all batches of all ranks"
    capacity = per_rank[0][0]["input_ids"].numel()
    assert capacity == round_capacity(capacity)
    # Every sample of the epoch once, and the same samples in a step as one rank alone would see.
    seen: list[int] = []
    for step in range(loaders[0].steps_per_epoch):
        in_step: list[int] = []
        for loader, batches in zip(loaders, per_rank):
            before = sum(len(loader.step_shape(earlier).samples) for earlier in range(step))
            shape = loader.step_shape(step)
            tokens = 0
            for batch, samples in zip(batches[before:], shape.samples):
                firsts = first_tokens(batch)
                assert len(firsts) == (samples or 1), "a filler holds one sample"
                if samples:
                    in_step += firsts
                    tokens += int(batch["offsets"][len(batch["labels"])])
            assert shape.tokens == tokens
            assert shape.padded_tokens == capacity * len(shape.samples)
        sampler = loaders[0].sampler
        assert sampler is not None
        expected = sampler.order()[step * global_batch : (step + 1) * global_batch]
        assert in_step == (100 + texts._store.offsets[expected]).tolist()
        seen += in_step
    kept = size // global_batch * global_batch if drop_last else size
    assert len(seen) == len(set(seen)) == kept
    # Resume: from any step on, the same batches.
    start = data.draw(st.integers(0, loaders[0].steps_per_epoch))
    loader, batches = loaders[-1], per_rank[-1]
    loader.seek(start)
    before = sum(len(loader.step_shape(earlier).samples) for earlier in range(start))
    resumed = list(loader)
    assert len(resumed) == len(batches) - before
    assert all(equal(left, right) for left, right in zip(resumed, batches[before:]))
    assert len(list(loader)) == len(batches), "a seek is for one iteration"


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_balanced_padded_steps_hold_the_samples_of_packed_ones(batching: Any) -> None:
    texts = random_texts(77)
    reference = create(texts, 8, seed=2, batching="packed").sampler
    loader = create(texts, 4, seed=2, global_batch=8, batching=batching, balance=True)
    loader.shard(1, 2)
    assert reference is not None
    assert loader.sampler is not None
    for epoch in (0, 3):
        reference.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert loader.sampler.order().tolist() == reference.order().tolist()
    plain = create(texts, 8, seed=2).sampler
    assert plain is not None
    plain.set_epoch(3)
    assert plain.order().tolist() != reference.order().tolist()


def test_packed_and_padded_batches_hold_the_same_samples() -> None:
    texts = random_texts(50)
    padded = create(texts, 8, balance=True, num_workers=0)
    packed = create(texts, 8, batching="packed")
    for left, right in zip(padded, packed, strict=True):
        rows = [row[:length].tolist() for row, length in zip(left["input_ids"], left["lengths"].tolist())]
        assert list(zip(left["labels"].tolist(), rows)) == samples_in(right)
    step = padded.steps_per_epoch - 1
    assert padded.step_shape(step).tokens == packed.step_shape(step).tokens


@pytest.mark.parametrize("most", [1, 3, 32])
def test_chunks_do_not_show(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_MOST_BATCHES", most)
    texts = random_texts(150)
    loader = create(texts, 2, global_batch=4, seed=1, batching="packed")
    loader.seek(5)
    chunks = list(loader.chunks())
    sizes = [len(chunk["labels"]) for chunk in chunks]
    assert max(sizes) <= most
    loader.seek(5)
    batches = list(loader)
    assert sum(sizes) == len(batches) == len(loader) - 10
    assert loader.sampler is not None
    one_by_one = PackedTexts(texts, 2, batches[0]["input_ids"].numel())
    indices = [piece.tolist() for step in range(5, loader.steps_per_epoch) for piece in loader.sampler.indices(step)]
    assert all(equal(one_by_one.__getitems__(few), batch) for few, batch in zip(indices, batches, strict=True))


def test_large_chunks_hold_fewer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = create(random_texts(400), 4, batching="packed")
    batch = next(iter(loader))
    size = sum(tensor.nbytes for tensor in batch.values())
    monkeypatch.setattr(chunks_module, "_MOST_BYTES", 5 * size + 1)
    assert max(len(chunk["labels"]) for chunk in loader.chunks()) == 5


def test_an_epoch_that_needs_more_gets_more() -> None:
    texts = texts_of([1] * 50 + [12] * 10)
    # Without balance the largest sum of a step differs from epoch to epoch.
    loader = create(texts, 4, seed=0, batching="packed", balance=False, epochs=2)
    sampler = loader.sampler
    assert sampler is not None
    plan = ChunkPlan(packing_of(texts), sampler, epochs=2)
    sums = []
    for epoch in range(30):
        ordered = texts.token_lengths[sampler.order_of(epoch)]
        sums.append(int(np.add.reduceat(ordered, np.arange(0, 60, 4)).max()))
    usual = round_capacity(max(sums[:2]))
    capacities = [plan.capacity(epoch) for epoch in range(30)]
    assert capacities == [max(usual, round_capacity(most)) for most in sums]
    assert max(capacities) > usual == capacities[0] == capacities[1]
    large = capacities.index(max(capacities))
    loader.set_epoch(large)
    assert {batch["input_ids"].numel() for batch in loader} == {capacities[large]}
    assert loader.step_shape(0).padded_tokens == capacities[large]


def test_the_next_epoch_is_drawn_ahead() -> None:
    texts = random_texts(60)
    loader = create(texts, 4, batching="packed", epochs=30)
    alone = create(texts, 4, batching="packed", epochs=30)
    for epoch in (8, 9, 10):
        loader.set_epoch(epoch)
        drawn = list(loader)
        alone.set_epoch(epoch)
        assert all(equal(left, right) for left, right in zip(drawn, alone, strict=True))
    for thread in threading.enumerate():
        if thread.name == "frameworm-next-epoch":
            thread.join(60)
    assert loader.sampler is not None
    assert loader.sampler.has_order(11)


@pytest.mark.parametrize("resident", [False, True])
def test_an_epoch_opened_ahead_is_the_same(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_MOST_BATCHES", 4)
    texts = random_texts(90)
    loader, alone = (create(texts, 4, seed=2, batching="packed", epochs=3) for _ in range(2))
    if resident:
        on_cpu = ResidentTexts(packing_of(texts), "cpu")
        monkeypatch.setattr(chunks_module.PackedBatches, "_on", lambda self, device: on_cpu)
    device = torch.device("cpu")

    def read(source: OptimizedDataLoader, epoch: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
        source.set_epoch(epoch)
        source.seek(start)
        shapes = [source.step_shape(step).tokens for step in range(source.steps_per_epoch)]
        batches = [batch for chunk in source.chunks(device) for batch in batches_of(chunk)]
        return [*batches, {"tokens": torch.tensor(shapes)}]

    read(loader, 0)
    loader.open_ahead(1, device)
    assert loader._packed is not None
    monkeypatch.setattr(loader._packed, "_open", lambda *args: pytest.fail("opened again"))
    opened = read(loader, 1)
    monkeypatch.undo()
    if resident:
        monkeypatch.setattr(chunks_module.PackedBatches, "_on", lambda self, device: on_cpu)
    assert all(equal(left, right) for left, right in zip(opened, read(alone, 1), strict=True))
    for wanted in ((2, 5), (1, 0)):  # another epoch, or another step, than was opened
        loader.open_ahead(2, device)
        assert all(equal(left, right) for left, right in zip(read(loader, *wanted), read(alone, *wanted), strict=True))
    loader.open_ahead(3, device)  # there is none
    loader.close()
    alone.close()


def test_the_next_epochs_rows_are_put_together_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = packing_of(random_texts(200))
    plan, alone = (ChunkPlan(packing, StepSampler(200, 4, 4, seed=3), epochs=6) for _ in range(2))
    plan.prepare(1)
    plan._wait_for(1)
    monkeypatch.setattr(plan, "_rows", lambda epoch, start: pytest.fail("put together again"))
    assert np.array_equal(plan.rows(1), alone.rows(1))
    monkeypatch.undo()
    plan.prepare(2)
    assert np.array_equal(plan.rows(2, 7), alone.rows(2, 7))  # a resumed epoch begins later
    assert np.array_equal(plan.rows(1), alone.rows(1))  # and an earlier one can be read again


def test_steps_come_through_the_whole_chain() -> None:
    loader = create(random_texts(45), 4, global_batch=8, seed=1, batching="packed")
    source = StepSource(CudaDataLoader(loader, "cpu"), accumulation=2)
    steps = list(source.epoch(1))
    assert [step.samples for step in steps] == [[4, 4]] * 5 + [[4, 1]]
    resumed = list(source.epoch(1, 4))
    for left, right in zip(steps[4:], resumed, strict=True):
        assert all(equal(one, other) for one, other in zip(left.batches, right.batches, strict=True))
        assert (left.tokens, left.padded_tokens) == (right.tokens, right.padded_tokens)


def test_closing_and_dropping_end_the_thread() -> None:
    loader = create(random_texts(400), 1, batching="packed")
    batches = iter(loader)
    next(batches)
    assert [thread for thread in threading.enumerate() if thread.name == "frameworm-read-ahead"]
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "frameworm-read-ahead"]
    through = iter(CudaDataLoader(loader, "cpu"))
    next(through)
    del through, batches
    assert not [thread for thread in threading.enumerate() if thread.name == "frameworm-read-ahead"]
    assert len(list(loader)) == 400


def test_packing_starts_no_workers_and_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    loader = create(random_texts(20), 4, num_workers=3, batching="packed")
    drawn = [torch.rand(1)]
    list(loader)
    drawn.append(torch.rand(1))
    assert loader.num_workers == 0
    assert torch.equal(torch.cat(drawn), expected)


def test_full_blocks_are_stacked_whatever_is_asked_for() -> None:
    blocks = TokenBlocks(store_of([50]), 4)
    orders = []
    for options in ({}, {"batching": "packed"}, {"batching": "bucketed"}, {"balance": True}):
        loader = create(blocks, 3, seed=5, num_workers=0, **options)
        orders.append([batch["input_ids"].tolist() for batch in loader])
        assert not loader.packs
    assert orders[0] == orders[1] == orders[2] == orders[3]
    assert not packable(blocks)


class Unknown(TensorDataset):
    """Does not tell its lengths."""


class Lengths(TensorDataset):
    """Tells its lengths and no more."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.arange(size))
        self.token_lengths = np.arange(size) % 7 + 1


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Unknown(torch.ones(9)), {"batching": "packed"}, "Unknown .* use padded"),
        (Lengths(9), {"batching": "packed"}, "Lengths .* use bucketed or padded"),
        (Unknown(torch.ones(9)), {"batching": "bucketed"}, "token_lengths"),
        (Unknown(torch.ones(9)), {"balance": True}, "token_lengths"),
        (texts_of([3] * 9), {"batching": "packed", "sampler": range(9)}, "sampler"),
        (texts_of([3] * 9), {"batching": "bucketed", "sampler": range(9)}, "sampler"),
        (texts_of([3] * 9), {"batching": "bucketed", "shuffle": False}, "shuffle"),
        (texts_of([3] * 9), {"batching": "bucketed", "balance": True}, "balance"),
        (texts_of([3] * 9), {"batching": "packed", "collate_fn": list}, "collate_fn"),
        (texts_of([3, 4] * 9), {"resident": True}, "resident: .* differ in shape"),
        (iter([1, 2]), {"batching": "packed"}, "stream"),
        (texts_of([3] * 9), {"batching": "zipped"}, "padded, bucketed, packed"),
        (texts_of([3] * 9), {"batching": "packed", "epochs": 0}, "epochs"),
    ],
)
def test_impossible_batchings(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create(dataset, 3, **options)


def test_ranks_with_samples_of_their_own_cannot_pack() -> None:
    loader = create(texts_of([3] * 9), 3, batching="packed", distributed=False)
    with pytest.raises(ConfigError, match="of their own"):
        loader.shard(0, 2)


def test_resident_needs_a_gpu() -> None:
    loader = create(texts_of([3] * 9), 3, batching="packed", resident=True)
    with pytest.raises(DeviceError, match="GPU"):
        iter(CudaDataLoader(loader, "cpu"))
    assert not fits_device(packing_of(texts_of([3])), torch.device("cpu"))
    small = create(texts_of([3] * 9), 3, batching="packed", resident="auto")
    assert len(list(CudaDataLoader(small, "cpu"))) == 3


def test_resident_chunks_follow_the_same_plan() -> None:
    texts = random_texts(150)
    loader = create(texts, 4, seed=1, batching="packed")
    host = list(loader)
    assert loader.sampler is not None
    plan = ChunkPlan(packing_of(texts), loader.sampler)
    resident = ResidentTexts(packing_of(texts), "cpu")
    batches = [batch for chunk in plan.resident_chunks(resident, 0, 0) for batch in batches_of(chunk)]
    assert all(equal(left, right) for left, right in zip(batches, host, strict=True))
    batches = [batch for chunk in plan.resident_chunks(resident, 0, 30) for batch in batches_of(chunk)]
    assert all(equal(left, right) for left, right in zip(batches, host[30:], strict=True))


@given(
    size=st.integers(1, 90),
    global_batch=st.integers(1, 16),
    micro=st.integers(1, 16),
    world=st.integers(1, 8),
    batching=st.sampled_from(["padded", "bucketed"]),
    most_widths=st.sampled_from([None, 4]),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_token_counts_of_padded_batches(
    size: int, global_batch: int, micro: int, world: int, batching: Any, most_widths: int | None, data: Any
) -> None:
    texts = random_texts(size)
    loader = create(
        texts, micro, num_workers=0, global_batch=global_batch, batching=batching, most_widths=most_widths, seed=1
    )
    loader.shard(data.draw(st.integers(0, world - 1)), world)
    loader.set_epoch(data.draw(st.integers(0, 2)))
    batches = list(loader)
    seen = []
    for step in range(loader.steps_per_epoch):
        shape = loader.step_shape(step)
        part, batches = batches[: len(shape.samples)], batches[len(shape.samples) :]
        assert shape.padded_tokens == sum(batch["input_ids"].numel() for batch in part)
        own = [batch for batch, samples in zip(part, shape.samples) if samples]
        assert shape.tokens == sum(int(batch["lengths"].sum()) for batch in own)
        seen += [batch["input_ids"].shape[1] for batch in part]
    assert batches == []
    if most_widths is not None and batching == "padded":
        assert {width % 3 for width in seen} <= {0}
    loader.seek(loader.steps_per_epoch // 2)
    assert len(list(loader)) == sum(
        len(loader.step_shape(step).samples) for step in range(loader.steps_per_epoch // 2, loader.steps_per_epoch)
    )


def test_widths_are_few() -> None:
    texts = TextDataset(store_of([7, 100, 55]), 100, width_step=7)
    assert [texts.padded_length(np.array([length])) for length in (1, 7, 8, 55, 98, 99, 100)] == [
        7,
        7,
        14,
        56,
        98,
        100,
        100,
    ]
    assert texts.__getitems__([0, 2])["input_ids"].shape == (2, 56)
    lengths = np.random.default_rng(0).integers(1, 200, 3_000).tolist()
    wide = texts_of(lengths, 150)
    for batching in ("padded", "bucketed"):
        loader = create(Subset(wide, range(2_000)), 8, batching=batching, num_workers=0, most_widths=16)
        assert 4 < len({batch["input_ids"].shape[1] for batch in loader}) <= 16
    of_many_widths = create(Subset(wide, range(2_000)), 8, batching="bucketed", num_workers=0, most_widths=64)
    assert 16 < len({batch["input_ids"].shape[1] for batch in of_many_widths}) <= 64
    exact = create(wide, 8, num_workers=0)
    assert len({batch["input_ids"].shape[1] for batch in exact}) > 16
    always = TextDataset(store_of(lengths), 150, pad_to="max").with_width_step(40)
    assert always.padded_length(np.array([3])) == 150


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [False, True, "auto"])
def test_packed_batches_on_the_gpu(resident: Any) -> None:
    loader = create(random_texts(500), 4, seed=1, batching="packed", resident=resident)
    host = list(loader)
    assert all(tensor.is_pinned() for tensor in host[0].values())
    on_device = CudaDataLoader(loader, "cuda")
    for start in (0, 30):
        loader.seek(start)
        batches = []
        for batch in on_device:
            if not batches:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")  # from the second batch on nothing waits for the device
            batches.append(batch)
        torch.cuda.set_sync_debug_mode("default")
        assert all(tensor.is_cuda for batch in batches for tensor in batch.values())
        moved = [{name: tensor.cpu() for name, tensor in batch.items()} for batch in batches]
        assert all(equal(left, right) for left, right in zip(moved, host[start:], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [False, True])
def test_chunks_are_not_overwritten_while_the_device_lags(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_MOST_BATCHES", 2)
    loader = create(random_texts(400), 4, seed=1, batching="packed", resident=resident)
    expected = [int(batch["input_ids"].sum()) for batch in loader]
    busy = torch.ones(2048, 2048, device="cuda")
    sums = []
    for batch in CudaDataLoader(loader, "cuda"):
        for _ in range(8):
            busy = (busy @ busy).clamp(max=1.0)
        sums.append(batch["input_ids"].sum())
        del batch
    assert [int(value) for value in sums] == expected


DATA = Path(os.environ.get("FRAMEWORM_DATA", "nowhere"))


def real_lengths(name: str, cache: Path) -> np.ndarray[Any, Any]:
    """Of every fourth text, four times over: as many to fill batches from, in a quarter of the time."""
    tokenizer = load_tokenizer(str(DATA / "vocab" / "bert-base-uncased-vocab.txt"), "classifier", [], 64, cache)
    texts = find_corpus(name, str(DATA / name), 0).train.read().texts
    return np.tile([len(tokens) for tokens in tokenizer.encode(texts[::4])], 4)


def waste(texts: TextDataset, batch: int, batching: Any) -> float:
    loader = create(texts, batch, batching=batching, epochs=8, num_workers=0)
    real = padded = 0
    for epoch in (0, 7):
        loader.set_epoch(epoch)
        for step in range(loader.steps_per_epoch):
            shape = loader.step_shape(step)
            assert shape.tokens is not None
            assert shape.padded_tokens is not None
            real += shape.tokens
            padded += shape.padded_tokens
    return 1 - real / padded


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not (DATA / "imdb").is_dir(), reason="FRAMEWORM_DATA names no folder with ag_news and imdb")
@pytest.mark.parametrize(("name", "cuts"), [("ag_news", (128, 256)), ("imdb", (512,))])
def test_padding_of_real_texts(name: str, cuts: tuple[int, ...], data_cache_dir: Path) -> None:
    lengths = real_lengths(name, data_cache_dir)
    store = TokenStore(
        Path("nowhere"),
        np.zeros(lengths.sum(), dtype=np.uint16),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.zeros(len(lengths), dtype=np.int64),
        {"num_classes": 4, "pad_id": 0},
    )
    for cut, batch in itertools.product(cuts, (32, 128)):
        texts = TextDataset(store, cut)
        assert waste(texts, batch, "padded") > 0.3
        assert waste(texts, batch, "bucketed") <= 0.05
        assert waste(texts, batch, "packed") <= (0.02 if batch >= 128 else 0.08)
