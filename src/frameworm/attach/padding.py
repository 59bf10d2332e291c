"""How much of a batch in host memory is padding, judging by its masks and labels.

Padding is recognised by the data, not by names alone: a mask hides positions at the ends of rows that all hold the same
ID. `attention_mask` is the exception, since it means the same in every library. Labels of -100 also hide prompts and
unmasked words, so only runs of them at the ends of rows with the same ID count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from frameworm.data.prefetch import map_tensors

IGNORED = -100
MOST_VALUES = 2**18  # largest tensor to read; more takes milliseconds
MOST_TENSORS = 32
_DEEPEST = 4
_READ = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}
_SHARED_NAME = "attention_mask"
_WIDTH_STEP = 8

_Array = NDArray[Any]


class Tokens(NamedTuple):
    """Counts of a batch's positions, its padding, and the padding beyond its longest sample."""

    positions: int
    padding: int
    beyond_longest: int

    def counts(self) -> dict[str, float]:
        """Return the counts for the step that trains on the batch."""
        return {
            "read_batches": 1.0,
            "positions": float(self.positions),
            "padding_tokens": float(self.padding),
            "padding_beyond_longest": float(self.beyond_longest),
        }


def tokens_of(batch: Any) -> Tokens | None:
    """Count the padding in a batch; None if nothing in it identifies padding."""
    tables = padding_in(batch)
    return None if tables is None else _sum_up(tables)


def trimmed(batch: Any) -> Any:
    """Remove the columns of a batch that contain only padding, if padding can be identified.

    Widths are rounded up to multiples of a few positions, to limit their number.
    """
    tables = padding_in(batch) or []
    shapes = {table.shape for table in tables}
    if len(shapes) != 1:
        return batch
    ((rows, width),) = shapes
    real = np.flatnonzero(~np.logical_and.reduce([table.all(0) for table in tables]))
    if not real.size or any(width in (*item.shape[:1], *item.shape[2:]) for _, item in _named_tensors(batch, "", 0)):
        return batch
    kept = min(width, -(-(int(real[-1]) - int(real[0]) + 1) // _WIDTH_STEP) * _WIDTH_STEP)
    first = 0 if real[0] == 0 else min(int(real[0]), width - kept)

    def cut(item: torch.Tensor) -> torch.Tensor:
        return item[:, first : first + kept].contiguous() if item.shape[:2] == (rows, width) else item

    return batch if kept == width else map_tensors(batch, cut)


def padding_in(batch: Any) -> list[_Array] | None:
    """Return masks of a batch's padding; None if nothing in it identifies padding."""
    tensors = dict(_named_tensors(batch, "", 0))
    tables = {name: item.numpy() for name, item in tensors.items() if _is_readable(item)}
    shared = [
        table == 0
        for name, table in tables.items()
        if name.lower().endswith(_SHARED_NAME)
        and _is_mask(name, table)
        and any(item.shape[:2] == table.shape for other, item in tensors.items() if other != name)
    ]
    if shared:
        return shared
    masks = {name: table for name, table in tables.items() if _is_mask(name, table)}
    ids = [table for name, table in tables.items() if table.dtype.kind in "iu" and name not in masks]
    for name, mask in masks.items():
        for words in (table for table in ids if table.shape == mask.shape):
            pads = _pads_by_mask(mask, words, named="mask" in name.lower())
            if pads is not None:
                return [pads]
    for labels in ids:
        ignored = labels == IGNORED
        for words in (table for table in ids if table is not labels and table.shape == labels.shape):
            if ignored.any():
                return [_pads_by_labels(ignored, words)]
    return None


def rows_of(batch: Any) -> int | None:
    """Return the least number of rows in matrix products over a batch: its tokens, vectors or samples."""
    found = [rows for _, item in _named_tensors(batch, "", 0) if (rows := _rows(item)) is not None]
    return max(found, default=None)


def _is_readable(item: torch.Tensor) -> bool:
    """Whether a tensor is a small host table of a dtype that may hold IDs, labels or a mask."""
    plain = type(item) is torch.Tensor and item.is_cpu and item.layout is torch.strided and not item.requires_grad
    return plain and item.dtype in _READ and item.dim() == 2 and 0 < item.numel() <= MOST_VALUES


def _rows(item: torch.Tensor) -> int | None:
    if not item.dim():
        return None
    vectors = item.is_floating_point() and item.dim() > 1
    rows = 1
    for size in item.shape[:-1] if vectors else item.shape:
        if type(size) is not int:  # a symbolic size; reading it would specialise a trace or export
            return None
        rows *= size
    return rows


def _named_tensors(batch: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif depth < _DEEPEST:
        for key, item in _members(batch):
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key), depth + 1)


def _members(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(islice(batch.items(), MOST_TENSORS))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(zip(batch._fields, batch))
    if isinstance(batch, (tuple, list)):
        return list(enumerate(batch[:MOST_TENSORS]))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name, None)) for field in dataclasses.fields(batch)]
    return []


def _is_mask(name: str, table: _Array) -> bool:
    if table.dtype.kind == "b":
        return True
    if table.dtype.kind in "iu":
        return bool(table.max() <= 1 and table.min() >= 0)
    return "mask" in name.lower() and bool(((table == 0) | (table == 1)).all())


def _pads_by_mask(mask: _Array, words: _Array, *, named: bool) -> _Array | None:
    """Return the padding by a mask, whichever of its values means padding; None if it does not identify padding."""
    sides = [mask == 0, mask != 0]
    if not (sides[0].any() and sides[1].any()):  # no padding, if it is a padding mask at all
        return np.zeros(mask.shape, bool) if named else None
    pads = [side for side in sides if _at_an_end(side) and np.ptp(words[side]) == 0]
    return pads[0] if len(pads) == 1 else None


def _at_an_end(side: _Array) -> bool:
    return bool((side[:, 1:] >= side[:, :-1]).all() or (side[:, 1:] <= side[:, :-1]).all())


def _pads_by_labels(ignored: _Array, words: _Array) -> _Array:
    right = np.flip(_run(np.flip(ignored, 1), np.flip(words, 1)), 1)
    left = _run(ignored, words)
    return max(right, left, key=np.count_nonzero)


def _run(ignored: _Array, words: _Array) -> _Array:
    """Ignored positions with the same ID at the start of each row; a single one is a marker such as start-of-text."""
    first = words[:, 0][ignored[:, 0]]
    if not first.size or np.ptp(first):
        return np.zeros(ignored.shape, bool)
    run: _Array = np.logical_and.accumulate(ignored & (words == first[0]), 1)
    return run if run.sum(1).max() > 1 else np.zeros(ignored.shape, bool)


def _sum_up(tables: list[_Array]) -> Tokens:
    padding = [int(np.count_nonzero(table)) for table in tables]
    # For each table, the padding that all rows have.
    beyond = [int(table.sum(1).min()) * len(table) for table in tables]
    return Tokens(sum(table.size for table in tables), sum(padding), sum(beyond))
