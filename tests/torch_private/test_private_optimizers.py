"""Optimizers and loss scales under private names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frameworm.torch_private import optimizers


@pytest.fixture
def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.arange(4.0))
    made.grad = torch.ones(4)
    return made


def test_fused_adamw_is_torchs_step(parameter: nn.Parameter) -> None:
    twin = nn.Parameter(parameter.detach().clone())
    twin.grad = torch.ones(4)
    torch.optim.AdamW([twin], lr=0.1, fused=True).step()
    step = torch.ones(())
    with torch.no_grad():
        optimizers.fused_adamw_(
            [parameter], [parameter.grad], [torch.zeros(4)], [torch.zeros(4)], [], [step], amsgrad=False, lr=0.1,
            beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
    assert torch.equal(parameter, twin)


def test_fused_sgd_heeds_its_flag(parameter: nn.Parameter) -> None:
    for flag, expected in ((1.0, [0.0, 1.0, 2.0, 3.0]), (0.0, [-1.0, 0.0, 1.0, 2.0])):
        with torch.no_grad():
            optimizers.fused_sgd_(
                [parameter], [parameter.grad], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False, grad_scale=None, found_inf=torch.tensor(flag),
            )  # fmt: skip
        assert parameter.tolist() == expected


def test_hooks_of_one_and_hooks_of_all(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter])
    assert not optimizers.hooks_of(optimizer)
    assert not optimizers.hooks_of_all()

    def hook(*_: Any) -> None:
        """Changes nothing."""

    optimizer.register_step_post_hook(hook)
    optimizer.register_step_pre_hook(hook)
    assert optimizers.hooks_of(optimizer) == [hook, hook]
    handle = register_optimizer_step_pre_hook(hook)
    try:
        assert optimizers.hooks_of_all() == [hook]
    finally:
        handle.remove()


def test_mark_stepped_is_what_schedulers_ask(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizers.is_patched_by_scheduler(optimizer.step)
    optimizers.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_make_state_is_what_the_first_step_makes(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizers.make_state(optimizer, optimizer.param_groups[0])
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[parameter]["step"].item() == 0


def test_accepts_found_inf_until_refuse_found_inf(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW([parameter], fused=True)
    assert optimizers.accepts_found_inf(optimizer)
    optimizers.refuse_found_inf(optimizer)
    assert not optimizers.accepts_found_inf(optimizer)


def test_allow_eager_capturable_is_a_mark_that_torch_sets_itself(parameter: nn.Parameter) -> None:
    import inspect

    optimizer = torch.optim.SGD([parameter])
    optimizers.allow_eager_capturable(optimizer)
    assert optimizer._warned_capturable_if_run_uncaptured
    assert "_warned_capturable_if_run_uncaptured" in inspect.getsource(torch.optim.Optimizer)


def test_orthogonalised_and_muon_factor_make_torchs_step() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4))
    weight.grad = torch.randn(6, 4)
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.0, nesterov=False)
    group, before = optimizer.param_groups[0], weight.detach().clone()
    update = optimizers.orthogonalised(weight.grad, group)
    optimizer.step()
    expected = before - 0.1 * optimizers.muon_factor(group, weight.shape) * update.float()
    assert torch.allclose(weight, expected, atol=1e-5)


def test_loss_scale_growth_tracker_and_found_inf(parameter: nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    assert optimizers.loss_scale(scaler) is None
    assert optimizers.growth_tracker(scaler) is None
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    flag, scale = optimizers.found_inf(scaler, optimizer), optimizers.loss_scale(scaler)
    assert flag is not None
    assert scale is not None
    assert (flag.item(), scale.item()) == (0.0, 8.0)
    scaler.step(optimizer)
    scaler.update()
    tracker = optimizers.growth_tracker(scaler)
    assert tracker is not None
    assert tracker.item() == 1
