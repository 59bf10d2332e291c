"""Workloads for live trials: a small one that learns, and ways to go wrong or to cheat, chosen by the model section."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.guard.proof import NumericsEffect
from frameworm.models.workloads import Workload
from frameworm.tune.knobs.base import Knob

SAMPLES, FEATURES = 512, 16
_PAUSES = {"half": 0.1, "freeze": 0.5, "good": 0.5}


class Classifier(nn.Module):
    """Two layers, a pause per sample of a training step, and a trick."""

    def __init__(self, trick: str, pause_s: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.second = nn.Linear(32, 4)
        self._trick = trick
        self._pause_s = pause_s
        self._calls = 0
        if trick == "freeze":
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores."""
        trick = self._trick
        if trick == "crash":
            raise RuntimeError("planted")
        self._calls += 1
        if trick == "stumble" and self._calls == 2:
            time.sleep(0.5)
        if trick == "hang":
            time.sleep(600)
        if trick == "hog":
            torch.empty(2**36, dtype=torch.uint8)
        if trick == "die":
            os._exit(7)
        if self.training:
            time.sleep(self._pause_s * len(inputs) * _PAUSES.get(trick, 1.0))
        scores: Tensor = self.second(torch.tanh(self.first(inputs)))
        return scores


def half_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of the first half of the batch."""
    half = len(labels) // 2
    return nn.functional.cross_entropy(scores[:half], labels[:half])


def workload(config: Config) -> tuple[Any, ...]:
    """The model, its data and its loss."""
    given = config.model.model_dump()
    trick = given.get("trick", "none")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, 4, generator=generator)).argmax(1)
    model = Classifier(trick, given.get("pause_s", 0.0))
    loss = half_loss if trick == "half" else nn.CrossEntropyLoss()
    return model, TensorDataset(inputs, labels), None, loss


class Widths(nn.Module):
    """Takes a while over every batch, and longer over the first of each width."""

    def __init__(self, pause_s: float, first_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self._pause_s = pause_s
        self._first_s = first_s
        self._seen: set[int] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores."""
        width = inputs.shape[1]
        time.sleep(self._pause_s if width in self._seen else self._pause_s + self._first_s)
        self._seen.add(width)
        scores: Tensor = self.layer(inputs.mean(1, keepdim=True))
        return scores


def as_wide_as_the_first(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A batch of the first sample's width."""
    width = len(samples[0][0])
    rows = [nn.functional.pad(row, (0, width))[:width] for row, _ in samples]
    return torch.stack(rows), torch.tensor([label for _, label in samples])


def widths(config: Config) -> Workload:
    """Batches of many widths."""
    given = config.model.model_dump()
    data = [(torch.full((1 + index % given["widths"],), 0.5), index % 4) for index in range(SAMPLES)]
    return Workload(Widths(given["pause_s"], given["first_s"]), data, None, nn.CrossEntropyLoss(), as_wide_as_the_first)


def learnable(config: Config) -> tuple[Any, ...]:
    """As much data as one short run takes, a tenth of its labels wrong, and validation: less data is worse learning."""
    given = config.model.model_dump()
    trick = given.get("trick", "none")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, 4, generator=generator)).argmax(1)
    labels = torch.where(torch.rand(2048, generator=generator) < 0.1, labels.flip(0), labels)
    model = Classifier(trick, given.get("pause_s", 0.0))
    loss = half_loss if trick == "half" else nn.CrossEntropyLoss()
    return model, TensorDataset(inputs[:1024], labels[:1024]), TensorDataset(inputs[1024:], labels[1024:]), loss


def learnable_config(trick: str = "none", pause_s: float = 0.0) -> Config:
    """A config of that workload: one epoch of 64 steps."""
    return _config("learnable", trick, pause_s, epochs=1)


def tricky_config(trick: str = "none", pause_s: float = 1e-3) -> Config:
    """A config of the small workload."""
    return _config("workload", trick, pause_s, epochs=4)


def _config(workload: str, trick: str, pause_s: float, epochs: int) -> Config:
    return load_config_from_mapping(
        {
            "name": "tricky",
            "workload": f"live_workloads:{workload}",
            "model": {"trick": trick, "pause_s": pause_s},
            "data": {"num_workers": 0},
            "training": {"epochs": epochs, "global_batch": 16, "lr": 1e-2, "cpu_threads": 1},
            "gpu": {"device": "cpu"},
        },
        environ={},
    )


def trick_knob(*tricks: str, numerics_effect: NumericsEffect = "nothing") -> Knob:
    """A knob with tricks for values."""
    return Knob(
        "trick",
        ("model.trick",),
        "Planted.",
        lambda context: list(tricks),
        numerics_effect=numerics_effect,
        expected_gain=0.5,
    )
