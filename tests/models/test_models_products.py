"""Linear layers whose products run by the fastest kernel of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from half_precision import assert_as_near
from torch import Tensor, nn

from frameworm.models import products
from frameworm.models.kernels import cublas_lt, cublas_plan
from frameworm.models.kernels.cublas_lt import multiply
from frameworm.models.kernels.cublas_plan import Ending
from frameworm.models.products import linear

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Function = Callable[[Tensor, nn.Linear], Tensor]


@pytest.fixture
def library_does_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products too, and none by torch's own operations."""

    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("left to torch")

    monkeypatch.setattr(cublas_lt, "LARGE", 0)
    monkeypatch.setattr(cublas_lt, "_in_steps", refuse)
    cublas_plan.plan_for.cache_clear()
    yield
    cublas_plan.plan_for.cache_clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def plain(inputs: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(inputs, layer.weight, layer.bias)


def results(function: Function, inputs: Tensor, layer: nn.Linear) -> list[Tensor]:
    """The result and all gradients."""
    inputs = inputs.detach().clone().requires_grad_()
    result = function(inputs, layer)
    total = (result.float() * torch.linspace(-1, 1, result.size(-1), device=result.device)).sum()
    return [result.detach().float(), *torch.autograd.grad(total, (inputs, *layer.parameters()))]


@pytest.mark.parametrize("bias", [True, False])
def test_off_the_gpu_it_is_the_plain_one(bias: bool) -> None:
    layer, inputs = nn.Linear(8, 16, bias), torch.randn(3, 4, 8)
    for mine, theirs in zip(results(linear, inputs, layer), results(plain, inputs, layer), strict=True):
        assert torch.equal(mine, theirs)


def test_the_gradient_of_the_bias_may_come_from_elsewhere() -> None:
    layer = nn.Linear(8, 16)
    linear(torch.randn(3, 8), layer, bias_gradient=False).sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_the_operation_and_its_gradients(compiled: bool, bias: bool) -> None:
    torch.manual_seed(1)
    layer, inputs = nn.Linear(8, 16, bias), torch.randn(3, 4, 8)

    def whole(inputs: Tensor, layer: nn.Linear) -> Tensor:
        result: Tensor = products._linear(inputs.flatten(0, -2), layer.weight, layer.bias, None)
        return result.view(3, 4, -1)

    function: Function = torch.compile(whole, backend="aot_eager", fullgraph=True) if compiled else whole
    for mine, theirs in zip(results(function, inputs, layer), results(plain, inputs, layer), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def multiply_laid(left: Tensor, right: Tensor, transposed: tuple[bool, bool], out: Tensor, add: bool) -> Tensor:
    """`left @ right`, with factors that lie transposed in memory where that is asked for."""
    factors = (item.t().contiguous() if other else item for item, other in zip((left, right), transposed))
    onto = out if add else None
    return multiply(*factors, left_transposed=transposed[0], right_transposed=transposed[1], out=out, onto=onto)


@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_products_by_torchs_own_operations(left_transposed: bool, right_transposed: bool, add: bool) -> None:
    left, right, out = torch.randn(5, 3), torch.randn(3, 4), torch.full((5, 4), float("nan"))
    expected = left @ right
    if add:
        out.fill_(7.0)
        expected = expected + 7.0
    assert multiply_laid(left, right, (left_transposed, right_transposed), out, add) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_stream_is_added_inside(bias: bool) -> None:
    torch.manual_seed(2)
    layer, inputs = nn.Linear(8, 16, bias), torch.randn(5, 8)
    stream = torch.randn(5, 16, requires_grad=True)
    mine = products._linear(inputs, layer.weight, layer.bias, stream)
    theirs = stream + plain(inputs, layer)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(linear(inputs, layer, stream), theirs)
    wanted = (stream, *layer.parameters())
    for one, other in zip(torch.autograd.grad(mine.sum(), wanted), torch.autograd.grad(theirs.sum(), wanted)):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("library_does_all", "timed")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8, 16), (3, 43, 64, 96), (2, 300, 768, 2304)])
def test_near_to_fp32(shape: tuple[int, int, int, int], compiled: bool) -> None:
    batch, length, width, wider = shape
    torch.manual_seed(4)
    layer, inputs = nn.Linear(width, wider, device="cuda"), torch.randn(batch, length, width, device="cuda")
    function: Function = torch.compile(linear) if compiled else linear
    reference = results(plain, inputs, layer)
    with torch.autocast("cuda", torch.bfloat16):
        ours, usual = results(function, inputs, layer), results(plain, inputs, layer)
    assert_as_near(ours, usual, reference)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("library_does_all", "timed")
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32])
def test_the_library_really_does_it(
    left_transposed: bool, right_transposed: bool, add: bool, result: torch.dtype
) -> None:
    torch.manual_seed(5)
    left, right = (torch.randn(size, device="cuda").bfloat16() for size in ((96, 64), (64, 48)))
    out = torch.full((96, 48), 2.0 if add else float("nan"), device="cuda", dtype=result)
    multiply_laid(left, right, (left_transposed, right_transposed), out, add)
    torch.testing.assert_close(out.float(), left.float() @ right.float() + (2.0 if add else 0.0), atol=0.15, rtol=0.01)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("library_does_all", "timed")
@pytest.mark.parametrize("bias", [True, False])
def test_the_library_adds_a_stream(bias: bool) -> None:
    torch.manual_seed(6)
    layer, inputs = nn.Linear(64, 96, bias, device="cuda"), torch.randn(200, 64, device="cuda")
    stream = torch.randn(200, 96, device="cuda")
    streams = [item.detach().clone().requires_grad_() for item in (stream.bfloat16(), stream)]
    with torch.autocast("cuda", torch.bfloat16):
        mine = linear(inputs, layer, streams[0])
    theirs = streams[1] + plain(inputs, layer)
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.float(), theirs, atol=0.05, rtol=0.02)
    given = torch.randn(200, 96, device="cuda")
    ours = torch.autograd.grad((mine.float() * given).sum(), (streams[0], *layer.parameters()))
    right = torch.autograd.grad((theirs * given).sum(), (streams[1], *layer.parameters()))
    for one, other in zip(ours, right, strict=True):
        assert (one.float() - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("library_does_all", "timed")
def test_kernels_are_timed_once_and_not_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    races = []
    race = cublas_plan.Plan._race
    monkeypatch.setattr(cublas_plan.Plan, "_race", lambda self, *args: races.append(1) or race(self, *args))
    left, right = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cublas_plan._workspace(torch.cuda.current_device(), side.cuda_stream)
        with torch.cuda.graph(graph, stream=side):
            multiply(left, right, out=out)
    assert not races
    graph.replay()
    replayed = out.clone()
    for _ in range(3):
        multiply(left, right, out=out)
    assert len(races) == 1
    torch.testing.assert_close(out, replayed, atol=0.2, rtol=0.02)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    first = multiply(left, right).clone()
    assert torch.equal(first, multiply(left, right))
    assert len(races) == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ending", [Ending.NONE, Ending.SUM])
def test_small_products_are_torchs(ending: Ending) -> None:
    left, right = (torch.randn(64, 64, device="cuda").bfloat16() for _ in range(2))
    bias = torch.randn(64, device="cuda").bfloat16()
    expected = left @ right if ending is Ending.NONE else torch.addmm(bias, left, right)
    assert torch.equal(multiply(left, right, ending, bias=bias), expected)
