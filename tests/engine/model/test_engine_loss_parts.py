"""What learns inside a loss function is found, however the loss is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.engine.model.loss_parts import find_beside, untrained_note
from frameworm.errors import ModelError

MODEL = nn.Linear(3, 3)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * self.scale).mean()

    def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * self.scale).sum()


class System(nn.Module):
    """Holds the model as well, whose parameters are not the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODEL
        self.head = Head()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.head.scale * output).mean()


class Plain:
    def __init__(self) -> None:
        self.heads = [Head()]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.heads[0].scale * output).mean()


class Slotted:
    __slots__ = ("head",)

    def __init__(self) -> None:
        self.head = Head()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.head.scale * output).mean()


HEAD = Head()
TEMPERATURE = nn.Parameter(torch.ones(1))
PARTS = SimpleNamespace(head=Head(), other=Head())


def _helper(output: torch.Tensor) -> torch.Tensor:
    return output * HEAD.scale


def by_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _helper(output).mean()


def by_parameter(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output / TEMPERATURE).mean()


def by_attribute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * PARTS.head.scale).mean()


def by_default(output: torch.Tensor, target: torch.Tensor, head: Any = HEAD) -> torch.Tensor:
    return (output * head.scale).mean()


def _closure() -> Callable[..., torch.Tensor]:
    head = Head()
    return lambda output, target: head(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "names"),
    [
        pytest.param(Head(), ["scale"], id="module"),
        pytest.param(Head().method, ["scale"], id="method of a module"),
        pytest.param(functools.partial(Head(), target=None), ["scale"], id="partial"),
        pytest.param(functools.partial(by_default, head=Head()), ["head.scale", "head-2.scale"], id="keyword"),
        pytest.param(_closure(), ["head.scale"], id="closure"),
        pytest.param(by_global, ["_helper.HEAD.scale"], id="global of a helper"),
        pytest.param(by_parameter, ["TEMPERATURE"], id="global parameter"),
        pytest.param(by_attribute, ["PARTS.head.scale"], id="attribute of a global"),
        pytest.param(by_default, ["head.scale"], id="default"),
        pytest.param(Plain().loss, ["heads.0.scale"], id="method of an object"),
        pytest.param(Slotted(), ["head.scale"], id="object with slots"),
        pytest.param(System(), ["head.scale"], id="module around the model"),
        pytest.param(System().loss, ["head.scale"], id="its method"),
        pytest.param(nn.CrossEntropyLoss(), [], id="module without parameters"),
        pytest.param(nn.functional.mse_loss, [], id="function of torch"),
        pytest.param(lambda output, target: MODEL(output).mean(), [], id="the model itself"),
        pytest.param(None, [], id="none"),
    ],
)
def test_parameters_of_a_loss_are_found(loss_fn: Callable[..., Any] | None, names: list[str]) -> None:
    found = find_beside(MODEL, loss_fn)
    assert list(found.parameters) == [f"loss_fn/{name}" for name in names]
    assert list(found.state_dict()) == names


def test_what_the_optimizer_holds_is_trained_even_if_nobody_finds_who_uses_it() -> None:
    hidden = nn.Parameter(torch.zeros(2))
    found = find_beside(MODEL, None, torch.optim.SGD([*MODEL.parameters(), hidden], lr=0.1))
    assert [item is hidden for item in found.parameters.values()] == [True]


def test_an_optimizer_over_a_copy_of_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match="optimizer holds no parameter of this model"):
        find_beside(MODEL, None, torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))


def test_parameters_that_nobody_trains_are_named() -> None:
    loss = Head()
    optimizer = torch.optim.SGD([MODEL.weight], lr=0.1)
    note = untrained_note(MODEL, find_beside(MODEL, loss, optimizer), optimizer)
    assert note is not None
    assert "bias" in note
    assert "loss_fn/scale" in note


def test_a_module_around_the_model_saves_and_loads_its_own_part() -> None:
    first, second = System(), System()
    with torch.no_grad():
        first.head.scale.fill_(2.0)
    find_beside(MODEL, second.loss).load_state_dict(find_beside(MODEL, first.loss).state_dict())
    assert torch.equal(second.head.scale, first.head.scale)
    with pytest.raises(ValueError, match=r"head\.scale"):
        find_beside(MODEL, second.loss).load_state_dict({})
