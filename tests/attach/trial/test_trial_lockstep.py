"""Runs that are compared step by step: what they note of loops that train their models in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.attach.trial.interception import ModelSwitches
from frameworm.attach.trial.job import Role, ScriptJob
from frameworm.attach.trial.lockstep import ComparedRun
from frameworm.attach.trial.switches import Switches
from frameworm.numerics.state import read

MAKERS: dict[str, Any] = {
    "adam": lambda models: torch.optim.Adam(models.parameters(), lr=0.01),
    "momentum": lambda models: torch.optim.SGD(models.parameters(), lr=0.01, momentum=0.9),
}


def compare(folder: Path, role: Role, make: Any) -> list[str]:
    """Train two models in turns with one optimizer, as a run of this role; what it reports."""
    job = ScriptJob("train.py", [], role=role, folder=str(folder), name=role, steps=[2, 3, 4, 99])
    told: list[str] = []
    run = ComparedRun(
        ModelSwitches(Switches()), job, lambda: folder, lambda item: told.append(f"{item['event']} {item['step']}")
    )
    run.counter.install()
    try:
        torch.manual_seed(0)
        models = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        optimizer = make(models)
        for number in range(5):
            optimizer.zero_grad()
            models[number % 2](torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    finally:
        run.counter.remove()
        for item in reversed(run._dropout):  # a trial ends with its process
            item.stop()
    return told


@pytest.mark.parametrize("optimizer", MAKERS)
def test_models_that_are_trained_in_turns_are_compared(tmp_path: Path, optimizer: str) -> None:
    """In the second step the second model's parameters get the first state that they ever have."""
    for role in ("lead", "follow"):
        assert compare(tmp_path, role, MAKERS[optimizer]) == ["noted 2", "noted 3", "noted 4"]
    noted = {step: read(tmp_path / f"follow-{step}.pt")["updates"] for step in (2, 3, 4)}
    assert not noted[2].keys() & {"(2) weight", "(2) bias"}
    for step, names in ((3, {"weight", "bias"}), (4, {"(2) weight", "(2) bias"})):
        assert names <= noted[step].keys()
        assert max(noted[step].values()) <= 1.0
