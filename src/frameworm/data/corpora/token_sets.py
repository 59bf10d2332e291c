"""Data sets over a token store: labelled texts, and fixed-length blocks; both assemble whole batches at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from frameworm.data.corpora.cache import TokenStore


@dataclass(frozen=True)
class Packing:
    """What packed batches are built from: sample i is `tokens[starts[i] : starts[i] + lengths[i]]`.

    A data set whose samples can be laid end to end has a method `packing()` that returns this.

    Attributes:
        tokens: Token ids of all samples.
        starts: Where each sample begins.
        lengths: Tokens of each sample, at most `max_seq_len`.
        labels: Class of each sample.
        pad_id: Token that fills the rest of a batch.
        max_seq_len: The longest sequence the model accepts.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    pad_id: int
    max_seq_len: int

    def of(self, indices: NDArray[Any]) -> Packing:
        """The packing of a subset of the samples, in the given order."""
        return Packing(
            self.tokens,
            self.starts[indices],
            self.lengths[indices],
            self.labels[indices],
            self.pad_id,
            self.max_seq_len,
        )


class TextDataset(Dataset[dict[str, Tensor]]):
    """Labelled texts, batched without a Python loop over the samples.

    Args:
        store: Tokens and labels.
        max_seq_len: Longer texts are truncated.
        pad_to: Whether a batch is as wide as its longest text or always `max_seq_len`.
        limit: Use only the first n samples.
        width_step: Round widths up to a multiple of this (or to `max_seq_len`), to get few different shapes.
    """

    assembles_batches = True
    reads_longest = True  # honours `MicroBatch.longest`, the longest text of all ranks

    def __init__(
        self,
        store: TokenStore,
        max_seq_len: int,
        pad_to: Literal["longest", "max"] = "longest",
        limit: int | None = None,
        width_step: int = 1,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.pad_to = pad_to
        self.num_classes = int(store.meta["num_classes"])
        self.pad_id = int(store.meta["pad_id"])
        self.token_lengths = np.minimum(np.diff(store.offsets), max_seq_len)[:limit]
        self.labels = store.labels[:limit]
        self._store = store
        self._columns = np.arange(max_seq_len)
        self._widths = _multiples(width_step, max_seq_len)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: its tokens without padding, its length and its label."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        length = int(self.token_lengths[index])
        start = int(self._store.offsets[index])
        return {
            "input_ids": torch.from_numpy(self._store.tokens[start : start + length].astype(np.int64)),
            "lengths": torch.tensor(length),
            "labels": torch.tensor(int(self.labels[index])),
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A finished batch: `input_ids` [batch, width], `lengths` [batch], `labels` [batch], all int64."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.token_lengths[chosen]
        # Where each real token of the batch lies in the token array, sample after sample.
        ends = np.cumsum(lengths)
        places = np.repeat(self._store.offsets[chosen] - ends + lengths, lengths)
        places += np.arange(len(places))
        width = max(self.padded_length(lengths), self.padded_length(np.array([getattr(indices, "longest", 0)])))
        input_ids = np.full((len(chosen), width), self.pad_id, dtype=np.int64)
        input_ids[self._columns[:width] < lengths[:, None]] = self._store.tokens[places]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(self.labels[chosen]),
        }

    def padded_length(self, lengths: NDArray[Any]) -> int:
        """Width of a batch of texts with these lengths."""
        return int(self.padded_lengths(lengths.max(initial=1)))

    def padded_lengths(self, longest: NDArray[Any]) -> NDArray[Any]:
        """Widths of batches given their longest texts."""
        if self.pad_to == "max":
            return np.full_like(longest, self.max_seq_len)
        return longest if self._widths is None else self._widths[np.searchsorted(self._widths, longest)]

    def with_widths(self, widths: Sequence[int] | NDArray[Any]) -> TextDataset:
        """The same texts in batches of these widths only; they ascend, and the last fits the longest text."""
        view = copy.copy(self)
        view._widths = np.asarray(widths, dtype=np.int64)
        assert view._widths[-1] >= self.token_lengths.max(initial=1)
        return view

    def with_width_step(self, width_step: int) -> TextDataset:
        """The same texts in batches whose widths are multiples of `width_step`."""
        view = copy.copy(self)
        view._widths = _multiples(width_step, self.max_seq_len)
        return view

    def packing(self) -> Packing:
        """What packed batches are built from."""
        starts = self._store.offsets[: len(self)]
        return Packing(self._store.tokens, starts, self.token_lengths, self.labels, self.pad_id, self.max_seq_len)


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """A range of a token array, cut into blocks with their next-token targets.

    Args:
        store: The tokens.
        max_seq_len: Tokens per block.
        start: First token of the range.
        stop: End of the range; its last token is only a target.
        limit: Use only the first n blocks.
    """

    assembles_batches = True
    blocks_are_full = True

    def __init__(
        self, store: TokenStore, max_seq_len: int, start: int = 0, stop: int | None = None, limit: int | None = None
    ) -> None:
        stop = len(store.tokens) if stop is None else stop
        blocks = max(0, stop - start - 1) // max_seq_len
        self.max_seq_len = max_seq_len
        self.vocab_size = int(store.meta["vocab_size"])
        self.token_lengths = np.full(blocks if limit is None else min(blocks, limit), max_seq_len, dtype=np.int64)
        self._store = store
        self._start = start
        self._columns = np.arange(max_seq_len + 1)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One block."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.__getitems__([index % len(self)]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A finished batch: `input_ids` and `targets`, both [batch, max_seq_len] int64."""
        starts = self._start + np.asarray(indices, dtype=np.int64) * self.max_seq_len
        block = self._store.tokens[starts[:, None] + self._columns].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(block[:, :-1])),
            "targets": torch.from_numpy(np.ascontiguousarray(block[:, 1:])),
        }

    def padded_length(self, lengths: NDArray[Any]) -> int:
        """The width of every batch: blocks are full."""
        return self.max_seq_len


def _multiples(step: int, longest: int) -> NDArray[np.int64] | None:
    """Multiples of a step up to the longest text; None if any width is allowed."""
    if step <= 1:
        return None
    return np.append(np.arange(step, longest, step), longest)
