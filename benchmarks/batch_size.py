"""The batch-size finder against brute force: how near to the true maximum, in how many trials and seconds?

    PYTHONPATH=src python benchmarks/batch_size.py                    # one GPU, about ten minutes
    PYTHONPATH=src python benchmarks/batch_size.py --device cpu       # a small model under a limit, to see that it runs

Each case is searched as `frameworm batch-size --free-global-batch` does, start of the server and planning included;
then the true maximum is found by growing strides away from that size until one fits and one does not, and plain
bisection between them to half a percent, with the same steps in the same kind of processes. Data is generated: text of
random words for GPT, the built-in data set padded to full length for texts.
Goals: within 3% of the true maximum, at most 8 trials, at most 90 s without the imports of this script itself.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, names_among, table, tell_progress, write_results

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.scaling.batch_search import BatchSizeReport
from frameworm.tune.batch_size.search import STEPS, BatchSizeFinder
from frameworm.tune.processes.batch_trial import RankJob
from frameworm.tune.processes.process_tree import free_port, run_family

CONFIGS = Path(__file__).parents[1] / "configs"
ERROR_GOAL, TRIALS_GOAL, SECONDS_GOAL = 0.03, 8, 90.0
RESOLUTION = 0.005
FIRST_STRIDE = 0.02
DEADLINE_S = 120.0
CPU_LIMIT_BYTES = 400 * 10**6
GPT, TEXTS = "gpt2_124m.yaml", "ag_news_single_gpu_optimized.yaml"
_GENERATED = ("data.dataset=generated", "data.pad_to=max", "model.vocab_size=32768")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt 124M": (GPT, ()),
    "gpt 124M full": (GPT, ("memory.activation_checkpointing=full",)),
    "gpt 124M fp32": (GPT, ("gpu.mixed_precision=off",)),
    "texts 16 layers": (TEXTS, (*_GENERATED, "model.num_layers=16")),
}
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {"quickstart": ("quickstart.yaml", ("data.pad_to=max",))}


def load(name: str, device: str, text: Path) -> Config:
    """The config of a case, on generated data."""
    file, overrides = (CASES if device == "cuda" else SMALL)[name]
    fixed = [f"gpu.device={device}", "observe.progress=false", "data.num_workers=0"]
    if file == GPT:
        fixed += [f"data.root={text}", "data.tokenizer=bytes", "model.vocab_size=50304"]
    return load_config(CONFIGS / file, [*overrides, *fixed])


def write_text(folder: Path) -> None:
    """Some tens of megabytes of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    for part in ("train", "val"):
        with (folder / f"{part}.txt").open("w", encoding="utf-8") as file:
            for _ in range(4000 if part == "train" else 200):
                file.write(" ".join(draw.choices(words, k=1000)) + "\n")


def search(config: Config, most: int | None, limit_bytes: int | None) -> BatchSizeReport:
    """As the command line does it."""
    finder = BatchSizeFinder(
        config, most=most, free_global_batch=True, deadline_s=DEADLINE_S, limit_bytes=limit_bytes, speed=False
    )
    return finder.run()


def brute_force(config: Config, begin: int, most: int | None, limit_bytes: int | None) -> tuple[int, int]:
    """The true maximum by strides from `begin` and bisection, and the trials that took."""
    trials = 0

    def fits(size: int) -> bool:
        nonlocal trials
        if most is not None and size > most:
            return False
        trials += 1
        with tempfile.TemporaryDirectory() as folder:
            job = RankJob(config, folder, (size,), steps=STEPS, limit_bytes=limit_bytes)
            _, verdict = run_family(replace(job, port=free_port()), DEADLINE_S)
        tell_progress(f"  brute force: {size} {verdict.outcome}")
        if verdict.outcome == "error":
            raise RuntimeError(f"micro-batch {size}: {verdict.message}")
        return verdict.outcome == "fits"

    stride = max(1, round(FIRST_STRIDE * begin))
    low, high = 0, begin
    if fits(begin):
        low, high = begin, begin + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        while low == 0 and high > 1:
            below = max(1, high - stride)
            low, high = (below, high) if fits(below) else (0, below)
            stride *= 2
    while high - low > max(1, RESOLUTION * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, trials


def run(names: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Search and brute force for each case."""
    most, limit_bytes = (None, None) if device == "cuda" else (512, CPU_LIMIT_BYTES)
    with tempfile.TemporaryDirectory() as text:
        write_text(Path(text))
        for name in names:
            config = load(name, device, Path(text))
            tell_progress(f"{name}: search")
            began = perf_counter()
            report = search(config, most, limit_bytes)
            seconds = perf_counter() - began
            tell_progress(f"{name}: {report.largest} in {seconds:.0f} s")
            truth, brute_trials = brute_force(config, report.largest or 1, most, limit_bytes)
            yield {
                "name": name,
                "planned": report.guess,
                "found": report.largest,
                "verified": report.verified,
                "truth": truth,
                "error": 1 - report.largest / truth if report.largest and truth else None,
                "trials": report.search_trials,
                "seconds": seconds,
                "brute_force_trials": brute_trials,
                "report": report.to_dict(),
            }


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and whether the goals were met."""
    cells = []
    for row in rows:
        error = row["error"]
        met = error is not None and abs(error) <= ERROR_GOAL
        met = met and row["trials"] <= TRIALS_GOAL and row["seconds"] <= SECONDS_GOAL
        cells.append(
            (
                row["name"],
                *(str(row[key]) for key in ("planned", "found", "truth")),
                "-" if error is None else f"{error:.1%}",
                f"{row['trials']} of {row['brute_force_trials']}",
                f"{row['seconds']:.0f} s",
                "met" if met else "missed",
            )
        )
    print(table(("case", "planned", "found", "true maximum", "below it", "trials", "took", "goals"), cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", type=names_among([*CASES, *SMALL]), help="some of them, comma between")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs a small case")
    names = arguments.cases or list(CASES if arguments.device == "cuda" else SMALL)
    goals = {"error": ERROR_GOAL, "trials": TRIALS_GOAL, "seconds": SECONDS_GOAL}
    settings = {"steps": STEPS, "deadline_s": DEADLINE_S, "resolution": RESOLUTION, "goals": goals}
    rows: list[dict[str, Any]] = []
    for row in run(names, arguments.device):
        rows.append(row)
        show(rows)
        path = write_results("batch_size", torch.device(arguments.device), settings, {"cases": rows}, arguments.out)
        print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
