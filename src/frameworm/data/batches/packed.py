"""Texts laid end to end: batches without padding, all of one shape.

A packed batch is a dict, in this order:

- `labels` int64 [B]: the classes; -100 where the micro-batch has fewer than B samples.
- `input_ids` int64 [T]: all sequences, one after another; the rest of the capacity T is padding.
- `positions` int64 [T]: where in its own sequence each token stands.
- `offsets` int32 [S + 1]: sequence i is `input_ids[offsets[i]:offsets[i + 1]]`. The first B are the samples (missing
  ones are empty); then come the padding, cut into sequences of at most `max_seq_len`, and empty ones, so that
  `offsets[-1]` is T and S is B + ceil(T / max_seq_len).

A chunk is several of them in one dict, with a dimension in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from frameworm.data.corpora.token_sets import Packing
from frameworm.data.samples.workers import base_of
from frameworm.errors import DataError

Indices = NDArray[Any] | Sequence[Sequence[int]]
MISSING = -1
IGNORED_LABEL = -100
_COARSE_FROM = 2_048


def packable(dataset: Any) -> bool:
    """Whether samples can be laid end to end: the data set, or the one it is a subset of, has `packing()`."""
    return callable(getattr(base_of(dataset), "packing", None))


def packing_of(dataset: Any) -> Packing:
    """What the packed batches of a packable data set are built from."""
    if isinstance(dataset, Subset):
        return packing_of(dataset.dataset).of(np.asarray(dataset.indices, dtype=np.int64))
    packing: Packing = dataset.packing()
    return packing


def round_capacity(tokens: int) -> int:
    """Round up to a size that suits the hardware: a multiple of 16, or of 64 above 2,048."""
    unit = 16 if tokens < _COARSE_FROM else 64
    return max(1, -(-tokens // unit)) * unit


def spare_sequences(capacity: int, max_seq_len: int) -> int:
    """Extra sequences of a packed batch that hold its padding."""
    return -(-capacity // max_seq_len)


def batch_bytes(batch_size: int, capacity: int, max_seq_len: int) -> int:
    """Bytes of one packed batch."""
    return 16 * capacity + 8 * batch_size + 4 * (batch_size + spare_sequences(capacity, max_seq_len) + 1)


def batches_of(chunk: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The batches of a chunk, as views."""
    names = tuple(chunk)
    for tensors in zip(*(tensor.unbind(0) for tensor in chunk.values())):
        yield dict(zip(names, tensors))


class PackedTexts(Dataset[dict[str, Tensor]]):
    """A view of labelled texts that yields packed batches.

    Args:
        texts: A packable data set, or its `Packing`.
        batch_size: B, the most samples of a batch.
        capacity: T, the tokens of a batch.
    """

    assembles_batches = True

    def __init__(self, texts: Any, batch_size: int, capacity: int) -> None:
        self.packing = texts if isinstance(texts, Packing) else packing_of(texts)
        self.batch_size = batch_size
        self.capacity = capacity
        self.token_lengths = self.packing.lengths

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A batch of one sample."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([index % len(self)])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One packed batch."""
        return next(batches_of(self.chunk([indices])))

    def chunk(self, indices: Indices, *, capacity: int | None = None, pin: bool = False) -> dict[str, Tensor]:
        """Build several packed batches at once, without a Python loop over samples.

        Args:
            indices: The samples of each batch, at most `batch_size`; as an array [batches, batch_size], -1 marks an
                empty slot.
            capacity: T for this chunk; None: the usual one.
            pin: Use page-locked memory.

        Raises:
            DataError: A batch holds more tokens than its capacity.
        """
        packing = self.packing
        capacity = self.capacity if capacity is None else capacity
        rows = indices if isinstance(indices, np.ndarray) else _as_rows(indices, self.batch_size)
        count, batch_size = rows.shape
        spare = spare_sequences(capacity, packing.max_seq_len)
        chunk = {
            "labels": torch.empty((count, batch_size), dtype=torch.int64, pin_memory=pin),
            "input_ids": torch.empty((count, capacity), dtype=torch.int64, pin_memory=pin),
            "positions": torch.empty((count, capacity), dtype=torch.int64, pin_memory=pin),
            "offsets": torch.empty((count, batch_size + spare + 1), dtype=torch.int32, pin_memory=pin),
        }
        labels, input_ids, positions, offsets = (tensor.numpy() for tensor in chunk.values())
        present = rows >= 0
        np.copyto(labels, np.where(present, packing.labels[rows], IGNORED_LABEL))
        lengths = np.where(present, packing.lengths[rows], 0)
        offsets[:, 0] = 0
        np.cumsum(lengths, axis=1, out=offsets[:, 1 : batch_size + 1])
        used = offsets[:, batch_size : batch_size + 1]
        if used.max(initial=0) > capacity:
            raise DataError(
                f"a packed batch holds {used.max()} tokens and has room for {capacity}; give PackedTexts a larger "
                "capacity"
            )
        padding = np.arange(1, spare + 1, dtype=np.int32) * packing.max_seq_len
        np.minimum(used + padding, capacity, out=offsets[:, batch_size + 1 :])
        columns = np.arange(capacity)
        # A token's position is its column minus the column where its sequence begins.
        begins = np.repeat(offsets[:, :-1].ravel(), np.diff(offsets, axis=1).ravel()).reshape(count, capacity)
        np.subtract(columns, begins, out=positions)
        real = columns < used
        places = np.repeat(packing.starts[rows].ravel(), lengths.ravel())
        places += positions[real]
        input_ids.fill(packing.pad_id)
        input_ids[real] = packing.tokens[places]
        return chunk


def _as_rows(batches: Sequence[Sequence[int]], batch_size: int) -> NDArray[np.int64]:
    """Lists of samples as rows of one table."""
    rows = np.full((len(batches), batch_size), MISSING, dtype=np.int64)
    for row, batch in zip(rows, batches):
        if len(batch) > batch_size:
            raise DataError(f"a packed batch of {len(batch)} samples was asked for, and it has room for {batch_size}")
        row[: len(batch)] = batch
    return rows
