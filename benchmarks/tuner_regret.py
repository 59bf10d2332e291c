"""How far the search stays behind trying everything: on simulated machines, and on this one with few knobs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import bootstrap_median, tell_progress

from frameworm.config.load import load_config, load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.guard.agreement import Agreement, OutputErrors, StateErrors
from frameworm.guard.gain import Window
from frameworm.guard.proof import Evidence, Learning, StepEvidence, prove
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.context import Context, WorkloadFacts, apply_changes
from frameworm.tune.knobs.registry import all_knobs
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.outcomes import Budget, ProofRequest, ProofResult, TrialRequest, TrialResult

Setting = tuple[Any, ...]
NOISE = 0.01
SWITCHES, SCALE = 6, (1, 2, 4, 8)
# Small enough to try everything on two cores; each changes the time of a step on a CPU.
REAL_KNOBS = (
    "batching",
    "precision",
    "micro_batch",
    "cpu_threads",
    "activation_checkpointing",
)
# Small passes of a larger batch, so that there are several micro-batches to choose from.
REAL_SETTINGS = ("training.global_batch=256", "training.micro_batch=32")


class Landscape:
    """A machine that is a table: a time for every combination of switches and one setting on a scale.

    Each switch helps, harms or does nothing; three pairs of them do more or less together than alone.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.names = [f"switch{index}" for index in range(SWITCHES)]
        alone = [math.exp(draw.gauss(-0.1, 0.25)) for _ in self.names]
        pairs = {pair: math.exp(draw.gauss(0, 0.1)) for pair in draw.sample([*itertools.combinations(range(6), 2)], 3)}
        peak, bend = draw.choice(SCALE), draw.uniform(0.0, 0.15)
        self.times: dict[Setting, float] = {}
        for setting in itertools.product(*[(False, True)] * SWITCHES, SCALE):
            time = math.prod(factor for on, factor in zip(setting, alone) if on)
            time *= math.prod(factor for (i, j), factor in pairs.items() if setting[i] and setting[j])
            self.times[setting] = time * math.exp(bend * abs(math.log2(setting[-1] / peak)))
        self._draw = random.Random(seed + 1)

    def knobs(self) -> list[Knob]:
        """Its settings."""
        switches = [
            Knob(
                name, (f"model.{name}",), name, lambda context: [True], numerics_effect="rounding", partners=tuple(rest)
            )
            for name in self.names
            for rest in [[other for other in self.names if other != name]]
        ]
        scale = Knob(
            "scale", ("model.scale",), "scale", lambda context: SCALE, numerics_effect="rounding", ordered=True
        )
        return [*switches, scale]

    def time(self, config: Config) -> float:
        """The time of a config."""
        values = config.model.model_dump()
        return self.times[(*(values[name] for name in self.names), values["scale"])]

    def window(self, config: Config) -> float:
        """The same as it would be measured."""
        return 1e-3 * self.time(config) * math.exp(self._draw.gauss(0, NOISE))

    def run_trial(self, request: TrialRequest) -> TrialResult:
        """A trial."""
        windows: list[float] = []
        while len(windows) < 5:
            windows.append(self.window(request.config))
            if not request.keep_going(windows):
                return TrialResult(windows, stopped_early=True)
        return TrialResult(windows, 1.0, "compute_bound")

    def prove(self, request: ProofRequest) -> ProofResult:
        """A proof; all settings learn the same."""
        windows = []
        for _ in range(10):
            windows.append(Window("before", self.window(request.baseline)))
            windows.append(Window("after", self.window(request.candidate)))
        draw = random.Random(0)
        learned = Learning([StepEvidence(2 / (1 + step / 8) + draw.gauss(0, 0.05)) for step in range(32)])
        same = OutputErrors("loss", 1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        agreement = Agreement([StateErrors(step, [same]) for step in range(8)])
        return ProofResult(
            prove(windows, Evidence(learned, learned, agreement), numerics_effect=request.numerics_effect)
        )


def landscape_context(machine: Landscape) -> Context:
    """Where a search of a landscape starts: with all switches off."""
    start = load_config_from_mapping(
        {
            "workload": "a.b:c",
            "model": {**dict.fromkeys(machine.names, False), "scale": 1},
            "training": {"global_batch": 64, "epochs": 100},
        },
        environ={},
    )
    return Context(start, workload=WorkloadFacts(samples_per_epoch=100_000))


def simulated(landscapes: int) -> dict[str, Any]:
    """Searches on many landscapes: regret and share of the trials that trying everything takes."""
    regrets, shares = [], []
    for seed in range(landscapes):
        machine = Landscape(seed)
        context = landscape_context(machine)
        journal = Journal(None, search_name(context))
        result = Search(machine.knobs(), context, machine.run_trial, machine.prove, Budget(), journal).run()
        regrets.append(machine.time(result.best) / min(machine.times.values()) - 1)
        shares.append(result.trials / len(machine.times))
    return {
        "landscapes": landscapes,
        "space": len(machine.times),
        "regret_median": statistics.median(regrets),
        "regret_95th": sorted(regrets)[math.ceil(0.95 * len(regrets)) - 1],
        "regret_most": max(regrets),
        "within_5_percent": sum(regret <= 0.05 for regret in regrets) / len(regrets),
        "trials_median": statistics.median(shares) * len(machine.times),
        "trials_share_most": max(shares),
    }


def combinations_of(config: Config, context: Context, knobs: Sequence[Knob]) -> list[Config]:
    """Every combination of the values that the knobs offer at the start; those that the config refuses are left out."""
    offered: list[list[Mapping[str, Any]]] = []
    for knob in knobs:
        if knob.why_not(context) is None:
            offered.append([{}, *(item.changes for item in knob.candidates(context))])
    found = []
    for chosen in itertools.product(*offered):
        changes = {key: value for part in chosen for key, value in part.items()}
        reason = context.why_not(changes) if changes else None
        if reason in (None, "already so"):
            found.append(apply_changes(config, changes) if changes else config)
    return list({item.model_dump_json(): item for item in found}.values())


def exact(knob: Knob) -> Knob:
    """The knob without values that change numerics: step times say nothing about what they cost in quality."""

    def values(context: Context) -> list[Any]:
        judge = knob.numerics_effect
        return [item for item in knob.values(context) if (judge(item) if callable(judge) else judge) != "more"]

    return replace(knob, values=values)


def real(path: Path, overrides: Sequence[str], folder: Path, rounds: int, most: int | None = None) -> dict[str, Any]:
    """The search on this machine with a few knobs against every combination of their values.

    Args:
        path: The config.
        overrides: Settings on top of it.
        folder: For trials.
        rounds: Trials of the found and of the fastest config, in turns; the regret is theirs.
        most: Try no more combinations than this (to see that it works).
    """
    from frameworm.tune.facts import tuning_context
    from frameworm.tune.trials.runner import TrialRunner
    from frameworm.tune.tuner import tune

    config = load_config(path, overrides)
    context = tuning_context(config)
    knobs = [exact(knob) for knob in all_knobs() if knob.name in REAL_KNOBS]
    result = tune(config, folder / "search", knobs=knobs, budget=Budget(trials=10 if most else None))
    tell_progress(f"search: {result.trials} trials and proofs, {list(result.changes)}")
    space = combinations_of(config, context, knobs)
    runner = TrialRunner(folder / "all")
    times: list[tuple[float, Config]] = []
    failed = 0
    for number, item in enumerate(space[:most]):
        trial = runner.run_trial(TrialRequest(f"{number}", item, f"combination {number}"))
        failed += trial.failure is not None
        times.append((trial.sample_s, item))
        if number % 10 == 9:
            tell_progress(f"{number + 1} of {len(space)} combinations")
    fastest = min(times, key=lambda pair: pair[0])[1]
    # The least of many noisy figures flatters itself: both are measured again, in turns.
    ratios = []
    for number in range(rounds):
        pair = [
            runner.run_trial(TrialRequest(f"again-{number}-{name}", item, name)).sample_s
            for name, item in (("found", result.best), ("fastest", fastest))
        ]
        ratios.append(pair[0] / pair[1])
    behind = bootstrap_median(ratios)
    return {
        "space": len(space),
        "tried": len(times),
        "failed": failed,
        "trials": result.trials,
        "trials_share": result.trials / len(space),
        "found": {key: after for key, (_, after) in result.changes.items()},
        "regret": {"value": behind.value - 1, "low": behind.low - 1, "high": behind.high - 1},
    }
