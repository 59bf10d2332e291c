"""Parts of the compression hook that need no other process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from frameworm.parallel.compression.exchange import ALIGNMENT_BYTES, Shards
from frameworm.parallel.compression.hook import mixed
from frameworm.parallel.compression.powersgd import orthogonalize
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.residuals import Named, Residuals

CPU = torch.device("cpu")


def _model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)})


def _filled(residuals: Residuals, *layouts: tuple[str, ...]) -> None:
    start = 0.0
    for names in layouts:
        flat = residuals.of(names, CPU)
        flat.copy_(torch.arange(start, start + flat.numel()))
        start += flat.numel()


def _by_name(residuals: Residuals) -> dict[str, Tensor]:
    values = residuals.state_dict()["values"]
    assert isinstance(values, dict)
    return values


def test_residuals_follow_their_parameters_into_other_buckets() -> None:
    residuals = Residuals(Named(_model()))
    _filled(residuals, ("b.bias", "b.weight"), ("a.bias", "a.weight"))
    before = _by_name(residuals)
    first = residuals.of(("b.weight", "a.weight"), CPU)
    assert torch.equal(first, torch.cat([before["b.weight"], before["a.weight"]]))
    second = residuals.of(("a.bias", "b.bias"), CPU)
    assert torch.equal(second, torch.cat([before["a.bias"], before["b.bias"]]))
    first.add_(1)  # what is written into the bucket is the parameter's
    after = _by_name(residuals)
    assert torch.equal(after["a.weight"], before["a.weight"] + 1)
    assert torch.equal(after["b.bias"], before["b.bias"])
    assert residuals.of(("b.weight", "a.weight"), CPU) is first


def test_residuals_go_back_and_forth() -> None:
    residuals = Residuals(Named(_model()))
    old, new = ("a.weight", "a.bias"), ("a.bias", "a.weight")
    _filled(residuals, old)
    residuals.of(new, CPU).mul_(2)
    assert torch.equal(residuals.of(old, CPU), 2 * torch.arange(9.0))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_residuals_keep_pace_with_the_loss_scale(as_tensor: bool) -> None:
    residuals = Residuals(Named(_model()))
    scale = torch.tensor(1024.0)
    residuals.rescale(scale.clone() if as_tensor else 1024.0)
    flat = residuals.of(("a.weight",), CPU)
    flat.fill_(3.0)
    for new, expected in ((1024.0, 3.0), (4096.0, 12.0), (512.0, 1.5)):
        residuals.rescale(torch.tensor(new) if as_tensor else new)
        assert torch.equal(flat, torch.full_like(flat, expected))
    saved = residuals.state_dict()
    again = Residuals(Named(_model()))
    assert again.load(_by_name(residuals), float(str(saved["scale"]))) == []
    again.rescale(1024.0)
    assert torch.equal(again.of(("a.weight",), CPU), torch.full((6,), 3.0))


def test_loading_says_what_does_not_fit() -> None:
    residuals = Residuals(Named(_model()))
    notes = residuals.load({"a.bias": torch.ones(3), "gone": torch.ones(1), "b.bias": torch.ones(7)}, None)
    assert len(notes) == 2
    assert "b.bias" in notes[0]
    assert "gone" in notes[1]
    assert list(_by_name(residuals)) == ["a.bias"]


def test_names_do_not_depend_on_wrappers() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = _model()

    assert list(Named(Wrapped()).parameters) == list(Named(_model()).parameters)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 128, 513, 10_000, 1_000_003])
def test_shards_cover_a_bucket(count: int, world_size: int, name: str) -> None:
    codec = make_codec(name)
    shards = Shards.of(count, world_size, codec)
    spans = [shards.span(rank) for rank in range(world_size)]
    assert spans[0].start == 0
    assert spans[-1].stop == count
    assert all(one.stop == other.start for one, other in itertools.pairwise(spans))
    assert all(span.start % codec.granularity == 0 or span.start == count for span in spans)
    assert shards.payload_bytes % ALIGNMENT_BYTES == 0
    assert shards.payload_bytes >= max(codec.encoded_bytes(shards.size(rank)) for rank in range(world_size))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_become_orthonormal_at_any_size(scale: float) -> None:
    torch.manual_seed(0)
    columns = torch.randn(200, 4) * scale
    original = columns.clone()
    orthogonalize(columns)
    torch.testing.assert_close(columns.t() @ columns, torch.eye(4))
    projected = columns @ (columns.t() @ (original / scale))
    torch.testing.assert_close(projected, original / scale, rtol=1e-4, atol=1e-4)


def test_columns_that_say_nothing_new_become_zero() -> None:
    torch.manual_seed(0)
    column = torch.randn(50, 1)
    columns = torch.cat([column, 3 * column, torch.zeros(50, 1), torch.randn(50, 1)], 1)
    orthogonalize(columns)
    torch.testing.assert_close(columns.t() @ columns, torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])))


def test_mixed_numbers_differ() -> None:
    found = {mixed(seed, rank, step) for seed in range(5) for rank in range(8) for step in range(50)}
    assert len(found) == 5 * 8 * 50
    assert all(0 <= number < 2**63 for number in found)
    assert mixed(1, 2) != mixed(2, 1)
