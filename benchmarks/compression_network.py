"""Step time against bandwidth: DDP as it is, torch's own compression hooks, and frameworm's, on limited links.

    PYTHONPATH=src python benchmarks/compression_network.py --rounds 15          (root and iproute2: network namespaces)

Two hosts (scripts/network_lab.py), one gloo rank on each, a chain of linear layers with 10.5 million parameters. At
each rate every method trains some steps in turn, round after round, in the same two processes: the network is the same
for all, and so is what else the machine does. A step is forward, backward with the exchange, and SGD; its time is
that of the slower rank. Bytes are what the first host's interface counted.

Contenders. `off`: DDP without a hook. `torch-fp16`, `torch-bf16`: torch's hooks (torch refuses the second off CUDA by
its name; here it goes by another). `torch-powersgd1`, `torch-powersgd2`: torch's hook in one bucket, since with more it
aborts on gloo. The others are `enable_gradient_compression`; `auto` and `auto-any` (which may also take topk and
powersgd) are begun anew at each rate and train until they have chosen, which is not timed. `no-sync` sends nothing:
what computing alone takes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    RESULTS,
    Interval,
    Measured,
    Sample,
    as_data,
    bootstrap_median,
    names_among,
    paired,
    ratio,
    table,
    tell_progress,
    times_as_fast,
    verdict,
    write_results,
)
from lab import Ranks, load_lab
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RATES = ("unlimited", "1gbit", "300mbit", "100mbit")
TORCH = ("off", "torch-fp16", "torch-bf16", "torch-powersgd1", "torch-powersgd2")
OURS = ("fp16", "bf16", "int8", "int4", "topk", "powersgd")
APPROXIMATE = ("torch-powersgd1", "torch-powersgd2", "topk", "powersgd")
AUTOS = ("auto", "auto-any")
METHODS = ("no-sync", *TORCH, *OURS, *AUTOS)
BYTE_GOALS = {"bf16": 0.51, "int8": 0.27, "int4": 0.145, "topk": 0.025}
NEAR_BEST, NEAR_OFF = 1.05, 1.02
INT4_GOALS = {"300mbit": 1.5, "100mbit": 2.5}
WHOLE_BUCKET_MB = 1024
LONGEST_CHOICE = 80  # steps until auto must have chosen


class Contender:
    """One method with a model of its own."""

    def __init__(self, name: str, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        chain: list[nn.Module] = []
        for _ in range(layers):
            chain += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*chain)
        whole = name.startswith("torch-powersgd")
        more: dict[str, Any] = {"bucket_cap_mb": WHOLE_BUCKET_MB} if whole else {}
        self.name = name
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, **more)
        self.enabled: Any = None
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())
        self._inputs, self._targets = torch.randn(batch, width), torch.randn(batch, width)
        self._register()

    def _register(self) -> None:
        name = self.name
        if name == "torch-fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "torch-bf16":
            self.model.register_comm_hook(None, _bf16)
        elif name.startswith("torch-powersgd"):
            state = powerSGD_hook.PowerSGDState(None, int(name[-1]), start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name in (*OURS, *AUTOS):
            from frameworm.distributed import enable_gradient_compression

            method, _, leave = name.partition("-")
            self.enabled = enable_gradient_compression(
                self.model, dist.get_rank(), method, allow_approximate=leave == "any"
            )

    def step(self) -> None:
        """Train once."""
        if self.name == "no-sync":
            with self.model.no_sync():
                self._loss().backward()
        else:
            self._loss().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """End what it started."""
        if self.enabled is not None:
            self.enabled.close()

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(self.model(self._inputs), self._targets)
        return loss


def _bf16(state: Any, bucket: Any) -> Any:
    return default_hooks.bf16_compress_hook(state, bucket)


_bf16.__annotations__ = {}


def work(options: argparse.Namespace) -> int:
    """One rank: reads a line per task from the parent, answers with a line of JSON."""
    torch.set_num_threads(1)
    from frameworm.launch.process_group import cleanup, setup_ddp

    setup_ddp(backend="gloo", timeout_s=300)
    contenders: dict[str, Contender] = {}

    def make(name: str) -> None:
        if name in contenders:
            contenders.pop(name).close()
            gc.collect()
        contenders[name] = Contender(name, options.width, options.layers, options.batch)

    def steps(name: str, count: int) -> list[float]:
        return [_timed(contenders[name].step) for _ in range(count)]

    def choose(name: str) -> dict[str, Any]:
        make(name)
        enabled = contenders[name].enabled
        for _ in range(LONGEST_CHOICE):
            contenders[name].step()
        found = enabled.describe()
        return {
            "method": found.method,
            "bandwidth_gbps": found.bandwidth_gbps,
            "latency_us": found.latency_us,
            "candidates": [[item.method, item.expected_s, item.measured_s] for item in found.candidates],
        }

    tasks: dict[str, Callable[..., Any]] = {"make": make, "steps": steps, "choose": choose}
    for line in sys.stdin:
        task = json.loads(line)
        if task[0] == "end":
            break
        answer = tasks[task[0]](*task[1:])
        print(json.dumps(answer), flush=True)
    for contender in contenders.values():
        contender.close()
    cleanup()
    return 0


def _timed(step: Callable[[], None]) -> float:
    """Seconds of a step, on the slower rank."""
    dist.barrier()
    begin = perf_counter()
    step()
    took = torch.tensor([perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _command(options: argparse.Namespace) -> list[str]:
    """What each of the two hosts runs."""
    command = [sys.executable, __file__, "--worker"]
    for name in ("width", "layers", "batch"):
        command += [f"--{name}", str(getattr(options, name))]
    return command


def count_bytes(lab: Any, ranks: Ranks, names: Sequence[str], steps: int = 4) -> dict[str, int]:
    """Bytes that the first host sends in a step of each method."""
    found = {}
    for name in names:
        ranks.ask("steps", name, 3)
        empty = _sent(lab, lambda: ranks.ask("steps", "no-sync", steps))
        found[name] = (_sent(lab, lambda name=name: ranks.ask("steps", name, steps)) - empty) // steps  # type: ignore[misc]
    return found


def _sent(lab: Any, action: Callable[[], Any]) -> int:
    before = lab.counters()[0].sent_bytes
    action()
    return int(lab.counters()[0].sent_bytes - before)


def measure_rate(ranks: Ranks, names: Sequence[str], rounds: int) -> tuple[dict[str, Measured], dict[str, Any]]:
    """All methods at the rate that is set."""
    choices = {name: ranks.ask("choose", name) for name in names if name in AUTOS}
    for name, choice in choices.items():
        tell_progress(f"{name} took {choice['method']}")
    measured: dict[str, Measured] = {}
    for name in names:
        warmup = ranks.ask("steps", name, 3)
        measured[name] = Measured(Sample(warmup[-1], 0.0))
    slowest = max(item.warmup.step_s for item in measured.values())
    for number in range(rounds):
        tell_progress(f"round {number + 1} of {rounds}")
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            # A step of its own first: what another method left in the caches and queues is not its fault.
            count = 2 if slowest > 1.0 else 4
            times = ranks.ask("steps", name, count)[1:]
            measured[name].rounds.append(Sample(sum(times) / len(times), 0.0))
    return measured, choices


def judge(rate: str, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """The goals at one rate."""
    goals = []

    def goal(text: str, interval: Interval, *, at_most: float | None = None, at_least: float | None = None) -> None:
        if at_most is not None:
            word = "met" if interval.high <= at_most else "missed" if interval.low > at_most else "open"
        else:
            assert at_least is not None
            word = verdict(interval, at_least)
        goals.append({"goal": text, "ratio": as_data(interval), "verdict": word})

    for own in (name for name in AUTOS if name in measured):
        barred = ("no-sync", *AUTOS, *(APPROXIMATE if own == "auto" else ()))
        best = min((name for name in measured if name not in barred), key=lambda name: measured[name].step_s)
        against = paired(measured[own], measured[best], ratio)
        goal(f"{own} within 5% of the best it may take ({best})", against, at_most=NEAR_BEST)
        if "off" in measured:
            against = paired(measured[own], measured["off"], ratio)
            goal(f"{own} never more than 2% slower than off", against, at_most=NEAR_OFF)
    if rate in INT4_GOALS and {"int4", "torch-fp16"} <= measured.keys():
        times = times_as_fast(measured["int4"], measured["torch-fp16"])
        goal(f"int4 at least {INT4_GOALS[rate]} times as fast as torch's fp16", times, at_least=INT4_GOALS[rate])
    return goals


def main() -> int:
    """Build the lab and run all rates."""
    options = _arguments()
    if options.worker:
        return work(options)
    if options.plot is not None:
        plot(options.out / "compression_network-cpu.json", options.plot)
        return 0
    lab_module = load_lab()
    names = options.methods
    rates: dict[str, Any] = {}
    counted: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, lab_module.NetworkLab(hosts=2) as lab:
        ranks = Ranks(lab, _command(options), Path(folder))
        try:
            for name in names:
                if name not in AUTOS:
                    ranks.ask("make", name)
            if "no-sync" in names:
                counted = count_bytes(lab, ranks, [name for name in names if name not in ("no-sync", *AUTOS)])
            for rate in options.rates:
                lab.set_rate(None if rate == "unlimited" else rate)
                tell_progress(f"at {rate}")
                measured, choices = measure_rate(ranks, names, options.rounds)
                rates[rate] = {
                    "methods": {
                        name: {
                            "step_s": as_data(bootstrap_median([sample.step_s for sample in item.rounds])),
                            "rounds": [sample.step_s for sample in item.rounds],
                        }
                        for name, item in measured.items()
                    },
                    "chosen": choices,
                    "goals": judge(rate, measured),
                }
                path = _write(options, rates, counted)
        finally:
            ranks.end()
    print(draw(rates, counted))
    for rate, found in rates.items():
        for item in found["goals"]:
            interval = item["ratio"]
            print(
                f"{rate}: {item['goal']}: {interval['value']:.2f} ({interval['low']:.2f}..{interval['high']:.2f}): "
                f"{item['verdict']}"
            )
    if "off" in counted:
        for name, most in BYTE_GOALS.items():
            if name in counted:
                share = counted[name] / counted["off"]
                print(f"bytes of {name}: {share:.4f} of off, goal {most}: {'met' if share <= most else 'missed'}")
    print(f"written to {path}")
    return 0


def _write(options: argparse.Namespace, rates: dict[str, Any], counted: dict[str, int]) -> Path:
    parameters = options.layers * (options.width**2 + options.width)
    settings = {
        "hosts": 2,
        "parameters": parameters,
        "batch": options.batch,
        "rounds": options.rounds,
        "bucket_cap_mb": 25,
    }
    results = {"bytes_per_step": counted, "rates": rates}
    name = f"compression_network{options.tag and '-' + options.tag}"
    return write_results(name, torch.device("cpu"), settings, results, options.out)


def draw(rates: dict[str, Any], counted: dict[str, int]) -> str:
    """Milliseconds per method and rate."""
    names = list(next(iter(rates.values()))["methods"])
    rows = []
    for name in names:
        row = [name, f"{counted[name] / 1e6:.2f}" if name in counted else "-"]
        for found in rates.values():
            step_s = found["methods"][name]["step_s"]
            row.append(f"{step_s['value'] * 1e3:.0f} ({step_s['low'] * 1e3:.0f}..{step_s['high'] * 1e3:.0f})")
        rows.append(row)
    for name in AUTOS:
        taken = [found["chosen"].get(name, {}).get("method", "-") for found in rates.values()]
        rows.append([f"{name} took", "", *taken])
    return table(("ms per step", "MB sent", *rates), rows)


RATE_MBIT = {"1gbit": 1000.0, "300mbit": 300.0, "100mbit": 100.0}
DRAWN = {
    "off": ("#4c4c4c", "DDP as it is"),
    "torch-fp16": ("#b39a00", "torch's fp16 hook"),
    "bf16": ("#1f77b4", "bf16"),
    "int8": ("#2ca02c", "int8"),
    "int4": ("#d62728", "int4"),
    "topk": ("#9467bd", "topk 1%"),
    "powersgd": ("#8c564b", "powersgd rank 1"),
}


def crossovers(times: dict[str, dict[float, float]], names: Sequence[str]) -> list[tuple[float, str, str]]:
    """Where, from the slowest link to the fastest, another method becomes the fastest: Mbit/s, before, after.

    Between two measured rates a step's time is taken to be a + b / rate.
    """
    rates = sorted(next(iter(times.values())))
    found: list[tuple[float, str, str]] = []
    before = ""
    for low, high in itertools.pairwise(rates):
        for part in range(201):
            inverse = 1 / low + (1 / high - 1 / low) * part / 200
            share = (inverse - 1 / low) / (1 / high - 1 / low)
            best = min(names, key=lambda name: times[name][low] + (times[name][high] - times[name][low]) * share)
            if before and best != before:
                found.append((1 / inverse, before, best))
            before = best
    return found


def plot(results: Path, target: Path) -> None:
    """Step time against bandwidth, from a results file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "frameworm"
    from matplotlib import pyplot

    rates = json.loads(results.read_text())["results"]["rates"]
    known = {RATE_MBIT[rate]: found["methods"] for rate, found in rates.items() if rate in RATE_MBIT}
    unlimited = rates.get("unlimited", {})
    seen = [item["bandwidth_gbps"] for item in unlimited.get("chosen", {}).values() if item["bandwidth_gbps"]]
    if seen:  # as fast as the ranks found it
        known[round(1000 * sum(seen) / len(seen))] = unlimited["methods"]
    times = {
        name: {rate: methods[name]["step_s"]["value"] for rate, methods in known.items()}
        for name in DRAWN
        if all(name in methods for methods in known.values())
    }
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, by_rate in times.items():
        colour, label = DRAWN[name]
        ordered = sorted(by_rate)
        axes.plot(ordered, [by_rate[rate] * 1e3 for rate in ordered], "o-", color=colour, label=label)
    for rate, _, after in crossovers(times, [name for name in times if name not in APPROXIMATE]):
        axes.axvline(rate, color=DRAWN[after][0], linestyle=":", linewidth=1.5)
        axes.annotate(
            f"{after} fastest\nfrom {rate:.0f} Mbit/s",
            (rate, 100),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
            color=DRAWN[after][0],
        )
    axes.set(xscale="log", yscale="log", xlabel="bandwidth between the two hosts, Mbit/s", ylabel="ms per step")
    axes.set_xticks(sorted(known), [f"{rate:,.0f}" for rate in sorted(known)])
    ticks = [100, 200, 500, 1000, 2000, 4000]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(top=6000)
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title("10.5 million parameters, two gloo ranks, one thread each", fontsize=10)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rates", type=lambda text: text.split(","), default=list(RATES), help="as tc writes them, or unlimited")
    add("--methods", type=names_among(METHODS), default=list(METHODS), help="names, comma between")
    add("--rounds", type=int, default=15)
    add("--width", type=int, default=1024)
    add("--layers", type=int, default=10)
    add("--batch", type=int, default=32)
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add("--tag", default="", help="part of the results file's name, for a call with some of the rates")
    add("--plot", type=Path, help="only draw the results that are there, into this file")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
