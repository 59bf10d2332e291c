"""What `frameworm tune` finds: from plain configs, from unknown models, on a CPU, and against trying everything.

    PYTHONPATH=src python benchmarks/tuner.py --data DATA --parts shipped,own --budget 8m        # on a GPU
    PYTHONPATH=src python benchmarks/tuner.py --device cpu --parts quickstart,regret
    PYTHONPATH=src python benchmarks/tuner.py --device cpu --smoke                               # does it run at all?

DATA (or FRAMEWORM_DATA) holds the folders ag_news and imdb. Parts:

shipped: `frameworm tune` from the plain config, as a command with a budget. Then three trainings take turns in blocks
(see live.py): the plain config, the best.yaml that came out, and the hand-made _fast config. Goals: a multiple of the
start that depends on the case, and within 5% of _fast.
own: a CNN on random images and, if `transformers` is installed, a BERT with random weights, through
`workload: own_models:...`. Third contender: the plain PyTorch loop of such a model. Goal: 1.5 times that loop.
quickstart: configs/quickstart.yaml on the CPU in at most 3 minutes. Goal: 1.5 times as fast.
regret: the search against trying everything: on simulated machines and, on the CPU, with five real knobs. Goals: at
most 5% behind with at most 20% of the trials.

In shipped and own the run to be tuned is given so many epochs that no start-up matters: asked is the best step there
is, and a search for a short run rightly leaves out what takes longer to compile than it saves.

One results file per case; what fails is in it with its error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import own_models
import torch
import tuner_regret
from harness import (
    RESULTS,
    ContenderError,
    Interval,
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
from live import Gate, Live, Plan, Train
from peers import run_config

from frameworm.config.load import load_config
from frameworm.tune.search.journal import JOURNAL_NAME

CONFIGS = Path(__file__).parents[1] / "configs"
PARTS = ("shipped", "own", "quickstart", "regret")
NEAR_FAST = 0.95
OWN_GOAL = QUICKSTART_GOAL = 1.5
QUICKSTART_S = 180.0
MOST_REGRET, MOST_TRIALS = 0.05, 0.20
TEXT_BYTES, PIECE_BYTES = 96 * 2**20, 12 * 2**20
LONG_EPOCHS = 10_000
SEARCHED = "searched.json"  # in the folder of a search that came to its end


@dataclass(frozen=True)
class Case:
    """A config to start from.

    Attributes:
        config: Name of the shipped config, or of the own model.
        goal: How many times as fast as the start, or as the plain loop, it should become.
        steps: Timed steps of a block of the start.
        fast_steps: The same of what is fast: blocks should take about as long, and hundreds of milliseconds.
        folder: Its data under DATA; None: made here, or none needed.
    """

    config: str
    goal: float
    steps: int
    fast_steps: int
    folder: str | None = None


SHIPPED = {
    "ag_news": Case("ag_news_single_gpu", 10.0, 100, 3000, "ag_news"),
    "ag_news_optimized": Case("ag_news_single_gpu_optimized", 8.0, 60, 1000, "ag_news"),
    "imdb": Case("imdb_single_gpu", 5.0, 50, 400, "imdb"),
    "gpt2": Case("gpt2_124m", 1.5, 2, 2),
}
OWN = {"cnn": Case("cnn", OWN_GOAL, 30, 60), "bert": Case("bert", OWN_GOAL, 30, 60)}
CASES = {**SHIPPED, **OWN}
OWN_BATCH = {"cnn": 128, "bert": 64}
SMALL = {"cnn": "{width: 8, size: 16, samples: 512}", "bert": "{width: 64, layers: 1, length: 32, samples: 512}"}


def train_config(gate: Gate, path: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A contender: `engine.run.run` of a config behind the gate."""
    if gate.device.type == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as `frameworm train` would find it
    config = load_config(path, overrides)
    with tempfile.TemporaryDirectory() as folder:
        return run_config(gate, Path(folder), config, lambda model: None)


@dataclass(frozen=True)
class Session:
    """What all parts share."""

    arguments: argparse.Namespace
    folder: Path

    @property
    def device(self) -> torch.device:
        """Where to run."""
        return torch.device(self.arguments.device)

    def tune(self, config: Path, overrides: Sequence[str], budget: str, name: str) -> dict[str, Any]:
        """`frameworm tune` as a command; its result and its wall time, or why there is none."""
        out = self.folder / f"tune-{name}"
        if (out / SEARCHED).exists():
            tell_progress(f"{name}: was searched before")
            return dict(json.loads((out / SEARCHED).read_text(encoding="utf-8")))
        command = [sys.executable, "-m", "frameworm", "tune", "--config", str(config), "--out", str(out)]
        command += ["--budget", budget, *(part for item in overrides for part in ("--set", item))]
        if self.arguments.trials is not None:
            command += ["--trials", str(self.arguments.trials)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        tell_progress(f"{name}: tuning, {budget}")
        began = perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.arguments.limit, env=environment
            )
        except subprocess.TimeoutExpired:
            raise ContenderError(f"tune took longer than {self.arguments.limit:.0f} s") from None
        wall_s = perf_counter() - began
        if done.returncode != 0:
            raise ContenderError(f"tune: exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}")
        told = json.loads((out / "tune.json").read_text(encoding="utf-8"))
        print(done.stdout, file=sys.stderr)
        result = {
            "wall_s": wall_s,
            "trials": told["trials"],
            "stopped": told["stopped"],
            "changes": told["changes"],
            "own_speedup": told["speedup"],
            "run_s_before": told["run_s_before"],
            "run_s_after": told["run_s_after"],
            "attempts": [
                {key: item[key] for key in ("knob", "label", "status", "reason", "screened")}
                for item in told["attempts"]
            ],
            "walls": _walls(out / JOURNAL_NAME),
            "best": str(out / "best.yaml"),
        }
        (out / SEARCHED).write_text(json.dumps(result), encoding="utf-8")
        return result

    def race(self, contenders: dict[str, tuple[Train, str, tuple[str, ...], int]]) -> dict[str, Any]:
        """Trainings that take turns; milliseconds a step, and how many times as fast as each other.

        Args:
            contenders: What trains, its config's path and overrides, and the timed steps of a block.
        """
        arguments = self.arguments
        failures: dict[str, str] = {}
        lives: dict[str, Live] = {}
        warmups: dict[str, Sample] = {}
        facts: dict[str, Any] = {}
        try:
            for name, (train, path, overrides, steps) in contenders.items():
                steps = 3 if arguments.smoke else steps
                plan = Plan(max(4, min(100, steps)), max(1, steps // 10), steps, arguments.rounds + 1)
                ends = (
                    f"training.max_steps={plan.total}",
                    "training.epochs=100000",
                    "checkpoint.every_steps=1000000000",
                )
                lives[name] = Live(
                    name, train, (path, (*overrides, *ends)), plan, arguments.device, self.folder, arguments.limit
                )
                # One after the other: compilations at the same time would disturb what is measured.
                try:
                    lives[name].wait_ready()
                    warmups[name] = lives[name].block()
                except ContenderError as error:
                    failures[name] = f"start: {error}"
            blocks: dict[str, Callable[[], Sample]] = {name: lives[name].block for name in warmups}
            measured = interleave(blocks, arguments.rounds, tell_progress, warmups=warmups, failures=failures)
            for name in measured:
                facts[name] = {**lives[name].ready, "step_s": measured[name].step_s}
        finally:
            for live in lives.values():
                live.end(2.0)
        ratios = {
            f"{one}/{other}": as_data(times_as_fast(measured[one], measured[other]))
            for one in measured
            for other in measured
            if one != other
        }
        return {"contenders": facts, "times_as_fast": ratios, "failures": failures}

    def write(self, name: str, results: dict[str, Any]) -> None:
        """One results file."""
        settings = {
            key: str(value) if isinstance(value, Path) else value for key, value in vars(self.arguments).items()
        }
        for place in ("data", "results", "work"):
            settings.pop(place)
        path = write_results(f"tuner-{name}", self.device, settings, results, self.arguments.results)
        tell_progress(f"wrote {path.name}")


def judged(race: dict[str, Any], one: str, other: str, goal: float) -> dict[str, Any]:
    """A goal and whether it is reached."""
    found = race["times_as_fast"].get(f"{one}/{other}")
    if found is None:
        return {"goal": goal, "verdict": "failed"}
    return {"goal": goal, **found, "verdict": verdict(Interval(**found), goal)}


def shipped(session: Session) -> list[list[str]]:
    """From the plain configs of the package."""
    rows = []
    for name, case in SHIPPED.items():
        if name not in session.arguments.cases:
            continue
        plain, fast = CONFIGS / f"{case.config}.yaml", CONFIGS / f"{case.config}_fast.yaml"
        overrides, long_run = [f"data.root={_data(session, case)}"], f"training.epochs={LONG_EPOCHS}"
        try:
            tuned = session.tune(plain, (*overrides, long_run), session.arguments.budget, name)
            best = tuned.pop("best")
            session.write(name, {"tune": tuned})  # the race takes minutes, which there may not be
            race = session.race(
                {
                    "start": (train_config, str(plain), tuple(overrides), case.steps),
                    "best": (train_config, best, (), case.fast_steps),
                    "fast": (train_config, str(fast), tuple(overrides), case.fast_steps),
                }
            )
        except ContenderError as error:
            session.write(name, {"error": str(error)})
            rows.append([name, "failed", str(error)[:60], "", ""])
            continue
        goals = {
            "over_start": judged(race, "best", "start", case.goal),
            "beside_fast": judged(race, "best", "fast", NEAR_FAST),
        }
        session.write(name, {"tune": tuned, **race, "goals": goals})
        rows.append([name, f"{tuned['wall_s']:.0f} s", *(_goal_text(goal) for goal in goals.values()), ""])
    return rows


def own(session: Session) -> list[list[str]]:
    """From models of somebody else."""
    rows = []
    for name, case in OWN.items():
        if name not in session.arguments.cases:
            continue
        if name == "bert" and find_spec("transformers") is None:
            rows.append([name, "skipped", "transformers is not installed", "", ""])
            continue
        smoke = session.arguments.smoke
        path = session.folder / f"{name}.yaml"
        model = SMALL[name] if smoke else "{}"
        batch = 16 if smoke else OWN_BATCH[name]
        path.write_text(
            f"name: own_{name}\nworkload: own_models:{name}\nmodel: {model}\n"
            f"training: {{epochs: {LONG_EPOCHS}, global_batch: {batch}, lr: 1.0e-4, schedule: constant, "
            "clip_norm: off}\n"
            f"gpu: {{device: {session.arguments.device}, mixed_precision: off, tf32: false, fused_optimizer: false}}\n",
            encoding="utf-8",
        )
        try:
            tuned = session.tune(path, (), session.arguments.budget, name)
            best = tuned.pop("best")
            session.write(f"own-{name}", {"tune": tuned})
            race = session.race(
                {
                    "loop": (own_models.plain_loop, str(path), (), case.steps),
                    "start": (train_config, str(path), (), case.steps),
                    "best": (train_config, best, (), case.fast_steps),
                }
            )
        except ContenderError as error:
            session.write(f"own-{name}", {"error": str(error)})
            rows.append([name, "failed", str(error)[:60], "", ""])
            continue
        goals = {"over_loop": judged(race, "best", "loop", case.goal)}
        session.write(f"own-{name}", {"tune": tuned, **race, "goals": goals})
        rows.append([name, f"{tuned['wall_s']:.0f} s", _goal_text(goals["over_loop"]), "", "over its plain loop"])
    return rows


def quickstart(session: Session) -> list[list[str]]:
    """What a newcomer types."""
    path = CONFIGS / "quickstart.yaml"
    try:
        tuned = session.tune(path, (), "150s", "quickstart")
        best = tuned.pop("best")
        race = session.race({"start": (train_config, str(path), (), 40), "best": (train_config, best, (), 40)})
    except ContenderError as error:
        session.write("quickstart", {"error": str(error)})
        return [["quickstart", "failed", str(error)[:60], "", ""]]
    goals = {"over_start": judged(race, "best", "start", QUICKSTART_GOAL)}
    in_time = tuned["wall_s"] <= QUICKSTART_S
    session.write("quickstart", {"tune": tuned, **race, "goals": goals, "in_time": in_time})
    told = f"{tuned['wall_s']:.0f} s" + ("" if in_time else ", too long")
    return [["quickstart", told, _goal_text(goals["over_start"]), "", ""]]


def regret(session: Session) -> list[list[str]]:
    """Against trying everything."""
    smoke = session.arguments.smoke
    results: dict[str, Any] = {"simulated": tuner_regret.simulated(5 if smoke else 100)}
    found = results["simulated"]
    share = found["trials_share_most"]
    good = found["regret_95th"] <= MOST_REGRET and share <= MOST_TRIALS
    told = f"{found['regret_95th']:.1%} (95th percentile)"
    rows = [["regret, simulated", f"{share:.0%} of trials", told, "met" if good else "missed", ""]]
    if session.arguments.device == "cpu":
        place = session.folder / "regret"
        path = CONFIGS / "quickstart.yaml"
        real = tuner_regret.real(path, tuner_regret.REAL_SETTINGS, place, 2 if smoke else 5, most=3 if smoke else None)
        results["real"] = real
        good = real["regret"]["value"] <= MOST_REGRET and real["trials_share"] <= MOST_TRIALS
        told = f"{real['regret']['value']:.1%} ({real['regret']['low']:.1%} to {real['regret']['high']:.1%})"
        words = f"{real['trials']} trials for {real['space']}"
        rows.append(["regret, quickstart", words, told, "met" if good else "missed", ""])
    session.write("regret", results)
    return rows


def _walls(journal: Path) -> list[dict[str, Any]]:
    """What each trial and proof of a search took."""
    events = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    labels = {(event["kind"], event["id"]): event["label"] for event in events if event["event"] == "begin"}
    return [
        {"kind": event["kind"], "label": labels[event["kind"], event["id"]], "wall_s": event["wall_s"]}
        for event in events
        if event["event"] == "end"
    ]


def _goal_text(goal: dict[str, Any]) -> str:
    if "value" not in goal:
        return "failed"
    return f"{goal['value']:.2f}x ({goal['low']:.2f} to {goal['high']:.2f}), goal {goal['goal']:g}: {goal['verdict']}"


def _data(session: Session, case: Case) -> Path:
    """Where the data of a case is; text is made up of random words."""
    if case.folder is not None:
        if session.arguments.data is None:
            raise SystemExit("give --data or set FRAMEWORM_DATA: the folder that holds ag_news and imdb")
        return Path(session.arguments.data) / case.folder
    path = session.folder / "text"
    if not path.exists():
        path.mkdir()
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(5000)]
        size = 2**21 if session.arguments.smoke else TEXT_BYTES
        text = ""
        while len(text) < min(size, PIECE_BYTES):
            text += "".join(" ".join(draw.choices(words, k=2000)) + "\n" for _ in range(100))
        with (path / "words.txt").open("w", encoding="utf-8") as file:
            while file.tell() < size:
                file.write(text)  # over and over: more words would only take longer to draw
    return path


def main() -> None:
    """Run the parts and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", type=names_among(PARTS), help="default: all that suit the device")
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES), help="of the parts shipped and own")
    parser.add_argument("--data", default=os.environ.get("FRAMEWORM_DATA"))
    parser.add_argument("--budget", default="8m", help="of each search")
    parser.add_argument("--trials", type=int, help="most trials and proofs of each search")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=900.0, help="longest to wait for anything, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help="keep searches here; one that ended is compared again, not repeated")
    parser.add_argument("--smoke", action="store_true", help="small sizes, few trials; the figures mean nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.trials, arguments.rounds, arguments.budget = arguments.trials or 4, 2, "60s"
        arguments.results = Path(tempfile.mkdtemp(prefix="tuner-smoke-"))
    usual = ["own", "quickstart", "regret"] if arguments.device == "cpu" else ["shipped", "own", "regret"]
    end_on_term()
    parts = {"shipped": shipped, "own": own, "quickstart": quickstart, "regret": regret}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() if arguments.work is None else nullcontext(arguments.work) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        session = Session(arguments, Path(folder).resolve())
        try:
            for name in arguments.parts or usual:
                rows += parts[name](session)
        except KeyboardInterrupt:
            tell_progress("stopped; what was measured by then follows")
        finally:
            if rows:
                print(table(["case", "search", "gain or regret", "beside _fast, or goal", ""], rows))


if __name__ == "__main__":
    main()
