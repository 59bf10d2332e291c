"""How many samples a batch holds, whatever its type.

A batch is read as its parts: the items of a tuple or list, the values of a mapping, the attributes of an object. Input
and target must agree on a number; if they do not, a target with one entry per sample decides. A list inside a batch may
hold one entry per sample (images of various sizes) or tensors of whole batches (two views): the other parts decide
which. If that leaves no number or more than one, the answer is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
UNKNOWN = "a batch ({kind}) does not tell how many samples it holds: {effect}; return (loss, count) to weigh it"
MAX_DEPTH = 4  # objects may refer to each other in a cycle
_MOST_PARTS = 1000
_PLAIN = (str, bytes, int, float, complex, type(None))
_NAMELESS = (*_PLAIN, torch.Tensor, list, type)


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch; None if its parts do not tell."""
    kind = type(batch)
    first = last = None  # the usual kinds of batches come first, since this runs in every step
    if kind is dict:
        for key in TARGET_KEYS:
            if key in batch:
                last = batch[key]
                first = last if isinstance(last, torch.Tensor) and last.dim() == 1 else next(iter(batch.values()))
                break
    elif kind is tuple or (kind is list and batch and not _may_be_samples(batch)):
        first, last = (batch[0], batch[-1]) if batch else (None, None)
    if isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        shape, other = first.shape, last.shape
        if shape and other and shape[0] == other[0]:
            return shape[0]
    return _samples(batch, 0)


def fields_of(batch: Any) -> Mapping[str, Any]:
    """The named parts of a mapping, named tuple, dataclass or other object; empty for a plain value."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, _NAMELESS):
        return {}
    if isinstance(batch, tuple):
        return dict(zip(getattr(batch, "_fields", ()), batch))
    if dataclasses.is_dataclass(batch):
        names = [item.name for item in dataclasses.fields(batch)]
    elif hasattr(batch, "__dict__"):
        names = list(vars(batch))
    else:
        names = [name for kind in type(batch).__mro__ for name in _slots(kind)]
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def common_length(batch: Any) -> int | None:
    """The first dimension of all tensors in a batch, at any depth; None if they differ or there are fewer than two."""
    lengths: list[int] = []
    inside, seen = [(batch, 0)], 0
    while inside and seen < _MOST_PARTS:
        part, depth = inside.pop()
        seen += 1
        if isinstance(part, torch.Tensor):
            lengths += [part.size(0)] if part.dim() else []
        elif depth < MAX_DEPTH + 2 and not isinstance(part, _PLAIN):
            parts = part if isinstance(part, (tuple, list)) else fields_of(part).values()
            inside += [(item, depth + 1) for item in parts]
    return lengths[0] if len(lengths) > 1 and len(set(lengths)) == 1 else None


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _samples(batch: Any, depth: int) -> int | None:
    if depth > MAX_DEPTH:
        return None
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    named = fields_of(batch)
    target = next((named[key] for key in TARGET_KEYS if key in named), None)
    if target is not None and (of_target := _counts(target, depth)):
        others = [item for item in named.values() if item is not target]
        return _agreed([count for item in others if (count := _counts(item, depth))], of_target, target)
    if named:
        return _common([count for item in named.values() if (count := _counts(item, depth))], list(named.values()))
    if not isinstance(batch, (tuple, list)):
        shape = getattr(batch, "shape", None)  # such as a numpy array
        return int(shape[0]) if shape else None
    if isinstance(batch, list) and batch and all(isinstance(item, (tuple, *_PLAIN)) for item in batch):
        # Uncollated samples; a list with a single tuple could just as well be a collated batch.
        return len(batch) if len(batch) > 1 or not isinstance(batch[0], tuple) else None
    known = [(item, count) for item in batch if (count := _counts(item, depth))]
    if not known or (isinstance(batch, list) and _may_be_samples(batch)):
        return None
    *others, (last, of_last) = known
    if not others:
        return _only(of_last)
    return _agreed([count for _, count in others], of_last, last if len(known) == 2 else None)


def _agreed(others: list[frozenset[int]], of_target: frozenset[int], target: Any) -> int | None:
    """The number that input and target agree on, else that of a target with one entry per sample."""
    both = of_target & others[0] if others else of_target
    if both:
        return _only(both)
    listed = isinstance(target, (tuple, list)) or (isinstance(target, torch.Tensor) and target.dim() == 1)
    return _only(of_target) if listed else None


def _common(counts: list[frozenset[int]], parts: list[Any]) -> int | None:
    """The number on which all parts agree; lists count only if there is no tensor."""
    tensors = [frozenset([item.size(0)]) for item in parts if isinstance(item, torch.Tensor) and item.dim()]
    counts = tensors or counts
    return _only(frozenset.intersection(*counts)) if counts else None


def _only(numbers: frozenset[int]) -> int | None:
    return next(iter(numbers)) if len(numbers) == 1 else None


def _counts(part: Any, depth: int) -> frozenset[int]:
    """The possible numbers of samples that a part of a batch stands for."""
    if not isinstance(part, (tuple, list)) or hasattr(part, "_fields"):
        size = _samples(part, depth + 1)
        return frozenset() if size is None else frozenset([size])
    found = frozenset([len(part)])
    if part and depth < MAX_DEPTH and not any(isinstance(item, _PLAIN) or fields_of(item) for item in part):
        found |= frozenset.intersection(*[_counts(item, depth + 1) for item in part])
    return found


def _may_be_samples(batch: list[Any]) -> bool:
    """Whether the items may be single samples: objects, or tensors of one kind that differ in more than their width."""
    first, last = batch[0], batch[-1]
    if not isinstance(first, torch.Tensor) or not isinstance(last, torch.Tensor):
        return all(fields_of(item) for item in batch)
    if first.dtype is not last.dtype or not all(isinstance(item, torch.Tensor) for item in batch):
        return False
    if len({(item.dtype, item.dim()) for item in batch}) > 1 or len({item.shape for item in batch}) == 1:
        return False
    return batch[0].dim() > 2 or len({item.shape[:1] for item in batch}) > 1


def changed_parts(item: Any, change: Callable[[Any], Any]) -> Any:
    """A plain container with its parts changed; other objects stay as they are."""
    if type(item) is tuple or type(item) is list:
        return type(item)(change(part) for part in item)
    if type(item) is dict:
        return {name: change(part) for name, part in item.items()}
    return item
