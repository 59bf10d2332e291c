"""The phases of the search, each left out alone, and a plain greedy search, on simulated machines.

    python benchmarks/search_phases.py --seeds 30

Four machines, each drawn `--seeds` times. `switches` is a table of step times for every combination of six switches
and one setting on a scale (see tuner_regret.py). `pairs` has two settings that gain only together, a scale, and
settings of which some gain less or more beside others, with noise of 0.5% or 3% (tests/tune/search). `ag_news` and
`gpt2` are tables of what the shipped configs take on an H200, with the real knobs and what trials and proofs take
there (tests/tune/simulated_gpu.py; three minutes, or ten). Every search uses the same trials and proofs.

The greedy search tries one knob at a time, proves the fastest value, and stops when no knob is left; `lean` adds the
leap, partners and pairs. The gain of a phase is how many times as fast the found config is with it, a geometric mean
with a bootstrap 95% interval. Beside it stand how far the found config is behind the best one known, and how many
trials and proofs were made.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import table, tell_progress, write_results
from tuner_regret import Landscape, landscape_context

from frameworm.records.estimate import Interval
from frameworm.tune.search import search as search_module
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.outcomes import Budget

TESTS = Path(__file__).resolve().parents[1] / "tests" / "tune"
sys.path += [str(TESTS), str(TESTS / "search")]
from simulated_gpu import BEST_S, GptGpu, Gpu, gpt_sample_s, step_s, tune_gpt_on, tune_on  # noqa: E402
from simulated_machine import Machine, config_of, model_of, planted  # noqa: E402
from simulated_machine import search as planted_search  # noqa: E402
from test_tune_search import random_space  # noqa: E402

PHASES = {
    "_leap": "all knobs with a large usual gain as one change, on a GPU",
    "_turn_with_a_partner": "a knob that fails alone is tried with its partners at once",
    "_turn_together": "pairs of knobs that failed alone",
    "_turn_again": "knobs that came close, after other changes",
    "_turn_back": "accepted changes left out again",
    "settle_doubts": "a longer proof for what the noise left open",
}
LEAN = ("_leap", "_turn_with_a_partner", "_turn_together")
RESAMPLES = 2000


@dataclass(frozen=True)
class Found:
    """What one search found: its time over the least known, and the trials and proofs it made."""

    behind: float
    trials: int


def switches(seed: int, trials: int | None) -> Found:
    """Search a table of switches."""
    machine = Landscape(seed)
    context = landscape_context(machine)
    journal = Journal(None, search_name(context))
    budget = Budget(trials=trials)
    result = Search(machine.knobs(), context, machine.run_trial, machine.prove, budget, journal).run()
    return Found(machine.time(result.best) / min(machine.times.values()), result.trials)


def pairs(seed: int, noise: float) -> Found:
    """Search settings with interactions, with a fifth of the trials that trying everything takes."""
    values, start, cost = random_space(seed)
    everything = [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]
    more: dict[str, dict[str, Any]] = {"pair_a": {"partners": ("pair_b",)}, "scale": {"ordered": True}}
    knobs = [planted(name, *items, **more.get(name, {})) for name, items in values.items()]
    budget = Budget(trials=len(everything) // 5)
    result = planted_search(Machine(cost, seed=seed, noise=noise), knobs, config_of(**start), budget=budget)
    return Found(cost(model_of(result.best)) / min(map(cost, everything)), result.trials)


def ag_news(seed: int, budget_s: float) -> Found:
    """Search the settings of a small text classifier on a GPU."""
    result = tune_on(Gpu(seed=seed), budget_s=budget_s)
    return Found((step_s(result.best) or math.inf) / BEST_S, result.trials)


def gpt2(seed: int, budget_s: float, best_s: float) -> Found:
    """Search the settings of GPT-2 on a GPU."""
    result = tune_gpt_on(GptGpu(seed=seed), budget_s=budget_s)
    return Found(gpt_sample_s(result.best) / best_s, result.trials)


def machines() -> dict[str, Callable[[int], Found]]:
    """The searches, by name."""
    best_s = gpt_sample_s(tune_gpt_on(GptGpu(), budget_s=1e5).best)
    return {
        "switches": partial(switches, trials=40),
        "pairs, noise 0.5%": partial(pairs, noise=0.005),
        "pairs, noise 3%": partial(pairs, noise=0.03),
        "ag_news, 3 min": partial(ag_news, budget_s=180),
        "ag_news, 10 min": partial(ag_news, budget_s=600),
        "gpt2, 3 min": partial(gpt2, budget_s=180, best_s=best_s),
        "gpt2, 10 min": partial(gpt2, budget_s=600, best_s=best_s),
    }


@contextmanager
def left_out(phases: Sequence[str]) -> Iterator[None]:
    """Leave phases out of every search."""
    with ExitStack() as stack:
        for name in phases:
            place = search_module if name == "settle_doubts" else Search
            stack.enter_context(mock.patch.object(place, name, return_value=False))
        yield


def gain(without: Sequence[Found], everything: Sequence[Found]) -> Interval[float]:
    """How many times as fast the found config is with a phase: the geometric mean and its 95% interval."""
    logs = [math.log(one.behind / other.behind) for one, other in zip(without, everything, strict=True)]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    value, low, high = (math.exp(item) for item in (statistics.fmean(logs), means[cut], means[-1 - cut]))
    return Interval(value, low, high)


def main() -> None:
    """Search, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    options = parser.parse_args()
    kinds: dict[str, list[str]] = {"everything": [], **{name: [name] for name in PHASES}}
    kinds |= {"lean": [name for name in PHASES if name not in LEAN], "greedy": list(PHASES)}
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for machine, search in machines().items():
        everything: list[Found] = []
        for name, phases in kinds.items():
            with left_out(phases):
                found = [search(seed) for seed in range(options.seeds)]
            everything = everything or found
            item = gain(found, everything)
            behind = sorted(one.behind - 1 for one in found)
            row = {
                "gain": asdict(item),
                "behind_best": statistics.fmean(behind),
                "behind_best_95th": behind[math.ceil(0.95 * len(behind)) - 1],
                "trials": statistics.fmean(one.trials for one in found),
            }
            results.setdefault(machine, {})[name] = row
            interval = "" if name == "everything" else f"{item.value:.3f} ({item.low:.3f}..{item.high:.3f})"
            label = name if not name.startswith("_") else f"without{name.replace('_', ' ')}"
            figures = [f"{row['behind_best']:.1%}", f"{row['behind_best_95th']:.1%}", f"{row['trials']:.0f}"]
            rows.append([machine, label.replace("settle_", "without settle "), interval, *figures])
        tell_progress(machine)
    print(table(["machine", "search", "gain (95%)", "behind the best", "95th", "trials"], rows))
    write_results("search_phases", torch.device("cpu"), {"seeds": options.seeds, "phases": PHASES}, results)


if __name__ == "__main__":
    main()
