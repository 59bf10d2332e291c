"""What all benchmarks share: a stopwatch that sits in the data, interleaved rounds, ratios with intervals, results.

The stopwatch is part of the data set, so no contender carries a probe of its own: it reads the clock when batch number
`first` is asked for and again at batch number `last`. A loop that reads k batches ahead does so at both moments, so
exactly `last - first` steps lie between them, whoever runs the loop; start-up, compilation, the end of the epoch and
what is written then lie outside. On a GPU the device is waited for at both moments and at no other.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from frameworm.hardware.fingerprint import environment_fingerprint

RESULTS = Path(__file__).parent / "results"
# AG News with a model small enough to train many times on a CPU.
SMALL_AG_NEWS = (
    "gpu.device=cpu",
    "gpu.mixed_precision=off",
    "model.d_model=32",
    "model.num_layers=1",
    "model.dim_feedforward=64",
    "model.max_seq_len=64",
    "training.global_batch=64",
    "training.lr=3e-3",
)
RESAMPLES = 10_000
_BEGUN = perf_counter()


class TimedBatches(Dataset[Any]):
    """Ready-made batches, taken in turn, with the stopwatch in them.

    Args:
        batches: What is read; begun anew when it is through.
        steps: Number of batches to hand out.
        first: Number of the batch whose request starts the watch; the last request stops it.
        device: Waited for before the clock is read.
    """

    def __init__(self, batches: Sequence[Any], steps: int, first: int, device: torch.device) -> None:
        assert 0 < first < steps - 1
        self._batches = batches
        self._steps = steps
        self._first = first
        self._device = device
        self._started: tuple[float, float] | None = None
        self._stopped: tuple[float, float] | None = None

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        if index == self._first:
            self._started = self._now()
        elif index == self._steps - 1:
            self._stopped = self._now()
        return self._batches[index % len(self._batches)]

    def loader(self) -> DataLoader[Any]:
        """The loader every contender reads: no workers, since there is nothing to prepare."""
        return DataLoader(self, batch_size=None, shuffle=False, pin_memory=self._device.type == "cuda")

    def step_s(self) -> float:
        """Wall time of one step inside the window."""
        return self._elapsed(0)

    def thread_s(self) -> float:
        """Processor time that the thread of the loop spent on one step inside the window."""
        return self._elapsed(1)

    def _elapsed(self, clock: int) -> float:
        assert self._started is not None, "the loop never came to the window"
        assert self._stopped is not None, "the loop ended inside the window"
        return (self._stopped[clock] - self._started[clock]) / (self._steps - 1 - self._first)

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter(), thread_time()


class ContenderError(Exception):
    """A contender could not go on; the others can."""


@dataclass
class Sample:
    """One block of one contender; `loss` where a block is a whole training."""

    step_s: float
    thread_s: float
    loss: float | None = None


@dataclass
class Interval:
    """A median over the rounds and where it lies with 95% confidence."""

    value: float
    low: float
    high: float


@dataclass
class Measured:
    """One contender over all rounds; the warm-up round is kept but not counted."""

    warmup: Sample
    rounds: list[Sample] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Median of a step over the rounds."""
        return statistics.median(item.step_s for item in self.rounds)


def interleave(
    blocks: Mapping[str, Callable[[], Sample]],
    rounds: int,
    tell: Callable[[str], None],
    *,
    warmups: Mapping[str, Sample] | None = None,
    failures: dict[str, str] | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> dict[str, Measured]:
    """Run all contenders in every round, each round beginning with another one, after a round that does not count.

    Args:
        blocks: What each contender does in a round.
        rounds: Rounds that count.
        tell: Is told how far it is.
        warmups: Blocks that were run before and do not count; instead of a round of them here.
        failures: Gets a sentence for each contender that failed (`ContenderError`), which the others survive; its
            rounds are dropped. Without it the first failure ends everything.
        may_go_on: Asked before each round but the first; no ends the rounds early.
    """
    names = list(blocks)
    measured: dict[str, Measured] = {name: Measured(sample) for name, sample in (warmups or {}).items()}
    for number in range(0 if warmups is None else 1, rounds + 1):
        if number > 1 and not may_go_on():
            tell(f"out of time after {number - 1} of {rounds} rounds")
            break
        tell(f"round {number} of {rounds}" if number else "warm-up round")
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if failures is not None and name in failures:
                continue
            gc.collect()
            try:
                sample = blocks[name]()
            except ContenderError as error:
                if failures is None:
                    raise
                failures[name] = f"round {number}: {error}"
                continue
            if number:
                measured[name].rounds.append(sample)
            else:
                measured[name] = Measured(sample)
    return {name: measured[name] for name in names if name not in (failures or {})}


def timed(work: Callable[[], None], repeats: int, device: torch.device) -> Sample:
    """Time of one call, out of several in a row."""
    if device.type != "cuda":
        before = perf_counter()
        for _ in range(repeats):
            work()
        return Sample((perf_counter() - before) / repeats, 0.0)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()  # brings the clocks up and the host ahead of the device
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return Sample(first.elapsed_time(last) / repeats / 1e3, 0.0)


def paired(
    contender: Measured, baseline: Measured, compare: Callable[[float, float], float], clock: str = "step_s"
) -> Interval:
    """Compare two contenders round by round; the interval is a percentile bootstrap of the median over rounds."""
    pairs = zip(contender.rounds, baseline.rounds, strict=True)
    return bootstrap_median([compare(getattr(one, clock), getattr(other, clock)) for one, other in pairs])


def bootstrap_median(values: Sequence[float], resamples: int = RESAMPLES) -> Interval:
    """The median and its 95% interval, by drawing the values anew with replacement from a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    cut = round(0.025 * resamples)
    return Interval(statistics.median(values), medians[cut], medians[resamples - 1 - cut])


def times_as_fast(one: Measured, other: Measured) -> Interval:
    """How many times as fast the first one is, round by round."""
    return paired(other, one, ratio)


def verdict(measured: Interval, at_least: float) -> str:
    """Whether a ratio reaches its goal; `open` when the interval holds both answers."""
    return "met" if measured.low >= at_least else "missed" if measured.high < at_least else "open"


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For argparse: some of the known names, comma between."""
    possible = list(known)

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if not names or any(name not in possible for name in names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(possible)}, got {text!r}")
        return names

    return parse


def ratio(one: float, other: float) -> float:
    """For `paired`: how many times the baseline's time."""
    return one / other


def difference(one: float, other: float) -> float:
    """For `paired`: time over the baseline's."""
    return one - other


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text, the first column to the left and the others to the right."""
    cells = [columns, *rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        for row in cells
    ]
    return "\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def device_word(device: torch.device) -> str:
    """The device as a part of a file name."""
    if device.type != "cuda":
        return device.type
    return "-".join(torch.cuda.get_device_name(device).lower().split())


def write_results(
    name: str, device: torch.device, settings: dict[str, Any], results: dict[str, Any], folder: Path = RESULTS
) -> Path:
    """Write <folder>/<name>-<device>.json: what was measured where, when, with what settings, and what came out."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{device_word(device)}.json"
    document = {
        "benchmark": name,
        **measured_now(device),
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def measured_now(device: torch.device) -> dict[str, Any]:
    """Machine, commit and time of a measurement."""
    measured = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"environment": environment_fingerprint(device), "commit": _COMMIT, "measured": measured}


def commit_of(root: Path) -> str | None:
    """The commit that a measurement belongs to; it ends in `-dirty` if anything but results differs from it.

    Where the repository did not travel with the code (a rented machine), set BENCHMARK_COMMIT to its commit.

    Args:
        root: Top of the working tree.

    Returns:
        The commit; None only in a copy without history and without the variable.

    Raises:
        RuntimeError: There is a repository here, but git does not name its commit.
    """
    given = os.environ.get("BENCHMARK_COMMIT")
    if given or not (root / ".git").exists():
        return given or None
    # The tree may belong to another user, as in a container.
    git = functools.partial(subprocess.run, capture_output=True, text=True, timeout=30, cwd=root)
    command = ["git", "-c", "safe.directory=*"]
    try:
        head = git([*command, "rev-parse", "--short=12", "HEAD"])
        changed = git([*command, "diff", "--quiet", "HEAD", "--", ":/", ":(exclude)benchmarks/results"])
        said = head.stderr.strip()
    except (OSError, subprocess.SubprocessError) as error:
        head, said = None, str(error)
    if head is None or head.returncode:
        raise RuntimeError(
            f"results must name the commit they were measured at, and git does not tell it: {said}; "
            "repair the repository, or set BENCHMARK_COMMIT"
        )
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")


# Asked when the benchmark begins: later commits are not what it measures.
_COMMIT = commit_of(RESULTS.parents[1])


def as_data(item: Any) -> dict[str, Any]:
    """A dataclass of this module as JSON-ready data."""
    return asdict(item)


def tell_progress(text: str) -> None:
    """Say on stderr how far it is, and since when; the table on stdout stays clean."""
    print(f"{perf_counter() - _BEGUN:6.1f} s  {text}", file=sys.stderr, flush=True)


def end_on_term(ignored: bool = False) -> None:
    """Let a time limit end the program as Ctrl-C does: what was measured by then is still written.

    Args:
        ignored: From now on both are ignored, while things are put in order.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignored else signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
