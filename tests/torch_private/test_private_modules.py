"""Modules under private names."""

from __future__ import annotations

import copy

import torch
from torch import nn

from frameworm.torch_private import modules


def test_set_compiled_call_replaces_plain_call() -> None:
    layer = nn.Linear(2, 2)
    hooked: list[int] = []
    layer.register_forward_hook(lambda *_: hooked.append(1))
    assert modules.compiled_call(layer) is None
    inputs = torch.ones(1, 2)
    plain = modules.plain_call(layer)(inputs)
    assert torch.equal(plain, layer(inputs))
    assert len(hooked) == 2
    modules.set_compiled_call(layer, lambda _inputs: "compiled")
    assert layer(inputs) == "compiled"
    assert modules.compiled_call(copy.deepcopy(layer)) is None
    modules.set_compiled_call(layer, None)
    assert torch.equal(plain, layer(inputs))


def test_without_compiler() -> None:
    layer = nn.Linear(2, 2)
    compiled = torch.compile(layer, backend="eager")
    assert modules.is_wrapped_by_compiler(compiled)
    assert modules.without_compiler(compiled) is layer
    assert not modules.is_wrapped_by_compiler(layer)
    assert modules.without_compiler(layer) is layer


def test_pre_hooks() -> None:
    layer = nn.Linear(2, 2)

    def hook(_module: nn.Module, _inputs: object) -> None:
        """Changes nothing."""

    layer.register_forward_pre_hook(hook)
    assert modules.pre_hooks(layer) == [hook]


def test_change_own_tensors_leaves_children_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("count", torch.zeros(1))
    modules.change_own_tensors(model, lambda item: item + 1)
    assert model.count.item() == 1
    before = model[0].weight.clone()
    modules.change_own_tensors(model, lambda item: item * 2)
    assert torch.equal(model[0].weight, before)
