"""Dropout is off inside a comparison, whoever draws it, and as it was afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as dropout_by_name
from torch.nn.functional import scaled_dot_product_attention as attention_by_name

from frameworm.numerics.dropout import DropoutOff

WIDTH = 16


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(inputs)


class Recurrent(nn.Module):
    """A recurrent layer's outputs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)[0]
        return outputs


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)
        self._need_weights = need_weights

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs, inputs, inputs, need_weights=self._need_weights)[0]
        return outputs


def in_place(inputs: Tensor) -> Tensor:
    return F.dropout(inputs * 1.0, 0.5, True, inplace=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.Dropout": lambda: nn.Dropout(0.5),
    "nn.Dropout in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5, inplace=True)),
    "nn.Dropout1d": lambda: nn.Dropout1d(0.5),
    "nn.AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "nn.FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.5),
    "F.dropout": lambda: Call(lambda inputs: F.dropout(inputs, 0.5)),
    "F.dropout by name": lambda: Call(lambda inputs: F.dropout(input=inputs, p=0.5, training=True)),
    "F.dropout in place": lambda: Call(in_place),
    "imported by name": lambda: Call(lambda inputs: dropout_by_name(inputs, 0.5)),
    "held by a layer": lambda: Call(functools.partial(F.dropout, p=0.5)),
    "attention by name": lambda: Call(lambda inputs: attention_by_name(inputs, inputs, inputs, dropout_p=0.5)),
    "torch.dropout": lambda: Call(lambda inputs: torch.dropout(inputs, 0.5, True)),
    "torch.dropout_": lambda: Call(lambda inputs: torch.dropout_(inputs.clone(), 0.5, True)),
    "attention": lambda: Call(lambda inputs: F.scaled_dot_product_attention(inputs, inputs, inputs, dropout_p=0.5)),
    "attention in place": lambda: Call(lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5, True)),
    "nn.LSTM": lambda: Recurrent(nn.LSTM),
    "nn.GRU": lambda: Recurrent(nn.GRU),
    "nn.RNN": lambda: Recurrent(nn.RNN),
    "nn.MultiheadAttention": lambda: Attention(False),
    "nn.MultiheadAttention with weights": lambda: Attention(True),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.5, batch_first=True),
}


def draws(model: nn.Module) -> list[Tensor]:
    """Two passes with other random numbers."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        inputs = torch.linspace(-1, 1, 3 * 5 * WIDTH).view(3, 5, WIDTH)
        found.append(model(inputs).detach())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_dropped_and_all_is_put_back(name: str) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().train()
    assert not torch.equal(*draws(model)), "it drops in training"
    dropout = DropoutOff(model)
    dropout.start()
    try:
        first, second = draws(model)
        assert torch.equal(first, second)
        model.eval()
        torch.testing.assert_close(draws(model)[0], first)
        model.train()
        with dropout.lifted():
            assert not torch.equal(*draws(model)), "it drops as in training"
        assert torch.equal(*draws(model)), "and no longer"
    finally:
        dropout.stop()
    assert not torch.equal(*draws(model))


def functions() -> list[Any]:
    names = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "scaled_dot_product_attention", "dropout2d")
    return [getattr(owner, name) for owner in (F, torch) for name in names if hasattr(owner, name)]


def test_functions_are_the_same_objects_afterwards() -> None:
    before = functions()
    dropout = DropoutOff(nn.LSTM(2, 2, 2, dropout=0.25))
    dropout.start()
    assert functions() != before
    dropout.stop()
    assert functions() == before
    dropout.stop()
    assert functions() == before, "stopping twice does no harm"


def test_an_error_inside_lifted_leaves_dropout_off() -> None:
    dropout = DropoutOff(nn.Dropout(0.5))
    dropout.start()
    try:
        with pytest.raises(RuntimeError, match="planted"), dropout.lifted():
            raise RuntimeError("planted")
        assert torch.equal(F.dropout(torch.ones(100)), torch.ones(100))
    finally:
        dropout.stop()
    assert (F.dropout(torch.ones(1000)) == 0).any()


def test_each_layer_gets_its_own_share_back() -> None:
    layers = nn.ModuleList(nn.LSTM(2, 2, 2, dropout=share) for share in (0.1, 0.7))
    dropout = DropoutOff(layers)
    dropout.start()
    assert [layer.dropout for layer in layers] == [0.0, 0.0]
    dropout.stop()
    assert [layer.dropout for layer in layers] == [0.1, 0.7]


def test_other_random_numbers_are_drawn_as_ever() -> None:
    model = Call(lambda inputs: inputs + torch.rand_like(inputs))
    dropout = DropoutOff(model)
    dropout.start()
    try:
        assert not torch.equal(*draws(model))
    finally:
        dropout.stop()


def test_an_attention_keeps_its_other_arguments() -> None:
    query = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    few = query[:, :2]
    expected = F.scaled_dot_product_attention(query, few, few, is_causal=True, scale=0.3, enable_gqa=True)
    dropout = DropoutOff(nn.Identity())
    dropout.start()
    try:
        found = F.scaled_dot_product_attention(
            query, few, few, dropout_p=0.5, is_causal=True, scale=0.3, enable_gqa=True
        )
    finally:
        dropout.stop()
    torch.testing.assert_close(found, expected)
