"""Kill -9 at random points of saving: can every state that is left be loaded, and does the run end as if never killed?

    python benchmarks/crash_campaign.py --kills 1000

Each case is a small training (AdamW, dropout, a schedule, a shuffled loader with validation) that saves every second
step, in a process forked from a server that has imported everything. It and its writing process get a SIGKILL:

- `storage`: before a call to storage (write, fsync, rename, unlink, ...) whose number is drawn at random from all
  that a whole run makes; a write is cut in half. So every moment of writing, renaming and pruning is hit.
- `staging`: between two copies of tensors to the memory that the writer reads.
- `time`: after a random time, wherever it is.

What is left is then checked: each folder that counts as a checkpoint is whole; the newest is at most one interval older
than the last snapshot, so the checkpoint under way is all that is lost; and the resumed run ends with bitwise the same
parameters and the same records, no step twice and none missing. Some cases are killed once more while they go on. All
else is a failure, and the exit code is 1. Files are in memory where the system has such a place: a kill does not lose
what was written, so disks make no difference but in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from crash_hooks import Countdown, install
from harness import RESULTS, table, tell_progress, write_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import frameworm.engine.checkpoint.staging as staging_module
import frameworm.engine.checkpoint.writer_client as writer_module
from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.checkpoint.load import list_checkpoints
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.errors import CheckpointError
from frameworm.records.events import Listener

STEPS, EVERY, KEEP = 14, 2, 2
LIMIT_S = 60.0
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
WAYS = ("storage", "staging", "time")
PRELOADED = ["torch", "torch._dynamo", "frameworm.distributed", "frameworm.engine.run", "crash_campaign"]


@dataclass
class Case:
    """One kill.

    Attributes:
        way: Of `WAYS`.
        at: Number of the call, or milliseconds; None for a run that nobody kills.
        mode: Of checkpoints: async has a process of its own to kill, sync is quicker to try.
    """

    way: str
    at: int | None
    mode: str


@dataclass
class Tally:
    """What came of all cases."""

    phases: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lost_steps: Counter[int] = field(default_factory=Counter)
    # Cases that ended before their kill came are run to the end, and are no kill.
    kills: int = 0


class Began:
    """Notes of which steps snapshots were taken, where a kill cannot take it back."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, step: int) -> None:
        os.write(self._descriptor, f"{step}\n".encode())


def train(folder: Path | str, mode: str, resume: bool, callbacks: Sequence[Listener] = ()) -> torch.Tensor:
    """The training of all cases, into a folder or to a URL; returns its parameters and buffers."""
    torch.set_num_threads(1)
    logging.getLogger("frameworm").setLevel(logging.ERROR)  # that memory is no place to stay
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Dropout(0.3), nn.Linear(48, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(54, 6, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].argmax(-1))
    trainer = Trainer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS),
        seed=11,
        run_dir=folder,
        every_steps=EVERY,
        keep=KEEP,
        mode=mode,
        when_busy="wait",  # so that a kill costs one interval at most, however slow the disk
        clip_norm=0.5,
        device="cpu",
        system_interval_s=None,
        callbacks=list(callbacks),
    )
    loader = OptimizedDataLoader.create(data, 8, seed=2, num_workers=0)
    trainer.train(loader, DataLoader(data, 16), epochs=2, resume="auto" if resume else None)
    return torch.cat([item.detach().flatten().float() for item in (*model.parameters(), *model.buffers())])


def _victim(folder: str, case: Case, resume: bool) -> None:
    """Body of the process that is killed."""
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    os.dup2(silent, 1)
    run = Path(folder) / "run"
    own = os.getpid()
    note = f"{folder}/phase"
    _note_saves(Path(folder) / "began")
    here = Countdown(
        case.at if case.way == "storage" and case.mode == "sync" else None, [own], note, f"{run}/checkpoints"
    )
    if case.mode == "sync":
        install(here)
    elif case.way == "storage":
        _hook_writer(case.at, note, f"{run}/checkpoints", f"{folder}/count")
    if case.way == "staging":
        _hook_staging(case.at, note)
    train(run, case.mode, resume)
    if case.mode == "sync":
        Path(f"{folder}/count").write_text(str(here.count))
    os._exit(0)


def _note_saves(path: Path) -> None:
    began, capture = Began(path), TrainingState.capture

    def noted(self: TrainingState, *rest: Any) -> Any:
        began.note(self.progress.step)
        return capture(self, *rest)

    TrainingState.capture = noted  # type: ignore[method-assign]


def _hook_writer(at: int | None, note: str, folder: str, count: str) -> None:
    """The writing process counts its calls; at the one it kills its parent and itself."""
    here = str(Path(__file__).parent)
    lines = writer_module._PROGRAM.rstrip().splitlines()
    hooks = [
        f"sys.path.insert(0, {here!r})",
        "import atexit, os, crash_hooks",
        f"countdown = crash_hooks.Countdown({at!r}, [{{parent}}, os.getpid()], {note!r}, {folder!r})",
        "crash_hooks.install(countdown)",
    ]
    if at is None:  # it ends by _exit: keep the count as it goes
        hooks.append(
            "crash_hooks.Countdown.reached = (lambda real: lambda self, *a: (real(self, *a), "
            f"open({count!r}, 'w').write(str(self.count)))[0])(crash_hooks.Countdown.reached)"
        )
    writer_module._PROGRAM = "\n".join([*lines[:-1], *hooks, lines[-1]])


def _hook_staging(at: int | None, note: str) -> None:
    view, calls = staging_module._view, [0]

    def counted(*arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at:
            Path(note).write_text(f"{at} staging", encoding="utf-8")
            os.killpg(os.getpgid(0), signal.SIGKILL)
        return view(*arguments)

    staging_module._view = counted


def strike(folder: Path, case: Case, resume: bool = False) -> int:
    """Run a case until it is killed or ends; returns its exit code, negative for a signal."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_victim, args=(str(folder), case, resume))
    process.start()
    assert process.pid is not None
    if case.way == "time" and case.at is not None:
        process.join(case.at / 1000)
        if process.is_alive():
            (folder / "phase").write_text("0 any moment", encoding="utf-8")
    else:
        process.join(LIMIT_S)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # also one that has no group of its own yet
        process.join(LIMIT_S)
    code = process.exitcode
    process.close()
    _wait_for_group(folder)
    assert code is not None
    return code


def _wait_for_group(folder: Path) -> None:
    """A writer whose parent was killed ends by itself a moment later."""
    needle, deadline = str(folder).encode(), time.monotonic() + 10
    while time.monotonic() < deadline and any(needle in _command(item) for item in Path("/proc").glob("[0-9]*")):
        time.sleep(0.02)


def _command(process: Path) -> bytes:
    try:
        state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
        found = (process / "cmdline").read_bytes()
    except OSError:
        return b""
    return b"" if state == "Z" or b"writer_process" not in found else found


def problems_of(folder: Path) -> tuple[list[str], int]:
    """What is wrong with what a kill left, and how many steps behind the last snapshot it is."""
    checkpoints = folder / "run" / "checkpoints"
    found, steps = [], [0]
    for stored in list_checkpoints(checkpoints):
        try:
            stored.read()
            steps.append(stored.step)
        except CheckpointError as error:
            found.append(f"unloadable: {error}")
    latest = checkpoints / "latest"
    if latest.exists() and not (checkpoints / latest.read_text().strip() / "manifest.json").is_file():
        found.append("latest names what is not there")
    path = folder / "began"
    began = [int(line) for line in path.read_text().split()] if path.exists() else []
    behind = max(began, default=0) - max(steps)
    if behind > EVERY:
        found.append(f"{behind} steps behind the last snapshot, which is more than one interval")
    return found, behind


def compare(folder: Path, expected: tuple[torch.Tensor, list[dict[str, Any]]], result: torch.Tensor) -> list[str]:
    """What differs between a resumed run and one that nobody killed."""
    found = [] if torch.equal(expected[0], result) else ["the parameters differ from those of a run that nobody killed"]
    steps = records_of(folder)
    if [step["step"] for step in steps] != list(range(1, STEPS + 1)):
        found.append(f"the records are of steps {[step['step'] for step in steps]}")
    elif steps != expected[1]:
        found.append("the records differ")
    return found


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, without times."""
    lines = (folder / "run" / "steps-rank0.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in ("step", "loss", "lr", "samples", "grad_norm")} for line in lines]


def run_case(
    case: Case, expected: tuple[torch.Tensor, list[dict[str, Any]]], tally: Tally, again: Case | None = None
) -> None:
    """Kill, look, go on, compare."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=PLACE) as name:
        folder = Path(name).resolve()
        problems: list[str] = []
        for number, each in enumerate([case] if again is None else [case, again]):
            (folder / "phase").unlink(missing_ok=True)
            code = strike(folder, each, resume=number > 0)
            if code == 0:
                tally.outcomes["ended before its kill"] += 1
                break
            if code != -signal.SIGKILL:
                problems.append(f"ended with code {code}")
            tally.kills += 1
            phase = folder / "phase"
            tally.phases[phase.read_text().split(" ", 1)[1] if phase.exists() else "unknown"] += 1
            found, behind = problems_of(folder)
            problems += found
            tally.lost_steps[behind] += 1
        # Whoever was killed before there was a run folder begins anew.
        if not problems:
            problems += compare(folder, expected, train(folder / "run", "sync", resume=True))
        tally.outcomes["bitwise equal" if not problems else "wrong"] += 1
        tally.failures += [f"{case}{'' if again is None else f' then {again}'}: {text}" for text in problems]


def reference() -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """A run that nobody kills."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=PLACE) as name:
        result = train(Path(name) / "run", "sync", resume=False)
        return result, records_of(Path(name))


def count_calls(mode: str) -> int:
    """How many calls to storage a whole run makes."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=PLACE) as name:
        folder = Path(name).resolve()
        code = strike(folder, Case("storage", None, mode))
        assert code == 0, f"a run that nobody killed ended with code {code}"
        return int((folder / "count").read_text())


def draw_cases(kills: int, calls: dict[str, int], seed: int, share_async: float = 1.0) -> list[Case]:
    """Cases at random: most at a call to storage, some while staging, some at any time."""
    draw = random.Random(seed)
    cases = []
    for number in range(kills):
        mode = "async" if draw.random() < share_async else "sync"
        way = "staging" if number % 10 == 0 else "time" if number % 10 == 5 else "storage"
        if way == "time":
            mode = "async"
        most = {"storage": calls[mode], "staging": 150, "time": 900}[way]
        cases.append(Case(way, draw.randint(1, most), mode))
    return cases


Prepared = tuple[tuple[torch.Tensor, list[dict[str, Any]]], dict[str, int]]


def prepare(modes: tuple[str, ...] = ("async",)) -> Prepared:
    """Start the server; what a run that nobody kills gives, and how many calls to storage it makes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return reference(), {mode: count_calls(mode) for mode in modes}


def campaign(
    prepared: Prepared, kills: int, seed: int, share_async: float = 1.0, twice: float = 0.1, budget_s: float = 1e9
) -> Tally:
    """All cases."""
    expected, calls = prepared
    tally, draw, begin = Tally(), random.Random(seed + 1), time.monotonic()
    for number, case in enumerate(draw_cases(2 * kills, calls, seed, share_async)):
        if tally.kills >= kills or time.monotonic() - begin > budget_s:
            break
        again = Case(case.way, max(1, (case.at or 2) // 2), case.mode) if draw.random() < twice else None
        run_case(case, expected, tally, again)
        if number % 50 == 49:
            tell_progress(f"{tally.kills} of {kills} kills, {len(tally.failures)} failures")
    return tally


def main() -> int:
    """The campaign as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no new case after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    tally = campaign(prepare(), given.kills, given.seed, budget_s=given.budget_s)
    rows = [[name, str(count)] for name, count in sorted(tally.phases.items(), key=lambda item: -item[1])]
    print(table(["killed while", "times"], [*rows, ["all", str(tally.kills)]]))
    print(
        table(
            ["what came of the case", "times"], [[name, str(count)] for name, count in sorted(tally.outcomes.items())]
        )
    )
    for text in tally.failures[:20]:
        print(text)
    settings = {"kills": given.kills, "seed": given.seed, "steps": STEPS, "every_steps": EVERY, "keep": KEEP}
    results = {
        "kills": tally.kills,
        "killed_while": dict(tally.phases),
        "outcomes": dict(tally.outcomes),
        "steps_behind_the_last_snapshot": {str(steps): count for steps, count in sorted(tally.lost_steps.items())},
        "failures": tally.failures,
    }
    print(f"written: {write_results('crash_campaign', torch.device('cpu'), settings, results, given.out)}")
    return 1 if tally.failures or tally.kills < given.kills else 0


if __name__ == "__main__":
    # Functions that children find by name must be those of the module, not of the program.
    import crash_campaign

    sys.exit(crash_campaign.main())
