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
from frameworm.guard.proof import Mathematics
from frameworm.tune.knobs import Knob

SAMPLES, FEATURES = 512, 16
_PAUSES = {"half": 0.3, "freeze": 0.5, "good": 0.5}


class Classifier(nn.Module):
    """Two layers, a pause per sample, and a trick."""

    def __init__(self, trick: str, pause_s: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.second = nn.Linear(32, 4)
        self._trick = trick
        self._pause_s = pause_s
        if trick == "freeze":
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores."""
        trick = self._trick
        if trick == "crash":
            raise RuntimeError("planted")
        if trick == "hang":
            time.sleep(600)
        if trick == "hog":
            torch.empty(2**36, dtype=torch.uint8)
        if trick == "die":
            os._exit(7)
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
    return load_config_from_mapping(
        {
            "name": "learnable",
            "workload": "live_workloads:learnable",
            "model": {"trick": trick, "pause_s": pause_s},
            "data": {"num_workers": 0},
            "training": {"epochs": 1, "global_batch": 16, "lr": 1e-2, "cpu_threads": 1},
            "gpu": {"device": "cpu"},
        },
        environ={},
    )


def tricky_config(trick: str = "none", pause_s: float = 1e-3) -> Config:
    """A config of that workload."""
    return load_config_from_mapping(
        {
            "name": "tricky",
            "workload": "live_workloads:workload",
            "model": {"trick": trick, "pause_s": pause_s},
            "data": {"num_workers": 0},
            "training": {"epochs": 4, "global_batch": 16, "lr": 1e-2, "cpu_threads": 1},
            "gpu": {"device": "cpu"},
        },
        environ={},
    )


def trick_knob(*tricks: str, mathematics: Mathematics = "nothing") -> Knob:
    """A knob with tricks for values."""
    return Knob(
        "trick",
        ("model.trick",),
        "Planted.",
        lambda context: list(tricks),
        mathematics=mathematics,
        expected_gain=0.5,
    )
