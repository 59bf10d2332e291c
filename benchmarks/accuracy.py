"""Whether the fast settings learn as well: real AG News and IMDB, several seeds, plain fp32 against the fast configs.

    PYTHONPATH=src python benchmarks/accuracy.py --data DATA --cases ag_news,imdb --seeds 3 --jobs 6

DATA (or FRAMEWORM_DATA) holds the folders ag_news (the 42,000-text subset) and imdb. Each training is a
`frameworm train` of its own: `plain` is the shipped config in fp32 without TF32, eager and padded, `fast` its _fast
twin; the same seed and epochs. Compared are the accuracies after the last epoch, seed by seed, and the seconds of
training (without validation, with compilation and capture) until the validation after an epoch reached the target. With
--jobs above 1 trainings share the GPU: accuracies stand, times are marked as not comparable. A training that fails is
in the results with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, names_among, table, tell_progress, write_results

from frameworm.config.load import load_config
from frameworm.models.workloads import build_workload
from frameworm.records.schema import EpochRecord, RunRecord

CONFIGS = Path(__file__).parents[1] / "configs"
PLAIN = (
    "gpu.mixed_precision=off",
    "gpu.tf32=false",
    "gpu.compile_model=false",
    "gpu.capture=off",
    "gpu.fused_optimizer=false",
    "data.batching=padded",
    "data.resident=false",
)
KINDS = ("plain", "fast")
WITHIN = 0.005  # the fast setting may lose so much accuracy


@dataclass(frozen=True)
class Case:
    """A shipped config and what it should reach."""

    config: str
    folder: str
    target: float
    epochs: int


CASES = {
    "ag_news": Case("ag_news_single_gpu", "ag_news", 0.90, 5),
    "ag_news_optimized": Case("ag_news_single_gpu_optimized", "ag_news", 0.90, 5),
    "imdb": Case("imdb_single_gpu", "imdb", 0.85, 5),
}


@dataclass(frozen=True)
class Trial:
    """One training."""

    case: str
    kind: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def config(self) -> Path:
        """Its config file."""
        name = CASES[self.case].config
        return CONFIGS / (f"{name}_fast.yaml" if self.kind == "fast" else f"{name}.yaml")

    def command(self, out: Path) -> list[str]:
        """How it is started."""
        settings = [f"seed={self.seed}", *(PLAIN if self.kind == "plain" else ()), *self.overrides]
        command = [sys.executable, "-m", "frameworm", "train", "--config", str(self.config), "--out", str(out)]
        return [*command, *(part for setting in settings for part in ("--set", setting))]


def run_trial(trial: Trial, folder: Path, limit_s: float) -> dict[str, Any]:
    """Train once; figures, or what went wrong."""
    out = folder / f"{trial.case}-{trial.kind}-{trial.seed}"
    began = perf_counter()
    try:
        done = subprocess.run(trial.command(out), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_s:.0f} s"}
    process_s = perf_counter() - began
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}"}
    record = RunRecord.from_dict(json.loads((out / "summary.json").read_text(encoding="utf-8")))
    tell_progress(f"{trial.case} {trial.kind} seed {trial.seed}: accuracy {record.accuracy}, {process_s:.0f} s")
    reached = time_to(record.epochs, CASES[trial.case].target)
    return {
        "val_accuracy": record.accuracy,
        "val_loss": record.quality.val_loss,
        "train_loss": record.quality.train_loss,
        "steps": record.steps,
        "skipped_steps": record.skipped_steps,
        "training_s": sum(epoch.epoch_time_s for epoch in record.epochs),
        "run_s": record.wall_s,
        "process_s": process_s,
        "to_target_s": reached[0] if reached else None,
        "to_target_epoch": reached[1] if reached else None,
        "accuracy_by_epoch": [epoch.val_accuracy for epoch in record.epochs],
        "notes": record.notes,
    }


def time_to(epochs: Sequence[EpochRecord], target: float) -> tuple[float, int] | None:
    """Seconds of training and epochs until validation reached the target; None if it never did."""
    spent_s = 0.0
    for epoch in epochs:
        spent_s += epoch.epoch_time_s
        if epoch.val_accuracy is not None and epoch.val_accuracy >= target:
            return spent_s, epoch.epoch
    return None


def summarise(trials: dict[str, dict[int, dict[str, Any]]], target: float) -> dict[str, Any]:
    """Per kind the means over its seeds, and the difference seed by seed.

    Args:
        trials: By kind and seed what `run_trial` gave.
        target: Accuracy that should be passed.
    """
    done = {kind: {seed: one for seed, one in seeds.items() if "error" not in one} for kind, seeds in trials.items()}
    figures: dict[str, Any] = {}
    for kind, seeds in done.items():
        if not seeds:
            continue
        reached = [one["to_target_s"] for one in seeds.values()]
        figures[kind] = {
            "accuracy": statistics.mean(one["val_accuracy"] for one in seeds.values()),
            "passes_target": all(one["val_accuracy"] >= target for one in seeds.values()),
            "training_s": statistics.median(one["training_s"] for one in seeds.values()),
            "run_s": statistics.median(one["run_s"] for one in seeds.values()),
            "to_target_s": None if None in reached else statistics.median(reached),
            "seeds": len(seeds),
        }
    both = sorted(set(done["plain"]) & set(done["fast"]))
    apart = [done["fast"][seed]["val_accuracy"] - done["plain"][seed]["val_accuracy"] for seed in both]
    failed = {
        f"{kind} seed {seed}": one["error"]
        for kind, seeds in trials.items()
        for seed, one in seeds.items()
        if "error" in one
    }
    return {
        "target": target,
        "kinds": figures,
        "differences": apart,
        "difference": statistics.mean(apart) if apart else None,
        "within_half_a_point": statistics.mean(apart) >= -WITHIN if apart else None,
        "failed": failed,
        "trials": {kind: {str(seed): one for seed, one in seeds.items()} for kind, seeds in trials.items()},
    }


def draw(name: str, result: dict[str, Any], comparable: bool) -> str:
    """The table of one case."""
    columns = ("", "accuracy", "passes", "training s", f"s to {result['target']:.2f}", "seeds")
    rows = [
        (
            kind,
            f"{item['accuracy']:.4f}",
            "yes" if item["passes_target"] else "no",
            f"{item['training_s']:.1f}",
            "-" if item["to_target_s"] is None else f"{item['to_target_s']:.1f}",
            str(item["seeds"]),
        )
        for kind, item in result["kinds"].items()
    ]
    lines = [name, table(columns, rows)]
    if result["difference"] is not None:
        verdict = "met" if result["within_half_a_point"] else "missed"
        lines.append(f"fast - plain: {100 * result['difference']:+.2f} points; goal at least -0.50: {verdict}")
    if not comparable:
        lines.append("trainings shared the GPU: times are not comparable")
    return "\n".join([*lines, *(f"  failed: {key}: {text}" for key, text in result["failed"].items())])


def main() -> int:
    """Run the cases asked for."""
    arguments = _arguments()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    comparable = arguments.jobs == 1
    results: dict[str, Any] = {}
    device = torch.device(arguments.device)
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases:
            case = CASES[name]
            overrides = (
                f"data.root={arguments.data / case.folder}",
                f"training.epochs={arguments.epochs or case.epochs}",
                "checkpoint.every_steps=off",
                f"gpu.device={arguments.device}",
                *arguments.set,
            )
            tell_progress(f"{name}: reading the texts")
            build_workload(load_config(CONFIGS / f"{case.config}.yaml", overrides))  # tokenised once for all
            # Turn by turn, so that a machine that slows down does so for both.
            trials = [Trial(name, kind, seed, overrides) for seed in seeds for kind in arguments.kinds]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                outcomes = list(pool.map(lambda one: run_trial(one, Path(folder), arguments.limit_s), trials))
            by_kind: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in KINDS}
            for trial, outcome in zip(trials, outcomes, strict=True):
                by_kind[trial.kind][trial.seed] = outcome
            results[name] = summarise(by_kind, case.target)
            settings = {
                "seeds": list(seeds),
                "jobs": arguments.jobs,
                "times_comparable": comparable,
                "epochs": {one: arguments.epochs or CASES[one].epochs for one in arguments.cases},
                "plain": list(PLAIN),
                "overrides": arguments.set,
            }
            suffix = "" if len(arguments.cases) > 1 else f"-{name}"
            path = write_results(f"accuracy{suffix}", device, settings, results, arguments.out)
            print("\n" + draw(name, results[name], comparable), flush=True)
            fine &= not results[name]["failed"] and results[name]["within_half_a_point"] is not False
    print(f"written to {path}")
    return 0 if fine else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA"), help="folder with ag_news/ and imdb/")
    add("--cases", type=names_among(CASES), default=["ag_news", "imdb"], help="names, comma between")
    add("--kinds", type=names_among(KINDS), default=list(KINDS), help="plain, fast or both")
    add("--seeds", type=int, default=3, help="how many")
    add("--first-seed", type=int, default=0, help="the first of them")
    add("--epochs", type=int, default=None, help="epochs of each training; each case has its own default")
    add("--jobs", type=int, default=1, help="trainings at the same time; above 1 times are not comparable")
    add("--limit-s", type=float, default=900.0, help="a training that takes longer has failed")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to see that the script works")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all trainings")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("say where the data is: --data, or the variable FRAMEWORM_DATA")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    arguments.data = Path(arguments.data).resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
