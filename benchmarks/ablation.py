"""Each trick of the engine switched off alone: on the workload it was made for, and on a model nobody here wrote.

    PYTHONPATH=src python benchmarks/ablation.py --zoo FOLDER                     # the CPU part: about an hour
    PYTHONPATH=src python benchmarks/ablation.py --part gpu --zoo FOLDER

For every case two processes train the same model on the same data from the same weights, one with the trick and one
without; they differ in nothing else and take turns, a window of steps each. Both are started anew several times: two
processes of one program differ by a percent or two for as long as they live. The gain is the median over all rounds of
how many times as fast a step is with the trick, with a bootstrap 95% interval. On a CPU it is taken from processor
time, which neighbours on a shared machine disturb less (set OMP_NUM_THREADS=1: threads that wait for each other take
processor time too); the gain in wall time stands beside it. A trick whose interval ends below 1.03 on both workloads is
condemned: it costs more to read than it saves. It is kept if a gain is shown, and open while an interval holds both.

A trick with a setting is switched by that setting. The others have none; `SWITCHES` says what is replaced in the
process that trains without them. What other benchmarks measure already stands in `ELSEWHERE`, with the file.

FOLDER holds the zoo (`models.py`, see zoo.py). Results are kept in benchmarks/results/ablation-DEVICE.json: a case that
is measured again replaces what was there, so the table may be filled in several sittings (`--only`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import (
    RESULTS,
    ContenderError,
    Measured,
    Sample,
    as_data,
    bootstrap_median,
    device_word,
    interleave,
    measured_now,
    names_among,
    table,
    tell_progress,
    write_results,
)

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.models.workloads import Workload, build_workload
from frameworm.tune.trials.live import Live, LiveError

CONFIGS = Path(__file__).parents[1] / "configs"
WORTH = 1.03
LEAD_IN = 2  # steps of each window that are not timed
LONGEST_S = 200.0  # of one live process, its start included
PLAIN = ("training.epochs=1000000", "training.schedule=constant", "checkpoint.every_steps=off", "data.num_workers=0")
# What the bookkeeping around the arithmetic of an update was long beside.
TINY = (
    "model.d_model=16", "model.n_heads=2", "model.num_layers=1", "model.dim_feedforward=32", "model.max_seq_len=8",
    "training.global_batch=4", "data.vocab_size=256",
)  # fmt: skip
LONG_TEXTS = ("model.max_seq_len=128", "model.d_model=128", "model.dim_feedforward=512", "training.global_batch=32")


@dataclass(frozen=True)
class Case:
    """One trick on one workload.

    Attributes:
        trick: Its name; see `TRICKS`.
        on: Settings with the trick.
        off: Settings without it; the same where a switch takes it away.
        workload: A config of configs/, or `zoo:NAME`.
        settings: Of both.
        steps: Of one window.
        switch: What `SWITCHES` replaces in the process without the trick.
        world_size: Ranks.
    """

    trick: str
    workload: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    steps: int = 100
    switch: str | None = None
    world_size: int = 1

    @property
    def name(self) -> str:
        """Of the case in the results."""
        return f"{self.trick}, {self.workload.removesuffix('.yaml')}"


def _torchs_adamw() -> None:
    from frameworm.engine.optim.host_adamw import HostAdamW

    HostAdamW.suits = staticmethod(lambda _optimizer: False)  # type: ignore[method-assign]


def _padded_attention() -> None:
    """Then packed tokens are padded again, and torch's attention gets a mask."""
    from frameworm.models import attention

    attention._may_look = lambda _offsets: False


def _varlen_attention() -> None:
    """Then short sequences go to torch's `varlen_attn`, as long ones do."""
    from frameworm.models import attention

    attention.suits_short_kernels = lambda _heads, _max_length: False  # type: ignore[attr-defined]


def _cast_each_time() -> None:
    from frameworm.engine.optim.half_weights import HalfWeights

    HalfWeights.of = classmethod(lambda _kind, _model, _dtype: None)  # type: ignore[assignment,method-assign]


def _torchs_clip_and_update() -> None:
    from frameworm.engine.optim.update import Update

    Update.find_one_pass = lambda _self: None  # type: ignore[method-assign]


def _shares_when_full() -> None:
    from frameworm.parallel import replicated

    replicated.EarlyShares = lambda _replica: None  # type: ignore[attr-defined,misc,assignment]


SWITCHES: dict[str, Callable[[], None]] = {
    "host_adamw": _torchs_adamw,
    "packed attention": _padded_attention,
    "varlen": _varlen_attention,
    "half_weights": _cast_each_time,
    "one pass": _torchs_clip_and_update,
    "early shares": _shares_when_full,
}

_GARBAGE = {"on": ("memory.enable_automatic_gc=true",), "off": ("memory.enable_automatic_gc=false",)}
_GELU = {"on": ("training.cpu_gelu=keep_slope",), "off": ("training.cpu_gelu=torch",)}
_ONEDNN = {"on": ("training.cpu_onednn=except_linear",), "off": ("training.cpu_onednn=true",)}
_VIT = ("training.global_batch=8",)
CPU = (
    Case("garbage", "quickstart.yaml", **_GARBAGE),
    Case("garbage", "zoo:graph", **_GARBAGE, steps=40),
    Case("host_adamw", "quickstart.yaml", switch="host_adamw", settings=TINY, steps=400),
    Case("host_adamw", "zoo:graph", switch="host_adamw", steps=40),
    Case("cpu_gelu", "quickstart.yaml", **_GELU),
    Case("cpu_gelu", "zoo:vit", **_GELU, settings=_VIT, steps=4),
    Case("cpu_onednn: except_linear", "quickstart.yaml", **_ONEDNN),
    Case("cpu_onednn: except_linear", "zoo:vit", **_ONEDNN, settings=_VIT, steps=4),
    Case(
        "packed attention", "quickstart.yaml", switch="packed attention",
        settings=("data.batching=packed", *LONG_TEXTS), steps=15,
    ),
)  # fmt: skip
_CAPTURED = ("gpu.capture=step", "gpu.mixed_precision=bf16")
_DDP = ("parallel.strategy=ddp",)
GPU = (
    Case("garbage", "quickstart.yaml", **_GARBAGE, steps=500),
    Case("garbage", "zoo:graph", **_GARBAGE, steps=100),
    Case("early shares", "quickstart.yaml", switch="early shares", settings=_DDP, steps=200, world_size=2),
    Case("early shares", "zoo:vit", switch="early shares", settings=_DDP, steps=50, world_size=2),
    Case("half_weights", "quickstart.yaml", switch="half_weights", settings=_CAPTURED, steps=2000),
    Case("half_weights", "zoo:vit", switch="half_weights", settings=_CAPTURED, steps=200),
    Case("one pass", "quickstart.yaml", switch="one pass", settings=_CAPTURED, steps=2000),
    Case("one pass", "zoo:vit", switch="one pass", settings=_CAPTURED, steps=200),
    Case(
        "packed attention beside varlen", "quickstart.yaml", switch="varlen",
        settings=("data.batching=packed", *_CAPTURED, *LONG_TEXTS), steps=1000,
    ),
)  # fmt: skip
PARTS = {"cpu": CPU, "gpu": GPU}
# Measured in other benchmarks, where their own conditions are made.
ELSEWHERE = {
    "PowerSGD of our own beside torch's hook": "compression_network-cpu.json: powersgd and torch-powersgd1, by rate",
    "phases of the search beside a plain greedy search": "search_phases-cpu.json",
    "p99 of steps with collections between them": "gc_jitter-cpu.json",
}
NOT_MEASURED = (
    "zstd for checkpoints",
    "packed attention beside flex attention",
    "packed attention on a model of the zoo: none is packed on a CPU",
)


def build(config: Config) -> Workload:
    """The workload of a case, in the process that trains it; `model.off` names a switch."""
    given = config.model.model_extra or {}
    if given.get("off"):
        SWITCHES[given["off"]]()
    if given["of"].startswith("zoo:"):
        import models  # the zoo's, from its folder

        model, train, validation, _, collate = models.ALL[given["of"][4:]]()
        more = {} if collate is None else {"collate_fn": collate}
        return Workload(model, train, validation, loss_fn=models.loss(given["of"][4:]), **more)
    return build_workload(load_config(CONFIGS / given["of"], given["settings"], {}))


def config_of(case: Case, with_trick: bool, device: str, folder: Path) -> Config:
    """The config of one side; a rehearsal on a CPU goes without what only a GPU can do."""
    settings = [*PLAIN, *case.settings, *(case.on if with_trick else case.off)]
    settings = [item for item in settings if device != "cpu" or not item.startswith("gpu.")] + [f"gpu.device={device}"]
    given: dict[str, Any] = {"of": case.workload, "settings": settings}
    if case.switch is not None and not with_trick:
        given["off"] = case.switch
    zoo = case.workload.startswith("zoo:")
    document: dict[str, Any] = {"name": "ablation", "workload": "ablation:build", "model": given}
    if zoo:
        document |= {"training": {"global_batch": BATCHES.get(case.workload[4:], 32), "lr": 1e-3}}
    else:
        plain = load_config(CONFIGS / case.workload, settings, {})
        data = plain.data.model_dump(mode="json", exclude_unset=True)
        document |= {"data": data, "training": plain.training.model_dump(mode="json", exclude_unset=True)}
    path = folder / f"{'with' if with_trick else 'without'}.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    own = [item for item in settings if not item.startswith("model.")]
    return load_config(path, own, {})


BATCHES = {"graph": 64, "vit": 64}


def processor_s(pids: Sequence[int]) -> float:
    """Processor time of all threads of some processes so far."""
    threads = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in threads) * 1e-9


def one_start(case: Case, device: str, rounds: int, folder: Path) -> dict[str, Measured]:
    """Both sides in processes of their own, in turns."""
    sides = {"with": True, "without": False}
    with ExitStack() as stack:
        lives: dict[str, Live] = {}
        pids: dict[str, list[int]] = {}
        for side, with_trick in sides.items():
            config = config_of(case, with_trick, device, folder)
            deadline = time.monotonic() + LONGEST_S
            lives[side] = stack.enter_context(Live(config, folder / side, deadline, world_size=case.world_size))
            lives[side].stand()
            pids[side] = lives[side].pids

        def window(side: str) -> Sample:
            before_s = processor_s(pids[side])
            try:
                stand = lives[side].go(LEAD_IN, case.steps)
            except LiveError as error:
                raise ContenderError(str(error)) from error
            assert stand.seconds is not None
            spent_s = processor_s(pids[side]) - before_s
            return Sample(stand.seconds / case.steps, spent_s / (case.steps + LEAD_IN))

        return interleave({side: functools.partial(window, side) for side in sides}, rounds, lambda _text: None)


def measure(case: Case, device: str, starts: int, rounds: int) -> dict[str, Any]:
    """The gain of one trick on one workload."""
    pairs: list[tuple[Sample, Sample]] = []
    for number in range(starts):
        tell_progress(f"{case.name}: start {number + 1} of {starts}")
        with tempfile.TemporaryDirectory() as folder:
            found = one_start(case, device, rounds, Path(folder))
        pairs += zip(found["with"].rounds, found["without"].rounds, strict=True)
    wall = bootstrap_median([without.step_s / with_it.step_s for with_it, without in pairs])
    gain = wall
    if device == "cpu":
        gain = bootstrap_median([without.thread_s / with_it.thread_s for with_it, without in pairs])
    return {
        "trick": case.trick,
        "workload": case.workload,
        "settings": list(case.settings),
        "with": list(case.on),
        "without": list(case.off) if case.switch is None else f"switch: {case.switch}",
        "step_s": _medians(pairs, "step_s"),
        "processor_s": _medians(pairs, "thread_s"),
        "gain": as_data(gain),
        "gain_in_wall_time": as_data(wall),
        "rounds": [[as_data(side) for side in pair] for pair in pairs],
        "steps": case.steps,
        **{key: value for key, value in measured_now(torch.device(device)).items() if key != "environment"},
    }


def _medians(pairs: Sequence[tuple[Sample, Sample]], clock: str) -> dict[str, float]:
    sides = {"with": 0, "without": 1}
    return {side: statistics.median(getattr(pair[place], clock) for pair in pairs) for side, place in sides.items()}


def verdicts(results: dict[str, Any], cases: tuple[Case, ...]) -> dict[str, str]:
    """By trick: kept, open, condemned, or that something is still to be measured."""
    found = {}
    for trick in dict.fromkeys(case.trick for case in cases):
        of_trick = [results.get(case.name) for case in cases if case.trick == trick]
        measured = [item for item in of_trick if item is not None and "gain" in item]
        if any(item["gain"]["high"] >= WORTH and item["gain"]["low"] > 1 for item in measured):
            found[trick] = "kept"
        elif any(item["gain"]["high"] >= WORTH for item in measured):
            found[trick] = "open"
        elif len(measured) < len(of_trick):
            found[trick] = "not measured yet"
        else:
            found[trick] = "condemned"
    return found


def tell(results: dict[str, Any], cases: tuple[Case, ...]) -> None:
    """Print the table."""
    rows = []
    decided = verdicts(results, cases)
    for case in cases:
        item = results.get(case.name)
        if item is None or "gain" not in item:
            rows.append([case.name, "", "", (item or {}).get("error", "not measured yet")[:60], ""])
            continue
        gain, step_s = item["gain"], item["processor_s"] if item["processor_s"]["with"] else item["step_s"]
        interval = f"{gain['value']:.3f} ({gain['low']:.3f}..{gain['high']:.3f})"
        rows.append(
            [case.name, f"{step_s['with'] * 1e3:.2f}", f"{step_s['without'] * 1e3:.2f}", interval, decided[case.trick]]
        )
    print(table(["trick, workload", "ms with", "ms without", "gain (95%)", "verdict"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), default="cpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cpu with --part gpu rehearses it")
    parser.add_argument("--zoo", type=Path, help="folder with the zoo's models.py; without it only our own workloads")
    parser.add_argument("--only", type=names_among({case.trick for part in PARTS.values() for case in part}))
    parser.add_argument("--workloads", type=names_among(["own", "zoo"]), default=["own", "zoo"])
    parser.add_argument("--steps", type=int, help="of every window, instead of each case's own; for a rehearsal")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of each start")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if options.part == "gpu" else "cpu")
    paths = [str(Path(__file__).parent), *([str(options.zoo.resolve())] if options.zoo else [])]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    name = "ablation-rehearsal" if options.part == "gpu" and device == "cpu" else "ablation"
    path = options.out / f"{name}-{device_word(torch.device(device))}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"]["cases"] if path.exists() else {}
    cases = PARTS[options.part]
    for case in cases:
        zoo = case.workload.startswith("zoo:")
        if (options.only and case.trick not in options.only) or ("zoo" if zoo else "own") not in options.workloads:
            continue
        if zoo and options.zoo is None:
            continue
        try:
            case = case if options.steps is None else replace(case, steps=options.steps)
            results[case.name] = measure(case, device, options.starts, options.rounds)
        except (LiveError, ContenderError) as error:
            results[case.name] = {"trick": case.trick, "workload": case.workload, "error": str(error)[:300]}
        settings = {"starts": options.starts, "rounds": options.rounds, "worth": WORTH}
        found = {"cases": results, "verdicts": verdicts(results, cases)}
        found |= {"elsewhere": ELSEWHERE, "not_measured": list(NOT_MEASURED)}
        write_results(name, torch.device(device), settings, found, options.out)
    tell(results, cases)
    print("written to", path)


if __name__ == "__main__":
    main()
