"""Data sets of equal samples on a device: read once, then batched there by index.

A data set qualifies if each batch is just its samples' rows, stacked: tensors of fixed shapes that depend neither on
the rest of the batch nor on random numbers or the time of reading. Reading a few samples shows whether that holds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from frameworm.data.batches.counts import groups_of_steps
from frameworm.data.samples.held import Held, process_generators
from frameworm.data.samples.sampling import StepSampler
from frameworm.data.samples.workers import as_it_is, base_of
from frameworm.errors import ConfigError, DataError
from frameworm.hardware.host import memory_total_bytes

READ_AT_ONCE = 256
MOST_SHARE_ASKED = 0.5  # of the device's memory, if the user asks for resident samples
_PROBED = 16
_ALIGNED_BYTES = 64  # as torch's own CPU memory; a matmul may round differently on other alignments
_MOST_STEPS = 256
_FIRST_STEPS = 4
# Per gather: on a GPU the host pays per gather; on a CPU a batch should still be in the cache when it is used.
_CHUNK_BYTES_GPU = 2**23
_CHUNK_BYTES_CPU = 2**18

Fetch = Callable[[list[int]], Any]
Collate = Callable[[Any], Any]


class UnfitError(Exception):
    """Says why the samples of a data set cannot be kept on a device."""


@dataclass(frozen=True)
class EqualSamples:
    """What is known about a data set of equal samples.

    Attributes:
        count: Number of samples.
        template: A batch of the probed samples.
        probed: Indices of the probed samples.
        per_sample_s: Seconds to read one sample.
        one_by_one: Rows are read as batches of one sample, because the collate function is not torch's own.
        tensors: The samples themselves if they are stacked already.
    """

    count: int
    template: Any
    probed: list[int]
    per_sample_s: float
    one_by_one: bool
    tensors: list[Tensor] | None = None

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of one sample in each tensor."""
        return [leaf.nbytes // len(self.probed) for _, leaf in leaves_of(self.template)]

    @property
    def total_bytes(self) -> int:
        """Memory taken by all samples."""
        return sum(self.row_bytes) * self.count


def look_at_samples(dataset: Any, collate: Collate | None, fetch: Fetch | None = None) -> EqualSamples:
    """Read a few samples in several ways to check that a batch is nothing but its samples' rows.

    Args:
        dataset: Map-style.
        collate: Makes a batch of samples; None: torch's own.
        fetch: Reads and collates samples, if not directly from the data set.

    Raises:
        UnfitError: A batch is more than that; the message says why, as a clause about the data set.
    """
    count = len(dataset)
    stacks = batch_maker(dataset, collate) is stack_alike
    probed = np.unique(np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)).tolist()
    fetch = fetch or fetcher(dataset, collate)
    watch = Draws(dataset, collate)
    try:
        began = time.perf_counter()
        batch = fetch(probed)
        per_sample_s = (time.perf_counter() - began) / len(probed)
        _check_rows(batch, len(probed))
        again, backward = fetch(probed), fetch(probed[::-1])
        alone = [fetch([index]) for index in probed]
    except UnfitError:
        raise
    except Exception as error:  # from the user's code, or from a collate that cannot stack these samples
        raise UnfitError(_why_not_stacked(error)) from error
    finally:
        drew = watch.restore()
    if drew:
        raise UnfitError("draws random numbers when a sample is read")
    if not same_bits(batch, again):
        raise UnfitError("gives another sample when the same index is read again")
    for single in alone:
        _check_like(single, batch)
    if not same_bits(batch, _rows_of(backward, slice(None), flip=True)) or any(
        not same_bits(single, _rows_of(batch, slice(row, row + 1))) for row, single in enumerate(alone)
    ):
        raise UnfitError("gives batches in which a sample's row depends on the other samples")
    tensors = _stacked_already(dataset) if stacks else None
    return EqualSamples(count, batch, probed, per_sample_s, not stacks, tensors)


def batch_maker(dataset: Any, collate: Collate | None) -> Collate:
    """The function that makes a batch of samples; torch's default is used only for samples of one kind."""
    if collate is None and getattr(base_of(dataset), "assembles_batches", False):
        return as_it_is
    return stack_alike if collate is None or collate is default_collate else collate


def fetcher(dataset: Any, collate: Collate | None) -> Fetch:
    """The function that reads and collates given indices, as torch's loader does."""
    many = getattr(dataset, "__getitems__", None)
    make = batch_maker(dataset, collate)
    return lambda indices: make(many(indices) if callable(many) else [dataset[index] for index in indices])


def stack_alike(samples: list[Any]) -> Any:
    """torch's `default_collate`, restricted to samples of one kind: it would cast mixed dtypes to the first sample's.

    Raises:
        UnfitError: The samples differ.
    """
    first = _kind(samples[0])
    for sample in samples:
        if _kind(sample) != first:
            raise UnfitError(f"has samples that differ in shape or type: {_kind(sample)} and {first}")
    return default_collate(samples)


class Draws:
    """Detects whether reading a data set draws from a generator, of the process or of its own."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._held = Held({**process_generators(), "dataset": dataset, "collate_fn": collate})
        self._before = self._held.capture()

    def drew(self) -> bool:
        """Whether a generator has advanced."""
        now, before = (item["generators"] for item in (self._held.capture(), self._before))
        return any(_state_bytes(now[path]) != _state_bytes(before[path]) for path in before if path in now)

    def restore(self) -> bool:
        """Restore the generators; returns whether one had advanced."""
        drew = self.drew()
        if drew:
            self._held.restore({**self._before, "counters": {}})
        return drew


def _state_bytes(state: dict[str, Any]) -> bytes:
    tensor = state.get("torch")
    return repr(state).encode() if tensor is None else bytes(tensor.numpy())


def leaves_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their paths in it.

    Raises:
        UnfitError: The batch holds something other than tensors.
    """
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves_of(value, f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for place, value in enumerate(batch):
            yield from leaves_of(value, f"{path}[{place}]")
    else:
        raise UnfitError(f"has batches that hold a {type(batch).__name__}, not only tensors")


def same_bits(first: Any, second: Any) -> bool:
    """Whether two batches have the same structure and identical bits."""
    ones, others = dict(leaves_of(first)), dict(leaves_of(second))
    if type(first) is not type(second) or list(ones) != list(others):
        return False
    return all(_equal(one, other) for one, other in zip(ones.values(), others.values()))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (item.detach().cpu().contiguous().view(torch.uint8) for item in (one, other))
    return torch.equal(left, right)


def _check_rows(batch: Any, count: int) -> None:
    found = list(leaves_of(batch))
    if not found:
        raise UnfitError("has batches without a tensor")
    for path, leaf in found:
        name = f"the tensor at batch{path}"
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
            raise UnfitError(f"has batches in which {name} is not a plain one")
        if leaf.dim() == 0 or leaf.size(0) != count:
            raise UnfitError(f"has batches in which {name} has the shape {list(leaf.shape)} for {count} samples")
        if not leaf.is_contiguous():
            raise UnfitError(f"has batches in which {name} is not contiguous")


def _check_like(batch: Any, template: Any) -> None:
    """Refuse rows that differ from the template's in structure, shape or type."""
    ones, others = list(leaves_of(batch)), list(leaves_of(template))
    if [path for path, _ in ones] != [path for path, _ in others]:
        raise UnfitError("has samples that differ in what they hold")
    for (path, one), (_, other) in zip(ones, others):
        if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
            raise UnfitError(
                f"has samples that differ in shape or type: batch{path} is {_words(one)} and {_words(other)}"
            )


def _words(tensor: Tensor) -> str:
    return f"{list(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"


def _rows_of(batch: Any, rows: slice, flip: bool = False) -> Any:
    return rebuilder(batch)([(leaf.flip(0) if flip else leaf)[rows] for _, leaf in leaves_of(batch)])


def _kind(sample: Any) -> Any:
    """A description of a sample that must be equal for two samples to be stacked in any order."""
    if isinstance(sample, (Tensor, np.ndarray)):
        return tuple(sample.shape), str(sample.dtype)
    if isinstance(sample, Mapping):
        return {key: _kind(value) for key, value in sample.items()}
    if isinstance(sample, (tuple, list)):
        return [_kind(item) for item in sample]
    return type(sample).__name__


def _why_not_stacked(error: Exception) -> str:
    return f"cannot be read and stacked ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


def _stacked_already(dataset: Any) -> list[Tensor] | None:
    """The tensors of a `TensorDataset`, or of a subset of one."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is not Subset or type(dataset.dataset) not in (TensorDataset, Subset):
        return None
    tensors = _stacked_already(dataset.dataset)
    if tensors is None:
        return None
    indices = torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))
    return [tensor[indices.to(tensor.device)] for tensor in tensors]


def rebuilder(template: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that builds a batch like the template from its tensors in the order of `leaves_of`."""
    kind = type(template)
    if kind is list and all(isinstance(item, Tensor) for item in template):
        return list
    if kind is dict and all(isinstance(item, Tensor) for item in template.values()):
        keys = list(template)
        return lambda tensors: dict(zip(keys, tensors))
    if isinstance(template, Tensor):
        return lambda tensors: tensors[0]

    def rebuild(part: Any, tensors: Iterator[Tensor]) -> Any:
        if isinstance(part, Tensor):
            return next(tensors)
        if isinstance(part, Mapping):
            filled = {key: rebuild(value, tensors) for key, value in part.items()}
            if type(part) is dict or not isinstance(part, MutableMapping):
                return filled
            clone = copy.copy(part)
            clone.update(filled)
            return clone
        items = [rebuild(item, tensors) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)

    return lambda tensors: rebuild(template, iter(tensors))


@dataclass(eq=False)
class Chunk:
    """The samples of several steps on the device, and how to cut them into batches."""

    tensors: list[Tensor]
    cut: Callable[[list[Tensor]], Iterator[Any]]

    def batches(self) -> Iterator[Any]:
        """The batches, as views."""
        return self.cut(self.tensors)


class ResidentBatches:
    """Batches of equal samples, assembled on the device in a sampler's order.

    An epoch's indices are sent to the device once. No call waits for the device.

    Args:
        samples: The result of `look_at_samples`.
        fetch: Reads and collates samples in this process.
        read: Reads all samples in the data set's order, in batches of the given size.
        watch: Starts watching the data set's generators.
    """

    def __init__(
        self,
        samples: EqualSamples,
        fetch: Fetch,
        read: Callable[[int], Iterable[Any]],
        watch: Callable[[], Draws],
    ) -> None:
        self._samples = samples
        self._fetch = fetch
        self._read = read
        self._watch = watch
        self._rebuild = rebuilder(samples.template)
        self._tensors: list[Tensor] | None = None
        self._device: torch.device | None = None
        self._sampler: StepSampler | None = None
        self._opened: tuple[int, torch.device, Iterator[Chunk]] | None = None

    def place(self, sampler: StepSampler) -> None:
        """Set the sampler that decides which samples form this rank's micro-batches."""
        sampler.kept_orders = max(2, sampler.kept_orders)
        self._sampler = sampler
        self._opened = None

    def chunks(self, epoch: int, start: int, device: torch.device) -> Iterator[Chunk]:
        """The chunks of an epoch from a step on."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[:2] == (epoch, device) and not start:
            return opened[2]
        return self._open(epoch, start, device)

    def open_ahead(self, epoch: int, device: torch.device) -> None:
        """Assemble the next epoch's first chunk; the user's own sampler must draw when its epoch begins."""
        if type(self._sampler) is StepSampler:
            chunks = self._open(epoch, 0, device)
            self._opened = (epoch, device, chain([next(chunks)], chunks))

    def close(self) -> None:
        """Release the samples."""
        self._tensors = self._opened = None

    def _open(self, epoch: int, start: int, device: torch.device) -> Iterator[Chunk]:
        tensors = self._on(device)
        assert self._sampler is not None, "not placed yet"
        order = self._checked(self._sampler.order_of(epoch))
        unit = _ALIGNED_BYTES // math.gcd(_ALIGNED_BYTES, *self._samples.row_bytes)
        tables = []
        for begins, pieces in groups_of_steps(self._sampler, len(order)):
            places: list[int] = []
            sizes: list[int] = []
            counts: list[bool] = []
            for piece in pieces:
                size = piece.stop - piece.start
                spare = -size % unit
                places += [*range(piece.start, piece.stop), *[piece.start] * spare]
                sizes += [size, spare] if spare else [size]
                counts += [True, False] if spare else [True]
            table = order[begins[:, None] + np.array(places)]
            table = table[max(0, start - int(begins[0]) // self._sampler.global_batch) :]
            rows = torch.from_numpy(table)
            if device.type == "cuda":
                rows = rows.pin_memory().to(device, non_blocking=True)
            tables.append((rows.to(device), sizes, counts))
        return self._cut(tensors, tables)

    def _cut(self, tensors: list[Tensor], tables: list[tuple[Tensor, list[int], list[bool]]]) -> Iterator[Chunk]:
        on_gpu = tensors[0].is_cuda
        most_bytes = _CHUNK_BYTES_GPU if on_gpu else _CHUNK_BYTES_CPU
        steps = _FIRST_STEPS  # small at first, so that the first step does not wait long
        for rows, sizes, counts in tables:
            most = max(1, min(_MOST_STEPS, most_bytes // (sum(self._samples.row_bytes) * rows.size(1))))
            begin = 0
            while begin < len(rows):
                taken = rows[begin : begin + min(steps, most)]
                flat = taken.reshape(-1)
                gathered = [tensor.index_select(0, flat) for tensor in tensors]
                yield Chunk(gathered, self._cutter(sizes * len(taken), counts))
                begin += len(taken)
                steps *= 2

    def _cutter(self, sizes: list[int], counts: list[bool]) -> Callable[[list[Tensor]], Iterator[Any]]:
        def cut(tensors: list[Tensor]) -> Iterator[Any]:
            rows = zip(*[tensor.split_with_sizes(sizes) for tensor in tensors])
            return map(self._rebuild, rows if all(counts) else compress(rows, cycle(counts)))

        return cut

    def _checked(self, order: NDArray[Any]) -> NDArray[np.int64]:
        """Check and normalise the indices on the host, since the device cannot reject bad ones."""
        count = self._samples.count
        if order.dtype == object:
            raise ConfigError("resident: the sampler yields keys that are not numbers; leave resident off")
        if not -count <= int(order.min()) <= int(order.max()) < count:
            raise DataError(f"resident: the sampler yields an index beyond the data set's {count} samples")
        order = order.astype(np.int64, copy=False)
        return np.where(order < 0, order + count, order) if order.min() < 0 else order

    def _on(self, device: torch.device) -> list[Tensor]:
        if self._tensors is None or self._device != device:
            self._tensors = None
            self._tensors = self._load(device)
            self._device = device
        few = self._samples.probed[:2]
        if not same_bits(self._fetch(few), _rows_of(self._samples.template, slice(0, len(few)))):
            raise DataError("resident: the data set gives other samples than at the start; leave resident off")
        return self._tensors

    def _load(self, device: torch.device) -> list[Tensor]:
        samples = self._samples
        if samples.tensors is not None and device.type == "cpu":
            return [tensor.to(device) for tensor in samples.tensors]
        memory_bytes = memory_total_bytes()
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        if samples.total_bytes > MOST_SHARE_ASKED * memory_bytes:
            raise ConfigError(
                f"resident: the data set would take {samples.total_bytes / 2**30:.1f} GiB of the {device.type}'s "
                f"{memory_bytes / 2**30:.1f} GiB; leave resident off"
            )
        if samples.tensors is not None:
            return [tensor.to(device) for tensor in samples.tensors]
        try:
            return self._filled(device)
        except UnfitError as error:
            raise unfit(error) from error

    def _filled(self, device: torch.device) -> list[Tensor]:
        samples = self._samples
        shapes = [((samples.count, *leaf.shape[1:]), leaf.dtype) for _, leaf in leaves_of(samples.template)]
        filled = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        watch = self._watch()
        done = 0
        waiting: list[list[Tensor]] = []

        def put() -> None:
            nonlocal done
            columns = [torch.cat(parts) for parts in zip(*waiting)]
            for target, rows in zip(filled, columns):
                target[done : done + len(rows)].copy_(rows)
            done += len(columns[0])
            waiting.clear()

        for batch in self._read(1 if samples.one_by_one else READ_AT_ONCE):
            _check_like(batch, samples.template)
            waiting.append([leaf for _, leaf in leaves_of(batch)])
            if sum(len(rows[0]) for rows in waiting) >= READ_AT_ONCE:
                put()
        if waiting:
            put()
        if watch.restore():
            raise UnfitError("draws random numbers when a sample is read")
        assert done == samples.count, "each sample is read once"
        return filled


def unfit(error: UnfitError) -> ConfigError:
    """The ConfigError for resident samples of a data set that does not allow them."""
    # An error from a worker process has that process's traceback around it.
    why = str(error).strip().rpartition(f"{UnfitError.__name__}: ")[2]
    return ConfigError(
        f"resident: the data set {why}, so its batches cannot be put together on the device; leave resident off"
    )
