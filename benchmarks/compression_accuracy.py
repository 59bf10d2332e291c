"""Whether training with compressed gradients learns the same: real AG News, two ranks, several seeds.

    PYTHONPATH=src python benchmarks/compression_accuracy.py --data DATA --seeds 3

DATA (or FRAMEWORM_DATA) holds the folder ag_news (the 42,000-text subset). Each training is a `frameworm train` of
configs/ag_news_single_gpu.yaml on CPU with a smaller model (see SETTINGS), two gloo ranks on this machine, the same
steps and seed for every method. Compared is the accuracy after the last epoch, seed by seed. The methods that `auto`
takes by itself (bf16, int8, int4) must stay within half a point; what topk and powersgd do is reported as it falls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, SMALL_AG_NEWS, names_among, table, tell_progress, write_results

from frameworm.records.schema import RunRecord

CONFIG = Path(__file__).parents[1] / "configs" / "ag_news_single_gpu.yaml"
METHODS = ("off", "bf16", "int8", "int4", "topk", "powersgd")
BY_ITSELF = ("bf16", "int8", "int4")  # what auto takes without further leave
WITHIN = 0.005
SETTINGS = (
    *SMALL_AG_NEWS,
    "data.batching=bucketed",
    "checkpoint.every_steps=off",
)


def train(method: str, seed: int, data: Path, epochs: int, folder: Path, limit_s: float) -> dict[str, Any]:
    """Train once; figures, or what went wrong."""
    out = folder / f"{method}-{seed}"
    settings = [
        *SETTINGS,
        f"data.root={data / 'ag_news'}",
        f"data.cache_dir={folder / 'cache'}",
        f"seed={seed}",
        f"training.epochs={epochs}",
        f"parallel.compression={method}",
    ]
    command = [sys.executable, "-m", "frameworm", "train", "--config", str(CONFIG), "--distributed"]
    command += ["--nproc-per-node", "2", "--out", str(out)]
    command += [part for setting in settings for part in ("--set", setting)]
    began = perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}"}
    record = RunRecord.from_dict(json.loads((out / "summary.json").read_text(encoding="utf-8")))
    tell_progress(f"{method} seed {seed}: accuracy {record.accuracy}, {perf_counter() - began:.0f} s")
    compression = record.communication.compression
    return {
        "val_accuracy": record.accuracy,
        "val_loss": record.quality.val_loss,
        "train_loss": record.quality.train_loss,
        "steps": record.steps,
        "bytes_per_step": record.communication.bytes_per_step,
        "method": None if compression is None else compression.method,
        "accuracy_by_epoch": [epoch.val_accuracy for epoch in record.epochs],
    }


def summarise(trials: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Per method the mean over seeds, and the difference from plain gradients seed by seed."""
    plain = trials["off"]
    figures: dict[str, Any] = {}
    for method, seeds in trials.items():
        whole = {seed: one for seed, one in seeds.items() if "error" not in one and "error" not in plain.get(seed, {})}
        if not whole:
            continue
        apart = [one["val_accuracy"] - plain[seed]["val_accuracy"] for seed, one in whole.items()]
        figures[method] = {
            "accuracy": statistics.mean(one["val_accuracy"] for one in whole.values()),
            "differences": apart,
            "difference": statistics.mean(apart),
            "bytes_per_step": next(iter(whole.values()))["bytes_per_step"],
            "seeds": len(whole),
            "goal": None if method not in BY_ITSELF else statistics.mean(apart) >= -WITHIN,
        }
    return figures


def draw(figures: dict[str, Any]) -> str:
    """The table."""
    words = {None: "", True: "met", False: "missed"}
    rows = [
        (
            method,
            f"{item['accuracy']:.4f}",
            f"{100 * item['difference']:+.2f}",
            " ".join(f"{100 * value:+.2f}" for value in item["differences"]),
            f"{item['bytes_per_step'] / 1e3:,.1f}",
            words[item["goal"]],
        )
        for method, item in figures.items()
    ]
    return table(("method", "accuracy", "points off", "by seed", "kB per step", "goal -0.50"), rows)


def main() -> int:
    """Train all methods with all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA"), help="folder with ag_news/")
    add("--methods", type=names_among(METHODS), default=list(METHODS), help="names, comma between; off among them")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=2)
    add("--limit-s", type=float, default=600.0, help="a training that takes longer has failed")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    if options.data is None:
        parser.error("where is ag_news? Give --data or set FRAMEWORM_DATA")
    trials: dict[str, dict[int, dict[str, Any]]] = {method: {} for method in options.methods}
    settings = {"config": CONFIG.name, "overrides": SETTINGS, "epochs": options.epochs, "ranks": 2}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for method in options.methods:
                trials[method][seed] = train(method, seed, options.data, options.epochs, Path(folder), options.limit_s)
            figures = summarise(trials)
            results = {"methods": figures, "trials": trials}
            path = write_results("compression_accuracy", torch.device("cpu"), settings, results, options.out)
    print(draw(figures))
    for method, seeds in trials.items():
        for seed, one in seeds.items():
            if "error" in one:
                print(f"  failed: {method} seed {seed}: {one['error']}")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
