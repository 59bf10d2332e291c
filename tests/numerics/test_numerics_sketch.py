"""Sketches keep lengths and angles of tensors of any size, kind and place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from frameworm.numerics.sketch import WIDTH, dense, sketch

LARGE = (WIDTH + 1, 3 * WIDTH, 100_003, 1024 * WIDTH + 17)


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 7, WIDTH])
def test_a_small_tensor_is_its_own_sketch(count: int) -> None:
    tensor = values(count)
    found = sketch(tensor.view(1, -1) if count else tensor)
    assert found.dtype == torch.float64
    assert torch.equal(found, tensor.double())


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("kind", ["random", "equal", "growing"])
def test_lengths_are_kept_within_a_few_percent(count: int, kind: str) -> None:
    tensor = {"random": values(count), "equal": torch.ones(count), "growing": torch.arange(count).float()}[kind]
    found = sketch(tensor)
    assert found.shape == (WIDTH,)
    assert float(found.norm()) == pytest.approx(float(tensor.double().norm()), rel=0.05)


def test_a_few_large_elements_count_as_much_as_many_small_ones() -> None:
    tensor = torch.zeros(1_000_000)
    tensor[[3, 500_000, 999_999]] = torch.tensor([3.0, -4.0, 12.0])
    assert float(sketch(tensor).norm()) == pytest.approx(13.0)


def test_angles_are_kept() -> None:
    one, other = values(200_000), values(200_000, 1)
    mixed = 0.6 * one + 0.8 * other
    cosine = torch.nn.functional.cosine_similarity(sketch(one), sketch(mixed), dim=0)
    assert float(cosine) == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("count", [100, *LARGE[:3]])
def test_sketches_are_linear(count: int) -> None:
    one, other = values(count).double(), values(count, 1).double()
    torch.testing.assert_close(sketch(2 * one - 3 * other), 2 * sketch(one) - 3 * sketch(other), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [10, 50_000])
def test_numbers_of_any_kind_are_added_up_exactly(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randint(-100, 100, (count,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sketch(tensor.to(dtype)), sketch(tensor))


def test_the_layout_of_memory_does_not_matter() -> None:
    images = values(64 * 3 * 32 * 32).view(64, 3, 32, 32)
    assert torch.equal(sketch(images), sketch(images.to(memory_format=torch.channels_last)))
    assert torch.equal(sketch(images.transpose(0, 1)), sketch(images.transpose(0, 1).contiguous()))
    sparse = torch.zeros(200, 50)
    sparse[3, 4] = 2.0
    assert torch.equal(sketch(sparse.to_sparse()), sketch(sparse))


def test_the_sign_of_an_element_depends_on_its_place_alone() -> None:
    """Else a tensor that is sketched in pieces, or after a larger one, would look like another."""
    count = 3 * WIDTH
    for index in (0, 1, WIDTH, count - 1):
        short, long = torch.zeros(count), torch.zeros(40 * WIDTH)
        short[index] = long[index] = 1.0
        assert torch.equal(sketch(short), sketch(long))
    pieces = values(count)
    parts = [torch.where(torch.arange(count) // 1000 == part, pieces, torch.zeros(())) for part in range(13)]
    torch.testing.assert_close(sum(map(sketch, parts)), sketch(pieces))


def test_signs_are_mixed_along_and_across_the_sums() -> None:
    """A constant gradient must not add up, in rows or in columns."""
    count = 512 * WIDTH
    signs = torch.stack([sketch(_row(row, count)) for row in range(0, 512, 16)])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert float(signs.mean(0).abs().max()) < 1.0
    assert float(signs.mean(1).abs().max()) < 0.1


def _row(row: int, count: int) -> torch.Tensor:
    tensor = torch.zeros(count)
    tensor[row * WIDTH : (row + 1) * WIDTH] = 1.0
    return tensor


def test_gradients_are_not_tracked() -> None:
    tensor = values(10_000).requires_grad_()
    assert not sketch(tensor).requires_grad
    assert not dense(tensor).requires_grad


def sharded(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = values(30_001).view(-1, 1).expand(-1, 3).contiguous()
    divided = [distribute_tensor(whole, mesh, [place]) for place in (Shard(0), Shard(1), Replicate())]
    return all(torch.equal(sketch(item), sketch(whole)) for item in divided)


def test_a_sharded_tensor_has_the_sketch_of_the_whole(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(sharded, 2) == [True, True]
