"""Operations under private names compute what their public relatives do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frameworm.torch_private import operators
from frameworm.torch_private.tensors import FakeTensorMode


@pytest.fixture
def heads() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)]


def test_softmax_to_and_log_softmax_to_take_dimension_and_whether_to_write_fp32() -> None:
    scores = torch.randn(2, 3)
    assert torch.equal(operators.softmax_to(scores, 1, False), scores.softmax(1))
    assert torch.equal(operators.log_softmax_to(scores, 1, False), scores.log_softmax(1))


def test_functions_are_those_that_layers_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.FUNCTIONS, "dropout", lambda *_: "called")
    assert F.dropout(torch.ones(1)) == "called"


def test_softmax_backward() -> None:
    scores, gradient = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    weights = scores.softmax(2)
    weights.backward(gradient)
    assert torch.allclose(operators.softmax_backward(gradient, weights.detach(), 2, torch.float32), scores.grad)


def test_cpu_attention_and_cpu_attention_backward(heads: list[torch.Tensor]) -> None:
    expected = F.scaled_dot_product_attention(*heads)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    plain = [item.detach() for item in heads]
    mixed, sums = operators.cpu_attention(*plain, 0.0, False)
    found = operators.cpu_attention_backward(gradient, *plain, mixed, sums, 0.0, False)
    assert torch.allclose(mixed, expected, atol=1e-5)
    for mine, item in zip(found, heads):
        assert torch.allclose(mine, item.grad, atol=1e-5)


def test_flash_attention_and_efficient_attention_of_fake_tensors(heads: list[torch.Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        plain = [torch.empty(item.shape, dtype=torch.float16) for item in heads]
        assert operators.flash_attention(*plain, 0.0, False, False, scale=None)[0].shape == plain[0].shape
        assert operators.efficient_attention(*plain, None, True, 0.0, False, scale=None)[0].shape == plain[0].shape


def test_flash_attention_varlen_takes_what_it_is_given() -> None:
    names = [item.name for item in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)
    assert operators.flash_attention_varlen is torch.ops.aten._flash_attention_forward
