"""A machine that is a function: from a config to a time per sample, noise, findings, failures and what is learned."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.guard.gain import Window
from frameworm.guard.proof import Evidence, prove
from frameworm.guard.quality import Quality, SeedEnd, judge_quality
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.context import Context, WorkloadFacts
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.result import TuneResult
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.outcomes import (
    Budget,
    ProofRequest,
    ProofResult,
    QualityCheckRequest,
    QualityCheckResult,
    TrialRequest,
    TrialResult,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "guard"))
from small_training import ROUNDINGS, Faults, compare, train

BASE_S = 1e-3
Cost = Callable[[Mapping[str, Any]], float]


@cache
def evidence_of(kept: int | None = None, frozen: str | None = None, precision: str = "fp32") -> Evidence:
    """Two sides of a real small training, the second of which may skip work."""
    rounding, faults = ROUNDINGS[precision], Faults(kept, frozen, lie=True)
    return Evidence(train(), train(rounding, faults), compare(rounding, faults, declared=precision))


class Machine:
    """Runs trials and proofs of configs whose `model` section holds the planted settings.

    Args:
        cost: Seconds per sample, from the model section; what it raises is the runner's error.
        noise: Relative noise of a window.
        seed: Seed of the noise.
        findings: Verdict and findings of a config.
        setup: Start-up of a config.
        results: Results to give instead, by the model section.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        noise: float = 0.005,
        seed: int = 0,
        findings: Callable[[Mapping[str, Any]], tuple[str, list[dict[str, Any]]]] | None = None,
        setup: Callable[[Mapping[str, Any]], float] | None = None,
        results: Callable[[Mapping[str, Any]], TrialResult | None] = lambda model: None,
        die_after: int | None = None,
    ) -> None:
        self.cost = cost
        self.noise = noise
        self.draw = random.Random(seed)
        self.findings = findings
        self.setup = setup
        self.results = results
        self.trials: list[str] = []
        self.tried: list[dict[str, Any]] = []
        self.windows = 0
        self.proofs: list[ProofRequest] = []
        self.checks: list[QualityCheckRequest] = []
        self.now_s = 0.0
        self.die_after = die_after

    def window(self, model: Mapping[str, Any]) -> float:
        return BASE_S * self.cost(model) * math.exp(self.draw.gauss(0, self.noise))

    def clock(self) -> float:
        return self.now_s

    def run_trial(self, request: TrialRequest) -> TrialResult:
        self._die_if_due()
        self.now_s += 10.0
        self.trials.append(request.id)
        model = model_of(request.config)
        self.tried.append(model)
        given = self.results(model)
        if given is not None:
            return given
        windows: list[float] = []
        for _ in range(3):
            windows.append(self.window(model))
            self.windows += 1
            if not request.keep_going(windows):
                return TrialResult(windows, stopped_early=True)
        verdict, found = self.findings(model) if self.findings else ("compute_bound", [])
        return TrialResult(windows, self.setup(model) if self.setup else 1.0, verdict, found)

    def prove(self, request: ProofRequest) -> ProofResult:
        self._die_if_due()
        self.now_s += 20.0
        self.proofs.append(request)
        before, after = model_of(request.baseline), model_of(request.candidate)
        windows = []
        for _ in range(6):
            windows += [Window("before", self.window(before)), Window("after", self.window(after))]
        evidence = evidence_of(16 if after.get("half_batch") else None, "first" if after.get("freeze") else None)
        return ProofResult(prove(windows, evidence, numerics_effect=request.numerics_effect, consent=request.consent))

    def check_quality(self, request: QualityCheckRequest) -> QualityCheckResult:
        """Seeds end about 0.01 apart, sides of a pair 0.001; `harm` and the noise `blur` of the model section add."""
        self._die_if_due()
        self.now_s += 50.0
        self.checks.append(request)
        models = [model_of(config) for config in (request.baseline, request.candidate)]
        ends: tuple[list[SeedEnd], list[SeedEnd]] = ([], [])
        for look in request.looks:
            for _ in range(look - len(ends[0])):
                luck = self.draw.gauss(0.5, 0.01)
                for side, model in zip(ends, models):
                    loss = self.draw.gauss(luck + (model.get("harm") or 0.0), 0.001 + (model.get("blur") or 0.0))
                    samples = 64 * request.steps
                    side.append(SeedEnd(2.0, loss, None, samples, ((samples // 2, 0.7 + loss), (samples, loss))))
            if not judge_quality(Quality(*ends, request.steps, request.looks), request.margin).open:
                break
        return QualityCheckResult(Quality(*ends, request.steps, request.looks))

    def _die_if_due(self) -> None:
        if self.die_after is not None and len(self.trials) + len(self.proofs) + len(self.checks) >= self.die_after:
            raise KeyboardInterrupt


def model_of(config: Config) -> dict[str, Any]:
    return config.model.model_dump()


def planted(name: str, *values: Any, **more: Any) -> Knob:
    """A knob over `model.<name>`."""
    more.setdefault("numerics_effect", "rounding")
    return Knob(name, (f"model.{name}",), f"planted {name}", lambda context: values, **more)


def config_of(**model: Any) -> Config:
    values = {"workload": "a.b:c", "model": model, "training": {"global_batch": 64, "epochs": 100}}
    return load_config_from_mapping(values, environ={})


def search(
    machine: Machine,
    knobs: Sequence[Knob],
    config: Config,
    *,
    folder: Path | None = None,
    budget: Budget = Budget(),  # noqa: B008
    samples_per_epoch: int | None = 10_000,
    validation: bool = False,
    **more: Any,
) -> TuneResult:
    context = Context(config, workload=WorkloadFacts(samples_per_epoch=samples_per_epoch, has_validation=validation))
    journal = Journal(folder, search_name(context))
    more.setdefault("clock", machine.clock)
    return Search(knobs, context, machine.run_trial, machine.prove, budget, journal, **more).run()
