"""How fast the fast settings are: real AG News and IMDB against Lightning, Accelerate and a bare loop, on one GPU.

    PYTHONPATH=src python benchmarks/peers_gpu.py --data DATA --cases ag_news,ag_news_optimized,imdb --rounds 7

DATA (or FRAMEWORM_DATA) holds the folders ag_news and imdb. One results file per case; a contender that fails is in it
with its error, and the rest goes on.

Contenders. `frameworm`: configs/*_fast.yaml as `frameworm train` runs it, run folder, records and checkpoints on.
`lightning`, `accelerate`: as usually set: bf16, 4 workers, pinned, a data set of single samples and a collate function
that pads to the longest, AdamW, clipping, schedule stepped per step; Lightning logs and saves as frameworm does,
Accelerate saves nothing. `lightning-best`, `accelerate-best`: also fused AdamW and torch.compile in the mode and with
the padding (longest, or always max_seq_len so that shapes stay) that were fastest for them here: all are tried for one
block and the best goes on. Lightning then runs `barebones`: no log, no checkpoints. `bare-fp32`: an eager loop.
`own-captured` against `own-plain`: frameworm with a model it cannot pack, eager bf16, padded, with and without
whole-step capture and resident data.

How it is measured. Each contender trains in a process that lives on and takes its turn in blocks (see live.py): the
clock is read after waiting for the device, at both ends of `--steps` steps. All start from the same weights, take the
same number of samples per step and of steps in all; their loss and accuracy on validation samples after the last step
stand beside the speed. Short last steps of an epoch are left out for all; nobody validates. Start-up (imports, data)
and warm-up (compilation, capture, first steps) are reported apart. Real tokens per second leave padding out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from harness import (
    RESULTS,
    ContenderError,
    Interval,
    Measured,
    Sample,
    as_data,
    end_on_term,
    interleave,
    names_among,
    table,
    tell_progress,
    times_as_fast,
    verdict,
    write_results,
)
from live import Live, Plan
from peers import ENTRIES, MODES, PADS, Entry, Work, train, variants

from frameworm.config.load import load_config
from frameworm.models.workloads import build_workload

CONFIGS = Path(__file__).parents[1] / "configs"
SUBJECT = "frameworm"
USUAL = ("lightning", "accelerate")
BEST = ("lightning-best", "accelerate-best")
OWN = ("own-captured", "own-plain")
OWN_GOAL = 2.0
OWN_SHORT_STEP_S = 0.010
LOSS_APART = 0.10  # relative; dropout draws differently in each, so curves only lie close. accuracy.py tells exactly.


@dataclass(frozen=True)
class Case:
    """A shipped config, its fast twin and what is asked of the fast one."""

    config: str
    folder: str
    steps: int
    goal_usual: float
    goal_best: float

    @property
    def fast(self) -> str:
        """The twin's name."""
        return f"{self.config}_fast"


CASES = {
    "ag_news": Case("ag_news_single_gpu", "ag_news", 300, 15.0, 6.0),
    "ag_news_optimized": Case("ag_news_single_gpu_optimized", "ag_news", 200, 8.0, 3.5),
    "imdb": Case("imdb_single_gpu", "imdb", 150, 7.0, 2.0),
}


@dataclass(frozen=True)
class Options:
    """How long, with whom and on what."""

    plan: Plan
    device: str
    names: tuple[str, ...]
    modes: tuple[str, ...]
    pads: tuple[str, ...]
    starts: int
    limit_s: float
    deadline: float
    tag: str = ""


@dataclass(frozen=True)
class Facts:
    """What all contenders of a case share."""

    work: Work
    batch_size: int
    tokens_per_sample: float


def look_at_data(plain: Path, fast: Path, overrides: Sequence[str], device: str, total: int) -> Facts:
    """Tokenise once for all, and count: texts are cached, so contenders find them ready."""
    settings = [*overrides, f"gpu.device={device}", "data.drop_last=true"]
    config = load_config(plain, settings)
    batch_size = config.training.global_batch
    assert batch_size is not None
    lengths = build_workload(config).train_data.token_lengths
    epochs = total // (len(lengths) // batch_size) + 1
    settings += [f"training.max_steps={total}", f"training.epochs={epochs}"]
    return Facts(Work(str(plain), str(fast), tuple(settings), device), batch_size, float(lengths.mean()))


class Field:
    """The contenders of one case, from start to end."""

    def __init__(self, work: Work, options: Options, folder: Path) -> None:
        self.failures: dict[str, str] = {}
        self.tried: dict[str, dict[str, Any]] = {}  # every variant of those at their best
        self.lives: dict[str, Live] = {}
        self.warmups: dict[str, Sample] = {}
        self.endings: dict[str, dict[str, Any]] = {}
        self._work = work
        self._options = options
        self._folder = folder

    def start(self) -> None:
        """Start all, let each train a block that does not count, and keep the best variant of each."""
        entries = [ENTRIES[name] for name in self._options.names]
        for entry in (item for item in entries if item.missing):
            self.failures[entry.name] = f"package {entry.package} is not installed"
        present = [item for item in entries if not item.missing]
        wanted = {item.name: variants(item, self._options.modes, self._options.pads) for item in present}
        only = [found[0] for found in wanted.values() if len(found) == 1]
        for begin in range(0, len(only), self._options.starts):
            self._warm(only[begin : begin + self._options.starts])
        for entry in (item for item in present if item.best):
            self._choose(entry.name, wanted[entry.name])

    def _warm(self, entries: Sequence[Entry]) -> None:
        """Start some at once, but let them run their blocks alone."""
        tell_progress(f"starting {', '.join(entry.name for entry in entries)}")
        for entry in entries:
            self.lives[entry.name] = self._begin(entry)
        for entry in entries:
            self._guarded(entry.name, lambda name=entry.name: self._await(name))
        for entry in entries:
            if entry.name not in self.failures:
                self._guarded(entry.name, lambda name=entry.name: self._first_block(name))

    def _begin(self, entry: Entry) -> Live:
        options = self._options
        return Live(entry.name, train, (self._work, entry), options.plan, options.device, self._folder, options.limit_s)

    def _choose(self, name: str, wanted: Sequence[Entry]) -> None:
        """Try the variants of one contender and keep the fastest; an only one has been started."""
        # Those that time kernels while they compile do so alone on the machine.
        alone = [[item] for item in wanted if item.mode == "max-autotune"]
        others = [item for item in wanted if item.mode != "max-autotune"]
        starts = self._options.starts
        best: str | None = None
        for group in [others[begin : begin + starts] for begin in range(0, len(others), starts)] + alone:
            if best is not None and monotonic() > self._options.deadline:
                self.tried.update({item.name: {"error": "not tried: out of time"} for item in group})
                continue
            if len(wanted) > 1:
                self._warm(group)
            for variant in group:
                best = self._better(best, variant.name)
        if best is None:
            self.failures[name] = "no variant ran: see tried"
            return
        self.lives[name] = self.lives.pop(best)
        self.warmups[name] = self.warmups.pop(best)

    def _better(self, best: str | None, name: str) -> str | None:
        """The faster of two variants; the other one ends."""
        if name in self.failures:
            self.tried[name] = {"error": self.failures.pop(name)}
            return best
        step_s = self.warmups[name].step_s
        self.tried[name] = {"step_us": step_s * 1e6, "warmup_s": self.lives[name].ready["warmup_s"]}
        if best is None:
            return name
        slower, faster = (best, name) if step_s < self.warmups[best].step_s else (name, best)
        self._drop(slower)
        return faster

    def _await(self, name: str) -> None:
        ready = self.lives[name].wait_ready()
        tell_progress(f"{name} is warm: start-up {ready['startup_s']:.1f} s, warm-up {ready['warmup_s']:.1f} s")

    def _first_block(self, name: str) -> None:
        self.warmups[name] = self.lives[name].block()
        tell_progress(f"{name}: {self.warmups[name].step_s * 1e6:,.0f} us a step")

    def _guarded(self, name: str, action: Any) -> None:
        try:
            action()
        except ContenderError as error:
            self.failures[name] = str(error)
            self._drop(name)
            tell_progress(f"{name} failed: {error}")

    def _drop(self, name: str) -> None:
        self.warmups.pop(name, None)
        self.lives.pop(name).end()

    def measure(self, rounds: int) -> dict[str, Measured]:
        """The rounds that count, among those that came so far."""
        names = [name for name in self._options.names if name in self.warmups]
        if not names:
            return {}
        return interleave(
            {name: self.lives[name].block for name in names},
            rounds,
            tell_progress,
            warmups={name: self.warmups[name] for name in names},
            failures=self.failures,
            may_go_on=lambda: monotonic() < self._options.deadline,
        )

    def finish(self, measured: dict[str, Measured]) -> None:
        """Let each run to its end, or stop there if the rounds ended early, and say what came of it."""
        for name, item in measured.items():
            # The block before the rounds counts as one of the plan's.
            whole = len(item.rounds) + 1 == self._options.plan.blocks
            try:
                self.endings[name] = self.lives[name].finish(early=not whole)
            except ContenderError as error:
                self.endings[name] = {"ending_failed": str(error)}
                tell_progress(f"{name} failed at its end: {error}")

    def close(self) -> None:
        """End whoever is still there; nobody is waited for long."""
        for live in self.lives.values():
            live.end(patience_s=2.0)


def summarise(field: Field, measured: dict[str, Measured], facts: Facts, plan: Plan) -> dict[str, dict[str, Any]]:
    """The figures of each contender; how many times as fast frameworm is, where it ran."""
    subject = measured.get(SUBJECT)
    figures: dict[str, dict[str, Any]] = {}
    for name, item in measured.items():
        ready, ending = field.lives[name].ready, field.endings.get(name, {})
        figures[name] = {
            "step_us": item.step_s * 1e6,
            "samples_per_s": facts.batch_size / item.step_s,
            "real_tokens_per_s": facts.batch_size * facts.tokens_per_sample / item.step_s,
            "frameworm_times_as_fast": None if subject is None else as_data(times_as_fast(subject, item)),
            "variant": field.lives[name].name,
            "startup_s": ready["startup_s"],
            "warmup_s": ready["warmup_s"],
            "compile_and_capture_s": max(0.0, ready["warmup_s"] - plan.warmup * item.step_s),
            "initial_weights": ready["weights"],
            **ending,
            "rounds": [as_data(sample) for sample in item.rounds],
            "first_block": as_data(item.warmup),
        }
    return figures


def goals(case: Case, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """What is asked of the fast settings, and what was measured."""
    found = []
    for text, peers, goal in (
        ("the better of the usual peers", USUAL, case.goal_usual),
        ("the better of the peers at their best", BEST, case.goal_best),
    ):
        present = {name: measured[name] for name in peers if name in measured}
        if SUBJECT not in measured or not present:
            found.append({"goal": f"{goal:g} times {text}", "verdict": "not measured"})
            continue
        fastest = min(present, key=lambda name: present[name].step_s)
        found.append(_judged(f"{goal:g} times {text} ({fastest})", measured[SUBJECT], present[fastest], goal))
    captured, plain = OWN
    if captured in measured and plain in measured:
        text = f"{OWN_GOAL:g} times frameworm without capture and resident data, own model"
        short = measured[plain].step_s < OWN_SHORT_STEP_S
        judged = _judged(text, measured[captured], measured[plain], OWN_GOAL)
        found.append(judged if short else {**judged, "verdict": "does not apply: the step takes 10 ms or more"})
    return found


def _judged(text: str, one: Measured, other: Measured, goal: float) -> dict[str, Any]:
    times: Interval = times_as_fast(one, other)
    return {"goal": text, "times": as_data(times), "verdict": verdict(times, goal)}


def draw(figures: dict[str, dict[str, Any]], failures: dict[str, str]) -> str:
    """The table of one case."""
    columns = (
        "contender",
        "samples/s",
        "real tokens/s",
        "us/step",
        "frameworm is x",
        "95%",
        "warm-up s",
        "loss",
        "acc",
    )
    rows = []
    for name, item in figures.items():
        times = item["frameworm_times_as_fast"]
        rows.append(
            (
                item["variant"] or name,
                f"{item['samples_per_s']:,.0f}",
                f"{item['real_tokens_per_s']:,.0f}",
                f"{item['step_us']:,.0f}",
                "" if times is None else f"{times['value']:.2f}",
                "" if times is None else f"{times['low']:.2f}..{times['high']:.2f}",
                f"{item['warmup_s']:.1f}",
                f"{item['val_loss']:.4f}" if "val_loss" in item else "-",
                f"{item['val_accuracy']:.3f}" if "val_accuracy" in item else "-",
            )
        )
    rows += [(name, "failed", *[""] * (len(columns) - 2)) for name in failures]
    return "\n".join([table(columns, rows), *(f"  {name}: {text}" for name, text in failures.items())])


def doubts(figures: dict[str, dict[str, Any]]) -> list[str]:
    """What makes the comparison less than one of the same work."""
    found = []
    weights = [item["initial_weights"] for item in figures.values()]
    if weights and max(weights) - min(weights) > 1e-6 * max(weights):
        found.append("the contenders did not all begin with the same weights")
    reference = figures.get("bare-fp32", {}).get("val_loss")
    for name, item in figures.items():
        apart = None if reference is None or "val_loss" not in item else item["val_loss"] / reference - 1
        if apart is not None and apart > LOSS_APART:
            found.append(f"{name}: the final loss is {apart:.0%} above the bare fp32 loop's")
    return found


def run_case(name: str, case: Case, data: Path, options: Options, rounds: int, out: Path, extra: Sequence[str]) -> bool:
    """Measure one case and write it down; False if frameworm itself failed or the work was not the same."""
    tell_progress(f"{name}: reading the texts")
    plan = options.plan
    facts = look_at_data(
        CONFIGS / f"{case.config}.yaml",
        CONFIGS / f"{case.fast}.yaml",
        [f"data.root={data / case.folder}", *extra],
        options.device,
        plan.total,
    )
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        field = Field(facts.work, options, Path(folder))
        try:
            field.start()
            measured = field.measure(rounds)
            field.finish(measured)
        finally:
            # Written also when interrupted: what was measured by then stays measured. A time limit may signal twice.
            end_on_term(ignored=True)
            measured = {key: item for key, item in measured.items() if item.rounds}
            field.close()
            figures = summarise(field, {key: item for key, item in measured.items() if key in field.lives}, facts, plan)
            results = {
                "batch_size": facts.batch_size,
                "tokens_per_sample": facts.tokens_per_sample,
                "goals": goals(case, measured),
                "contenders": figures,
                "tried": field.tried,
                "failed": field.failures,
                "doubts": doubts(figures),
            }
            settings = {
                "rounds": rounds,
                "warmup_steps": plan.warmup,
                "lead_in_steps": plan.lead_in,
                "steps": plan.steps,
                "total_steps": plan.total,
                "configs": [f"configs/{case.config}.yaml", f"configs/{case.fast}.yaml"],
                "overrides": list(extra),
            }
            path = write_results(
                f"peers_gpu-{name}{options.tag}", torch.device(options.device), settings, {name: results}, out
            )
    print(
        f"\n{name}, batch {facts.batch_size}, {plan.steps} steps a block, {facts.tokens_per_sample:.0f} tokens a text"
    )
    print(draw(figures, field.failures))
    for goal in results["goals"]:
        print(f"goal: {goal['goal']}: {goal['verdict']}")
    for doubt in results["doubts"]:
        print(f"doubt: {doubt}")
    print(f"written to {path}", flush=True)
    return SUBJECT not in field.failures and not results["doubts"]


def main() -> int:
    """Run the cases asked for."""
    arguments = _arguments()
    began = monotonic()
    fine = True
    for name in arguments.cases:
        end_on_term()
        case = CASES[name]
        steps = arguments.steps or case.steps
        options = Options(
            plan=Plan(arguments.warmup, arguments.lead_in, steps, arguments.rounds + 1),
            device=arguments.device,
            names=tuple(arguments.contenders),
            modes=tuple(arguments.modes),
            pads=tuple(arguments.pads),
            starts=arguments.starts,
            limit_s=arguments.limit_s,
            deadline=began + arguments.budget_s,
            tag=f"-{arguments.tag}" if arguments.tag else "",
        )
        fine &= run_case(name, case, arguments.data, options, arguments.rounds, arguments.out, arguments.set)
    return 0 if fine else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA"), help="folder with ag_news/ and imdb/")
    add("--cases", type=names_among(CASES), default=list(CASES), help="names, comma between")
    add("--contenders", type=names_among(ENTRIES), default=list(ENTRIES), help="names, comma between")
    add("--modes", type=names_among(MODES), default=list(MODES), help="torch.compile modes tried for the peers")
    add("--pads", type=names_among(PADS), default=list(PADS), help="paddings tried for the peers")
    add("--rounds", type=int, default=7, help="rounds that count")
    add("--steps", type=int, default=None, help="timed steps of a block; each case has its own default")
    add("--lead-in", type=int, default=10, help="steps at the beginning of each block that are not timed")
    add("--warmup", type=int, default=60, help="steps before the first block")
    add("--starts", type=int, default=2, help="contenders that start at the same time")
    add("--budget-s", type=float, default=1e9, help="no new round or variant after so many seconds")
    add("--limit-s", type=float, default=300.0, help="a contender that is silent for so long has failed")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to see that the script works")
    add("--tag", default="", help="part of the results file's name, for a call with some of the contenders")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all contenders")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("say where the data is: --data, or the variable FRAMEWORM_DATA")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    if arguments.rounds < 1 or arguments.warmup < 1:
        parser.error("at least one round and one step of warm-up are needed")
    arguments.data = Path(arguments.data).resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
