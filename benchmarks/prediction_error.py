"""How far are predictions from what happens? Written down first, then measured, between hosts with limited links.

    PYTHONPATH=src python benchmarks/prediction_error.py --data DATA             (root and iproute2: network namespaces)

2, 4 and 8 hosts (scripts/network_lab.py), one gloo rank on each. For each number of hosts and each rate: the network is
probed, steps of one device are profiled on every host (as a run there would record them) and the codecs are timed; from
these every setting is predicted, the predictions are written to <out>/prediction_error-predictions.json, and only then
the settings are measured, DDP as it is or with frameworm's compression, medians of several steps of the slowest
rank. Two hosts compute or sleep; more of them sleep, for there are not the cores to compute.

Beside it stand two naive predictors: `no communication` (the step of one device) and `no overlap` (that step, and all
that is sent one after the other). Regret: among settings that do the same work at one rate, how much slower is the one
with the shortest predicted step than the one with the shortest measured one.

`ag_news`: the small and the optimized config between two hosts, predicted from runs on one device and then trained with
`frameworm train`; `published`: the figures of benchmarks/published, fed in by hand. What was measured is kept in
<out>/prediction_error-work.json: --resume goes on from there.

The links add no delay (the kernel has no netem here), so terms of latency cannot be checked: what is small against the
rest stays unproven.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, measured_now, names_among, table, tell_progress, write_results
from lab import Ranks, load_lab
from prediction_ranks import KINDS

from frameworm.records.gradients import GradientTimes
from frameworm.records.statistics import DEFAULT_WARMUP, percentile
from frameworm.records.writer import read_steps
from frameworm.scaling.fabrics import MeasuredNetwork
from frameworm.scaling.network import NetworkModel
from frameworm.scaling.predict import Predictor
from frameworm.scaling.profile import load_case, load_run, network_of
from frameworm.scaling.simulate import Setting, StepProfile, simulate_step
from frameworm.scaling.traffic import Codec, Gradient

RATES = ("100mbit", "300mbit", "1gbit", "unlimited")
ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("prediction_ranks.py")
MEDIAN_GOAL, P90_GOAL, REGRET_GOAL, PUBLISHED_GOAL = 0.07, 0.15, 0.05, 0.15
LIMIT_S, MOST_STEPS, SHORT_STEPS = 2.0, 6, 200
PROBE_S = 3.0
AG_NEWS_RATE = "100mbit"
AG_NEWS_TESTS = 64  # texts to validate on
AG_NEWS = {  # config, global batch, steps
    "small": ("ag_news_single_gpu.yaml", 32, 40),
    "optimized": ("ag_news_single_gpu_optimized.yaml", 64, 12),  # half its batch: a step of a core takes seconds
}

# Bucket size in MB, accumulation and method; by number of hosts and size of the model.
_ALL = ((25, 1, "off"), (1, 1, "off"), (25, 1, "bf16"), (1, 4, "off"), (25, 1, "int4"), (25, 1, "powersgd"))
_SOME = ((25, 1, "off"), (1, 1, "bf16"), (25, 4, "off"))
VARIANTS = {
    (2, "large"): _ALL,
    (2, "small"): ((25, 1, "off"), (25, 1, "bf16")),
    (4, "large"): _SOME,
    (4, "small"): ((25, 1, "off"), (25, 4, "bf16")),
    (8, "large"): ((25, 1, "off"), (1, 1, "bf16")),
    (8, "small"): ((25, 1, "off"),),
    (2, "captured"): ((25, 1, "off"), (25, 4, "off"), (25, 1, "int8")),
    (4, "captured"): ((25, 1, "off"), (25, 4, "off")),
    (8, "captured"): ((25, 1, "off"),),
}


@dataclass(frozen=True)
class Case:
    """One setting."""

    hosts: int
    rate: str
    kind: str
    bucket_mb: int
    accumulation: int
    method: str

    @property
    def key(self) -> str:
        """As the files name it."""
        sent = f"{self.method}, {self.bucket_mb} MB, x{self.accumulation}"
        return f"{self.hosts} hosts, {self.rate}, {self.kind}, {sent}"


def cases(hosts: Iterable[int], rates: Sequence[str], kinds: Sequence[str]) -> list[Case]:
    """All settings, by hosts, rate and kind."""
    return [
        Case(count, rate, kind, *variant)
        for count in hosts
        for rate in rates
        for kind in kinds
        if count == 2 or kind.startswith("sleeping")
        for variant in VARIANTS[count, kind.partition("-")[2]]
    ]


def make_profile(found: dict[str, Any]) -> StepProfile:
    """What the ranks saw of one device as a profile, by the same rule as that of a run's folder."""
    gradients = GradientTimes.from_dict(found["gradients"])
    forward_s, backward_s = (statistics.fmean(found[name]) for name in ("forwards", "backwards"))
    step_s = statistics.fmean(found["times"])
    stretch = backward_s / (gradients.backward_s or backward_s)
    return StepProfile(
        tuple(
            Gradient(
                item.size_bytes, min(backward_s, (item.ready_s or 0.0) * stretch), item.size_bytes // 4, item.shape
            )
            for item in gradients.gradients
        ),
        forward_s,
        backward_s,
        optimizer_s=max(0.0, step_s - forward_s - backward_s),
        step_times_s=tuple(found["times"]),
    )


def foretell(
    case: Case, profile: StepProfile, network: NetworkModel, codecs: dict[str, float], cores: int
) -> dict[str, float]:
    """The predicted step, and what the naive predictors say."""
    # Ranks that sleep leave their cores to the network; those that compute have none to spare.
    busy = 1.0 if case.kind.startswith("computing") and cores <= case.hosts else 0.0
    setting = Setting("ddp", Codec(case.method, codecs), case.bucket_mb, min(1.0, case.bucket_mb), busy_host=busy)
    work = replace(profile, accumulation=case.accumulation)
    found = simulate_step(work, setting, MeasuredNetwork(network), case.hosts)
    return {
        "step_s": found.step_s,
        "no_communication_s": work.compute_s,
        "no_overlap_s": work.compute_s + found.communication_s,
        "exposed_s": found.exposed_s,
        "straggler_s": found.straggler_s,
    }


class Notebook:
    """What is known so far, written after every step."""

    def __init__(self, folder: Path, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._work = folder / "prediction_error-work.json"
        self._predictions = folder / "prediction_error-predictions.json"
        self.data: dict[str, Any] = {"predicted": {}, "measured": {}, "networks": {}, "ag_news": None}
        if resume and self._work.exists():
            self.data = json.loads(self._work.read_text(encoding="utf-8"))

    def save(self) -> None:
        """Write everything."""
        self._work.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    def write_down(self) -> None:
        """The predictions, on disk before anything is measured."""
        with self._predictions.open("w", encoding="utf-8") as file:
            json.dump({**measured_now(torch.device("cpu")), "predicted": self.data["predicted"]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self.save()

    def close(self, keep: bool) -> None:
        """Nothing is left to resume."""
        if not keep:
            self._work.unlink(missing_ok=True)


def run_hosts(wanted: Sequence[Case], notebook: Notebook, options: argparse.Namespace) -> None:
    """All settings with one number of hosts: at each rate predict all, write that down, then measure all."""
    data, hosts = notebook.data, wanted[0].hosts
    if all(case.key in data["measured"] for case in wanted):
        return
    cores = len(os.sched_getaffinity(0))
    profiles: dict[str, StepProfile] = {}
    codecs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, load_lab().NetworkLab(hosts=hosts) as lab:
        ranks = Ranks(lab, [sys.executable, str(RANK)], Path(folder))
        try:
            for rate in dict.fromkeys(case.rate for case in wanted):
                left = [case for case in wanted if case.rate == rate and case.key not in data["measured"]]
                if not left:
                    continue
                lab.set_rate(None if rate == "unlimited" else rate)
                tell_progress(f"{hosts} hosts at {rate}: network, one device, codecs")
                # Many hosts on few cores: a short look at their network is mostly noise.
                found = ranks.ask("probe", options.probe * hosts / 2)
                network = NetworkModel.from_dict(found)
                data["networks"][f"{hosts} hosts, {rate}"] = found["summary"]
                for kind in dict.fromkeys(case.kind for case in left):
                    # What computes is looked at again: a machine is not as fast at all times. Sleep is sleep.
                    if kind not in profiles or kind.startswith("computing"):
                        profiles[kind] = make_profile(ranks.ask("profile", kind))
                        codecs[kind] = ranks.ask("codecs", kind) if hosts == 2 or kind not in codecs else codecs[kind]
                for case in left:
                    data["predicted"][case.key] = foretell(case, profiles[case.kind], network, codecs[case.kind], cores)
                notebook.write_down()
                for case in left:
                    measure(case, ranks, notebook, options)
        finally:
            ranks.end()


def measure(case: Case, ranks: Ranks, notebook: Notebook, options: argparse.Namespace) -> None:
    """One setting, at the rate that is set."""
    data = notebook.data
    setting = {"bucket_mb": case.bucket_mb, "accumulation": case.accumulation, "method": case.method}
    most = SHORT_STEPS if case.kind.endswith("captured") else MOST_STEPS
    times = ranks.ask("measure", case.kind, setting, options.limit, most)
    data["measured"][case.key] = times
    notebook.save()
    expected_s, step_s = data["predicted"][case.key]["step_s"], statistics.median(times)
    error = expected_s / step_s - 1
    tell_progress(f"{case.key}: {expected_s * 1e3:.3g} ms expected, {step_s * 1e3:.3g} measured ({error:+.1%})")


def judge(wanted: Sequence[Case], data: dict[str, Any]) -> dict[str, Any]:
    """Errors of all predictors, and the regret of choosing by the prediction."""
    errors: dict[str, list[float]] = {"predicted": [], "no communication": [], "no overlap": []}
    names = {"predicted": "step_s", "no communication": "no_communication_s", "no overlap": "no_overlap_s"}
    rows = []
    groups: dict[tuple[Any, ...], list[tuple[float, float, str]]] = {}
    for case in wanted:
        if case.key not in data["measured"]:
            continue
        said, times = data["predicted"][case.key], data["measured"][case.key]
        step_s = statistics.median(times)
        for name, key in names.items():
            errors[name].append(abs(said[key] / step_s - 1))
        rows.append({"setting": case.key, "measured_s": step_s, **said, "error": said["step_s"] / step_s - 1})
        group = (case.hosts, case.rate, case.kind, case.accumulation)
        groups.setdefault(group, []).append((said["step_s"], step_s, case.key))
    regrets = []
    for members in groups.values():
        if len(members) > 1:
            chosen, best = min(members), min(members, key=lambda item: item[1])
            regrets.append({"chosen": chosen[2], "best": best[2], "regret": chosen[1] / best[1] - 1})
    summary = {
        name: {"median": statistics.median(values), "p90": percentile(sorted(values), 0.9), "worst": max(values)}
        for name, values in errors.items()
        if values
    }
    return {"settings": len(rows), "errors": summary, "regrets": regrets, "rows": rows}


def published() -> list[dict[str, Any]]:
    """The published case, fed in by hand."""
    found = []
    for name, low, high in (("small", 0.46, 0.46), ("optimized", 2.8, 3.2)):
        source = load_case(ROOT / "benchmarks" / "published" / f"ag_news_{name}.json")
        network = network_of(source)
        assert network is not None
        speedup = Predictor(source, network, scaling="strong").speedup(4)
        error = max(0.0, low / speedup - 1, speedup / high - 1)
        found.append({"case": source.name, "published": [low, high], "predicted": speedup, "error": error})
    return found


def ag_news(notebook: Notebook, options: argparse.Namespace) -> None:
    """The small and the optimized config between two hosts: predicted from one device, then trained."""
    if notebook.data["ag_news"] is not None or options.data is None:
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text, load_lab().NetworkLab(hosts=2) as lab:
        folder = Path(text)
        train = [sys.executable, "-m", "frameworm", "train"]
        alone = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))

        def run(name: str, config: str, batch: int, steps: int, together: bool) -> None:
            """One training on both hosts, each by itself or together."""
            common = [
                *train, "--config", str(ROOT / "configs" / config), "--set", f"data.root={folder / 'ag_news'}",
                "--set", "gpu.device=cpu", "--set", "gpu.mixed_precision=off", "--set", f"training.max_steps={steps}",
                "--set", "data.num_workers=0", "--set", f"training.global_batch={batch}",
            ]  # fmt: skip
            each = [[*common, "--out", str(folder / name)] for _ in range(2)]
            if together:
                each = [[*words, "--distributed"] for words in each]
            else:
                each[1][-1] = str(folder / f"{name}-other")
            env: dict[str, str | None] = {"OMP_NUM_THREADS": "1"} if together else {"OMP_NUM_THREADS": "1", **alone}
            for ended in lab.run(each, env, timeout_s=300):
                if ended.returncode != 0:
                    raise RuntimeError(f"{name} on host {ended.host} failed:\n{ended.stderr[-2000:]}")

        # All of the training texts, for their vocabulary; a few to validate on, which takes minutes otherwise.
        texts = folder / "ag_news"
        texts.mkdir()
        for path in options.data.glob("ag_news/train*"):
            (texts / path.name).symlink_to(path.resolve())
        tests = (options.data / "ag_news" / "test.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        (texts / "test.csv").write_text("".join(tests[:AG_NEWS_TESTS]), encoding="utf-8")
        lab.set_rate(options.ag_news_rate)
        probed = folder / "network.json"
        for ended in lab.run([sys.executable, "-m", "frameworm", "network", "--budget", "4", "--out", str(probed)]):
            if ended.returncode != 0:
                raise RuntimeError(f"the probe failed:\n{ended.stderr[-2000:]}")
        network = MeasuredNetwork(NetworkModel.load(probed))
        configs = [(name, *AG_NEWS[name]) for name in options.ag_news]
        for name, config, batch, steps in configs:
            tell_progress(f"AG News {name}: one device, whole and half batch")
            run(f"{name}-whole", config, batch, steps, together=False)
            run(f"{name}-half", config, batch // 2, steps, together=False)
            whole, half = load_run(folder / f"{name}-whole"), load_run(folder / f"{name}-half")
            step = simulate_step(half.profile, Setting(busy_host=1.0), network, 2)
            # Steps differ by the lengths of their texts: level against level, as a run of many steps would.
            found[name] = {
                "rate": options.ag_news_rate,
                "predicted_s": step.step_s,
                "predicted": whole.profile.compute_s / step.step_s,
            }
        notebook.data["predicted"]["ag_news"] = json.loads(json.dumps(found))
        notebook.write_down()
        for name, config, batch, steps in configs:
            tell_progress(f"AG News {name}: two hosts, {found[name]['predicted']:.2f} times as fast expected")
            run(f"{name}-two", config, batch, steps, together=True)
            whole = load_run(folder / f"{name}-whole")
            step_s = statistics.fmean(
                step.step_s - step.phases.get("validation", 0.0) - step.phases.get("checkpoint", 0.0)
                for step in read_steps(folder / f"{name}-two" / "steps-rank0.jsonl")
                if step.step > DEFAULT_WARMUP
            )
            found[name]["measured_s"] = step_s
            found[name]["measured"] = whole.profile.compute_s / step_s
    notebook.data["ag_news"] = found
    notebook.save()


def show(results: dict[str, Any]) -> str:
    """Everything as text."""
    lines = []
    if results["rows"]:
        columns = ("setting", "measured ms", "predicted ms", "error", "no communication", "no overlap")
        rows = [
            (
                row["setting"],
                f"{row['measured_s'] * 1e3:.0f}",
                f"{row['step_s'] * 1e3:.0f}",
                f"{row['error']:+.1%}",
                f"{row['no_communication_s'] / row['measured_s'] - 1:+.0%}",
                f"{row['no_overlap_s'] / row['measured_s'] - 1:+.0%}",
            )
            for row in results["rows"]
        ]
        lines += [table(columns, rows), ""]
    goals = {"predicted": (MEDIAN_GOAL, P90_GOAL)}
    for name, errors in results["errors"].items():
        lines.append(
            f"{name}: median error {errors['median']:.1%}, p90 {errors['p90']:.1%}, worst {errors['worst']:.0%}"
        )
        if name in goals:
            met = errors["median"] <= goals[name][0] and errors["p90"] <= goals[name][1]
            lines.append(f"  goals {goals[name][0]:.0%} and {goals[name][1]:.0%}: {'met' if met else 'missed'}")
    if results["regrets"]:
        worst = max(results["regrets"], key=lambda item: item["regret"])
        middle = statistics.median(item["regret"] for item in results["regrets"])
        over = sum(item["regret"] > REGRET_GOAL for item in results["regrets"])
        lines.append(
            f"regret of choosing by prediction: median {middle:.1%}, worst {worst['regret']:.1%} ({worst['chosen']}), "
            f"{over} of {len(results['regrets'])} above {REGRET_GOAL:.0%}"
        )
    for item in results["published"]:
        low, high = item["published"]
        met = "met" if item["error"] <= PUBLISHED_GOAL else "missed"
        goal = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines.append(f"{item['case']}: {item['predicted']:.2f} times, published {goal}: within 15% {met}")
    for name, item in (results["ag_news"] or {}).items():
        lines.append(
            f"AG News {name}, 2 hosts at {item['rate']}: {item['predicted']:.2f} times predicted, "
            f"{item['measured']:.2f} measured"
        )
    return "\n".join(lines)


def main() -> int:
    """Predict, measure, compare."""
    options = _arguments()
    wanted = cases(options.hosts, options.rates, options.kinds)
    notebook = Notebook(options.out, options.resume)
    try:
        if options.part in ("all", "grid"):
            for count in dict.fromkeys(case.hosts for case in wanted):
                run_hosts([case for case in wanted if case.hosts == count], notebook, options)
        if options.part in ("all", "ag_news"):
            ag_news(notebook, options)
    finally:
        results = {
            **judge(wanted, notebook.data),
            "published": published(),
            "ag_news": notebook.data["ag_news"],
            "networks": notebook.data["networks"],
        }
        settings = {"kinds": KINDS, "probe_s": options.probe, "limit_s": options.limit, "most_steps": MOST_STEPS}
        path = write_results(f"prediction_error{options.tag}", torch.device("cpu"), settings, results, options.out)
    notebook.close(options.keep)
    print(show(results))
    print(f"written to {path}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--rates", type=names_among(RATES), default=list(RATES))
    parser.add_argument("--kinds", type=names_among(KINDS), default=list(KINDS))
    parser.add_argument("--part", choices=("all", "grid", "ag_news", "published"), default="all")
    parser.add_argument("--data", type=Path, help="folder with ag_news/; without it that part is left out")
    parser.add_argument("--ag-news", type=names_among(AG_NEWS), default=list(AG_NEWS))
    parser.add_argument("--ag-news-rate", default=AG_NEWS_RATE)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of steps per setting")
    parser.add_argument(
        "--probe", type=float, default=PROBE_S, help="seconds of a probe between two hosts; more take longer"
    )
    parser.add_argument("--resume", action="store_true", help="go on where a run with the same --out was ended")
    parser.add_argument("--keep", action="store_true", help="keep what --resume needs, also after the end")
    parser.add_argument("--tag", default="", help="goes into the name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
