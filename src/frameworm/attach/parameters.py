"""What a script trains, judging by the optimizers that it steps: number of parameters, device and precision."""

from __future__ import annotations

from typing import Any

import torch

MOST_OPTIMIZERS = 32  # some scripts create a new one for every step


class Parameters:
    """Counts the parameters of optimizers that step in turns; one that never steps again trains something else."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, int]] = {}  # parameter sizes per optimizer, in order of their latest step
        self._teams: set[frozenset[int]] = set()

    def look_at(self, optimizer: Any, facts: dict[str, Any]) -> None:
        """Record what an optimizer that has just stepped trains.

        Args:
            optimizer: The optimizer.
            facts: Receives `parameters`, `device` and `precision`.
        """
        identity, known = id(optimizer), self._known
        if known and next(reversed(known)) == identity:
            return
        if identity not in known:
            parameters = [item for group in optimizer.param_groups for item in group["params"]]
            known[identity] = {id(item): item.numel() for item in parameters}
            facts.setdefault("parameters", sum(known[identity].values()))
            if parameters and "device" not in facts:
                facts["device"] = str(parameters[0].device)
                facts.setdefault("precision", short_name(parameters[0].dtype))
            if len(known) > MOST_OPTIMIZERS:
                del known[next(iter(known))]
            return
        order = list(known)
        team = order[order.index(identity) :]  # optimizers that have stepped since this one did
        known[identity] = known.pop(identity)
        if frozenset(team) not in self._teams and len(self._teams) < MOST_OPTIMIZERS:
            self._teams.add(frozenset(team))
            together: dict[int, int] = {}
            for member in team:
                together.update(known[member])
            facts["parameters"] = max(facts["parameters"], sum(together.values()))


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a precision in reports."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
