"""What steps of several runs of a script gave from the same states, as one agreement that can be judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from frameworm.guard.agreement import Agreement, StateErrors
from frameworm.guard.proof import Evidence, Learning, StepEvidence
from frameworm.numerics.comparison import errors_of, noise_of
from frameworm.numerics.state import read

LEADER, CANDIDATE = "leader", "candidate"


def evidence_of(
    folders: Sequence[Path], steps: Sequence[int], moved: Sequence[str], name: str, unit: float, expected: str = LEADER
) -> Evidence:
    """Hold a run against the one that led.

    Args:
        folders: Where the runs wrote, one for each of their processes.
        steps: Compared steps.
        moved: Names of the runs that show the noise: perturbed, or just repeated.
        name: Of the run in question.
        unit: Unit of rounding of the coarser precision.
        expected: Name of a run in the precision of the one in question, with nothing else changed.
    """
    states: list[StateErrors] = []
    differences: list[str] = []
    updates: dict[str, float] = {}
    before: list[StepEvidence] = []
    after: list[StepEvidence] = []
    for folder, step in product(folders, steps):
        leader, other, plain = (_noted(folder, who, step) for who in (LEADER, name, expected))
        noise_runs = [_noted(folder, who, step) for who in moved]
        if leader is None or other is None or plain is None or None in noise_runs:
            continue
        own = leader["outputs"]
        noise = noise_of(own, [item["outputs"] for item in noise_runs if item is not None])
        states.append(
            StateErrors(step, errors_of(own, own, plain["outputs"], other["outputs"], noise, leader["counts"]))
        )
        differences += _differences(step, leader, other)
        for key, times in other["updates"].items():
            updates[key] = max(times, updates.get(key, 0.0))
        before.append(StepEvidence(leader["loss"] or 0.0, leader["samples"]))
        after.append(StepEvidence(other["loss"] or 0.0, other["samples"]))
    agreement = Agreement(states, differences, updates, "baseline", unit, changes_precision=expected != LEADER)
    return Evidence(Learning(before), Learning(after), agreement)


def _noted(folder: Path, name: str, step: int) -> dict[str, Any] | None:
    path = folder / f"{name}-{step}.pt"
    return read(path) if path.exists() else None


def _differences(step: int, leader: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    missing = sorted(set(leader["outputs"]) - set(other["outputs"]))
    if missing:
        found.append(f"step {step} gave no {missing[0]}")
    if leader["settings"] != other["settings"]:
        names = [name for name, value in leader["settings"].items() if other["settings"].get(name) != value]
        found.append(f"the optimizer's settings of {names[0] if names else 'a parameter'} differ in step {step}")
    return found
