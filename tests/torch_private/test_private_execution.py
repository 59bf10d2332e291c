"""Autograd, profiler, processes and files under private names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from frameworm.torch_private import execution


def test_profiler_enabled() -> None:
    assert not execution.profiler_enabled()
    with torch.profiler.profile():
        assert execution.profiler_enabled()


def test_run_after_backward_and_in_backward() -> None:
    order: list[str] = []
    first, last = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)

    def seen(_gradient: torch.Tensor) -> None:
        assert execution.in_backward()
        order.append("first ready")
        execution.run_after_backward(lambda: order.append("after"))

    last.register_hook(seen)
    first.register_hook(lambda _: order.append("last ready"))
    (first.exp() * last).sum().backward()
    assert order[-1] == "after"
    assert len(order) == 3
    assert not execution.in_backward()


def test_run_backward_fills_gradients() -> None:
    weight = torch.full((2,), 3.0, requires_grad=True)
    execution.run_backward((weight**2).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 6.0]


def test_cuda_lost_in_fork() -> None:
    assert execution.cuda_lost_in_fork() is False


def test_attention_order_is_a_permutation_that_set_attention_order_changes() -> None:
    before = execution.attention_order()
    assert int(SDPBackend.CUDNN_ATTENTION) in before  # type: ignore[call-overload]
    try:
        execution.set_attention_order(reversed(before))
        assert execution.attention_order() == before[::-1]
    finally:
        execution.set_attention_order(before)


def test_names_of_functions_finds_built_in_layers() -> None:
    found = execution.names_of_functions("softmax cross_entropy_loss", (torch, F))
    assert torch.softmax in found
    assert F.softmax in found
    assert torch._C._nn.cross_entropy_loss in found


def test_save_archive_is_where_torch_writes() -> None:
    owner, name = execution.SAVE_ARCHIVE
    assert callable(getattr(owner, name))
