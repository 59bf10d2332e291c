"""Kill -9 while a run is uploaded: does a machine that has nothing go on from what is in storage, bitwise?

    python benchmarks/upload_campaign.py --kills 100

Each case is a small training (AdamW, dropout, a schedule, a shuffled loader) that saves every second step and uploads
to an S3 server on this machine, in a process forked from a server that has imported everything. At a random moment it
gets a SIGKILL: all of it (`machine`), the process that uploads (`uploader`, whose training must then end by itself), or
the training alone (`training`). What is then in storage is checked: each checkpoint that counts is whole by its
checksums, and `latest` names one. Then a fresh folder, as on another machine (or, in three cases of ten, the same one),
resumes by the URL, sometimes after a
second kill, and must end with bitwise the same parameters and the same records as a run that nobody killed. In the end
storage must hold no more checkpoints than `keep`, and nothing torn. All else is a failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from crash_campaign import EVERY, KEEP, STEPS
from crash_campaign import train as train_into
from harness import RESULTS, table, tell_progress, write_results
from object_server import BUCKET, ObjectServer

from frameworm.engine.upload.fetch import fetch_checkpoint
from frameworm.errors import FramewormError
from frameworm.records.events import Listener
from frameworm.records.objects.place import Place
from frameworm.records.objects.runs import MANIFEST, parts_of_checkpoints, whole_checkpoints
from frameworm.records.schema import StepRecord

PAUSE_S = 0.12  # per step: the upload of a checkpoint takes about as long as the steps between two
LIMIT_S = 90.0
WAYS = ("machine", "machine", "machine", "uploader", "training")
PRELOADED = ["torch", "torch._dynamo", "s3fs", "frameworm.distributed", "frameworm.engine.run", "upload_campaign"]


@dataclass
class Tally:
    """What came of all cases."""

    ways: Counter[str] = field(default_factory=Counter)
    found: Counter[int] = field(default_factory=Counter)  # step of the newest whole checkpoint in storage; 0: none
    torn: int = 0  # cases that left a checkpoint without a manifest
    kills: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Pause(Listener):
    """Makes steps long enough for uploads to lie between them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, step: StepRecord) -> None:
        time.sleep(self._seconds)


def train(url: str, machine: Path, *, resume: bool, pause_s: float = 0.0) -> torch.Tensor:
    """The training of all cases, on a machine that is a folder; returns its parameters and buffers."""
    machine.mkdir(exist_ok=True)
    os.chdir(machine)
    return train_into(url, "async", resume, [Pause(pause_s)])


def _victim(url: str, machine: str, resume: bool, variables: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.update(variables)  # the server that it forks from may be older than they are
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    train(url, Path(machine), resume=resume, pause_s=PAUSE_S)
    os._exit(0)


def strike(url: str, machine: Path, way: str, after_s: float, resume: bool) -> str:
    """Run a case until it is killed or ends; returns what came of it."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_victim, args=(url, str(machine), resume, dict(os.environ))
    )
    process.start()
    assert process.pid is not None
    process.join(after_s)
    if not process.is_alive():
        code = process.exitcode
        process.close()
        return "ended before its kill" if code == 0 else f"ended with code {code}"
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if way == "uploader":
            for child in psutil.Process(process.pid).children():
                if "upload.service" in " ".join(child.cmdline()):
                    child.kill()
            process.join(LIMIT_S)  # the training continues to its end
        elif way == "training":
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(LIMIT_S)
    process.close()
    deadline = time.monotonic() + 10
    while _is_left(machine) and time.monotonic() < deadline:  # what is left ends with its parent
        time.sleep(0.05)
    return "killed"


def _is_left(machine: Path) -> bool:
    needle = str(machine).encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            if needle in command and b"service" in command and b"Z" not in (path / "stat").read_bytes().split()[2:3]:
                return True
    return False


def problems_of(place: Place, scratch: Path) -> tuple[list[str], int, bool]:
    """What is wrong with what is in storage, its newest step, and whether an upload was torn."""
    found: list[str] = []
    names = whole_checkpoints(place)
    for name in names:
        try:
            fetch_checkpoint(place, name, scratch)
        except FramewormError as error:
            found.append(f"{name} counts and is not whole: {error}")
    objects = place.find()
    if "checkpoints/latest" in objects:
        latest = place.read("checkpoints/latest", 100).decode().strip()
        if latest not in names:
            found.append(f"latest names {latest}, and there are {names}")
    parts = parts_of_checkpoints(list(objects))
    torn = any(MANIFEST not in files for files in parts.values())
    return found, max((int(name[5:13]) for name in names), default=0), torn


def records_of(machine: Path) -> list[dict[str, Any]]:
    """The steps of a run, without times."""
    lines = (machine / "runs" / "run" / "steps-rank0.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in ("step", "loss", "lr", "samples", "grad_norm")} for line in lines]


def run_case(
    number: int,
    draw: random.Random,
    longest_s: float,
    expected: tuple[torch.Tensor, list[dict[str, Any]]],
    tally: Tally,
) -> None:
    """Kill, look, go on elsewhere, compare."""
    with tempfile.TemporaryDirectory(prefix="upload-") as name:
        base = Path(name).resolve()
        url = f"s3://{BUCKET}/case-{os.getpid()}-{number}/run"
        place, problems, last = Place(url), [], 1
        twice = draw.random() < 0.2
        for turn in range(2 if twice else 1):
            way, after_s = draw.choice(WAYS), draw.uniform(0.25, 1.05) * longest_s
            try:
                came = strike(url, base / f"machine{turn}", way, after_s, resume=turn > 0)
            finally:
                os.chdir("/")
            last = turn + (draw.random() < 0.7)  # the others go on where they were killed
            if came == "ended before its kill":
                tally.outcomes[came] += 1
                break
            if came != "killed":
                problems.append(came)
            tally.kills += 1
            tally.ways[way] += 1
            found, step, torn = problems_of(place, base / f"scratch{turn}")
            problems += found
            tally.found[step] += 1
            tally.torn += torn
        if not problems:
            try:
                result = train(url, base / f"machine{last}", resume=True)
            finally:
                os.chdir("/")
            if not torch.equal(expected[0], result):
                problems.append("the parameters differ from those of a run that nobody killed")
            if records_of(base / f"machine{last}") != expected[1]:
                problems.append("the records differ from those of a run that nobody killed")
            found, step, torn = problems_of(place, base / "scratch")
            problems += found
            if step != STEPS or torn or len(whole_checkpoints(place)) > KEEP:
                problems.append(f"in the end there are {sorted(place.find('checkpoints'))}")
        tally.outcomes["bitwise equal" if not problems else "wrong"] += 1
        tally.failures += [f"case {number}: {text}" for text in problems]


def campaign(kills: int, seed: int, budget_s: float = 1e9) -> Tally:
    """All cases, on a server of their own, which the environment of this process then names."""
    tally, draw, begin = Tally(), random.Random(seed), time.monotonic()
    with ObjectServer() as server:
        before = dict(os.environ)
        os.environ.update(server.variables())
        try:
            multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
            with tempfile.TemporaryDirectory(prefix="upload-") as name:
                machine = Path(name) / "machine"
                began = time.monotonic()
                result = train(f"s3://{BUCKET}/reference/run", machine, resume=False, pause_s=PAUSE_S)
                longest_s = time.monotonic() - began
                expected = result, records_of(machine)
                os.chdir("/")
            number = 0
            while tally.kills < kills and time.monotonic() - begin < budget_s:
                run_case(number, draw, longest_s, expected, tally)
                number += 1
                if number % 10 == 0:
                    tell_progress(f"{tally.kills} of {kills} kills, {len(tally.failures)} failures")
        finally:
            os.environ.clear()
            os.environ.update(before)
    return tally


def main() -> int:
    """The campaign as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no new case after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    tally = campaign(given.kills, given.seed, given.budget_s)
    print(table(("killed", "times"), [(way, str(count)) for way, count in tally.ways.most_common()]))
    print(table(("newest step in storage", "times"), [(str(step), str(n)) for step, n in sorted(tally.found.items())]))
    print(*tally.failures, sep="\n")
    settings = {"kills": given.kills, "seed": given.seed, "steps": STEPS, "every_steps": EVERY, "keep": KEEP}
    results = {
        "kills": tally.kills,
        "killed": dict(tally.ways),
        "newest_step_in_storage": {str(step): count for step, count in sorted(tally.found.items())},
        "torn_uploads_found": tally.torn,
        "outcomes": dict(tally.outcomes),
        "failures": tally.failures,
    }
    print(f"written: {write_results('upload_campaign', torch.device('cpu'), settings, results, given.out)}")
    return 1 if tally.failures or tally.kills < given.kills else 0


if __name__ == "__main__":
    # Functions that children find by name must be those of the module, not of the program.
    import upload_campaign

    sys.exit(upload_campaign.main())
