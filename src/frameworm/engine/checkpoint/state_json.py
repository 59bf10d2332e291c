"""Encode nested state as JSON, with names in place of tensors.

Numbers, strings, lists and dicts with string keys are stored as they are. Everything else is an object with a single
key that begins with `$`. Decoding can produce only plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from frameworm.errors import CheckpointError
from frameworm.parallel.shards import StoredArray, StoredSparse, StoredTensor
from frameworm.torch_private.tensors import sparse_indices, sparse_values

Path = tuple[str, ...]
_NOT_NUMPYS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def encode(value: Any, keep: Callable[[Path, torch.Tensor], str], path: Path = ()) -> Any:
    """Encode state as JSON data.

    Args:
        value: Plain data and tensors in dicts, lists and tuples.
        keep: Called with each tensor and its path; returns the name to store instead.
        path: Path of `value` in the whole state.

    Raises:
        CheckpointError: If a value is neither plain data nor a tensor.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        # Not coalesced, so that later sums round as they would have.
        held = value.detach()
        dense = {"indices": sparse_indices(held), "values": sparse_values(held)}
        shape = {"size": list(held.shape), "coalesced": held.is_coalesced()}
        return {"$sparse": encode({**dense, **shape}, keep, path)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": keep(path, value)}
    if type(value) is np.ndarray:
        return {"$ndarray": encode(_as_tensor(value, path), keep, path)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not any(key.startswith("$") for key in value):
            return {key: encode(part, keep, (*path, key)) for key, part in value.items()}
        return {
            "$dict": [[encode(key, keep, path), encode(part, keep, (*path, str(key)))] for key, part in value.items()]
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [encode(part, keep, (*path, str(place))) for place, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": parts}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(f"{'/'.join(path)} is a {kind}, and a checkpoint holds only tensors, arrays and plain data")


def _as_tensor(array: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    """Convert an array to a tensor, which may share its memory."""
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise CheckpointError(
            f"{'/'.join(path)} is an array of {array.dtype}, which a checkpoint cannot hold"
        ) from None


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Decode what `encode` returned.

    Args:
        value: The encoded state, after a round trip through JSON.
        tensor: Returns the replacement for a tensor's name.

    Raises:
        CheckpointError: If the value is corrupt.
    """
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if not (len(value) == 1 and next(iter(value)).startswith("$")):
        return {key: decode(part, tensor) for key, part in value.items()}
    ((kind, content),) = value.items()
    try:
        return _decode_special(kind, content, tensor)
    except (TypeError, ValueError, AttributeError, KeyError):
        raise CheckpointError(f"its manifest is corrupt: a {kind} has invalid content") from None


def _decode_special(kind: str, content: Any, tensor: Callable[[str], Any]) -> Any:
    if kind == "$tensor" and isinstance(content, str):
        return tensor(content)
    if kind == "$ndarray":
        stored = decode(content, tensor)
        if isinstance(stored, StoredTensor) and stored.dtype not in _NOT_NUMPYS:
            return StoredArray(stored)
    if kind == "$sparse":
        stored = decode(content, tensor)
        tensors = (stored.pop("indices"), stored.pop("values"))
        if all(isinstance(item, StoredTensor) for item in tensors):
            return StoredSparse(*tensors, **stored)
    if kind == "$tuple":
        return tuple(decode(part, tensor) for part in content)
    if kind == "$set":
        return {decode(part, tensor) for part in content}
    if kind == "$dict":
        return {decode(key, tensor): decode(part, tensor) for key, part in content}
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return bytes.fromhex(content)
    if kind == "$dtype":
        dtype = getattr(torch, content)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise ValueError(kind)
