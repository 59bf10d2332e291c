"""Short trainings with random faults, from a server that has imported everything: does any fail without a cause?

    python benchmarks/fault_campaign.py --runs 1000

Each run trains a small model in a process of its own, alone or on two ranks, with at most one fault: a kill, SIGTERM,
Ctrl-C, a NaN, a sample that cannot be read, a torn checkpoint, records that are deleted, or none. A run is right when
it ends within its limit as its fault asks for; after kills and stops it is resumed, and must then end completed with
every step recorded once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

FAULTS = ("none", "kill", "sigterm", "sigint", "nan", "many_nan", "torn_sample", "torn_checkpoint", "lost_records")
STEPS = 24
LIMIT_S = 90.0
# Ranks without the signal look once a second whether another has it: steps take a while there, and where too few are
# left the run may end completed before all have looked.
STOPS, STOP_STEP_S, LOOK_STEPS = ("sigterm", "sigint"), 0.1, 14
RESULTS = Path(__file__).parent / "results/fault_campaign.json"


def train(folder: str, fault: str, at: int, rank: int, world_size: int, port: int, resume: bool) -> None:
    """One rank of one training; the exit code says how it ended."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world_size)})
    sys.stdout = sys.stderr = Path(folder, f"said-{rank}{'-again' if resume else ''}.txt").open("w", buffering=1)  # noqa: SIM115
    import torch

    from frameworm import Trainer
    from frameworm.data.loader import OptimizedDataLoader
    from frameworm.errors import FramewormError

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(STEPS * 8, 6)
    target = (inputs.sum(1) > 0).long()

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(inputs)

        def __getitem__(self, index: int) -> Any:
            step, place = divmod(index, 8)
            if fault in STOPS and world_size > 1 and place == 0:
                time.sleep(STOP_STEP_S)
            bad = (fault == "many_nan" and step >= at) or (fault == "nan" and step == at)
            if step == at and place == (7 if world_size > 1 else 0) and not resume:
                self.fail()
            return (inputs[index] * float("nan") if bad else inputs[index]), target[index]

        def fail(self) -> None:
            mine = rank == world_size - 1
            if fault == "torn_sample":
                raise ValueError("torn")
            if fault == "lost_records" and mine:
                Path(folder, "run", f"steps-rank{rank}.jsonl").unlink(missing_ok=True)
            number = {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}.get(fault)
            if number is not None and mine:
                os.kill(os.getpid(), number)

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    loader = OptimizedDataLoader.create(
        Samples(), 8 // world_size, num_workers=0, shuffle=False, global_batch=8, on_error="skip"
    )
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        run_dir=Path(folder, "run"),
        device="cpu",
        seed=0,
        every_steps=5,
        max_bad_steps=3,
        watchdog_s=20,
        timeout_s=60,
        progress=False,
        system_interval_s=None,
    )
    code = 0
    try:
        trainer.train(loader, resume="auto" if resume else None)
    except FramewormError as error:
        print(error)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 9
    sys.stdout.flush()
    os._exit(code)


def run_ranks(context: Any, folder: str, fault: str, at: int, world_size: int, resume: bool) -> list[int | None]:
    """Start the ranks, wait for them, end what is late; the exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=train, args=(folder, fault, at, rank, world_size, port, resume))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    return codes


def one(context: Any, fault: str, at: int, world_size: int) -> str | None:
    """One run with its fault; what is wrong with how it went, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(context, folder, fault, at, world_size, resume=False)
        last = codes[-1]
        if None in codes:
            return f"still running after {LIMIT_S:.0f} s"
        wanted = {"kill": -9, "sigterm": 75, "sigint": 130, "many_nan": 1}.get(fault, 0)
        in_time = world_size == 1 or fault not in STOPS or at < STEPS - LOOK_STEPS
        if last != wanted and (in_time or any(codes)):
            return f"ended with {codes}, wanted {wanted}: {said(folder)}"
        if fault == "many_nan":
            return (
                None if Path(folder, f"run/bad-numbers-rank{world_size - 1}.json").exists() else "nothing written down"
            )
        if fault in ("kill", "torn_checkpoint") or (fault in STOPS and any(codes)):
            newest = sorted(Path(folder, "run/checkpoints").glob("step-*/rank-00000.safetensors"))
            if fault == "torn_checkpoint":
                if len(newest) < 2:
                    return None
                newest[-1].write_bytes(newest[-1].read_bytes()[:100])
            codes = run_ranks(context, folder, fault, at, world_size, resume=True)
            if any(codes):
                return f"resumed, ended with {codes}: {said(folder)}"
        if fault == "lost_records":
            return None
        for rank in range(world_size):
            lines = Path(folder, f"run/steps-rank{rank}.jsonl").read_text().splitlines()
            steps = [json.loads(line)["step"] for line in lines]
            if steps != list(range(1, STEPS + 1)):
                return f"rank {rank} recorded the steps {steps}"
        summary = json.loads(Path(folder, "run/summary.json").read_text())
        return None if summary["status"] == "completed" else f"status {summary['status']}"


def said(folder: str) -> str:
    """The last words of the ranks."""
    texts = [path.read_text(errors="replace").strip().splitlines()[-2:] for path in Path(folder).glob("said-*")]
    return " | ".join(line for text in texts for line in text)


def main() -> int:
    """Run the campaign and write its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "frameworm.distributed", "frameworm.engine.trainer"])
    generator = random.Random(options.seed)
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    began = time.monotonic()
    for number in range(options.runs):
        fault, at, world_size = generator.choice(FAULTS), generator.randrange(1, STEPS - 4), generator.choice((1, 1, 2))
        problem = one(context, fault, at, world_size)
        counts[fault] += 1
        if problem is not None:
            failures.append({"run": number, "fault": fault, "step": at, "world_size": world_size, "problem": problem})
            print(f"run {number}: {fault} at step {at} with {world_size} ranks: {problem}", flush=True)
        if (number + 1) % 50 == 0:
            print(f"{number + 1} runs, {len(failures)} failures, {time.monotonic() - began:.0f} s", flush=True)
    import torch
    from harness import measured_now

    rate = len(failures) / options.runs
    print(f"{options.runs} runs, {len(failures)} without a cause ({rate:.2%}); faults: {dict(counts)}")
    result = {
        "command": f"python benchmarks/fault_campaign.py --runs {options.runs} --seed {options.seed}",
        **measured_now(torch.device("cpu")),
        "runs": options.runs,
        "faults": dict(counts),
        "failures": failures,
        "failure_rate": rate,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if rate < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
