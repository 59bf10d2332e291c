"""Every form of torch's optimizers agrees with the plain one, and faults in an update are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameworm.numerics.plain_update import PlainUpdate, settings_of
from frameworm.numerics.state import Named, StepTensors

RATE = 1.0  # as in a comparison: at the rates of training a lost decay vanishes in rounding


class Training:
    """A model and an optimizer after some steps, and one step of it that can be gone wrong about."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], clip_norm: float | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4))
        self.optimizer = make(self.model.parameters())
        self.names = {item: name for name, item in self.model.named_parameters()}
        self.tensors = StepTensors(self.model.named_parameters(), self.model.named_buffers(), self.optimizer)
        self.plain = PlainUpdate(self.optimizer, self.names, clip_norm)
        self.clip_norm = clip_norm
        for seed in range(5):
            self.compute(seed)
            self.optimizer.step()

    def compute(self, seed: int) -> Named:
        """Gradients of a step, before clipping."""
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model(inputs).pow(3).mean().backward()
        return {name: item.grad.clone() for name, item in self.model.named_parameters() if item.grad is not None}

    def errors(self, fault: Callable[[Training, Named], object] = lambda training, before: None) -> dict[str, float]:
        """The errors of one step at a large rate, after which something may be changed."""
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(RATE) if isinstance(group["lr"], Tensor) else RATE
        before = self.tensors.copy()
        gradients = self.compute(seed=99)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        with torch.no_grad():
            fault(self, before)
        return self.plain.errors(before, gradients, self.tensors.live())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda items, **how: torch.optim.AdamW(items, lr=1e-2, weight_decay=0.05, **how),
    "AdamW amsgrad": lambda items, **how: torch.optim.AdamW(items, lr=1e-2, amsgrad=True, **how),
    "Adam": lambda items, **how: torch.optim.Adam(items, lr=1e-2, weight_decay=0.01, **how),
    "SGD": lambda items, **how: torch.optim.SGD(items, lr=1e-2, **how),
    "SGD momentum": lambda items, **how: torch.optim.SGD(items, lr=1e-2, momentum=0.9, weight_decay=0.01, **how),
    "SGD Nesterov": lambda items, **how: torch.optim.SGD(items, lr=1e-2, momentum=0.9, nesterov=True, **how),
    "Adagrad": lambda items, **how: torch.optim.Adagrad(items, lr=1e-2, **how),
}
ONLY_FOREACH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "RMSprop": lambda items, **how: torch.optim.RMSprop(items, lr=1e-3, momentum=0.5, centered=True, **how),
    "NAdam": lambda items, **how: torch.optim.NAdam(items, lr=1e-2, **how),
    "Adadelta": lambda items, **how: torch.optim.Adadelta(items, lr=1e-1, **how),
}
FORMS = [
    *((name, form) for name in OPTIMIZERS for form in ("foreach", "fused")),
    *((name, "foreach") for name in ONLY_FOREACH),
]


def make(name: str, form: str | None = None) -> Callable[[Any], torch.optim.Optimizer]:
    how = {} if form is None else {form: True}
    return lambda items: {**OPTIMIZERS, **ONLY_FOREACH}[name](items, **how)


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_forms_of_one_algorithm_agree(name: str, form: str, clip_norm: float | None) -> None:
    errors = Training(make(name, form), clip_norm).errors()
    assert set(errors) == {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
    assert max(errors.values()) <= 1, errors


def lost_decay(training: Training, before: Named) -> None:
    weight = training.model[0].weight
    weight.add_(before["parameter 0.weight"], alpha=RATE * training.optimizer.param_groups[0]["weight_decay"])


def twice_the_rate(training: Training, before: Named) -> None:
    weight = training.model[0].weight
    weight.copy_(2 * weight - before["parameter 0.weight"])


def not_updated(training: Training, before: Named) -> None:
    training.model[0].weight.copy_(before["parameter 0.weight"])


def not_a_number(training: Training, before: Named) -> None:
    training.model[0].weight[0, 0] = torch.nan


def slightly_off(training: Training, before: Named) -> None:
    weight = training.model[0].weight
    weight.add_(weight - before["parameter 0.weight"], alpha=1e-4)


@pytest.mark.parametrize("fault", [lost_decay, twice_the_rate, not_updated, not_a_number, slightly_off])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD momentum"])
def test_a_wrong_update_is_found_at_its_parameter(name: str, fault: Callable[[Training, Named], None]) -> None:
    errors = Training(make(name)).errors(fault)
    assert [parameter for parameter, times in errors.items() if not times <= 1] == ["0.weight"]


def other_settings(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that steps with other settings than its groups say."""

    def build(items: Any) -> torch.optim.Optimizer:
        optimizer = make(name)(items)
        step = optimizer.step

        def wrong() -> None:
            told = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.update(settings)
            step()
            for group, values in zip(optimizer.param_groups, told):
                group.update(values)

        optimizer.step = wrong  # type: ignore[method-assign, assignment]
        return optimizer

    return build


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {"betas": (0.91, 0.999)}),
        ("AdamW", {"betas": (0.9, 0.99)}),
        ("AdamW", {"eps": 1e-4}),
        ("AdamW", {"weight_decay": 0.0}),
        ("Adam", {"weight_decay": 0.02}),
        ("SGD momentum", {"momentum": 0.89}),
        ("SGD momentum", {"nesterov": True}),
        ("RMSprop", {"alpha": 0.98}),
    ],
    ids=str,
)
def test_other_settings_than_told_are_found(name: str, settings: Mapping[str, Any]) -> None:
    errors = Training(other_settings(name, **settings)).errors()
    assert max(errors.values()) > 1


@pytest.mark.parametrize("told", [None, 2e-3])
def test_lost_or_other_clipping_is_found(told: float | None) -> None:
    training = Training(make("SGD"), 1e-3)
    training.clip_norm = told
    assert max(training.errors().values()) > 1


def test_a_parameter_without_a_gradient_is_not_to_move() -> None:
    training = Training(make("AdamW"))
    before = training.tensors.copy()
    gradients = training.compute(seed=99)
    training.model[0].bias.grad = None
    training.optimizer.step()
    without = {name: value for name, value in gradients.items() if name != "0.bias"}
    assert max(training.plain.errors(before, without, training.tensors.live()).values()) <= 1
    with torch.no_grad():
        training.model[0].bias.add_(1e-3)
    assert training.plain.errors(before, without, training.tensors.live())["0.bias"] > 1


def test_sparse_gradients_are_updated_where_they_have_rows() -> None:
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=RATE)
    tensors = StepTensors(table.named_parameters(), [], optimizer)
    for rows in ([1, 2, 2], [3, 2, 9]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).pow(2).sum().backward()
        before = tensors.copy()
        optimizer.step()
    plain = PlainUpdate(optimizer, {table.weight: "weight"}, None)
    assert table.weight.grad is not None
    gradients = {"weight": table.weight.grad}
    assert plain.errors(before, gradients, tensors.live())["weight"] <= 1
    with torch.no_grad():
        table.weight[5] += 1e-3
    assert plain.errors(before, gradients, tensors.live())["weight"] > 1


def test_a_parameter_whose_state_another_rank_holds_is_left_to_that_rank() -> None:
    training = Training(make("AdamW"))
    del training.optimizer.state[training.model[0].weight]
    before = training.tensors.copy()
    gradients = training.compute(seed=99)
    after = {**before, **{name: before[name] * 3 for name in before if "0.weight" in name}}
    assert "0.weight" not in training.plain.errors(before, gradients, after)
    assert "0.weight" in Training(make("SGD")).errors(), "without any state each rank knows all of it"


def test_the_optimizer_itself_is_left_alone() -> None:
    training = Training(make("AdamW", "fused"))
    before = training.tensors.copy()
    gradients = training.compute(seed=99)
    held = {name: item.grad for name, item in training.model.named_parameters()}
    training.plain.errors(before, gradients, before)
    now = training.tensors.live()
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert all(item.grad is held[name] for name, item in training.model.named_parameters())
    assert training.optimizer.param_groups[0]["fused"] is True


def test_a_scheduled_optimizer_can_be_checked() -> None:
    """torch's schedulers replace the optimizer's method `step` by one that counts."""
    training = Training(make("AdamW"))
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    assert max(training.errors().values()) <= 1
    scheduler.step()
    assert max(training.errors(lost_decay).values()) > 1


def test_parameters_in_half_precision_are_judged_by_their_own_rounding() -> None:
    training = Training(make("AdamW"))
    training.model.bfloat16()
    for state in training.optimizer.state.values():
        state.update({key: value.bfloat16() for key, value in state.items() if key != "step"})

    def errors(fault: Callable[[Training, Named], object]) -> float:
        before = training.tensors.copy()
        gradients = {
            name: torch.randn(item.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            for name, item in training.model.named_parameters()
        }
        for name, item in training.model.named_parameters():
            item.grad = gradients[name].clone()
        training.optimizer.step()
        with torch.no_grad():
            fault(training, before)
        return max(training.plain.errors(before, gradients, training.tensors.live()).values())

    assert errors(lambda training, before: None) <= 1
    assert errors(not_updated) > 1


def test_settings_are_told_by_parameter_and_without_their_implementation() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}]
    names = {model.weight: "weight", model.bias: "bias"}
    plain = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.0, foreach=False)
    graph = torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.0, capturable=True, foreach=True)
    found = settings_of(plain, names)
    assert found == settings_of(graph, names)
    assert (found["weight"]["weight_decay"], found["bias"]["weight_decay"]) == (0.1, 0.0)
    assert found["bias"]["betas"] == (0.9, 0.999)
    assert not {"fused", "foreach", "capturable", "differentiable", "params"} & set(found["weight"])


@pytest.mark.parametrize("step", [2, 3, 10])
def test_powers_of_settings_may_be_computed_in_fp32(step: int) -> None:
    """As CUDA's fused kernel does, whose power is four units off at most."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.Adam([weight], lr=5e-6)
    for _ in range(step):
        weight.grad = torch.randn(2000) * 1e-4
        before = StepTensors([("weight", weight)], [], optimizer).copy()
        optimizer.step()
    state, (beta1, beta2) = optimizer.state[weight], optimizer.defaults["betas"]

    def after(units: float) -> Named:
        corrected = 1 - (beta2**step + units * 2.0**-24)
        moved = 5e-6 / (1 - beta1**step) * state["exp_avg"] / ((state["exp_avg_sq"] / corrected).sqrt() + 1e-8)
        return {"parameter weight": before["parameter weight"] - moved}

    assert weight.grad is not None
    plain, gradients = PlainUpdate(optimizer, {weight: "weight"}, None), {"weight": weight.grad}
    assert plain.errors(before, gradients, after(0.0))["weight"] <= 0.2
    assert plain.errors(before, gradients, after(3.5))["weight"] <= 1
    assert plain.errors(before, gradients, after(100.0))["weight"] > 1
