"""The decoder: GPT-2's size, causal, and with a loss of its own."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from frameworm.errors import ModelError
from frameworm.models import gpt
from frameworm.models.gpt import GPT


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=30, d_model=16, n_heads=2, num_layers=2, max_seq_len=8).eval()


def test_124m_parameters() -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=50_257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_later_tokens_do_not_change_earlier_logits(model: GPT) -> None:
    first = torch.randint(30, (2, 8))
    second = first.clone()
    second[:, 5:] = (second[:, 5:] + 1) % 30
    before, after = model(first), model(second)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_loss_is_the_mean_over_targets(model: GPT) -> None:
    input_ids, targets = torch.randint(30, (2, 6)), torch.randint(30, (2, 6))
    targets[0, 2] = -100
    loss = model(input_ids, targets)
    assert loss.shape == ()
    expected = F.cross_entropy(model(input_ids).transpose(1, 2), targets)
    assert torch.allclose(loss, expected)
    assert abs(loss.item() - math.log(30)) < 0.2


def test_fused_loss_is_the_same() -> None:
    def run(fused: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = GPT(vocab_size=30, d_model=16, n_heads=2, num_layers=2, max_seq_len=8, fused_loss=fused)
        input_ids, targets = torch.randint(30, (2, 6)), torch.randint(30, (2, 6))
        targets[0, 2] = -100
        loss = model(input_ids, targets)
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    (loss, gradients), (expected, others) = run(True), run(False)
    assert torch.allclose(loss, expected, atol=1e-6)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("fused", "vocabulary", "expected"), [("auto", 8192, 0), (True, 30, 1), (False, 8192, 0)])
def test_when_the_loss_is_fused(
    monkeypatch: pytest.MonkeyPatch, fused: bool | Literal["auto"], vocabulary: int, expected: int
) -> None:
    calls = []

    def count(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return torch.zeros(())

    monkeypatch.setattr(gpt, "linear_cross_entropy", count)
    model = GPT(vocabulary, d_model=4, n_heads=1, num_layers=1, max_seq_len=8, fused_loss=fused)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens)
    assert len(calls) == expected
    assert model(tokens).shape == (1, 8, vocabulary)


def test_initial_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=500, d_model=128, n_heads=2, num_layers=8, max_seq_len=64)
    layer = model.layers[3]
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.contract.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.attention_output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not layer.expand.bias.any()


def test_head_is_tied(model: GPT) -> None:
    assert not any("head" in name for name in model.state_dict())
    with torch.no_grad():
        model.token_embedding.weight[7] = 0
    assert not model(torch.tensor([[1, 2]]))[:, :, 7].any()


def test_too_long_a_batch(model: GPT) -> None:
    with pytest.raises(ModelError, match="9 tokens long, the model takes 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_learns_to_count() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=10, d_model=32, n_heads=2, num_layers=1, max_seq_len=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = (torch.arange(10)[:, None] + torch.arange(9)) % 10
    for _ in range(40):
        optimizer.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    assert torch.equal(model(rows[:, :-1]).argmax(2), rows[:, 1:])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("residual", "expected"), [("fp32", torch.float32), ("half", torch.bfloat16)])
def test_the_residual_stream_is_in_the_numbers_asked_for(residual: Any, expected: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT(30, d_model=16, n_heads=2, num_layers=2, max_seq_len=8, residual=residual)
    seen: list[torch.dtype] = []
    model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tokens = torch.randint(0, 30, (2, 8))
    exact = model(tokens, tokens)
    assert seen.pop() == torch.float32, "without autocast nothing changes"
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens)
    loss.backward()
    assert seen == [expected]
    assert torch.allclose(loss, exact, rtol=2e-2)
