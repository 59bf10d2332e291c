"""What the input costs: padding that is computed for nothing, and the share of a step spent waiting for data.

    PYTHONPATH=src python benchmarks/input_pipeline.py --data DATA --parts waste            # CPU, no training
    PYTHONPATH=src python benchmarks/input_pipeline.py --data DATA --parts wait --set training.epochs=40  # GPU

DATA (or FRAMEWORM_DATA) holds the folders ag_news and imdb. `waste` plans one epoch of each data set with each way of
batching and adds up real tokens and tokens computed on; nothing is trained. `wait` trains each _fast config for some
steps, as `frameworm train` does, and takes the phases data_wait and transfer from its step records, as a share of the
step without validation and checkpoints; the first steps, which compile and capture, do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from harness import RESULTS, names_among, table, tell_progress, write_results

from frameworm.config.load import load_config
from frameworm.engine import run as engine_run
from frameworm.hardware.resolve import resolve_here
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import build_workload
from frameworm.records.events import Listener
from frameworm.records.schema import StepRecord

CONFIGS = Path(__file__).parents[1] / "configs"
CASES = {
    "ag_news": ("ag_news_single_gpu", "ag_news"),
    "ag_news_optimized": ("ag_news_single_gpu_optimized", "ag_news"),
    "imdb": ("imdb_single_gpu", "imdb"),
}
BATCHINGS = ("padded", "bucketed", "packed")
BATCHES = (32, 128)
MOST_WAIT = 0.01
MOST_WASTE = {"bucketed": 0.05, "packed": 0.02}
PACKED_FROM = 128  # the goal of packed holds from this batch on
PARTS = ("waste", "wait")


def loader_of(config: Path, overrides: list[str]) -> Any:
    """The loader that `frameworm train` would read."""
    resolved = resolve_here(load_config(config, overrides), 1)
    workload = build_workload(resolved)
    return build_loader(resolved, workload, workload.train_data, evaluation=False)


def waste_of(loader: Any, epoch: int = 0) -> dict[str, Any]:
    """Tokens of one epoch, and the share of those computed on that are padding."""
    loader.shard(0, 1, 1)
    loader.set_epoch(epoch)
    tokens = computed = samples = 0
    widths: set[int] = set()
    for step in range(loader.steps_per_epoch):
        shape = loader.step_shape(step)
        tokens += shape.tokens
        computed += shape.padded_tokens
        samples += shape.global_samples
        widths.add(shape.padded_tokens)
    return {
        "steps": loader.steps_per_epoch,
        "samples": samples,
        "tokens": tokens,
        "computed_tokens": computed,
        "distinct_step_sizes": len(widths),
        "waste": 1 - tokens / computed,
    }


def measure_waste(name: str, batchings: list[str], batches: list[int], data: Path, extra: list[str]) -> dict[str, Any]:
    """Every way of batching one data set, with the plain config's model."""
    config, folder = CASES[name]
    found: dict[str, Any] = {}
    for batching in batchings:
        for batch in batches:
            overrides = [
                f"data.root={data / folder}",
                f"data.batching={batching}",
                f"training.global_batch={batch}",
                "gpu.device=cpu",
                *extra,
            ]
            key = f"{batching}, batch {batch}"
            began = perf_counter()
            try:
                figures = waste_of(loader_of(CONFIGS / f"{config}.yaml", overrides))
            except Exception as error:
                found[key] = {"batching": batching, "batch": batch, "error": f"{type(error).__name__}: {error}"}
                tell_progress(f"{name}, {key} failed: {error}")
                continue
            goal = MOST_WASTE.get(batching) if batching != "packed" or batch >= PACKED_FROM else None
            found[key] = {
                "batching": batching,
                "batch": batch,
                **figures,
                "planning_s": perf_counter() - began,
                "goal": goal,
                "met": None if goal is None else figures["waste"] <= goal,
            }
    return found


class KeepSteps(Listener):
    """Remembers what the engine recorded of each step."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, step: StepRecord) -> None:
        """One more."""
        self.steps.append(step)


def wait_share(steps: Sequence[StepRecord], skip: int) -> float | None:
    """Waiting for data and its transfer, as a share of what steps take beside validation and checkpoints.

    Args:
        steps: All of a run; those that were not divided into phases are left out.
        skip: Steps at the beginning that do not count: compiling would make every wait look small.

    Returns:
        The share, or None where nothing was measured.
    """
    divided = _divided(steps, skip)
    apart_s = sum(step.phases.get(name, 0.0) for step in divided for name in ("validation", "checkpoint"))
    whole_s = sum(step.step_s for step in divided) - apart_s
    return sum(map(_waited_s, divided)) / whole_s if divided else None


def _divided(steps: Sequence[StepRecord], skip: int) -> list[StepRecord]:
    return [step for step in steps if step.step > skip and step.phases]


def _waited_s(step: StepRecord) -> float:
    return sum(step.phases.get(name, 0.0) for name in ("data_wait", "transfer"))


def measure_wait(name: str, steps: int, skip: int, data: Path, extra: list[str]) -> dict[str, Any]:
    """Train the fast config for some steps."""
    config, folder = CASES[name]
    overrides = [f"data.root={data / folder}", f"training.max_steps={steps}", *extra]
    kept = KeepSteps()
    with tempfile.TemporaryDirectory() as out:
        try:
            loaded = load_config(CONFIGS / f"{config}_fast.yaml", overrides)
            record = engine_run.run(loaded, out=Path(out) / "run", callbacks=[kept])
        except Exception as error:
            tell_progress(f"{name} failed: {error}")
            return {"error": f"{type(error).__name__}: {error}"}
    share = wait_share(kept.steps, skip)
    divided = _divided(kept.steps, skip)
    waits_us = [(_waited_s(step) * 1e6, step.step) for step in divided]
    if share is None:
        return {"error": f"none of the {record.steps} steps after step {skip} was divided into phases; train more"}
    return {
        "steps": record.steps,
        "wait_share": share,
        "goal": MOST_WAIT,
        "met": share <= MOST_WAIT,
        "divided_steps": len(waits_us),
        "wait_us": {
            f"p{part}": float(np.percentile([wait_us for wait_us, _ in waits_us], part))
            for part in (10, 50, 90, 99, 100)
        },
        "longest_waits_us": sorted(waits_us, reverse=True)[:8],  # with their steps
        "median_step_us": statistics.median(step.step_s for step in kept.steps if step.step > skip) * 1e6,
        "captured_steps": record.captured_steps,
        "padding_waste": record.padding_waste,
        "notes": record.notes,
    }


def draw_waste(found: dict[str, Any]) -> str:
    """Rows by way of batching and batch."""
    rows = [
        (key, item["error"], "", "")
        if "error" in item
        else (key, f"{item['waste']:.1%}", str(item["distinct_step_sizes"]), _verdict(item))
        for key, item in found.items()
    ]
    return table(("", "padding", "step sizes", "goal"), rows)


def _verdict(item: dict[str, Any]) -> str:
    if item["goal"] is None:
        return ""
    return f"<= {item['goal']:.0%} {'met' if item['met'] else 'missed'}"


def main() -> int:
    """Measure the parts asked for."""
    arguments = _arguments()
    fine = True
    if "waste" in arguments.parts:
        results = {}
        for name in arguments.cases:
            tell_progress(f"{name}: planning epochs")
            results[name] = measure_waste(name, arguments.batchings, arguments.batches, arguments.data, arguments.set)
            print(f"\n{name}: padding of one epoch\n{draw_waste(results[name])}", flush=True)
            fine &= all(item.get("met") is not False and "error" not in item for item in results[name].values())
        settings = {"batches": arguments.batches, "batchings": arguments.batchings, "overrides": arguments.set}
        path = write_results("padding_waste", torch.device("cpu"), settings, results, arguments.out)
        print(f"written to {path}")
    if "wait" in arguments.parts:
        results = {}
        for name in arguments.cases:
            tell_progress(f"{name}: training {arguments.steps} steps")
            results[name] = item = measure_wait(name, arguments.steps, arguments.skip, arguments.data, arguments.set)
            if "error" in item:
                print(f"{name}: failed: {item['error']}")
            else:
                print(f"{name}: {item['wait_share']:.2%} of a step waits for data: {_verdict(item)}", flush=True)
            fine &= bool(item.get("met"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = {"steps": arguments.steps, "skip": arguments.skip, "overrides": arguments.set}
        path = write_results("input_wait", device, settings, results, arguments.out)
        print(f"written to {path}")
    return 0 if fine else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA"), help="folder with ag_news/ and imdb/")
    add("--cases", type=names_among(CASES), default=list(CASES), help="names, comma between")
    usual = [*PARTS] if torch.cuda.is_available() else ["waste"]
    add("--parts", type=names_among(PARTS), default=usual, help="waste, wait or both")
    add("--batchings", type=names_among(BATCHINGS), default=list(BATCHINGS), help="names, comma between")
    add("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES))
    add(
        "--steps",
        type=int,
        default=6000,
        help="steps of a training in part wait; of short steps one in some is looked into",
    )
    add("--skip", type=int, default=100, help="steps at the beginning that do not count")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("say where the data is: --data, or the variable FRAMEWORM_DATA")
    arguments.data = Path(arguments.data).resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
