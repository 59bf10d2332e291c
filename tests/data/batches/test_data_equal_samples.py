"""Resident samples of any data set: the ordinary loader's batches, bit for bit, or a reason why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from frameworm.data.batches import equal_samples as equal_samples_module
from frameworm.data.batches.equal_samples import UnfitError, leaves_of, look_at_samples, same_bits
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.steps import StepSource
from frameworm.errors import ConfigError, DataError

COUNT = 53
create = OptimizedDataLoader.create


class Row(NamedTuple):
    values: Tensor
    extra: dict[str, Any]


class Samples(Dataset[Any]):
    """Makes each sample by a function of its index."""

    def __init__(self, make: Callable[[int], Any], count: int = COUNT) -> None:
        self.make = make
        self.count = count
        self.reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.make(index)


def table(count: int = COUNT) -> TensorDataset:
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, torch.arange(count), torch.arange(count).remainder(2).bool())


def as_dict(index: int) -> dict[str, Any]:
    return {"x": np.full((3,), index, dtype=np.float32), "weight": index / 2, "label": index}


def as_row(index: int) -> Row:
    return Row(torch.full((2, 2), float("nan") if index == 3 else float(index)), {"pair": (index, torch.tensor(index))})


def renaming(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collate function of the user's own that stacks."""
    return {
        "features": torch.stack([torch.from_numpy(sample["x"]) for sample in samples]),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


DATA: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors": (table(), {}),
    "subset of tensors": (Subset(Subset(table(), list(range(50, 2, -1))), list(range(40))), {}),
    "split": (random_split(Samples(as_dict), [40, 13], torch.Generator().manual_seed(1))[0], {}),
    "dicts": (Samples(as_dict), {}),
    "named tuples": (Samples(as_row), {}),
    "joined": (ConcatDataset([table(20), table(17)]), {}),
    "own collate": (Samples(as_dict), {"collate_fn": renaming}),
    "one tensor": (Samples(lambda index: torch.tensor([index, -index])), {}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "micro-batches": {"accumulation": 3},
    "in order": {"shuffle": False},
    "whole steps": {"drop_last": True},
    "rank 1 of 3": {"rank": 1, "world_size": 3, "accumulation": 2},
    "fillers": {"rank": 3, "world_size": 4, "global_batch": 17},
}


def batches_of(dataset: Any, start: int = 0, **options: Any) -> list[Any]:
    options = {"rank": 0, "world_size": 1, "accumulation": 1, **options}
    place = [options.pop(name) for name in ("rank", "world_size", "accumulation")]
    loader = create(dataset, 4, num_workers=0, seed=7, epochs=3, **options)
    loader.shard(*place)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        loader.seek(start)
        found += list(CudaDataLoader(loader, "cpu"))
    assert len(found) == 2 * len(loader) - 2 * start * place[2]
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", DATA)
def test_batches_are_the_ordinary_loaders(data: str, shape: str) -> None:
    dataset, options = DATA[data]
    options = {**options, **SHAPES[shape]}
    ordinary, resident = (batches_of(dataset, resident=on, **options) for on in (False, True))
    assert len(ordinary) == len(resident)
    for one, other in zip(ordinary, resident):
        assert type(one) is type(other)
        assert same_bits(one, other)
        for (_, left), (_, right) in zip(leaves_of(one), leaves_of(other)):
            assert left.stride() == right.stride()
            assert right.data_ptr() % 64 == 0  # as a tensor of its own: products may round otherwise


def test_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = batches_of(table(), resident=True)
    rest = batches_of(table(), start=9, resident=True)
    assert len(rest) == 10
    assert all(map(same_bits, rest, [*whole[9:14], *whole[23:]]))


def test_large_data_comes_in_several_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_samples_module, "_CHUNK_BYTES_CPU", 1000)
    monkeypatch.setattr(equal_samples_module, "READ_AT_ONCE", 7)
    for data in ("tensors", "dicts", "own collate"):
        dataset, options = DATA[data]
        ordinary, resident = (batches_of(dataset, resident=on, **options) for on in (False, True))
        assert all(map(same_bits, ordinary, resident))


def test_each_sample_is_read_once_and_few_again() -> None:
    data = Samples(as_dict, 1000)
    loader = create(data, 8, resident=True, num_workers=0)
    assert data.reads < 100
    list(loader)
    begun = data.reads
    assert begun < 1100
    list(loader)
    assert data.reads - begun < 5


def test_plain_iteration_a_skip_and_a_close_go_on_alike() -> None:
    ordinary, resident = (create(table(), 4, seed=3, resident=on, num_workers=0) for on in (False, True))
    assert (resident.num_workers, resident.in_chunks, resident.packs) == (0, True, False)
    for loader in (ordinary, resident):
        loader.skip(10)
    assert all(map(same_bits, list(ordinary), list(resident)))
    resident.close()
    for loader in (ordinary, resident):
        loader.set_epoch(1)
    assert all(map(same_bits, list(ordinary), list(resident)))


def test_an_epoch_opened_ahead_is_the_same() -> None:
    device = torch.device("cpu")
    loader, alone = (create(table(), 4, seed=3, resident=True, epochs=2) for _ in range(2))
    list(loader)
    loader.open_ahead(1, device)
    loader.open_ahead(2, device)  # there is none
    for item in (loader, alone):
        item.set_epoch(1)
    assert all(map(same_bits, list(loader), list(alone)))


def test_steps_of_a_source() -> None:
    sources = [
        StepSource(CudaDataLoader(create(table(), 4, global_batch=8, seed=1, resident=on), "cpu"), accumulation=2)
        for on in (False, True)
    ]
    for ordinary, resident in zip(*(source.epoch(0, start=2) for source in sources), strict=True):
        assert ordinary.samples == resident.samples
        assert all(map(same_bits, ordinary.batches, resident.batches))


def test_a_users_sampler_decides_the_order() -> None:
    picks = [5, -1, 5, 0, 52]
    ordinary, resident = (create(table(), 2, sampler=picks, resident=on, num_workers=0) for on in (False, True))
    assert all(map(same_bits, list(ordinary), list(resident)))
    with pytest.raises(DataError, match="beyond the data set's 53"):
        list(create(table(), 2, sampler=[53], resident=True))
    with pytest.raises(ConfigError, match="not numbers"):
        list(create(table(), 2, sampler=["a"], resident=True))


def test_a_sample_that_cannot_be_read_is_replaced_as_ever() -> None:
    def broken(index: int) -> Tensor:
        if index == 30:
            raise OSError("gone")
        return torch.tensor([index])

    loaders = [create(Samples(broken), 4, on_error="skip", resident=on, num_workers=0) for on in (False, True)]
    assert all(map(same_bits, *(list(loader) for loader in loaders)))
    assert [item.number for item in loaders[1].skipped_samples] == [30]
    with pytest.raises(OSError, match="gone"):
        list(create(Samples(broken), 4, resident=True))


def test_processes_read_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.data.assembly.LONG_READ_S", 0.0)
    data = Samples(as_dict)
    loader = create(data, 4, num_workers=1, resident=True)
    looked = data.reads
    found = list(loader)
    assert data.reads - looked < 5  # the process has a copy
    assert all(map(same_bits, found, list(create(Samples(as_dict), 4, num_workers=0))))


class Noisy(Samples):
    def __init__(self) -> None:
        super().__init__(lambda index: torch.tensor([index]))
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        self.generator.random()
        return super().__getitem__(index)


def ragged(index: int) -> Tensor:
    return torch.zeros(1 + index % 3)


def padding(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def centred(samples: list[Tensor]) -> Tensor:
    stacked = torch.stack(samples).float()
    return stacked - stacked.mean(0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(5))


def counting() -> Callable[[int], Tensor]:
    reads = iter(range(10**9))
    return lambda index: torch.tensor([index, next(reads)])


@pytest.mark.parametrize(
    ("dataset", "collate", "words"),
    [
        (Samples(lambda index: torch.rand(2)), None, "draws random numbers"),
        (Samples(lambda index: random.random()), None, "draws random numbers"),
        (Noisy(), None, "draws random numbers"),
        (Samples(counting()), None, "another sample"),
        (Samples(ragged), None, "differ in shape"),
        (Samples(ragged), padding, "differ in shape"),
        (Samples(lambda index: index if index % 2 else float(index)), None, "differ in shape or type"),
        (Samples(lambda index: torch.tensor([float(index)])), centred, "depends on the other samples"),
        (Samples(lambda index: {"text": "a", "x": index}), None, "hold a"),
        (Samples(lambda index: {"text": None}), None, "cannot be read and stacked"),
        (Samples(lambda index: torch.tensor([1.0], requires_grad=True)), None, "not a plain one"),
        (Samples(lambda index: torch.tensor([index])), lambda samples: torch.stack(samples).t(), "for 16 samples"),
        (Stream(), None, "stream"),
    ],
)
def test_refused_in_words(dataset: Any, collate: Any, words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"^resident: .*{words}.*leave"):
        create(dataset, 4, resident=True, collate_fn=collate)
    assert torch.equal(before, torch.get_rng_state())


def test_a_rare_odd_sample_is_met_when_all_are_read() -> None:
    loader = create(Samples(lambda index: torch.zeros(2 if index == 31 else 1), 500), 4, resident=True, num_workers=0)
    with pytest.raises(ConfigError, match=r"differ in shape or type: \(\(2,\)"):
        list(loader)


def test_a_data_set_that_changes_is_noticed() -> None:
    state = {"add": 0}
    loader = create(Samples(lambda index: torch.tensor([index + state["add"]])), 4, resident=True)
    list(loader)
    state["add"] = 1
    with pytest.raises(DataError, match="other samples"):
        list(loader)


def test_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_samples_module, "memory_total_bytes", lambda: 100)
    with pytest.raises(ConfigError, match="GiB"):
        list(create(Samples(as_dict), 4, resident=True))
    list(create(table(), 4, resident=True))  # on a CPU these tensors are used where they lie


def test_the_size_follows_from_a_few_samples() -> None:
    data = Samples(as_dict, 10**6)
    assert look_at_samples(data, None).total_bytes == 10**6 * (3 * 4 + 8 + 8)
    assert data.reads < 100
    with pytest.raises(UnfitError, match="draws"):
        look_at_samples(Noisy(), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("data", ["tensors", "dicts", "named tuples", "own collate"])
def test_batches_on_the_gpu(data: str) -> None:
    dataset, options = DATA[data]
    ordinary, resident = (
        create(dataset, 4, seed=7, num_workers=0, epochs=3, resident=on, **options) for on in (False, True)
    )
    on_device = CudaDataLoader(resident, "cuda")
    for epoch, start in ((0, 0), (1, 5), (2, 0)):
        for loader in (ordinary, resident):
            loader.set_epoch(epoch)
            loader.seek(start)
        found = []
        for batch in on_device:
            if not found:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")  # from the second batch on nothing waits for the device
            found.append(batch)
        torch.cuda.set_sync_debug_mode("default")
        assert all(leaf.is_cuda for batch in found for _, leaf in leaves_of(batch))
        assert all(same_bits(left, right) for left, right in zip(found, ordinary, strict=True))
        if epoch == 1:
            on_device.open_ahead(2)
