"""What codecs cost: timed for every method, on shapes as they come."""

from __future__ import annotations

import pytest
import torch

from frameworm.parallel.compression.codec_cost import MOST_VALUES, SQUARE, _sample, codec_seconds_per_value


def test_every_method_is_timed() -> None:
    found = codec_seconds_per_value(torch.device("cpu"), [(64, 32), (64,), (8, 4, 3)], world_size=4)
    assert set(found) == {"fp16", "bf16", "int8", "int4", "topk", "powersgd"}
    assert all(0 < seconds < 1e-3 for seconds in found.values())


@pytest.mark.parametrize("shapes", [[], [(0, 5)], [(3,), (1,)]])
def test_shapes_that_are_hardly_any(shapes: list[tuple[int, ...]]) -> None:
    assert codec_seconds_per_value(torch.device("cpu"), shapes)["int4"] > 0


def test_a_fair_sample_of_the_largest() -> None:
    assert _sample([]) == [SQUARE]
    (huge,) = _sample([(50_000, 1024), (7,)])[:1]
    assert huge == (MOST_VALUES // 1024, 1024)
    many = _sample([(1024, 1024)] * 30 + [(3,)])
    assert len(many) == 4
