"""Training and evaluation mode are kept module by module."""

from __future__ import annotations

import torch
from torch import nn

from frameworm.engine.model.modes import TrainingMode, restore_modes, start_evaluation


class Merging(nn.Linear):
    """Does something at each change of mode, as layers that merge their adapters do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def _model() -> nn.Sequential:
    model = nn.Sequential(Merging(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1][0].eval()
    return model


def _modes(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def test_evaluation_ends_with_the_modes_of_before() -> None:
    model = _model()
    before = _modes(model)
    modes = start_evaluation([model])
    assert _modes(model) == [False] * len(before)
    assert model[0].merged
    restore_modes(modes)
    assert _modes(model) == before
    assert not model[0].merged, "modules hear of the change by train()"


def test_a_model_in_evaluation_mode_is_put_into_training_mode_as_a_whole() -> None:
    model = _model().eval()
    assert TrainingMode.note(model) is None
    TrainingMode(model).enter()
    assert all(_modes(model))


def test_layers_in_evaluation_mode_stay_there_and_are_named() -> None:
    model = _model()
    before = _modes(model)
    mode = TrainingMode(model)
    mode.enter()
    assert _modes(model) == before
    assert "1.0" in (TrainingMode.note(model) or "")
    model.eval()  # somebody's own validation
    with torch.no_grad():
        model(torch.zeros(2, 2))
    mode.enter()
    assert _modes(model) == before
