"""Two linear layers with GELU between them, whose bias and GELU are parts of the matrix products."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from half_precision import assert_as_near
from torch import Tensor, nn

from frameworm.models import feed_forward as module
from frameworm.models.feed_forward import feed_forward
from frameworm.models.kernels import cublas_lt
from frameworm.models.kernels.cublas_plan import Ending

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Function = Callable[[Tensor, nn.Linear, nn.Linear], Tensor]


def plain(inputs: Tensor, expand: nn.Linear, contract: nn.Linear) -> Tensor:
    result: Tensor = contract(F.gelu(expand(inputs), approximate="tanh"))
    return result


def results(function: Function, inputs: Tensor, expand: nn.Linear, contract: nn.Linear) -> list[Tensor]:
    """The result and all gradients."""
    inputs = inputs.detach().clone().requires_grad_()
    result = function(inputs, expand, contract)
    total = (result.float() * torch.linspace(-1, 1, result.size(-1), device=result.device)).sum()
    wanted = (inputs, *chain(expand.parameters(), contract.parameters()))
    return [result.detach().float(), *torch.autograd.grad(total, wanted)]


def test_off_the_gpu_it_is_the_plain_one() -> None:
    layers, inputs = (nn.Linear(8, 16), nn.Linear(16, 8)), torch.randn(3, 4, 8)
    for mine, theirs in zip(results(feed_forward, inputs, *layers), results(plain, inputs, *layers), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operation_and_its_gradients(compiled: bool) -> None:
    torch.manual_seed(1)
    layers, inputs = (nn.Linear(8, 16), nn.Linear(16, 24)), torch.randn(3, 4, 8)

    def whole(inputs: Tensor, expand: nn.Linear, contract: nn.Linear) -> Tensor:
        rows = inputs.flatten(0, -2)
        weights = (expand.weight, expand.bias, contract.weight, contract.bias)
        product: Tensor = module._feed_forward(rows, *weights, None)[0]
        return product.view(3, 4, -1)

    function: Function = torch.compile(whole, backend="aot_eager", fullgraph=True) if compiled else whole
    for mine, theirs in zip(results(function, inputs, *layers), results(plain, inputs, *layers), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8, 16), (3, 43, 64, 96), (2, 300, 64, 3072), (1, 7, 32, 1000)])
def test_near_to_fp32(shape: tuple[int, int, int, int], compiled: bool) -> None:
    batch, length, width, wider = shape
    torch.manual_seed(4)
    layers = nn.Linear(width, wider, device="cuda"), nn.Linear(wider, width, device="cuda")
    inputs = 3 * torch.randn(batch, length, width, device="cuda")
    inputs.view(-1)[0] = 300.0  # far out on both sides of zero
    function: Function = torch.compile(feed_forward) if compiled else feed_forward
    reference = results(plain, inputs, *layers)
    with torch.autocast("cuda", torch.bfloat16):
        ours, usual = results(function, inputs, *layers), results(plain, inputs, *layers)
    assert_as_near(ours, usual, reference)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_really_does_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    left, right = (torch.randn(size, device="cuda", dtype=dtype) for size in ((64, 32), (48, 32)))
    bias, aside, other = (torch.randn(size, device="cuda", dtype=dtype) for size in ((48,), (64, 48), (64, 48)))
    calls = []
    monkeypatch.setattr(cublas_lt, "_in_steps", lambda *args: calls.append(args))
    found = cublas_lt.multiply(left, right, Ending.GELU_OF_SUM, aside, bias, right_transposed=True)
    slope = cublas_lt.multiply(left, right.t().contiguous(), Ending.GELU_SLOPE, aside)
    monkeypatch.undo()
    assert not calls
    monkeypatch.setattr(cublas_lt, "_suits", lambda *args: False)
    expected = cublas_lt.multiply(left, right, Ending.GELU_OF_SUM, other, bias, right_transposed=True)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)
    torch.testing.assert_close(aside, other, atol=0.1, rtol=0.02)
    expected = cublas_lt.multiply(left, right.t().contiguous(), Ending.GELU_SLOPE, other)
    torch.testing.assert_close(slope, expected, atol=0.1, rtol=0.02)


@pytest.mark.gpu
@needs_gpu
def test_without_a_kernel_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_lt, "plan_for", lambda *sizes: None)
    layers, inputs = (nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(5, 64)
    layers, inputs = tuple(layer.cuda() for layer in layers), inputs.cuda()  # type: ignore[assignment]
    with torch.autocast("cuda", torch.bfloat16):
        for mine, theirs in zip(results(feed_forward, inputs, *layers), results(plain, inputs, *layers), strict=True):
            assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()


@pytest.mark.gpu
@needs_gpu
def test_the_same_bits_every_time() -> None:
    torch.manual_seed(5)
    layers = nn.Linear(64, 3072, device="cuda"), nn.Linear(3072, 64, device="cuda")
    inputs = torch.randn(8, 1000, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        first, second = results(feed_forward, inputs, *layers), results(feed_forward, inputs, *layers)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_sizes_without_such_kernels() -> None:
    layers = nn.Linear(6, 10, device="cuda"), nn.Linear(10, 6, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        inputs = torch.randn(3, 6, device="cuda")
        assert torch.equal(feed_forward(inputs, *layers), plain(inputs, *layers))
