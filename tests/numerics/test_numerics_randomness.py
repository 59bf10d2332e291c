"""Whether something was drawn is known from the generators, not from results."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from frameworm.numerics.randomness import has_drawn, random_state

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        lambda: np.random.randn(1),
        lambda: torch.rand(1),
        lambda: torch.nn.functional.dropout(torch.ones(3)),
    ],
)
def test_every_draw_is_seen(draw: Callable[[], object]) -> None:
    before = random_state(CPU)
    assert not has_drawn(before, CPU)
    draw()
    assert has_drawn(before, CPU)


def test_other_generators_and_plain_work_are_no_draws() -> None:
    before = random_state(CPU)
    torch.rand(3, generator=torch.Generator().manual_seed(1))
    np.random.default_rng(0).random()
    torch.nn.functional.dropout(torch.ones(3), training=False).sum()
    assert not has_drawn(before, CPU)
