"""Whether steps with little padding learn as well as shuffled ones: paired seeds on the CPU.

    PYTHONPATH=src python benchmarks/batching_quality.py --data DATA --seeds 8

Cases: `quickstart` is configs/quickstart.yaml as it is; `ag_news` is real AG News (DATA or FRAMEWORM_DATA holds the
folder ag_news) with a small model, 300 steps. Three orders of the samples, each from the same weights and seeds:

    shuffled   random steps, padded to their longest text
    alike      all texts of a step are of like length (how `data.batching: bucketed` was until these figures)
    mixed      half of each step is short and half is long, a forward pass each (`data.batching: bucketed` now)

Compared with `shuffled`, seed by seed: validation loss and accuracy at the end, with the interval and the margin of
`frameworm tune`'s quality check; the padding; and the processor time of a whole training.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from harness import RESULTS, SMALL_AG_NEWS, names_among, table, tell_progress, write_results

from frameworm.config.load import load_runnable
from frameworm.data.batches import batching
from frameworm.data.batches.arrange import bucketed
from frameworm.engine.run import train_workload
from frameworm.guard.quality import Quality, SeedEnd, judge_quality
from frameworm.hardware.resolve import resolve_here
from frameworm.models.workloads import build_workload

CONFIGS = Path(__file__).parents[1] / "configs"
ORDERS = ("shuffled", "alike", "mixed")
AG_NEWS = (
    *SMALL_AG_NEWS,
    "training.epochs=1",
    "training.max_steps=300",
    "checkpoint.every_steps=off",
    "data.num_workers=0",
)


def train(case: str, order: str, seed: int, data: Path | None) -> dict[str, Any]:
    """One training in this process; how it ended."""
    torch.set_num_threads(1)
    settings = ["training.cpu_threads=1", f"data.batching={'padded' if order == 'shuffled' else 'bucketed'}"]
    if order == "alike":
        settings.append("training.accumulation=1")
    if case == "ag_news":
        assert data is not None
        settings += [*AG_NEWS, f"data.root={data / 'ag_news'}"]
    name = "quickstart.yaml" if case == "quickstart" else "ag_news_single_gpu.yaml"
    config = load_runnable(CONFIGS / name, settings)
    config.observe = config.observe.model_copy(update={"sinks": [], "progress": False})
    config = resolve_here(config, 1)
    workload = build_workload(config, weights_seed=seed)
    began = process_time()
    with patch.object(batching, "bucketed", steps_alike if order == "alike" else bucketed):
        record = train_workload(config.model_copy(update={"seed": seed}), workload)
    return {
        "val_loss": record.quality.val_loss,
        "val_accuracy": record.quality.val_accuracy,
        "padding_waste": record.padding_waste,
        "steps": record.steps,
        "processor_s": process_time() - began,
    }


def steps_alike(*given: Any, mixed: bool, ranks: int, **more: Any) -> Any:
    """The order of bucketed steps before their lengths were mixed."""
    return bucketed(*given, **more)


def summarise(trials: dict[str, list[dict[str, Any]]], start_loss: float) -> dict[str, Any]:
    """Each order beside the shuffled one."""
    figures: dict[str, Any] = {}
    sides = {
        order: [SeedEnd(start_loss, one["val_loss"], one["val_accuracy"]) for one in ended]
        for order, ended in trials.items()
    }
    for order, ended in trials.items():
        judged = judge_quality(Quality(sides["shuffled"], sides[order], ended[0]["steps"]))
        figures[order] = {
            "val_loss": sum(one["val_loss"] for one in ended) / len(ended),
            "val_accuracy": sum(one["val_accuracy"] for one in ended) / len(ended),
            "padding_waste": sum(one["padding_waste"] for one in ended) / len(ended),
            "processor_s": median(one["processor_s"] for one in ended),
            "loss_higher": None if judged.loss is None else judged.loss._asdict(),
            "accuracy_lower": None if judged.accuracy is None else judged.accuracy._asdict(),
            "seeds": len(ended),
            "seeds_needed": judged.seeds_needed,
        }
    return figures


def draw(figures: dict[str, Any]) -> str:
    """The table of one case."""
    rows = []
    for order, item in figures.items():
        loss, accuracy = item["loss_higher"], item["accuracy_lower"]
        same = order == "shuffled"
        rows.append(
            (
                order,
                f"{item['padding_waste']:.1%}",
                f"{item['processor_s']:.1f}",
                f"{item['val_loss']:.4f}",
                "" if same else f"{loss['worse']:+.4f} ({loss['low']:+.4f}..{loss['high']:+.4f})",
                f"{item['val_accuracy']:.2%}",
                ""
                if same
                else f"{-100 * accuracy['worse']:+.2f} ({-100 * accuracy['high']:+.2f}..{-100 * accuracy['low']:+.2f})",
            )
        )
    columns = ("order", "padding", "processor s", "loss", "higher (95%)", "accuracy", "points (95%)")
    return table(columns, rows)


def main() -> int:
    """Train all orders with all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA"), help="folder with ag_news/")
    add("--cases", type=names_among(("quickstart", "ag_news")), default=["quickstart", "ag_news"])
    add("--seeds", type=int, default=8)
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="trainings at a time, one thread each")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    if options.data is None and "ag_news" in options.cases:
        parser.error("where is ag_news? Give --data or set FRAMEWORM_DATA")
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for case in options.cases:
            # Orders take turns, so that all of them meet the same machine.
            waiting = [
                (order, pool.submit(train, case, order, seed, options.data))
                for seed in range(options.seeds)
                for order in ORDERS
            ]
            trials: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
            for order, ended in waiting:
                trials[order].append(ended.result())
                tell_progress(f"{case} {order} {len(trials[order])}: {trials[order][-1]['val_loss']:.4f}")
            # Four classes that nothing is known about yet: ln 4.
            figures = summarise(trials, torch.tensor(4.0).log().item())
            results[case] = {"orders": figures, "trials": trials}
            print(f"{case}, {options.seeds} seeds of {trials['shuffled'][0]['steps']} steps")
            print(draw(figures))
            settings = {"seeds": options.seeds, "cases": options.cases, "ag_news": AG_NEWS}
            path = write_results("batching_quality", torch.device("cpu"), settings, results, options.out)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
