"""Copies to a GPU are queued without a wait, losses are read a step late; everything else is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frameworm.attach.patches import Patches
from frameworm.attach.trial.host_waits import copies_to_gpu, copying_ahead
from frameworm.attach.trial.interception import intercept
from frameworm.attach.trial.switches import Switches


@pytest.mark.parametrize(
    ("args", "kwargs", "copies"),
    [
        (("cuda",), {}, True),
        ((torch.device("cuda", 1),), {}, True),
        ((), {"device": "cuda", "dtype": torch.half}, True),
        (("cpu",), {}, False),
        ((torch.float64,), {}, False),
        ((), {"dtype": torch.half}, False),
        (("cuda", torch.half, False), {}, False),
        (("cuda",), {"non_blocking": False}, False),
        ((torch.zeros(1),), {}, False),
    ],
)
def test_only_plain_copies_to_a_gpu_are_meant(args: tuple[Any, ...], kwargs: dict[str, Any], copies: bool) -> None:
    assert copies_to_gpu("to", args, kwargs) is copies


def test_only_what_lies_on_the_host_is_copied_without_a_wait() -> None:
    asked: list[dict[str, Any]] = []

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        asked.append(kwargs)

    copy = copying_ahead(to)
    copy(torch.zeros(2), "cuda")
    copy(torch.zeros(2), "cpu")
    copy(torch.zeros(2, device="meta"), "cuda")  # as to tensors that are on a device already
    assert asked == [{"non_blocking": True}, {}, {}]


def test_tensors_on_the_host_are_read_and_copied_as_ever() -> None:
    patches = Patches()
    intercept(Switches(non_blocking=True, late_losses=True), patches)
    try:
        loss = torch.ones(2, requires_grad=True).sum()
        assert [loss.item(), (loss + 1).item()] == [2.0, 3.0]
        assert loss.to(torch.float64).dtype == torch.float64
        assert loss.to("cpu") is loss
    finally:
        patches.remove()
    assert "to" not in vars(torch.Tensor)
    assert "item" not in vars(torch.Tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_is_read_one_step_late_and_what_has_no_gradient_at_once() -> None:
    patches = Patches()
    intercept(Switches(non_blocking=True, late_losses=True), patches)
    try:
        read = [torch.full((), float(step), device="cuda", requires_grad=True).sum().item() for step in range(4)]
        exact = [torch.full((), float(step), device="cuda").item() for step in range(4)]
        copied = torch.arange(1000.0).pin_memory().to("cuda")
    finally:
        patches.remove()
    assert read == [0.0, 0.0, 1.0, 2.0]
    assert exact == [0.0, 1.0, 2.0, 3.0]
    torch.testing.assert_close(copied.cpu(), torch.arange(1000.0))
