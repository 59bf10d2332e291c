"""Samples in batches of many shapes."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.prefetch import move_batch, tensors_in
from frameworm.data.steps import sized

ones = torch.ones
LABELS = ones(4).long()
IMAGES = [ones(3, 4, 4), ones(3, 5, 5), ones(3, 6, 6), ones(3, 4, 5)]  # three channels, and no batch of three
EQUAL_IMAGES = [ones(3, 4, 4)] * 4
BOXES = [{"boxes": ones(3, 4), "labels": ones(3)}] * 4
GRAPH = (ones(18, 4), ones(2, 9), ones(18))
Named = namedtuple("Named", "images labels")


@dataclass(frozen=True)
class Batch:
    inputs: Any
    labels: Any


class Slotted:
    __slots__ = ("inputs", "y")

    def __init__(self) -> None:
        self.inputs, self.y = ones(4, 2), LABELS


class Circle:
    def __init__(self) -> None:
        self.me = self
        self.points, self.kind = ones(4, 2), LABELS


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        pytest.param((ones(4, 2), LABELS), 4, id="pair"),
        pytest.param([[ones(4, 2), ones(4, 2)], LABELS], 4, id="two views"),
        pytest.param((ones(4, 2), None, LABELS), 4, id="None inside"),
        pytest.param((ones(4, 3, 8, 8), ones(4, 8, 8).long()), 4, id="segmentation"),
        pytest.param((IMAGES, LABELS), 4, id="images"),
        pytest.param((EQUAL_IMAGES, [0, 1, 1, 0]), 4, id="equal images"),
        pytest.param((IMAGES, BOXES), 4, id="images and boxes"),
        pytest.param((tuple(EQUAL_IMAGES), tuple(BOXES)), 4, id="zipped"),
        pytest.param({"images": IMAGES, "targets": BOXES}, 4, id="mapping of lists"),
        pytest.param(Named(IMAGES, LABELS), 4, id="named tuple"),
        pytest.param([(ones(3, 4, 4), 1)] * 4, 4, id="samples that are not collated"),
        pytest.param((GRAPH, ones(2).long()), 2, id="graphs"),
        pytest.param((ones(7, 4, 3), LABELS), 4, id="time first"),
        pytest.param(((ones(4, 2), (ones(4, 1), ones(4, 3))), LABELS), 4, id="nested"),
        pytest.param(Batch(ones(4, 2), LABELS), 4, id="dataclass"),
        pytest.param(Batch(IMAGES, LABELS), 4, id="dataclass of images"),
        pytest.param(Slotted(), 4, id="slots"),
        pytest.param(Circle(), 4, id="circle"),
        pytest.param(SimpleNamespace(x=ones(18, 4), edge_index=ones(2, 9), y=ones(3), batch=ones(18)), 3, id="object"),
        pytest.param({"input_ids": ones(4, 7), "class_weights": ones(9), "labels": LABELS}, 4, id="constant inside"),
        pytest.param((np.ones((4, 2)), np.ones(4)), 4, id="arrays"),
        # Nothing tells these apart from batches that hold another number.
        pytest.param((*GRAPH, ones(2).long()), None, id="flat graphs"),
        pytest.param((ones(7, 4).long(), ones(5, 4).long()), None, id="two sequences, time first"),
        pytest.param((ones(4, 2), LABELS, ones(9)), None, id="constant last"),
        pytest.param(IMAGES, None, id="images alone"),
        pytest.param([{"x": ones(3)}] * 4, None, id="mappings that are not collated"),
        pytest.param(3, None, id="number"),
        pytest.param((), None, id="nothing"),
    ],
)
def test_samples_are_counted(batch: Any, size: int | None) -> None:
    assert batch_size_of(batch) == size


def test_objects_move_like_other_batches() -> None:
    given = Batch(IMAGES, LABELS)
    moved = move_batch(given, "meta")
    assert isinstance(moved, Batch)
    assert {item.device.type for item in tensors_in(moved)} == {"meta"}
    assert {item.device.type for item in tensors_in(given)} == {"cpu"}
    assert len(list(tensors_in(moved))) == 5
    assert move_batch(Circle(), "meta").points.device.type == "meta"
    assert move_batch(given, "cpu") is given


def test_where_a_batch_tells_nothing_its_loader_does() -> None:
    loader: DataLoader[Any] = DataLoader(list(range(10)), 4, collate_fn=lambda numbers: sum(numbers))
    assert [size for _, size in sized(loader)] == [4, 4, 2]
    assert [size for _, size in sized([1, 2])] == [None, None]
