"""What the engine costs: eager fp32 against a bare loop, Lightning, Fabric and Accelerate.

    python benchmarks/overhead.py --cases mlp,text-cpu,ag_news,ag_news_optimized --rounds 7

Cases: `mlp` (32-64-10, batch 32) and `text-cpu` (the quickstart model) on CPU; `ag_news` (128 wide, batch 32) and
`ag_news_optimized` (256 wide, batch 128) on a GPU, with random tokens of AG News' lengths. Without --cases: those of
the CPU, and those of the GPU if there is one.

How it is measured. In every round each contender trains the same model from the same weights on the same batches, in
blocks that take turns. A block is a whole `train()`/`fit()`; only a window inside it is timed, by a stopwatch in the
data set that all read through the same DataLoader (see harness.py): start-up and the end of the run do not count, and
no contender carries a probe that another does not. Ratios and differences are taken within a round; their median is
reported with a bootstrap 95% interval. `thread` is the processor time of the loop's own thread, which neighbours on a
shared machine disturb less than the wall clock. frameworm runs with records, run folder, checkpoints and progress line
on. The loss after the last step is shown beside the speed and must be the bare loop's (exit code 1 if not).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import CPU_CASES, GPU_CASES, Case, make_case
from contenders import BASELINE, CONTENDERS, Train, hush_peers, missing_package
from harness import (
    RESULTS,
    Measured,
    Sample,
    TimedBatches,
    as_data,
    difference,
    interleave,
    names_among,
    paired,
    ratio,
    table,
    tell_progress,
    write_results,
)

SAME_LOSS = 1e-3  # relative; fp32 and the same operations


def run_block(case: Case, train: Train, steps: int) -> Sample:
    """Train once from the initial weights, quietly, in a folder that is thrown away."""
    batches = TimedBatches(case.batches, steps, first=max(2, steps // 10), device=case.device)
    model, optimizer = case.fresh()
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        train(case, model, optimizer, batches.loader(), Path(folder))
    # Whoever switched to other numbers would win by them.
    assert torch.get_float32_matmul_precision() == "highest"
    return Sample(batches.step_s(), batches.thread_s(), case.final_loss(model))


def summarise(case: Case, measured: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """The figures of each contender, against the bare loop's."""
    bare = measured[BASELINE]
    tokens = case.tokens_per_step
    figures: dict[str, dict[str, Any]] = {}
    for name, item in measured.items():
        losses = [sample.loss for sample in item.rounds]
        apart = max(abs(loss - sample.loss) / abs(sample.loss) for loss, sample in zip(losses, bare.rounds))
        figures[name] = {
            "step_us": item.step_s * 1e6,
            "ratio": as_data(paired(item, bare, ratio)),
            "over_bare_us": _microseconds(as_data(paired(item, bare, difference))),
            "thread_over_bare_us": _microseconds(as_data(paired(item, bare, difference, "thread_s"))),
            "samples_per_s": case.batch_size / item.step_s,
            "real_tokens_per_s": None if tokens is None else tokens / item.step_s,
            "loss": losses[-1],
            "loss_apart": apart,
            "same_loss": apart <= SAME_LOSS,
            "rounds": [as_data(sample) for sample in item.rounds],
            "warmup_round": as_data(item.warmup),
        }
    return figures


def judge(case: Case, figures: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Whether the goal of the case is met; `open` when the interval holds both answers."""
    if "frameworm" not in figures:
        return None
    if case.goal_us is not None:
        measured, limit, text = (
            figures["frameworm"]["over_bare_us"],
            case.goal_us,
            f"at most {case.goal_us:.0f} us over",
        )
    elif case.goal_ratio is not None:
        measured, limit = figures["frameworm"]["ratio"], case.goal_ratio
        text = f"at most {case.goal_ratio:.2f} times"
    else:
        return None
    verdict = "met" if measured["high"] <= limit else "missed" if measured["low"] > limit else "open"
    return {"goal": f"frameworm {text} the bare loop's step", "verdict": verdict}


def draw(figures: dict[str, dict[str, Any]], absent: dict[str, str]) -> str:
    """The table of one case."""
    columns = ("contender", "us/step", "ratio", "95%", "over bare us", "95%", "thread us", "samples/s", "loss", "same")
    rows = []
    for name, item in figures.items():
        times, over = item["ratio"], item["over_bare_us"]
        rows.append(
            (
                name,
                f"{item['step_us']:,.1f}",
                f"{times['value']:.3f}",
                f"{times['low']:.3f}..{times['high']:.3f}",
                f"{over['value']:+,.1f}",
                f"{over['low']:+,.1f}..{over['high']:+,.1f}",
                f"{item['thread_over_bare_us']['value']:+,.1f}",
                f"{item['samples_per_s']:,.0f}",
                f"{item['loss']:.5f}",
                "yes" if item["same_loss"] else f"NO ({item['loss_apart']:.1e})",
            )
        )
    rows += [(name, *[""] * (len(columns) - 2), f"absent: no {package}") for name, package in absent.items()]
    return table(columns, rows)


def run_case(case: Case, names: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Measure one case, print its table and return its results."""
    absent = {name: package for name in names if (package := missing_package(name)) is not None}
    present = [name for name in names if name not in absent]
    tell_progress(f"{case.name}: {', '.join(present)}, {steps} steps a block")
    measured = interleave(
        {name: lambda train=CONTENDERS[name][0]: run_block(case, train, steps) for name in present},
        rounds,
        tell_progress,
    )
    figures = summarise(case, measured)
    goal = judge(case, figures)
    print(f"\n{case.name} on {case.device.type}, batch {case.batch_size}, {rounds} rounds of {steps} steps")
    print(draw(figures, absent))
    if goal is not None:
        print(f"goal: {goal['goal']}: {goal['verdict']}")
    sys.stdout.flush()
    return {
        "device": case.device.type,
        "batch_size": case.batch_size,
        "steps": steps,
        "goal": goal,
        "contenders": figures,
        "absent": {name: f"package {package} is not installed" for name, package in absent.items()},
    }


def main() -> int:
    """Run the cases asked for."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    hush_peers()
    names = [BASELINE, *(name for name in arguments.contenders if name != BASELINE)]
    results = {}
    for name in arguments.cases:
        case = make_case(name)
        results[name] = run_case(case, names, arguments.rounds, arguments.steps or case.steps)
    on_gpu = any(item["device"] == "cuda" for item in results.values())
    settings = {"rounds": arguments.rounds, "threads": arguments.threads, "same_loss": SAME_LOSS, "precision": "fp32"}
    path = write_results("overhead", torch.device("cuda" if on_gpu else "cpu"), settings, results, arguments.out)
    print(f"\nwritten to {path}")
    different = [
        f"{case}: {name}"
        for case, item in results.items()
        for name, figures in item["contenders"].items()
        if not figures["same_loss"]
    ]
    if different:
        print(f"not the bare loop's loss, so not the same work: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def _arguments() -> argparse.Namespace:
    usual = [*CPU_CASES, *(GPU_CASES if torch.cuda.is_available() else ())]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cases", type=names_among((*CPU_CASES, *GPU_CASES)), default=usual, help="names, comma between"
    )
    parser.add_argument(
        "--contenders", type=names_among(CONTENDERS), default=list(CONTENDERS), help="names, comma between"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--steps", type=int, default=None, help="steps of a block; each case has its own default")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and set(arguments.cases) & set(GPU_CASES):
        parser.error(f"{', '.join(GPU_CASES)} need a CUDA device, and torch finds none")
    if arguments.rounds < 5:
        parser.error("fewer than 5 rounds give no interval worth the name")
    if arguments.steps is not None and arguments.steps < 20:
        parser.error("a block needs at least 20 steps")
    return arguments


def _microseconds(interval: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e6 for name, value in interval.items()}


if __name__ == "__main__":
    sys.exit(main())
