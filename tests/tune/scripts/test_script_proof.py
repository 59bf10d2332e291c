"""What changes a script's steps is found by comparing them from the script's own states; what only rounds is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frameworm.attach.trial.job import ScriptJob
from frameworm.guard.agreement import judge_agreement
from frameworm.guard.proof import Evidence
from frameworm.numerics.state import read
from frameworm.tune.scripts.comparing import CANDIDATE, LEADER, evidence_of
from frameworm.tune.scripts.process import ScriptProcess

STEPS = [2, 3, 4, 5, 6, 8, 10, 12]
DEADLINE_S = 100.0
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wrong = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(0)
inputs = torch.randn(512, 20)
labels = (inputs[:, :4].sum(1) > 0).long()
if wrong == "labels":
    labels[::20] = 1 - labels[::20]
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(),
                      nn.Linear(64, 2))
if wrong == "frozen":
    model[4].weight.requires_grad_(False)
decay = [0.1, 0.0] if wrong == "decay" else [0.1, 0.1]
optimizer = torch.optim.AdamW([{"params": model[:4].parameters(), "weight_decay": decay[0]},
                               {"params": model[4:].parameters(), "weight_decay": decay[1]}], lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step + (wrong == "rate")))
if wrong == "momentum":
    model[1].momentum = 0.2
for epoch in range(3):
    for number, (batch, target) in enumerate(DataLoader(TensorDataset(inputs, labels), 32, shuffle=True)):
        if wrong == "batch" and number == 4:
            batch, target = batch[:-1], target[:-1]
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        (loss * 1.02 if wrong == "scaled" else loss).backward()
        if wrong == "layer":
            model[4].weight.grad.mul_(1.02)
        if wrong == "noise":
            for item in model.parameters():
                item.grad.mul_(1 + 1e-7)
        optimizer.step()
        scheduler.step()
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Evidence]:
    folder = tmp_path_factory.mktemp("states")
    script = folder / "script.py"
    script.write_text(SCRIPT)

    def note(name: str, role: Any, arguments: list[str], switches: dict[str, Any], perturbed: int = 0) -> None:
        job = ScriptJob(
            str(script),
            arguments,
            switches=switches,
            role=role,
            folder=str(folder),
            name=name,
            steps=STEPS,
            perturbed=perturbed,
            isolated=False,
        )
        with ScriptProcess(job, folder / "processes", time.monotonic() + DEADLINE_S) as process:
            process.hear("compared")

    note(LEADER, "lead", [], {})
    note("noise-1", "follow", [], {}, 1)
    note("noise-2", "follow", [], {}, 2)

    def compare(wrong: str = "", **switches: Any) -> Evidence:
        for path in folder.glob(f"{CANDIDATE}-*.pt"):
            path.unlink()
        note(CANDIDATE, "follow", [wrong] if wrong else [], switches)
        return evidence_of([folder], STEPS, ["noise-1", "noise-2"], CANDIDATE, 2.0**-24)

    return compare


@pytest.mark.slow
@pytest.mark.parametrize("switches", [{}, {"fused_optimizer": True}, {"workers": 1}])
def test_what_only_rounds_agrees(compared: Callable[..., Evidence], switches: dict[str, Any]) -> None:
    evidence = compared(**switches)
    assert evidence.agreement is not None
    judged = judge_agreement(evidence.agreement)
    assert judged.passed is True, judged.detail
    assert evidence.baseline.steps == evidence.candidate.steps, "the same samples and losses"
    assert len(evidence.agreement.updates) == 8


@pytest.mark.slow
def test_a_rounding_error_agrees(compared: Callable[..., Evidence]) -> None:
    agreement = compared("noise").agreement
    assert agreement is not None
    assert judge_agreement(agreement).passed is True


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["scaled", "layer", "labels", "frozen", "decay", "rate", "momentum", "batch"])
def test_what_is_changed_is_found(compared: Callable[..., Evidence], wrong: str) -> None:
    agreement = compared(wrong).agreement
    assert agreement is not None
    judged = judge_agreement(agreement)
    assert judged.passed is False, f"{wrong}: {judged.detail}"


@pytest.mark.slow
def test_states_go_where_they_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "states"
    folder.mkdir()
    job = ScriptJob(str(script), [], role="lead", folder=str(folder), name="x", steps=[2], isolated=False)
    with ScriptProcess(job, tmp_path / "processes", time.monotonic() + DEADLINE_S) as process:
        process.hear("compared")
    assert sorted(path.name for path in folder.glob("*.pt")) == ["state-2.pt", "x-2.pt"]


UNSEEDED = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

rows = torch.arange(400.0).view(100, 4)
order = np.random.permutation(100).tolist()
random.shuffle(order)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for (batch,) in DataLoader(TensorDataset(rows), 4, sampler=order):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_scripts_that_seed_nothing_take_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNSEEDED)
    seen = []
    for name in ("one", "two"):
        job = ScriptJob(str(tmp_path / "script.py"), [], role="lead", folder=str(tmp_path), name=name, steps=[2, 3])
        with ScriptProcess(replace(job, isolated=False), tmp_path, time.monotonic() + DEADLINE_S) as process:
            process.hear("compared")
        seen.append([read(tmp_path / f"{name}-{step}.pt")["samples"] for step in (2, 3)])
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
