from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from frameworm.config.schema import TrainingConfig
from frameworm.engine.model.host_gelu import gelu
from frameworm.engine.model.processors import host_layers
from frameworm.engine.trainer import Trainer
from frameworm.errors import ModelError

FORMS = ("tanh", "none")


def value_and_slope(function: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    inputs = inputs.detach().clone().requires_grad_()
    result = function(inputs)
    result.sum().backward()
    assert inputs.grad is not None
    return result.detach(), inputs.grad


@pytest.mark.parametrize("form", FORMS)
def test_value_and_slope_are_those_of_torch(form: str) -> None:
    layer = nn.GELU(approximate=form)
    inputs = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e10, -300.0, -0.0, 0.0, 300.0, 1e10])])
    exact = value_and_slope(layer, inputs.double())
    mine, theirs = value_and_slope(lambda rows: gelu(layer, rows), inputs), value_and_slope(layer, inputs)
    for found, torchs, wanted in zip(mine, theirs, exact, strict=True):
        limit = 4e-6 + 2 * (torchs - wanted).abs().max().item()
        assert (found - wanted).abs().le(limit + 1e-6 * wanted.abs()).all()
    assert not torch.equal(mine[1], theirs[1]), "it is torch's own"


@pytest.mark.parametrize("form", FORMS)
def test_bad_numbers_stay_bad(form: str) -> None:
    values, slopes = value_and_slope(lambda rows: gelu(nn.GELU(approximate=form), rows), torch.tensor([torch.nan, 1.0]))
    assert values.isnan().tolist() == slopes.isnan().tolist() == [True, False]


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    inputs = torch.ones(3, requires_grad=True)
    with pytest.raises(ModelError, match=r"leave training\.cpu_gelu at torch"):
        torch.autograd.grad(gelu(nn.GELU(), inputs).sum(), inputs, create_graph=True)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_backward_it_is_torchs_own(form: str) -> None:
    layer, inputs = nn.GELU(approximate=form), torch.randn(50, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(gelu(layer, inputs), layer(inputs))
    assert torch.equal(gelu(layer, inputs.detach()), layer(inputs.detach()))
    half = inputs.to(torch.bfloat16)
    assert torch.equal(gelu(layer, half), layer(half))


class Sees(nn.GELU):
    """Computes something of its own, so nobody may put another forward in its place."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def test_only_layers_of_torchs_own_kind_and_only_for_so_long() -> None:
    replaced = nn.GELU()
    replaced.forward = lambda inputs: inputs  # type: ignore[method-assign]
    model = nn.Sequential(nn.GELU(), Sees(), replaced)
    with host_layers(model, TrainingConfig(cpu_gelu="keep_slope")):
        assert ["forward" in vars(layer) for layer in model] == [True, False, True]
        assert model[2](torch.ones(1)) == 1
    assert ["forward" in vars(layer) for layer in model] == [False, False, True]


def trained(form: str, **settings: Any) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(approximate=form), nn.Linear(32, 3))
    inputs, labels = torch.randn(64, 4), torch.randint(0, 3, (64,))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=None, **settings)
    trainer.train([(inputs, labels)] * 20, epochs=1)
    return [item.detach() for item in model.parameters()], model


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_the_users_own_learns_the_same_to_rounding(form: str) -> None:
    usual, _ = trained(form)
    kept, model = trained(form, cpu_gelu="keep_slope")
    for one, other in zip(usual, kept, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(one, other) for one, other in zip(usual, kept, strict=True)), "nothing was changed"
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_recomputed(reentrant: bool) -> None:
    layer, inputs = nn.GELU(), torch.randn(50)
    usual = value_and_slope(lambda rows: gelu(layer, rows), inputs)
    again = value_and_slope(lambda rows: checkpoint(gelu, layer, rows, use_reentrant=reentrant), inputs)
    assert torch.equal(usual[1], again[1])
    torch.testing.assert_close(again[0], usual[0])  # reentrant: at first there is no backward to prepare for
