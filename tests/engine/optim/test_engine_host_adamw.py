from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.engine.optim.host_adamw import HostAdamW, are_plain, clip, norm_of
from frameworm.engine.trainer import Trainer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def optimizer_of(net: nn.Module, **settings: Any) -> torch.optim.AdamW:
    matrices = [item for item in net.parameters() if item.ndim > 1]
    vectors = [item for item in net.parameters() if item.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, **{"fused": True, **settings})


def give_gradients(net: nn.Module, number: int, without: int | None = None) -> None:
    draw = torch.Generator().manual_seed(number)
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = None if index == without else torch.randn(parameter.shape, generator=draw)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        for name, value in state.items():
            assert torch.equal(value, theirs["state"][key][name]), (key, name)


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    place = io.BytesIO()
    torch.save(state, place)
    place.seek(0)
    loaded: dict[str, Any] = torch.load(place)
    return loaded


def test_it_is_torchs_adamw_bit_for_bit_through_schedules_gaps_and_resumes() -> None:
    ours, theirs = model(), model()
    mine, reference = optimizer_of(ours), optimizer_of(theirs)
    host = HostAdamW(mine)
    done = []
    for number in range(12):
        without = 3 if number in (4, 5, 9) else None
        for net, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(net, number, without)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
                group["betas"] = (0.9 - 0.01 * number, 0.99)
        if number == 7:
            mine.load_state_dict(saved_and_loaded(mine.state_dict()))
        done.append(host.step())
        if not done[-1]:
            mine.step()
        reference.step()
        assert_same(ours, theirs)
        assert_same_state(mine, reference)
    assert all(done)


def test_state_that_is_missing_begins_as_torch_begins_it() -> None:
    ours, theirs = model(), model()
    mine, reference = optimizer_of(ours), optimizer_of(theirs)
    host = HostAdamW(mine)
    for number in range(6):
        give_gradients(ours, number, without=2 if number < 3 else None)
        give_gradients(theirs, number, without=2 if number < 3 else None)
        if number == 4:
            mine.state.pop(ours.get_parameter("1.weight"))
            reference.state.pop(theirs.get_parameter("1.weight"))
        assert host.step()
        reference.step()
        assert_same(ours, theirs)
        assert_same_state(mine, reference)


def test_torch_can_step_in_between() -> None:
    ours, theirs = model(), model()
    mine, reference = optimizer_of(ours), optimizer_of(theirs)
    host = HostAdamW(mine)
    for number in range(6):
        give_gradients(ours, number)
        give_gradients(theirs, number)
        if number % 2 or not host.step():
            mine.step()
        reference.step()
    assert_same(ours, theirs)
    assert_same_state(mine, reference)


def test_a_copy_of_the_state_does_not_follow() -> None:
    net = model()
    optimizer = optimizer_of(net)
    host = HostAdamW(optimizer)
    for number in range(3):
        give_gradients(net, number)
        if not host.step():
            optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    give_gradients(net, 3)
    assert host.step()
    assert {float(state["step"]) for state in kept["state"].values()} == {3.0}
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {4.0}


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_torchs_bit_for_bit(limit: float) -> None:
    ours, theirs = model(), model()
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    gradients = [item.grad for item in ours.parameters() if item.grad is not None]
    assert are_plain(gradients)
    norm = norm_of(gradients)
    clip(gradients, limit, norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), limit))
    for mine, reference in zip(ours.parameters(), theirs.parameters()):
        assert mine.grad is not None
        assert reference.grad is not None
        assert torch.equal(mine.grad, reference.grad)


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"maximize": True}, {"fused": False}, {"foreach": True}])
def test_other_optimizers_are_left_to_torch(settings: dict[str, Any]) -> None:
    if "foreach" in settings:
        settings = {**settings, "fused": False}
    assert not HostAdamW.suits(optimizer_of(model(), **settings))


def test_adamw_of_others_is_left_to_them() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert HostAdamW.suits(optimizer_of(model()))
    assert not HostAdamW.suits(Own(model().parameters(), fused=True))
    assert not HostAdamW.suits(torch.optim.SGD(model().parameters(), 0.1))


def test_torchs_schedulers_are_told_of_the_steps() -> None:
    net = model()
    optimizer = optimizer_of(net)
    host = HostAdamW(optimizer)
    give_gradients(net, 0)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(3):
        give_gradients(net, number)
        assert host.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)


def sparse_gradient(net: nn.Sequential) -> None:
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.grad = torch.zeros_like(weight).to_sparse()


def changed_setting(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["maximize"] = True


@pytest.mark.parametrize(
    "spoil",
    [
        lambda net, optimizer: sparse_gradient(net),
        changed_setting,
        lambda net, optimizer: optimizer.register_step_post_hook(lambda *_: None),
        lambda net, optimizer: setattr(optimizer, "step", lambda closure=None: None),
        lambda net, optimizer: optimizer.state[net[1].weight].update(exp_avg=torch.zeros(8, 8, dtype=torch.float64)),
    ],
)
def test_what_it_does_not_know_is_left_as_it_was(spoil: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    net = model()
    optimizer = optimizer_of(net)
    host = HostAdamW(optimizer)
    for number in range(2):
        give_gradients(net, number)
        if not host.step():
            optimizer.step()
    give_gradients(net, 2)
    spoil(net, optimizer)
    before = [item.detach().clone() for item in net.parameters()]
    assert not host.step()
    assert all(torch.equal(item, old) for item, old in zip(net.parameters(), before))


def test_a_profiler_sees_torchs_own_step() -> None:
    net = model()
    optimizer = optimizer_of(net)
    host = HostAdamW(optimizer)
    for number in range(2):
        give_gradients(net, number)
        if not host.step():
            optimizer.step()
    give_gradients(net, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not host.step()
    assert host.step()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_training_is_that_of_a_plain_loop(clip_norm: float | None) -> None:
    batches = [(torch.randint(0, 20, (16,)), torch.randint(0, 3, (16,))) for _ in range(20)]
    ours, theirs = model(), model()
    Trainer(ours, optimizer_of(ours), clip_norm=clip_norm, run_dir=None).train(batches, epochs=1)
    reference = optimizer_of(theirs)
    for inputs, targets in batches:
        nn.functional.cross_entropy(theirs(inputs), targets).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        reference.step()
        reference.zero_grad()
    assert_same(ours, theirs)
