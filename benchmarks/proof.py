"""How often does the proof of `frameworm tune` accept what is wrong, and refuse what is right?

    python benchmarks/proof.py --device cpu

Both sides of a trial train one of six small models (`proof_cases.py`) in lock step, as a proof does: the side before
the change leads, the side after it follows through the same states. Three campaigns:

- faults: the side after the change has one of 25 planted faults; none may be accepted;
- honest: it only rounds otherwise (micro-batches, recomputed activations, precision, compiled, captured); at most 2%
  may be refused or left open;
- same: nothing was changed; at most 1% may be taken for a change.

On a GPU faults are planted into steps in fp32, in bf16 and captured in bf16. Results go to
benchmarks/results/proof-DEVICE.json; the exit code is 1 if a rate is too high.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import RESULTS, table, tell_progress, write_results
from proof_cases import FAULTS, HONEST, MODELS, REPEATING, Fault, build

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.engine.lockstep import FollowingGate, LeadingGate, Plan
from frameworm.engine.run import train_workload
from frameworm.guard.agreement import Agreement, AgreementVerdict, judge_agreement
from frameworm.hardware.resolve import resolve_here
from frameworm.tune.trials.outcomes import rounding_unit

STEPS, EARLY, UPDATES, DRAWS = (6, 7, 8, 10, 13, 16, 20, 24), (1, 3), (2, 7), 24
GPU_ONLY = ("captured", "captured in bf16", "compiled and captured in bf16", "TF32", "fp16", "channels last")
COMPILED = ("compiled", "compiled in bf16", "compiled and captured in bf16")
SLOW_ON_CPU = ("compiled", "compiled in bf16")
MOST_REFUSED, MOST_CHANGED = 0.02, 0.01
COLUMNS = ("campaign", "trials", "accepted", "refused", "open", "failed")
Settings = dict[str, dict[str, Any]]


class Trial(NamedTuple):
    """One comparison: a model with a seed, what was changed, and the fault planted."""

    campaign: str
    model: str
    seed: int
    label: str
    settings: Settings
    base: Settings
    fault: Fault | None = None


def config_of(device: str, *changes: Settings) -> Config:
    """A small run with everything that an update can have: decay, clipping, a schedule."""
    values: Settings | dict[str, Any] = {
        "name": "proof",
        "workload": "proof_cases:build",
        "seed": 1,
        "training": {
            "global_batch": 16,
            "epochs": 50,
            "lr": 1e-3,
            "weight_decay": 0.01,
            "clip_norm": 0.1,
            "schedule": "cosine",
            "warmup": 0.1,
            "max_steps": 40,
        },
        "gpu": {"device": device, "mixed_precision": "off", "tf32": False, "capture": "off", "channels_last": False},
        "observe": {"progress": False, "sinks": []},
        "data": {"num_workers": 0, "shuffle": True},
        "checkpoint": {"every_steps": None},
    }
    for change in changes:
        for section, settings in change.items():
            values.setdefault(section, {}).update(settings)  # type: ignore[union-attr]
    return resolve_here(load_config_from_mapping(values, environ={}), 1)


def compare(trial: Trial, device: str) -> tuple[AgreementVerdict, Agreement]:
    """Both sides of a trial in lock step, in this process, one after the other."""
    before = config_of(device, trial.base)
    after = config_of(device, trial.base, trial.settings)
    units = rounding_unit(before), rounding_unit(after)
    plan = Plan("", STEPS, EARLY, UPDATES, after.gpu.mixed_precision, bool(after.gpu.tf32), units[0])
    agreement, is_random = _follow(trial, before, after, plan, max(units))
    if is_random:
        drawing = replace(plan, steps=STEPS[:1], early=(), updates=(), draws=DRAWS)
        drawn, _ = _follow(trial, before, after, drawing, max(units))
        agreement = replace(agreement, draws=drawn.draws)
    return judge_agreement(agreement), agreement


def _follow(trial: Trial, before: Config, after: Config, plan: Plan, unit: float) -> tuple[Agreement, bool]:
    fault = trial.fault or Fault()
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(plan, folder=folder)
        leading = LeadingGate(plan)
        train_workload(before, build(trial.model, trial.seed), gate=leading)
        workload = build(trial.model, trial.seed)
        fault.change(workload, random.Random(trial.seed))
        following: FollowingGate = fault.gate(replace(plan, unit=unit))
        train_workload(after, workload, gate=following)
    return following.agreement(), bool(leading.random)


def trials(device: str, seeds: int, same: int, compiled: bool) -> Iterator[Trial]:
    """All trials of a device."""
    bases: list[tuple[str, Settings]] = [("", {})]
    if device == "cuda":
        bases += [(f" under {name}", HONEST[name]) for name in ("bf16", "captured in bf16")]
    number = 0
    for extra, base in bases:
        for label, fault in FAULTS.items():
            if fault.eager and "captured" in extra:
                continue
            for model in fault.models:
                number += 1
                yield Trial("faults", model, number, label + extra, fault.settings, base, fault)
    for label, settings in HONEST.items():
        if (device == "cpu" and label in GPU_ONLY) or (label in COMPILED and not compiled):
            continue
        for model in MODELS:
            if model == "pictures" and "accumulation" in settings.get("training", {}):
                continue  # batch norm over fewer samples is another model
            if label == "activation checkpointing" and model not in REPEATING:
                continue
            if model == "tagger" and device == "cpu" and "bf16" in label:
                continue  # not every CPU has recurrent layers in bf16
            for seed in range(1 if label in COMPILED else seeds):
                yield Trial("honest", model, 1000 + seed, label, settings, {})
    for seed in range(same):
        yield Trial("same", MODELS[seed % len(MODELS)], 5000 + seed, "nothing changed", {}, bases[seed % len(bases)][1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each honest change and model")
    parser.add_argument("--same", type=int, default=300, help="trials in which nothing was changed")
    parser.add_argument("--campaigns", default="faults,honest,same")
    parser.add_argument("--no-compile", action="store_true", help="leave out what has to be compiled")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    given = parser.parse_args()
    chosen = [
        item
        for item in trials(given.device, given.seeds, given.same, not given.no_compile)
        if item.campaign in given.campaigns.split(",")
    ]
    random.Random(0).shuffle(chosen)  # so that one that is stopped has some of everything
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60 * given.minutes
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_run, trial._replace(fault=None), given.device) for trial in chosen]
        for ended in as_completed(waiting):
            row = ended.result()
            rows.append(row)
            told = f"{len(rows)} of {len(chosen)}: {row['campaign']}, {row['label']}, {row['model']}: {row['passed']}"
            tell_progress(told + (f" WRONG: {row['detail']}" if row["wrong"] else ""))
            if time.monotonic() > deadline:
                pool.shutdown(cancel_futures=True)
                break
    rates = summarise(rows)
    print(table(COLUMNS, [tuple(map(str, row)) for row in rates]))
    for row in (row for row in rows if row["wrong"]):
        print(f"{row['campaign']}: {row['label']}, {row['model']}, seed {row['seed']}: {row['detail']}")
    settings = {"seeds": given.seeds, "same": given.same, "campaigns": given.campaigns, "compile": not given.no_compile}
    results = {"rates": [dict(zip(COLUMNS, row)) for row in rates], "trials": rows}
    print(write_results("proof", torch.device(given.device), settings, results, given.out))
    return 1 if too_high(rows) else 0


def _run(trial: Trial, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    began = time.monotonic()
    if trial.campaign == "faults":  # functions cannot be sent to another process, their names can
        trial = trial._replace(fault=FAULTS[trial.label.partition(" under ")[0]])
    row: dict[str, Any] = {"campaign": trial.campaign, "label": trial.label, "model": trial.model, "seed": trial.seed}
    try:
        verdict, agreement = compare(trial, device)
        worst = verdict.outputs[0] if verdict.outputs else None
        row |= {"passed": verdict.passed, "detail": verdict.detail, "reference": agreement.reference, "failed": False}
        judged = [item for item in verdict.outputs if not item.below_noise]
        row["times"] = max((item.times / item.allowed for item in verdict.outputs), default=None)
        row["bias"] = max((abs(item.bias) + item.bias_error for item in judged), default=None)
        row["worst"] = None if worst is None else list(worst)
    except Exception as error:
        row |= {"passed": None, "detail": f"{type(error).__name__}: {error}", "failed": True}
        traceback.print_exc()
    row["wrong"] = row["failed"] or (row["passed"] is True) == (trial.campaign == "faults")
    row["seconds"] = time.monotonic() - began
    torch.compiler.reset()
    return row


def summarise(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Per campaign: trials, accepted, refused, left open, failed."""
    found = []
    for campaign in dict.fromkeys(row["campaign"] for row in rows):
        of = [row for row in rows if row["campaign"] == campaign]
        ended = [row["passed"] for row in of if not row["failed"]]
        found.append(
            (campaign, len(of), *(ended.count(verdict) for verdict in (True, False, None)), len(of) - len(ended))
        )
    return found


def too_high(rows: list[dict[str, Any]]) -> bool:
    """Whether a rate is higher than promised."""
    wrong = {name: [row["wrong"] for row in rows if row["campaign"] == name] for name in ("faults", "honest", "same")}
    return (
        any(wrong["faults"])
        or sum(wrong["honest"]) > MOST_REFUSED * len(wrong["honest"])
        or sum(wrong["same"]) > MOST_CHANGED * len(wrong["same"])
    )


if __name__ == "__main__":
    sys.exit(main())
