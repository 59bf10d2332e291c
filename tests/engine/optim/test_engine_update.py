"""Momentum of a fused SGD whose first steps are left out; clipping on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.schedule import NoSchedule
from frameworm.engine.optim.update import Update, begin_momentum


def _parameter() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(1000))


def _step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: float, left_out: bool) -> None:
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(left_out))  # type: ignore[attr-defined]
    optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=["plain", "nesterov"])
def test_a_first_step_that_is_left_out_leaves_no_trace(settings: dict[str, object]) -> None:
    parameter, expected = _parameter(), _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True, **settings)  # type: ignore[arg-type]
    usual = torch.optim.SGD([expected], lr=0.1, momentum=0.9, fused=True, **settings)  # type: ignore[arg-type]
    rubbish = [torch.full_like(parameter, 1e30) for _ in range(50)]
    del rubbish  # torch takes its memory for the momentum
    begin_momentum(optimizer)
    _step(optimizer, parameter, float("inf"), left_out=True)
    for gradient in (1.0, -2.0, 0.5):
        _step(optimizer, parameter, gradient, left_out=False)
        _step(usual, expected, gradient, left_out=False)
    assert torch.equal(parameter, expected)


def test_momentum_that_is_there_stays() -> None:
    parameter = _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    _step(optimizer, parameter, 1.0, left_out=False)
    before = optimizer.state[parameter]["momentum_buffer"].clone()
    begin_momentum(optimizer)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], before)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "dampening": 0.5, "fused": True}, {"momentum": 0.9}])
def test_others_are_left_alone(settings: dict[str, object]) -> None:
    parameter = _parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1, **settings)  # type: ignore[arg-type]
    begin_momentum(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("limit", [0.1, 1.0, 3.7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 1.5, 100.0])
def test_gradients_near_the_limit_are_clipped_as_torch_does(limit: float, share: float) -> None:
    cpu = torch.device("cpu")
    ours, theirs = [_parameter(), _parameter()], [_parameter(), _parameter()]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(1000, generator=generator) for _ in ours]
    factor = share * limit / torch.nn.utils.get_total_norm(gradients)
    for parameters in (ours, theirs):
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient * factor
    update = Update(ours, torch.optim.SGD(ours, 0.1), NoSchedule(), Precision("off", cpu), limit, cpu)
    update.apply(None)
    norm = torch.nn.utils.clip_grad_norm_(theirs, limit)
    torch.optim.SGD(theirs, 0.1).step()
    assert update.grad_norm is not None
    assert torch.equal(update.grad_norm, norm)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine, other)
