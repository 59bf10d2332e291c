"""What `tune.json` holds after searches on a simulated machine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from frameworm.tune.search.result import TuneResult
from frameworm.tune.trials.outcomes import Budget, Failure, TrialRequest, TrialResult

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from simulated_machine import Machine, config_of, planted, search

FACTORS = {"capture": 0.4, "packed": 0.7, "threads": 0.9}
FAILURES = {
    "eats": TrialResult(failure=Failure("oom", "CUDA out of memory: tried to allocate 2.00 GiB")),
    "hangs": TrialResult(failure=Failure("hang", "no step for 60 s")),
    "graph": TrialResult(failure=Failure("capture_refused", "model.py:41: a tensor was read on the host")),
}


class PhasedMachine(Machine):
    """Trials also tell their phases."""

    def run_trial(self, request: TrialRequest) -> TrialResult:
        trial = super().run_trial(request)
        if not trial.seconds_per_sample:
            return trial
        step_s = trial.sample_s * 64
        shares = {"data_wait": 0.1, "forward": 0.25, "backward": 0.45, "optimizer": 0.15, "other": 0.05}
        phases = {name: {"mean_s": step_s * share, "share": share} for name, share in shares.items()}
        return replace(trial, details={"phases": phases})


def _cost(model: Mapping[str, Any]) -> float:
    factors = {**FACTORS, "half_batch": 0.5, "slow": 1.6}
    return math.prod(factor for name, factor in factors.items() if model.get(name))


def run_search(budget: Budget = Budget()) -> TuneResult:  # noqa: B008
    """Three real gains, a cheat, a slower setting, a null one, three failures and one that needs consent."""
    names = [*FACTORS, "half_batch", "slow", "null", *FAILURES]
    knobs = [planted(name, True) for name in names]
    knobs.append(planted("approximate", True, numerics_effect="more"))
    knobs.append(planted("far", True, applies=lambda context: "needs a GPU"))
    start = dict.fromkeys([*names, "approximate", "far"], False)

    def results(model: Mapping[str, Any]) -> TrialResult | None:
        return next((FAILURES[name] for name in FAILURES if model.get(name)), None)

    def setup(model: Mapping[str, Any]) -> float:
        return 12.0 if model.get("capture") else 1.0

    return search(PhasedMachine(_cost, results=results, setup=setup), knobs, config_of(**start), budget=budget)


@cache
def _stored(trials: int | None) -> str:
    return json.dumps(run_search(Budget(trials=trials)).to_json())


def stored(trials: int | None = None) -> dict[str, Any]:
    """`tune.json` of that search, stopped after some trials."""
    found: dict[str, Any] = json.loads(_stored(trials))
    return found
