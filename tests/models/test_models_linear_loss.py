"""The fused head and loss equals torch's, in all the places where a loss is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.errors import ModelError
from frameworm.models import linear_loss
from frameworm.models.linear_loss import choose_chunk, linear_cross_entropy
from triton_here import DEVICE, needs_gpu, needs_kernels

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
quiet_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def inputs(tokens: int = 50, vocabulary: int = 30, width: int = 8, ignored: int = 4, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    hidden = torch.randn(tokens, width, generator=generator).to(device).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[torch.randperm(tokens, generator=generator)[:ignored]] = -100
    return hidden, weight, targets.to(device)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def assert_equal(
    one: torch.Tensor, other: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, tolerance: float
) -> None:
    assert torch.allclose(one, other, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(one, (hidden, weight)), torch.autograd.grad(other, (hidden, weight)), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    vocabulary=st.integers(2, 40),
    chunk=st.none() | st.integers(1, 80),
    ignored=st.integers(0, 69),
    scale=st.sampled_from([1.0, -0.5, 1024.0]),
)
def test_equals_torchs(tokens: int, vocabulary: int, chunk: int | None, ignored: int, scale: float) -> None:
    hidden, weight, targets = inputs(tokens, vocabulary, ignored=min(ignored, tokens - 1))
    ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
    assert ours.dtype == torch.float32
    assert ours.shape == ()
    assert_equal(ours * scale, plain(hidden, weight, targets) * scale, hidden, weight, 1e-5 * max(1.0, abs(scale)))


def test_all_targets_ignored() -> None:
    hidden, weight, targets = inputs(ignored=50)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert not gradient.any()


def test_no_tokens() -> None:
    hidden, weight, targets = inputs(tokens=0, ignored=0)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, weight)[0].any()


def test_another_ignored_target() -> None:
    hidden, weight, targets = inputs(ignored=0)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=3)
    assert torch.allclose(linear_cross_entropy(hidden, weight, targets, ignore_index=3), expected)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden * 1e4, weight, targets)
    assert torch.isfinite(loss)
    assert torch.allclose(loss, plain(hidden * 1e4, weight, targets), rtol=1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_without_gradient_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear_loss.multiply

    def refuse(*factors: torch.Tensor, **how: Any) -> torch.Tensor:
        if how.get("left_transposed"):
            raise AssertionError("a gradient was computed")
        return multiply(*factors, **how)

    monkeypatch.setattr(linear_loss, "multiply", refuse)
    hidden, weight, targets = inputs()
    expected = plain(hidden, weight, targets)
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(hidden, weight, targets), expected)
    assert torch.allclose(linear_cross_entropy(hidden.detach(), weight.detach(), targets), expected)
    with pytest.raises(AssertionError, match="a gradient was computed"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_frozen(frozen: int) -> None:
    hidden, weight, targets = inputs()
    (hidden, weight)[frozen].requires_grad_(False)
    free = (hidden, weight)[1 - frozen]
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), free)[0]
    assert torch.allclose(ours, torch.autograd.grad(plain(hidden, weight, targets), free)[0], atol=1e-6)


def test_tied_weight_used_twice() -> None:
    """The embedding feeds the head it is tied to, and two losses share it."""

    def gradient(loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        _, weight, targets = inputs(ignored=0)
        first, second = weight[targets], weight[targets.flip(0)]
        total = loss_of(first, weight, targets.roll(1)) + 3 * loss_of(second, weight, targets.roll(2))
        return torch.autograd.grad(total, weight)[0]

    assert torch.allclose(gradient(linear_cross_entropy), gradient(plain), atol=1e-5)


def test_second_derivative_is_refused() -> None:
    hidden, weight, targets = inputs()
    first = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)[0]
    with pytest.raises(ModelError, match="no second derivative"):
        first.pow(2).sum().backward()


@quiet_bf16
def test_autocast() -> None:
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
        theirs = plain(hidden, weight, targets)
    assert ours.dtype == torch.float32
    assert_equal(ours, theirs, hidden, weight, 1e-2)


@quiet_bf16
def test_weight_gradient_is_summed_in_fp32() -> None:
    """Of 4,096 equal contributions a bf16 sum would lose most."""
    hidden = torch.ones(4096, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), chunk_tokens=8)
    assert torch.autograd.grad(loss, weight)[0].flatten().tolist() == [-0.5, 0.5]


def test_deterministic_mode() -> None:
    hidden, weight, targets = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)[0] for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)


def test_operator_keeps_torchs_rules() -> None:
    hidden, weight, targets = inputs()
    cases = [(True, None, False), (True, weight[:, 0], False), (True, None, True), (False, None, False)]
    for wanted, bias, frozen in cases:
        torch.library.opcheck(
            torch.ops.frameworm.linear_cross_entropy.default,
            (hidden, weight, targets, -100, 16, wanted, bias, frozen),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    hidden, weight, targets = inputs()

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, targets, chunk_tokens=16) * 2

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(hidden), plain(hidden.tanh(), weight, targets) * 2, hidden, weight, 1e-5)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"),
    [(16_384, 50_304, 8192), (65_536, 50_304, 9472), (3, 10, 3), (5000, 10**6, 1024), (0, 10, 1)],
)
def test_chunks_are_bounded(tokens: int, vocabulary: int, chunk: int) -> None:
    assert choose_chunk(tokens, vocabulary, 2) == chunk
    most = max(1024, linear_loss.LOGITS_BYTES // (vocabulary * 2))
    assert chunk <= most + 128


@pytest.mark.gpu
@needs_kernels
@pytest.mark.usefixtures("interpreted_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [5, 64, 9000, 50_304])
def test_kernel_equals_torchs_operations(dtype: torch.dtype, vocabulary: int) -> None:
    from frameworm.models.kernels.cross_entropy import cross_entropy_rows

    torch.manual_seed(0)
    logits = (torch.randn(33, vocabulary, device=DEVICE) * 4).to(dtype)
    targets = torch.randint(vocabulary, (33,), device=DEVICE)
    targets[7] = -100
    results = []
    for function in (cross_entropy_rows, linear_loss._cross_entropy_rows):
        rows, losses = logits.clone(), torch.empty(33, device=DEVICE)
        function(rows, targets, losses, -100, True)
        results.append((rows.float(), losses))
    (ours, our_losses), (theirs, their_losses) = results
    assert torch.allclose(our_losses, their_losses, atol=1e-5, rtol=1e-5)
    assert torch.allclose(ours, theirs, atol=1e-6 if dtype == torch.float32 else 8e-3)
    assert not ours[7].any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(tokens=3000, vocabulary=8256, width=64, ignored=100, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1024)
    assert_equal(ours, plain(hidden, weight, targets), hidden, weight, 2e-2)
    with torch.autocast("cuda", dtype=dtype):
        ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=1024)
    scale = 2.0**16
    small = torch.autograd.grad(ours, hidden, retain_graph=True)[0]
    large = torch.autograd.grad(ours * scale, hidden)[0] / scale
    assert torch.allclose(small, large, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
def test_in_a_cuda_graph() -> None:
    hidden, weight, targets = inputs(tokens=300, vocabulary=8256, width=64, device="cuda")

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=128)
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            hidden.grad = weight.grad = None
            step()
    torch.cuda.current_stream().wait_stream(stream)
    hidden.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.add_(1.0)
        targets.copy_(targets.roll(1))
        assert weight.grad is not None
        weight.grad.zero_()
    graph.replay()
    replayed, gradient = captured.clone(), weight.grad.clone()
    weight.grad = None
    assert torch.equal(step(), replayed)
    assert torch.equal(weight.grad, gradient)
