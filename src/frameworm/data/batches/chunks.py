"""The packed batches of a run: their common shape, and the samples of each, built in chunks of tens of batches."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameworm.data.batches.ahead import ReadAhead
from frameworm.data.batches.counts import groups_of_steps
from frameworm.data.batches.packed import MISSING, PackedTexts, batch_bytes, round_capacity
from frameworm.data.batches.resident import ResidentTexts, fits_device
from frameworm.data.corpora.token_sets import Packing
from frameworm.data.samples.sampling import StepSampler
from frameworm.errors import DeviceError

LOOKED_AT_EPOCHS = 8
_MOST_BATCHES = 32
_TIMES_RESIDENT = 8  # on the device a chunk costs the host the same however many batches it holds
_MOST_BYTES = 2**23
_FIRST_BATCHES = 4
_MOST_KEPT_SAMPLES = 2**23


class ChunkPlan:
    """Packed batches of one rank.

    The capacity T is the same on all ranks: the largest token sum of any rank's micro-batch in the first epochs (at
    most eight, fewer for more than a million samples), rounded up. A later epoch that needs more gets a larger one.

    Args:
        packing: The samples.
        sampler: Decides which samples form which micro-batch.
        epochs: Number of epochs that will be read, if known.
    """

    def __init__(self, packing: Packing, sampler: StepSampler, epochs: int = 1) -> None:
        self._packing = packing
        self._sampler = sampler
        self._epochs = epochs
        share = -(-sampler.global_batch // sampler.world_size)
        self.batch_size = min(sampler.micro_batch, share)
        self._needs: dict[int, int] = {}
        self._usual: int | None = None
        self._preparing: dict[int, threading.Thread] = {}
        self._ready: dict[int, NDArray[np.int64]] = {}  # rows of the next epoch, prepared in full
        # Orders of a large data set cost time to draw and memory to keep, so fewer epochs are examined.
        self._looked_at = max(1, min(epochs, LOOKED_AT_EPOCHS, _MOST_KEPT_SAMPLES // sampler.size))
        sampler.kept_orders = max(2, self._looked_at)

    def capacity(self, epoch: int) -> int:
        """T: the number of tokens in every micro-batch of an epoch."""
        if self._usual is None:
            self._usual = max(self._need(early) for early in range(self._looked_at))
        return round_capacity(max(self._usual, self._need(epoch)))

    def rows(self, epoch: int, start: int = 0) -> NDArray[np.int64]:
        """This rank's samples [micro-batches, batch_size] from a step on; -1 marks an empty slot."""
        self._wait_for(epoch)
        ready = self._ready.get(epoch)
        self._ready.clear()
        return self._rows(epoch, start) if ready is None or start else ready

    def _rows(self, epoch: int, start: int) -> NDArray[np.int64]:
        order = self._sampler.order_of(epoch)
        found = []
        for begins, pieces in groups_of_steps(self._sampler, len(order)):
            rows = np.full((len(begins), len(pieces), self.batch_size), MISSING, dtype=np.int64)
            for number, piece in enumerate(pieces):
                size = piece.stop - piece.start
                rows[:, number, :size] = order[begins[:, None] + np.arange(piece.start, piece.stop)]
            found.append(rows[max(0, start - int(begins[0]) // self._sampler.global_batch) :])
        return np.concatenate([rows.reshape(-1, self.batch_size) for rows in found])

    def prepare(self, epoch: int) -> None:
        """Draw an epoch's order and build its rows in a thread, so that nothing waits when that epoch begins."""
        if epoch < self._epochs and epoch not in self._preparing and epoch not in self._ready:
            thread = threading.Thread(target=self._draw, args=(epoch,), name="frameworm-next-epoch", daemon=True)
            self._preparing[epoch] = thread
            thread.start()

    def _draw(self, epoch: int) -> None:
        """Runs in the thread: compute everything that can be known of an epoch before it begins."""
        if epoch not in self._needs or not self._sampler.has_order(epoch):
            self._measure(epoch)
        self._ready[epoch] = self._rows(epoch, 0)

    def host_chunks(self, epoch: int, start: int, pin: bool) -> ReadAhead[Any, dict[str, Tensor]]:
        """Chunks in host memory, assembled in a thread."""
        capacity = self.capacity(epoch)
        texts = PackedTexts(self._packing, self.batch_size, capacity)
        device = torch.cuda.current_device() if pin else None
        rows = self.rows(epoch, start)
        return ReadAhead(
            (rows[part] for part in self._parts(epoch, len(rows), capacity, _MOST_BATCHES)),
            lambda part: texts.chunk(part, pin=pin),
            # A new thread would otherwise use the first GPU, and allocate memory there.
            start=None if device is None else lambda: torch.cuda.set_device(device),
        )

    def resident_chunks(self, texts: ResidentTexts, epoch: int, start: int) -> Iterator[dict[str, Tensor]]:
        """Chunks assembled on the device; an epoch's indices are sent there once."""
        capacity = self.capacity(epoch)
        rows = torch.from_numpy(self.rows(epoch, start))
        if texts.device.type == "cuda":
            rows = rows.pin_memory().to(texts.device, non_blocking=True)
        parts = self._parts(epoch, len(rows), capacity, _TIMES_RESIDENT * _MOST_BATCHES)
        return (texts.chunk(rows[part], capacity) for part in parts)

    def _parts(self, epoch: int, count: int, capacity: int, batches_at_most: int) -> Iterator[slice]:
        """Split into small chunks first, so that the first step need not wait; near the end, prepare the next epoch."""
        size = batch_bytes(self.batch_size, capacity, self._packing.max_seq_len)
        most = max(1, min(batches_at_most, _MOST_BYTES // size))
        begin, batches = 0, min(_FIRST_BATCHES, most)
        while begin < count:
            yield slice(begin, min(begin + batches, count))
            begin += batches
            if batches == most or begin >= count:
                self.prepare(epoch + 1)
            batches = min(2 * batches, most)

    def _need(self, epoch: int) -> int:
        """The largest token sum of any rank's micro-batch in an epoch."""
        self._wait_for(epoch)
        if epoch not in self._needs:
            self._measure(epoch)
        return self._needs[epoch]

    def _measure(self, epoch: int) -> None:
        sampler = self._sampler
        order = sampler.order_of(epoch)
        before = np.concatenate(([0], np.cumsum(self._packing.lengths[order], dtype=np.int64)))
        most = 1
        for begins, _ in groups_of_steps(sampler, len(order)):
            samples = min(sampler.global_batch, len(order) - int(begins[0]))
            pieces = sampler.pieces_of_all(samples)
            starts = np.array([piece.start for piece in pieces])
            stops = np.array([piece.stop for piece in pieces])
            sums = before[begins[:, None] + stops] - before[begins[:, None] + starts]
            most = max(most, int(sums.max()))
        self._needs[epoch] = most

    def _wait_for(self, epoch: int) -> None:
        thread = self._preparing.pop(epoch, None)
        if thread is not None:
            thread.join()


class PackedBatches:
    """The source of a loader's chunks: a thread on the host, or the device itself.

    Args:
        packing: The samples.
        epochs: As for `ChunkPlan`.
        resident: Whether the samples are kept on the device; auto: if they are small relative to its memory.
        pin: Whether host chunks are page-locked.
    """

    def __init__(self, packing: Packing, epochs: int, resident: bool | Literal["auto"], pin: bool) -> None:
        self._packing = packing
        self._epochs = epochs
        self._wanted = resident
        self._pin = pin
        self._plan: ChunkPlan | None = None
        self._resident: ResidentTexts | None = None
        self._readers: weakref.WeakSet[ReadAhead[Any, Any]] = weakref.WeakSet()
        self._opened: tuple[int, torch.device | None, Iterator[dict[str, Tensor]]] | None = None

    @property
    def plan(self) -> ChunkPlan:
        """The current plan."""
        assert self._plan is not None, "not placed yet"
        return self._plan

    def place(self, sampler: StepSampler) -> None:
        """Set the sampler that decides which samples form this rank's micro-batches."""
        self._plan = ChunkPlan(self._packing, sampler, self._epochs)
        self._opened = None

    def chunks(self, epoch: int, start: int, device: torch.device | None) -> Iterator[dict[str, Tensor]]:
        """The chunks of an epoch from a step on; see `OptimizedDataLoader.chunks`."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[:2] == (epoch, device) and not start:
            return opened[2]
        return self._open(epoch, start, device)

    def open_ahead(self, epoch: int, device: torch.device | None) -> None:
        """Assemble the first chunk of an epoch now."""
        if epoch < self._epochs:
            chunks = self._open(epoch, 0, device)
            first = [] if isinstance(chunks, ReadAhead) else [next(chunks)]  # a reader's thread starts by itself
            self._opened = (epoch, device, itertools.chain(first, chunks) if first else chunks)

    def _open(self, epoch: int, start: int, device: torch.device | None) -> Iterator[dict[str, Tensor]]:
        texts = None if device is None else self._on(device)
        if texts is not None:
            return self.plan.resident_chunks(texts, epoch, start)
        reader = self.plan.host_chunks(epoch, start, self._pin)
        self._readers.add(reader)
        return reader

    def close(self) -> None:
        """Stop the reader threads."""
        self._opened = None
        for reader in list(self._readers):
            reader.close()

    def _on(self, device: torch.device) -> ResidentTexts | None:
        """The samples on the device, or None if they stay on the host."""
        if self._wanted is False:
            return None
        if self._wanted is True and device.type != "cuda":
            raise DeviceError(f"resident: true keeps the samples on a GPU, and this run is on {device}; use auto")
        if self._resident is None or self._resident.device != device:
            if self._wanted == "auto" and not fits_device(self._packing, device):
                return None
            self._resident = ResidentTexts(self._packing, device)
        return self._resident
