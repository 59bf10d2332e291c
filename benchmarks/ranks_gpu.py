"""Captured steps of several ranks: what DDP in the graph costs, and what it saves the host.

    PYTHONPATH=src python benchmarks/ranks_gpu.py --data DATA                      (one GPU; about six minutes)
    PYTHONPATH=src python benchmarks/ranks_gpu.py --parts predict --results FILE    (anywhere, from what `alone` took)

DATA (or FRAMEWORM_DATA) holds the folders ag_news and imdb.

`alone`: the fast configs on one GPU with the strategy `single` and with `ddp` at world size 1, both captured, both by
`frameworm train`'s own path. DDP is really in the graph: its buckets and its all-reduce are recorded, though one rank
sends nothing. Both live in processes of their own and take turns (see live.py); GPT-2 reads random tokens.

`pair`: two ranks of NCCL that share the one GPU, each as if on a host of its own, so that gradients cross by sockets
within the machine. Nothing here is a speed that two GPUs would have: what counts is the time that a step takes from the
host's training thread, and the share of the time in which the GPU computes nothing for the rank (kernels other than
NCCL's, by torch.profiler, over 30 further steps). Contenders run one after the other, in two passes, each in
processes of its own: frameworm captured and eager from the fast config, Lightning and Accelerate with DDP as usually
set and at their best (bf16, fused AdamW, torch.compile).

`predict`: what 2, 4 and 8 GPUs would do, strong scaling, from the runs that `alone` left: the captured step of one GPU,
when its gradients are there, how much of it an eighth of the batch still takes, DDP's buckets and published figures of
NVLink and 100 Gbit Ethernet. No goal: whatever it says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter, thread_time
from typing import Any
from unittest import mock

import torch
from gpt_mfu import VOCABULARY, write_tokens
from harness import (
    RESULTS,
    ContenderError,
    as_data,
    interleave,
    names_among,
    table,
    tell_progress,
    times_as_fast,
    write_results,
)
from live import Gate, GatedLoader, Live, Plan
from peers import ENTRIES, TRAINERS, Task, Work, run_config

from frameworm.config.load import load_config
from frameworm.data.corpora.cache import open_store
from frameworm.data.corpora.text import LanguageData, TokenBlocks
from frameworm.models import workloads
from frameworm.scaling.fabrics import LinkNetwork, find_fabric
from frameworm.scaling.predict import Predictor
from frameworm.scaling.profile import from_figures, load_run
from frameworm.scaling.simulate import Setting, StepProfile

CONFIGS = Path(__file__).parents[1] / "configs"
COST_GOAL = 1.05
WORLD_SIZES = (1, 2, 4, 8)
FABRICS = ("nvlink4", "100gbe")
PAIR = ("frameworm-captured", "frameworm-eager", "lightning", "accelerate", "accelerate-best")
PROFILED = 30
TINY = ("model.d_model=32", "model.num_layers=1", "model.n_heads=2", "gpu.mixed_precision=off")


@dataclass(frozen=True)
class Case:
    """A fast config, how long its blocks are, and the batch of which an eighth is trained too."""

    config: str
    folder: str | None  # None: random tokens
    steps: int
    settings: tuple[str, ...] = ()
    batch: int | None = None  # None: it is divided by accumulating less


CASES = {
    "ag_news": Case("ag_news_single_gpu_fast", "ag_news", 2000, batch=32),
    "ag_news_wide": Case("ag_news_single_gpu_optimized_fast", "ag_news", 600, batch=128),
    "imdb": Case("imdb_single_gpu_fast", "imdb", 400, batch=32),
    "gpt2": Case("gpt2_124m_fast", None, 3, ("training.micro_batch=64", "training.global_batch=512")),
}


@dataclass(frozen=True)
class Run:
    """What one contender of `alone` trains."""

    case: str
    settings: tuple[str, ...]
    strategy: str
    folder: str  # its run folder is made in it
    device: str


def train(gate: Gate, run: Run) -> dict[str, Any]:
    """Train one contender through the gate."""
    if run.strategy == "ddp":
        _lone_rank(run.device)
    case = CASES[run.case]
    overrides = [*case.settings, *run.settings, f"parallel.strategy={run.strategy}", *on_device(run.device)]
    config = load_config(CONFIGS / f"{case.config}.yaml", overrides)
    tokens = next((item.partition("=")[2] for item in run.settings if item.startswith("data.root=")), "")

    def random_tokens(data: Any, *, max_seq_len: int, **more: Any) -> LanguageData:
        store = open_store(Path(tokens))
        return LanguageData(TokenBlocks(store, max_seq_len), TokenBlocks(store, max_seq_len, limit=1), VOCABULARY)

    Path(run.folder).mkdir(parents=True, exist_ok=True)
    with mock.patch.object(workloads, "load_language_modelling", random_tokens):
        return run_config(gate, Path(run.folder), config, lambda model: None)


def on_device(device: str) -> list[str]:
    """Settings of the fast configs for a device; on a CPU, for rehearsals, nothing is captured."""
    if device != "cpu":
        return ["gpu.device=cuda"]
    return ["gpu.device=cpu", "gpu.capture=off", "gpu.compile_model=false", "gpu.combine_kernels=false", *TINY]


def _lone_rank(device: str) -> None:
    """A process group with this rank alone."""
    from frameworm.distributed import setup_ddp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    setup_ddp(0, 1, backend="gloo" if device == "cpu" else "nccl")


def measure_alone(names: list[str], options: argparse.Namespace, folder: Path, runs: Path) -> dict[str, Any]:
    """The captured step of one GPU with and without DDP in it."""
    lives: dict[str, Live] = {}
    results: dict[str, Any] = {}
    try:
        for name in names:
            case = CASES[name]
            steps = options.steps or case.steps
            plan = Plan(options.warmup if case.folder else 6, options.lead_in, steps, options.rounds + 1)
            settings = [f"training.max_steps={plan.total}", "data.drop_last=true"]
            if case.folder is None:
                tokens = folder / "tokens"
                write_tokens(tokens, (plan.total + 1) * 512, 1024)
                settings += [f"data.root={tokens}"]
            else:
                settings += [f"data.root={options.data / case.folder}", "training.epochs=1000"]
            kinds = {"single": settings, "ddp": settings}
            if case.batch is not None:
                kinds["eighth"] = [*settings, f"training.global_batch={case.batch // 8}"]
            for kind, own in kinds.items():
                strategy = "ddp" if kind == "ddp" else "single"
                run = Run(name, tuple(own), strategy, str(runs / f"{name}-{kind}"), options.device)
                key = f"{name}-{kind}"
                lives[key] = Live(key, train, (run,), plan, options.device, folder, options.limit_s)
        for key, live in lives.items():  # whoever still compiles would disturb the others
            with contextlib.suppress(ContenderError):  # said below
                tell_progress(f"{key} is warm after {live.wait_ready()['warmup_s']:.0f} s")
        for name in names:
            results[name] = _raced(name, lives, options, runs)
    finally:
        for live in lives.values():
            live.end(patience_s=2.0)
    return results


def _raced(name: str, lives: dict[str, Live], options: argparse.Namespace, runs: Path) -> dict[str, Any]:
    failures: dict[str, str] = {}
    pair = {strategy: lives[f"{name}-{strategy}"] for strategy in ("single", "ddp")}
    said: dict[str, Any] = {}
    for strategy, live in pair.items():
        try:
            said[strategy] = live.ready or live.wait_ready()
        except ContenderError as error:
            failures[strategy] = str(error)
    ready = {strategy: live.block for strategy, live in pair.items() if strategy not in failures}
    measured = interleave(ready, options.rounds, tell_progress, failures=failures)
    for strategy in measured:
        try:
            said[strategy] = {**said[strategy], **pair[strategy].finish()}
        except ContenderError as error:
            said[strategy]["ending_failed"] = str(error)
    eighth = lives.get(f"{name}-eighth")
    eighth_us = None
    if eighth is not None and eighth.ready:
        with contextlib.suppress(ContenderError):
            eighth_us = 1e6 * min(eighth.block().step_s for _ in range(3))
    cost = None
    if len(measured) == 2:
        cost = times_as_fast(measured["single"], measured["ddp"])  # the step of ddp in steps of single
    run = next(iter(sorted((runs / f"{name}-single").glob("run*"))), None)
    return {
        "gradient_bytes": None if run is None else load_run(run).profile.gradient_bytes,
        "cost_of_ddp": None if cost is None else as_data(cost),
        "verdict": None if cost is None else ("met" if cost.value <= COST_GOAL else "missed"),
        "failed": failures,
        "eighth_of_batch_us": eighth_us,
        "contenders": {
            strategy: {
                "step_us": item.step_s * 1e6,
                "thread_us": 1e6 * sum(sample.thread_s for sample in item.rounds) / len(item.rounds),
                **said[strategy],
                "rounds": [as_data(sample) for sample in item.rounds],
            }
            for strategy, item in measured.items()
        },
    }


class FreeGate(Gate):
    """Lets a loop run through: a timed window after the warm-up, then a profiled one.

    Args:
        warmup: Steps before the window.
        steps: Of the window.
    """

    def __init__(self, warmup: int, steps: int, device: str) -> None:
        self.plan = Plan(warmup, 0, steps + PROFILED, 1)
        self._steps = steps
        self.device = torch.device(device)
        self.facts: dict[str, Any] = {}
        self.told: dict[str, float] = {}
        self._asked = 0
        self._closed = False
        self._begun: tuple[float, float] = (0.0, 0.0)
        self._profile: Any = None

    @property
    def open(self) -> bool:
        return self._asked < self.plan.total

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        for batch in source:
            if not self.open:
                return
            self._look()
            self._asked += 1
            yield batch

    def loader(self, source: Any) -> GatedLoader:
        return GatedLoader(self, source)

    def _look(self) -> None:
        first, last = self.plan.warmup, self.plan.warmup + self._steps
        if self._asked == first:
            self._begun = self._now()
        elif self._asked == last:
            wall, thread = self._now()
            self.told["step_us"] = 1e6 * (wall - self._begun[0]) / self._steps
            self.told["thread_us"] = 1e6 * (thread - self._begun[1]) / self._steps
            if self.device.type == "cpu":
                return
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()
            self._begun = self._now()
        elif self._asked == last + PROFILED and self._profile is not None:
            wall, _ = self._now()
            self._profile.__exit__(None, None, None)
            self.told |= busy(self._profile, wall - self._begun[0])

    def _now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter(), thread_time()


def busy(profile: Any, wall_s: float) -> dict[str, float]:
    """The share of the time in which kernels ran that do not belong to NCCL, and in which NCCL's did."""
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in kernels:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    shares = {}
    for is_nccl, found in spans.items():
        total = reached = 0.0
        for begin, end in sorted(found):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        shares[is_nccl] = total / 1e6 / wall_s
    return {"computing": shares[False], "gpu_idle": 1 - shares[False], "in_nccl": shares[True]}


def worker(kind: str, case: Case, data: Path, warmup: int, steps: int, device: str) -> dict[str, Any]:
    """One rank of a contender of `pair`."""
    gate = FreeGate(warmup, steps, "cuda:0" if device == "cuda" else device)
    settings = [f"data.root={data / str(case.folder)}", f"training.max_steps={gate.plan.total}", "training.epochs=1000"]
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        if kind.startswith("frameworm"):
            more = ["parallel.strategy=ddp", *([] if kind.endswith("captured") else ["gpu.capture=off"])]
            more += on_device(device)
            config = load_config(CONFIGS / f"{case.config}.yaml", [*settings, *more, "data.drop_last=true"])
            shared = Path(os.environ["RANKS_GPU_FOLDER"])
            facts = run_config(gate, shared, config, lambda model: None)
            gate.told["captured_steps"] = facts["captured_steps"]
            gate.told["notes"] = facts["notes"]
        else:
            plain = CONFIGS / f"{case.config.removesuffix('_fast')}.yaml"
            more = [*TINY, "gpu.device=cpu"] if device == "cpu" else []
            more += ["training.global_batch=16"]  # of this rank
            work = Work(str(plain), str(plain), (*settings, *more), device)
            entry = ENTRIES[kind]
            if entry.best:
                entry = type(entry)(kind, entry.kind, True, "default", "max")
            patch = mock.patch("lightning.Trainer", _two_nodes) if entry.kind == "lightning" else mock.MagicMock()
            with patch:
                TRAINERS[entry.kind](Task(gate, work, entry, Path(folder) / str(rank)))
    return gate.told


def _two_nodes(*args: Any, **settings: Any) -> Any:
    """Lightning's trainer on two nodes with a GPU each."""
    import lightning.pytorch.trainer as trainer

    return trainer.Trainer(*args, **{**settings, "num_nodes": 2, "strategy": "ddp"})


def measure_pair(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Two ranks on one GPU, one contender after the other."""
    found: dict[str, Any] = {name: [] for name in names}
    for number in range(options.passes):
        for name in names if number % 2 == 0 else names[::-1]:
            tell_progress(f"pass {number + 1} of {options.passes}: {name}")
            found[name].append(_two_ranks(name, options))
            tell_progress(str({key: value for key, value in found[name][-1].items() if key != "notes"}))
    return {name: _both(passes) for name, passes in found.items()}


def _two_ranks(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(2):
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
                "NODE_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "pair",
                "NCCL_HOSTID": f"host-{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "RANKS_GPU_FOLDER": folder,
            }
            command = [sys.executable, __file__, "--worker", kind, "--data", str(options.data)]
            command += ["--warmup", str(options.warmup), "--pair-steps", str(options.pair_steps)]
            command += ["--device", options.device]
            log = (Path(folder) / f"log-{rank}").open("w+")
            processes.append((subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log), log))
        deadline, outputs, failure = monotonic() + options.pair_limit_s, [], None
        for rank, (process, log) in enumerate(processes):
            try:
                output, _ = process.communicate(timeout=max(1.0, deadline - monotonic()))
                outputs.append(output.decode().strip().splitlines()[-1:])
                if process.returncode:
                    raise ContenderError(f"rank {rank} ended with code {process.returncode}")
            except (subprocess.TimeoutExpired, ContenderError) as error:
                log.seek(0)
                failure = f"{error}: {' | '.join(log.read().splitlines()[-8:])[-900:]}"
                break
        for process, log in processes:
            process.kill()
            process.wait()
            log.close()
    return {"failed": failure} if failure else dict(json.loads(outputs[0][0]))


def _both(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """The quicker of the passes, which other work on the machine has disturbed less; all are kept."""
    fine = [item for item in passes if "thread_us" in item]
    best = min(fine, key=lambda item: item["thread_us"]) if fine else {}
    return {**{key: value for key, value in best.items() if key != "notes"}, "passes": passes}


def predict(runs: Path, names: list[str], alone: dict[str, Any]) -> dict[str, Any]:
    """Predictions from the captured steps of one GPU: from their runs, or where those are gone from the figures."""
    found: dict[str, Any] = {}
    for name in names:
        folder = next(iter(sorted((runs / f"{name}-single").glob("run*"))), None)
        measured = alone.get(name, {})
        single = measured.get("contenders", {}).get("single")
        if folder is None and single is None:
            found[name] = {"failed": f"no run of {name} in {runs}"}
            continue
        if folder is None:
            figures = {"name": name, "compute_ms": single["step_us"] / 1e3}
            source = from_figures({**figures, "gradient_mb": measured["gradient_bytes"] / 1e6})
        else:
            source = load_run(folder)
            if single is not None:  # contenders took turns: a run's own record holds its waits for the others
                source = replace(source, profile=_as_long_as(source.profile, single["step_us"] / 1e6))
        if measured.get("eighth_of_batch_us") and single is not None:
            fixed = min(1.0, max(0.0, (measured["eighth_of_batch_us"] / single["step_us"] - 1 / 8) * 8 / 7))
            source = replace(source, fixed_share=(fixed, fixed, fixed))
        found[name] = {
            "compute_ms": 1e3 * source.profile.compute_s,
            "gradient_bytes": source.profile.gradient_bytes,
            "overlap_measured": source.overlap_measured,
            "unknown": source.unknown,
            "fixed_share": source.fixed_share,
            "fabrics": {
                fabric: Predictor(source, LinkNetwork(find_fabric(fabric)), Setting(strategy="ddp"))
                .predict(WORLD_SIZES)
                .to_dict()
                for fabric in FABRICS
            },
        }
    return found


def _as_long_as(profile: StepProfile, compute_s: float) -> StepProfile:
    """The profile with all its times stretched alike to a step that was measured undisturbed."""
    factor = compute_s / profile.compute_s
    return replace(
        profile,
        gradients=tuple(replace(item, ready_s=item.ready_s * factor) for item in profile.gradients),
        forward_s=profile.forward_s * factor,
        backward_s=profile.backward_s * factor,
        optimizer_s=profile.optimizer_s * factor,
        other_s=profile.other_s * factor,
        step_times_s=(),
    )


def predict_again(path: Path, names: list[str]) -> int:
    """Predict from the figures in a results file, and leave the rest of it as it is."""
    document = json.loads(path.read_text())
    results = document["results"]
    results["predict"] = predict(Path("nowhere"), names, results["alone"])
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(draw(results))
    return 0


def draw(results: dict[str, Any]) -> str:
    """The tables."""
    texts = []
    if results.get("alone"):
        rows = []
        for name, item in results["alone"].items():
            cost, sides = item["cost_of_ddp"], item["contenders"]
            steps = [f"{sides[side]['step_us']:,.0f}" if side in sides else "failed" for side in ("single", "ddp")]
            shown = ("", "") if cost is None else (f"{cost['value']:.3f}", f"{cost['low']:.3f}..{cost['high']:.3f}")
            rows.append((name, *steps, *shown, item["verdict"] or ""))
        columns = ("captured, one rank", "single us", "ddp us", "ddp/single", "95%", f"goal {COST_GOAL}")
        texts.append(table(columns, rows))
    if results.get("pair"):
        rows = []
        for name, item in results["pair"].items():
            if "thread_us" not in item:
                rows.append((name, "failed", "", "", ""))
                continue
            shares = [f"{item[key]:.0%}" if key in item else "-" for key in ("gpu_idle", "in_nccl")]
            rows.append((name, f"{item['thread_us']:,.0f}", f"{item['step_us']:,.0f}", *shares))
        texts.append(table(("two ranks, one GPU", "host us/step", "wall us/step", "GPU idle", "in NCCL"), rows))
    for name, item in results.get("predict", {}).items():
        if "fabrics" not in item:
            texts.append(f"{name}: {item['failed']}")
            continue
        rows = []
        for fabric, prediction in item["fabrics"].items():
            for row in prediction["rows"]:
                step, speed = row["step_s"], row["speedup"]
                rows.append(
                    (
                        fabric,
                        str(row["world_size"]),
                        f"{1e3 * step['value']:.3f}",
                        f"{speed['value']:.2f}",
                        f"{speed['low']:.2f}..{speed['high']:.2f}",
                        row["status"],
                    )
                )
        texts.append(f"{name}, captured\n" + table(("fabric", "GPUs", "ms/step", "speedup", "interval", ""), rows))
    return "\n\n".join(texts)


def main() -> int:
    """Run the parts asked for."""
    options = _arguments()
    if options.worker:
        case = CASES["ag_news"]
        told = worker(options.worker, case, options.data, options.warmup, options.pair_steps, options.device)
        print(json.dumps(told), flush=True)
        os._exit(0)  # peers leave process groups and workers behind
    if options.results is not None:
        return predict_again(options.results, options.cases)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder) / "runs"
        for part in options.parts:
            if part == "alone":
                results[part] = measure_alone(options.cases, options, Path(folder), runs)
            elif part == "pair":
                results[part] = measure_pair(options.contenders, options)
            else:
                results[part] = predict(runs, options.cases, results.get("alone", {}))
            device = torch.device(options.device)
            settings = {key: str(value) for key, value in vars(options).items() if key not in ("data", "runs", "out")}
            path = write_results("ranks_gpu", device, settings, results, options.out)
    print(draw(results))
    print(f"written to {path}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("FRAMEWORM_DATA", "data"))
    parser.add_argument("--parts", type=names_among(["alone", "pair", "predict"]), default="alone,pair,predict")
    parser.add_argument("--cases", type=names_among(list(CASES)), default=",".join(CASES))
    parser.add_argument("--contenders", type=names_among(list(PAIR)), default=",".join(PAIR))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal without capture")
    parser.add_argument("--steps", type=int, help="of a block; each case has its own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--lead-in", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--pair-steps", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest wait for a contender")
    parser.add_argument("--pair-limit-s", type=float, default=120.0)
    parser.add_argument("--runs", type=Path, help="where run folders are kept, or lie")
    parser.add_argument("--results", type=Path, help="predict from this file's measurements, and write it again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    found = parser.parse_args()
    found.data = Path(found.data).resolve()
    for name in ("parts", "cases", "contenders"):
        value = getattr(found, name)
        if isinstance(value, str):
            setattr(found, name, value.split(","))
    return found


if __name__ == "__main__":
    sys.exit(main())
