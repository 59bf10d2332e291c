"""Tokens of each step, counted once per epoch so that a step only looks them up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from frameworm.data.samples.sampling import Order, Piece, StepSampler
from frameworm.data.samples.workers import base_of

Counts = npt.NDArray[np.int64]


def token_lengths(dataset: Any) -> npt.NDArray[Any] | None:
    """Real tokens per sample, also through nested subsets; None if the data set does not declare them."""
    if isinstance(dataset, Subset):
        lengths = token_lengths(dataset.dataset)
        return None if lengths is None else lengths[np.asarray(dataset.indices)]
    lengths = getattr(dataset, "token_lengths", None)
    return None if lengths is None else np.asarray(lengths)


class TokenCounts:
    """Real and padded tokens of this rank's part of each step.

    Args:
        dataset: Declares `token_lengths`, and the width of a batch by `padded_length(lengths)` or, for many batches at
            once, by `padded_lengths(longest)` if the width follows from the longest sample.
        capacity: Returns the tokens of every micro-batch of an epoch, if batches are packed.
    """

    def __init__(self, dataset: Any, capacity: Callable[[int], int] | None = None) -> None:
        self._dataset = dataset
        base = base_of(dataset)
        self._padded_length: Callable[[npt.NDArray[Any]], int] | None = getattr(base, "padded_length", None)
        self._padded_lengths: Callable[[Counts], Counts] | None = getattr(base, "padded_lengths", None)
        self._capacity = capacity
        self._counted: list[tuple[Order, list[int], list[int] | None]] = []  # of at most two epochs

    @cached_property
    def _lengths(self) -> npt.NDArray[Any] | None:
        return token_lengths(self._dataset)

    def of(self, sampler: StepSampler, step: int) -> tuple[int | None, int | None]:
        """Real and padded tokens of this rank's part of a step; None if the data set does not declare them."""
        counted = self._counts(sampler, sampler.epoch)
        if counted is None:
            return None, None
        _, tokens, padded = counted
        return tokens[step], None if padded is None else padded[step]

    def count(self, sampler: StepSampler, epoch: int) -> None:
        """Count an epoch's tokens ahead of time."""
        self._counts(sampler, epoch)

    def _counts(self, sampler: StepSampler, epoch: int) -> tuple[Order, list[int], list[int] | None] | None:
        order = sampler.order_of(epoch)
        if self._lengths is None or order.dtype == object:
            return None
        for counted in self._counted:
            if counted[0] is order:
                return counted
        tokens, padded = self._count(sampler, epoch, order, self._lengths[order])
        self._counted = [*self._counted[-1:], (order, tokens, padded)]
        return self._counted[-1]

    def _count(
        self, sampler: StepSampler, epoch: int, order: Order, lengths: npt.NDArray[Any]
    ) -> tuple[list[int], list[int] | None]:
        before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        tokens, padded = [], []
        for begins, pieces in groups_of_steps(sampler, len(order)):
            own = [piece for piece in pieces if piece.samples]
            first, last = (own[0].start, own[-1].stop) if own else (0, 0)
            tokens.append(before[begins + last] - before[begins + first])
            beside = None
            if sampler.lengths is not None:
                beside = sampler.beside(min(sampler.global_batch, len(order) - int(begins[0])))
            padded.append(self._padded_tokens(epoch, begins, pieces, lengths, beside))
        real = [count for part in tokens for count in part.tolist()]
        if any(part is None for part in padded):
            return real, None
        return real, [count for part in padded if part is not None for count in part.tolist()]

    def _padded_tokens(
        self,
        epoch: int,
        begins: Counts,
        pieces: list[Piece],
        lengths: npt.NDArray[Any],
        beside: list[list[Piece]] | None,
    ) -> Counts | None:
        """Padded tokens of each step; `beside` lists, per piece, the pieces of all ranks padded to the same width."""
        if self._capacity is not None:
            return np.full(len(begins), self._capacity(epoch) * len(pieces))
        if self._padded_length is None:
            return None
        total = np.zeros(len(begins), dtype=np.int64)
        for place, piece in enumerate(pieces):
            starts, size = begins + piece.start, piece.stop - piece.start
            if self._padded_lengths is not None:
                wide = [piece] if beside is None else beside[place]
                longest = np.max([_longest(begins, item, lengths) for item in wide], axis=0)
                total += size * self._padded_lengths(longest)
            else:
                total += [size * int(self._padded_length(lengths[start : start + size])) for start in starts.tolist()]
        return total


def _longest(begins: Counts, piece: Piece, lengths: npt.NDArray[Any]) -> Counts:
    """The longest sample of a piece in each step."""
    # Maxima over [start, stop) and over the gaps between pieces, which are dropped; the extra 0 ends the last piece.
    borders = np.stack([begins + piece.start, begins + piece.stop], axis=1).ravel()
    found: Counts = np.maximum.reduceat(np.append(lengths, 0), borders)[::2]
    return found


def groups_of_steps(sampler: StepSampler, size: int) -> list[tuple[Counts, list[Piece]]]:
    """Group an epoch of `size` samples into full and partial steps: where each begins, and this rank's pieces of it."""
    full, rest = divmod(size, sampler.global_batch)
    begins = np.arange(full + 1) * sampler.global_batch
    groups = [(begins[:full], sampler.pieces_for(sampler.global_batch))] if full else []
    if rest and not sampler.drop_last:
        groups.append((begins[full:], sampler.pieces_for(rest)))
    return groups
