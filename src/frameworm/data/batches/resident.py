"""A small data set that lives on the device: packed batches are built there, and the host sends only indices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from frameworm.data.batches.packed import IGNORED_LABEL, spare_sequences
from frameworm.data.corpora.token_sets import Packing

MOST_BYTES = 2**30
MOST_SHARE = 0.05
_BYTES_PER_TOKEN = 4
_BYTES_PER_SAMPLE = 3 * 8


def resident_bytes(packing: Packing) -> int:
    """Device memory taken by the samples."""
    begin, end = _stretch(packing)
    return (end - begin) * _BYTES_PER_TOKEN + len(packing.lengths) * _BYTES_PER_SAMPLE


def fits_device(packing: Packing, device: torch.device) -> bool:
    """Whether the samples take only a small fraction of the GPU's memory."""
    if device.type != "cuda":
        return False
    return fits_memory(resident_bytes(packing), torch.cuda.get_device_properties(device).total_memory)


def fits_memory(size_bytes: int, memory_bytes: int) -> bool:
    """True if `size_bytes` is a small fraction of GPU memory."""
    return size_bytes < MOST_BYTES and size_bytes < MOST_SHARE * memory_bytes


class ResidentTexts:
    """`PackedTexts` on a device: tokens, starts, lengths and labels are tensors there.

    No call waits for the device.

    Args:
        packing: The samples.
        device: Where they are kept.
    """

    def __init__(self, packing: Packing, device: torch.device | str) -> None:
        self.device = torch.device(device)
        begin, end = _stretch(packing)
        # `astype` copies before torch takes over: the store is memory-mapped read-only.
        self._tokens = torch.from_numpy(packing.tokens[begin:end].astype(np.int32)).to(self.device)
        self._starts = torch.from_numpy(packing.starts.astype(np.int64) - begin).to(self.device)
        self._lengths = torch.from_numpy(packing.lengths.astype(np.int64)).to(self.device)
        self._labels = torch.from_numpy(packing.labels.astype(np.int64)).to(self.device)
        self._pad_id = packing.pad_id
        self._max_seq_len = packing.max_seq_len
        self._columns: dict[int, Tensor] = {}
        self._padding: dict[int, Tensor] = {}

    def chunk(self, indices: Tensor, capacity: int) -> dict[str, Tensor]:
        """Build packed batches of samples [batches, batch_size] on the device; -1 marks an empty slot.

        Batches that exceed the capacity are not detected, since that would mean asking the device: the plan that
        gives the indices also gives the capacity.
        """
        count, batch_size = indices.shape
        spare = spare_sequences(capacity, self._max_seq_len)
        columns, padding = self._constants(capacity, spare)
        present = indices >= 0
        safe = indices.clamp(min=0)
        labels = torch.where(present, self._labels[safe], IGNORED_LABEL)
        lengths = torch.where(present, self._lengths[safe], 0)
        ends = lengths.cumsum(1)
        used = ends[:, -1:]
        borders = torch.cat([ends, (used + padding).clamp(max=capacity)], dim=1)
        # A column belongs to the first sequence that ends after it, which skips empty ones.
        sequence = torch.searchsorted(borders, columns.repeat(count, 1), right=True)
        begins = torch.nn.functional.pad(borders, (1, 0))
        positions = columns - begins.gather(1, sequence)
        starts = self._starts[safe]
        places = starts.gather(1, sequence.clamp(max=batch_size - 1)) + positions
        # Padding also reads a token, within bounds, which is then discarded.
        tokens = self._tokens[places.clamp(max=self._tokens.numel() - 1)].long()
        return {
            "labels": labels,
            "input_ids": torch.where(columns < used, tokens, self._pad_id),
            "positions": positions,
            "offsets": begins.int(),
        }

    def _constants(self, capacity: int, spare: int) -> tuple[Tensor, Tensor]:
        if capacity not in self._columns:
            self._columns[capacity] = torch.arange(capacity, device=self.device)
            self._padding[capacity] = torch.arange(1, spare + 1, device=self.device) * self._max_seq_len
        return self._columns[capacity], self._padding[capacity]


def _stretch(packing: Packing) -> tuple[int, int]:
    """The range of the token array that holds all the samples."""
    return int(packing.starts.min()), int((packing.starts + packing.lengths).max())
