"""Nested state becomes JSON and comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from frameworm.engine.checkpoint.state_json import Path, decode, encode
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import StoredTensor, loaded


class Kept(StoredTensor):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._tensor = tensor.clone()

    def read(self, first_row: int = 0, rows: int | None = None) -> torch.Tensor:
        return self._tensor


def _there_and_back(value: Any) -> Any:
    tensors: dict[str, Kept] = {}

    def keep(path: Path, tensor: torch.Tensor) -> str:
        name = "/".join(path)
        tensors[name] = Kept(tensor)
        return name

    return loaded(decode(json.loads(json.dumps(encode({"state": value}, keep))), tensors.__getitem__))["state"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype=np.uint16)[::-2],
        np.array(3.5, dtype=np.float16),
        np.array([True, False]),
        np.zeros((0, 3), dtype=np.complex64),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back(array: Any) -> None:
    array.flags.writeable = False
    found = _there_and_back({"a": [array]})["a"][0]
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


@pytest.mark.parametrize(
    "value",
    [np.array(["a"]), np.array([object()]), np.array(["2020-01-01"], dtype="M8[D]"), np.ma.masked_array([1]), object()],
    ids=["text", "objects", "dates", "masked", "object"],
)
def test_what_no_checkpoint_can_hold_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match="state/a"):
        _there_and_back({"a": value})


@pytest.mark.parametrize("content", [5, [1], {"a": 1}])
def test_a_manifest_cannot_pass_anything_off_as_an_array(content: Any) -> None:
    with pytest.raises(CheckpointError, match="ndarray"):
        decode({"$ndarray": content}, lambda name: None)


@pytest.mark.parametrize("entries", [0, 3])
def test_sparse_tensors_come_back(entries: int) -> None:
    places = torch.tensor([[0, 4, 0][:entries], [1, 2, 1][:entries]])
    tensor = torch.sparse_coo_tensor(places, torch.arange(1.0, entries + 1), (5, 3), check_invariants=True)
    found = _there_and_back({"a": [tensor]})["a"][0]
    assert found.layout is torch.sparse_coo
    assert found.is_coalesced() == tensor.is_coalesced()
    assert torch.equal(found._values(), tensor._values())
    assert found.shape == tensor.shape
    assert torch.equal(found.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("content", [5, {}, {"indices": 1, "values": 2, "size": [1]}])
def test_a_manifest_cannot_pass_anything_off_as_a_sparse_tensor(content: Any) -> None:
    with pytest.raises(CheckpointError, match="sparse"):
        decode({"$sparse": content}, lambda name: None)
