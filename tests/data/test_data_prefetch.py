"""Batches on their way to the device."""

from __future__ import annotations

import contextlib
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from frameworm.data import prefetch
from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader, move_batch
from frameworm.errors import DeviceError

Pair = namedtuple("Pair", "left right")
META = torch.device("meta")  # stands for a device that is not the CPU


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like the encodings of HF tokenizers: a mapping with attributes of its own."""

    def __init__(self, data: dict[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note


class Movable:
    """An object with `.to`."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: Any) -> Movable:
        return Movable(self.values.to(device))


class Hidden:
    """An object with `.to` whose tensors nobody sees."""

    __slots__ = ("_values",)

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def to(self, device: Any) -> Hidden:
        return Hidden(self._values.to(device))

    def read(self) -> torch.Tensor:
        return self._values


def nested() -> dict[str, Any]:
    return {
        "plain": torch.ones(3, 2),
        "tuple": (torch.ones(1), "text"),
        "named": Pair(torch.ones(1), [torch.ones(2), 5]),
        "encoding": Encoding({"input_ids": torch.ones(3)}, note="kept"),
        "movable": Movable(torch.ones(4)),
        "packed": pack_sequence([torch.ones(2), torch.ones(1)]),
        "number": 1.5,
        "nothing": None,
    }


def test_moving_keeps_the_structure() -> None:
    batch = nested()
    moved = move_batch(batch, META)
    assert moved["plain"].device == moved["tuple"][0].device == META
    assert moved["tuple"][1] == "text"
    assert type(moved["tuple"]) is tuple
    assert isinstance(moved["named"], Pair)
    assert moved["named"].right[0].device == META
    assert type(moved["encoding"]) is Encoding
    assert moved["encoding"]["input_ids"].device == META
    assert moved["encoding"].note == "kept"
    assert batch["encoding"]["input_ids"].device.type == "cpu", "the given batch is not changed"
    assert moved["movable"].values.device == META
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert (moved["number"], moved["nothing"]) == (1.5, None)


def test_nothing_to_move_gives_the_same_object() -> None:
    batch = {"pair": Pair(torch.ones(1), (torch.ones(2), "x")), "encoding": Encoding({"a": torch.ones(1)})}
    assert move_batch(batch, "cpu") is batch


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ((torch.tensor(1.0), torch.ones(3)), 3),
        ({"name": "x", "input": torch.ones(4, 1)}, 4),
        (Encoding({"ids": torch.ones(2)}), 2),
        (Movable(torch.ones(6)), 6),
        (["text", "text"], 2),
        ("text", None),
        (torch.tensor(1.0), None),
    ],
)
def test_batch_size_of(batch: Any, size: int | None) -> None:
    assert batch_size_of(batch) == size


def test_on_the_cpu_batches_pass_through() -> None:
    batches = [(torch.ones(1), {"x": torch.zeros(2)}), (torch.ones(2), {"x": torch.zeros(1)})]
    loader = CudaDataLoader(batches, "cpu")
    assert [given is got for given, got in zip(batches, loader)] == [True, True]
    assert len(loader) == 2


def test_batches_that_are_elsewhere_are_moved() -> None:
    assert next(iter(CudaDataLoader([torch.ones(2)], META))).device == META


def test_it_stands_for_the_loader_it_wraps() -> None:
    inner = OptimizedDataLoader.create(list(range(10)), 2, num_workers=0, shuffle=False)
    loader = CudaDataLoader(inner, "cpu")
    loader.set_epoch(1)
    loader.seek(3)
    assert [batch.tolist() for batch in loader] == [[6, 7], [8, 9]]
    assert loader.step_shape(0).samples == [2]
    assert loader.dataset is inner.dataset
    assert len(loader) == 5
    assert not hasattr(CudaDataLoader([1], "cpu"), "set_epoch")


def test_a_loader_without_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(CudaDataLoader(iter([torch.ones(1)]), "cpu"))


def failing() -> Iterator[torch.Tensor]:
    yield torch.ones(1)
    yield torch.ones(1) * 2
    raise OSError("disk on fire")


def surfaces_after_two(device: str) -> None:
    batches = iter(CudaDataLoader(failing(), device))
    assert [float(next(batches)), float(next(batches))] == [1.0, 2.0]
    with pytest.raises(OSError, match="disk on fire"):
        next(batches)


def test_an_error_in_the_loader_surfaces_at_its_batch() -> None:
    surfaces_after_two("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="no GPU"):
        CudaDataLoader([], "cuda")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_values_and_structure_on_the_gpu() -> None:
    for batch in CudaDataLoader([nested(), nested()], "cuda"):
        assert batch["plain"].is_cuda
        assert float(batch["plain"].sum()) == 6
        assert batch["encoding"].note == "kept"
        assert float(batch["encoding"]["input_ids"].sum()) == 3
        assert float(batch["movable"].values.sum()) == 4
        assert batch["packed"].data.is_cuda
    hidden = [(torch.full((2,), float(index)), Hidden(torch.full((2,), float(index)))) for index in range(4)]
    for index, (tensor, opaque) in enumerate(CudaDataLoader(hidden, 0)):
        assert tensor.is_cuda
        assert tensor.tolist() == opaque.read().tolist() == [index, index]


@pytest.mark.gpu
@needs_gpu
def test_an_error_on_the_gpu_surfaces_at_its_batch() -> None:
    surfaces_after_two("cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_memory_is_not_reused_while_the_caller_still_reads(pinned: bool) -> None:
    size = 1 << 20
    source = [torch.full((size,), float(index)) for index in range(40)]
    if pinned:
        source = [tensor.pin_memory() for tensor in source]
    busy = torch.ones(2048, 2048, device="cuda")
    sums = []
    for batch in CudaDataLoader(source, "cuda"):
        # The device falls far behind the host, so freed batches come up for reuse before they have been read.
        for _ in range(8):
            busy = (busy @ busy).clamp(max=1.0)
        sums.append(batch.sum(dtype=torch.float64))
        del batch
    assert [float(value) for value in sums] == [float(index * size) for index in range(40)]


@pytest.mark.gpu
@needs_gpu
def test_the_caller_reads_only_what_has_arrived() -> None:
    # Large enough that the copy is still under way when the caller's first kernel could start.
    source = torch.ones(1 << 26).pin_memory()
    assert [float(batch[-1024:].sum()) for batch in CudaDataLoader([source, source], "cuda")] == [1024, 1024]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("small", [False, True])
def test_large_batches_leave_the_callers_stream_and_nobody_waits(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    calls: list[tuple[bool, bool]] = []
    original = torch.Tensor.to

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        on_side_stream = torch.cuda.current_stream() != torch.cuda.default_stream()
        calls.append((on_side_stream, kwargs["non_blocking"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    size = 4 if small else prefetch.SMALL_BATCH_BYTES
    batches = [(torch.ones(size).pin_memory(), torch.ones(size))]
    moved = next(iter(CudaDataLoader(batches, "cuda")))
    assert calls == [(not small, True)] * 2
    assert all(float(tensor.sum()) == size for tensor in moved)


@pytest.mark.gpu
@needs_gpu
def test_a_pinning_loader_feeds_the_gpu() -> None:
    inner = OptimizedDataLoader.create(torch.arange(10.0), 3, num_workers=0, shuffle=False)
    assert all(batch.is_pinned() for batch in inner)
    assert torch.cat(list(CudaDataLoader(inner, "cuda"))).tolist() == list(range(10))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total = sum(batch.sum() for batch in CudaDataLoader(inner, "cuda"))
    stream.synchronize()
    assert float(total) == 45


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "tensor"])
def test_a_small_batch_keeps_its_kind(kind: str) -> None:
    tensor = torch.arange(3.0)
    batch: Any = {"dict": {"a": tensor, "b": tensor}, "tuple": (tensor, tensor), "list": [tensor], "tensor": tensor}[
        kind
    ]
    assert prefetch._is_small(batch)
    moved = prefetch._copied(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert all(item.device.type == "meta" and item.shape == (3,) for item in prefetch.tensors_in(moved))
    assert not prefetch._is_small((tensor, "text"))
    assert not prefetch._is_small(torch.empty(prefetch.SMALL_BATCH_BYTES, device="meta"))


class SideStream:
    """Stands in for a stream and an event, which a machine without a GPU cannot make."""

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("size", [8, prefetch.SMALL_BATCH_BYTES], ids=["small", "large"])
def test_the_time_of_copies_is_told_apart_from_that_of_the_loader(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    now_s = 0.0

    def copy(batch: Any, device: Any, non_blocking: bool = True) -> Any:
        nonlocal now_s
        now_s += 0.25
        return batch

    def batches() -> Iterator[torch.Tensor]:
        nonlocal now_s
        for _ in range(3):
            now_s += 1.0
            yield torch.zeros(size, dtype=torch.float32)

    monkeypatch.setattr(prefetch, "perf_counter", lambda: now_s)
    monkeypatch.setattr(prefetch, "_copied", copy)
    monkeypatch.setattr(prefetch, "move_batch", copy)
    monkeypatch.setattr(prefetch, "_checked", torch.device)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, SideStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    loader = CudaDataLoader(batches(), "cuda:0")
    spent = []
    iterator = iter(loader)
    while next(iterator, None) is not None:
        spent.append(loader.copied_s)
        loader.copied_s = 0.0
    # A large batch is copied one ahead, so that the first request makes two copies and the last none.
    assert spent == ([0.25, 0.25, 0.25] if size == 8 else [0.5, 0.25, 0.0])
    assert loader.copied_s == 0.0
