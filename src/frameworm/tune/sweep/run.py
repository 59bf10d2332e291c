"""The scaling sweep: the same training on several numbers of processes, repeated in turns, then analysed.

Each run is `frameworm train` itself, in separate processes, and leaves its run folder under `runs/`. Completed runs are
never repeated; an interrupted one is started again from scratch, because a resumed run would measure a start that the
others do not have. `scaling.json` holds the result, next to the report's files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frameworm.config.load import dump_config, load_config_from_mapping
from frameworm.errors import DeviceError, MissingPackageError, RunFolderError
from frameworm.hardware.resolve import resolve_here, resolve_machine
from frameworm.launch.allocation import Allocation
from frameworm.launch.environment import own_command, ranks_per_gpu
from frameworm.records.atomic import make_folder_in, open_to_append, refuse_link, write_atomic
from frameworm.records.reading import read_json
from frameworm.records.store import RunFolder
from frameworm.report.scaling.report import write_report
from frameworm.scaling.analysis import Analysis, analyse
from frameworm.scaling.run_points import DEFAULT_WARMUP, Collection, collect
from frameworm.tune.sweep.plan import SweepPlan, shell_settings
from frameworm.tune.sweep.process import run_to_end

SCHEMA_VERSION = 1
RESULT_NAME, CONFIG_NAME, PLAN_NAME, LOCK_NAME = "scaling.json", "sweep.yaml", "sweep.json", ".sweep.lock"
RUNS = "runs"
LOCK_PATIENCE_S = 60.0

Tell = Callable[[str], None]


@dataclass(slots=True)
class SweepRun:
    """One training of the sweep."""

    world_size: int
    repeat: int
    folder: str  # relative to the sweep's own
    status: str  # completed, failed, or skipped because that world size has failed before
    wall_s: float | None = None  # None: run by an earlier call
    reason: str | None = None


@dataclass(slots=True)
class SweepResult:
    """The result of a sweep."""

    plan: SweepPlan
    out: Path
    runs: list[SweepRun]
    analysis: Analysis
    collection: Collection
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[SweepRun]:
        """Runs that failed."""
        return [run for run in self.runs if run.status == "failed"]

    def to_dict(self) -> dict[str, Any]:
        """The content of scaling.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.plan.config.name,
            "mode": self.plan.mode,
            "world_sizes": list(self.plan.world_sizes),
            "repeats": self.plan.repeats,
            "fingerprint": self.plan.fingerprint,
            "runs": [asdict(run) for run in self.runs],
            **self.analysis.to_dict(),
            "excluded": [asdict(item) for item in self.collection.excluded],
            "notes": [*self.notes, *self.collection.notes],
            "files": [path.name for path in self.files],
        }


def run_sweep(
    plan: SweepPlan,
    out: Path,
    *,
    resume: bool = False,
    warmup: int = DEFAULT_WARMUP,
    allocation: Allocation | None = None,
    per_host: int | None = None,
    tell: Tell | None = None,
) -> SweepResult:
    """Run what is missing of a sweep, analyse all of it, and write its files.

    Args:
        plan: What to run.
        out: The folder of the sweep.
        resume: Continue the sweep in `out`; otherwise a folder that holds one is rejected.
        warmup: Epochs of each run to leave out.
        allocation: Hosts of a SLURM job; None: all processes on this machine.
        per_host: Most processes on one host of the allocation; default: its number of GPUs, or one.
        tell: Called with progress messages.

    Returns:
        The result.

    Raises:
        ConfigError: The config does not fit one of the world sizes.
        RunFolderError: The folder holds something else, or another sweep.
    """
    tell = tell or (lambda text: None)
    commands = {size: _command(plan, size, allocation, per_host) for size in plan.world_sizes}
    _check_machine(plan, allocation)
    with _locked(out, plan, resume, tell) as lock:
        runs = _run_all(plan, out, commands, tell, lock)
        return _judge(plan, out, runs, warmup)


def _command(plan: SweepPlan, world_size: int, allocation: Allocation | None, per_host: int | None) -> list[str]:
    """The command of one world size without its folder; also validates the config for it."""
    settings = [*plan.overrides, *plan.settings(world_size)]
    config = load_config_from_mapping(plan.config.model_dump(), settings)
    resolve_here(config, world_size)
    hosts, workers = 1, world_size
    if allocation is not None:
        most = per_host or resolve_machine(config).device_count or 1
        hosts, workers = allocation.place(world_size, most)
    command = own_command("train", *shell_settings(settings))
    if world_size > 1:
        command += ["--distributed", "--nproc-per-node", str(workers)]
    return command if allocation is None else allocation.command(hosts, command)


def _check_machine(plan: SweepPlan, allocation: Allocation | None) -> None:
    """Raise if there are more processes than GPUs."""
    if allocation is not None:
        return
    machine = resolve_machine(plan.config)
    most = plan.world_sizes[-1]
    if machine.device == "cuda" and most > machine.device_count * ranks_per_gpu():
        raise DeviceError(
            f"world size {most} needs {most} GPUs and this machine has {machine.device_count}: leave it out of "
            "--world-sizes, run inside a SLURM allocation, or set gpu.device=cpu to try the sweep out"
        )


def _run_all(plan: SweepPlan, out: Path, commands: dict[int, list[str]], tell: Tell, lock: int) -> list[SweepRun]:
    order = plan.runs()
    runs: list[SweepRun] = []
    broken: set[int] = set()
    for number, (size, repeat) in enumerate(order, start=1):
        name = f"ws{size:04d}-run{repeat:02d}"
        folder = RunFolder(out / RUNS / name)
        run = SweepRun(size, repeat, f"{RUNS}/{name}", "completed")
        runs.append(run)
        if folder.status() == "completed":
            tell(f"run {number} of {len(order)}: world size {size}, repeat {repeat}: done before")
            continue
        if size in broken:
            run.status, run.reason = "skipped", "an earlier run of this world size failed"
            continue
        tell(f"run {number} of {len(order)}: world size {size}, repeat {repeat}")
        # Delete what an interrupted run has left.
        refuse_link(folder.path)
        shutil.rmtree(folder.path, ignore_errors=True)
        began = time.monotonic()
        command = [*commands[size], "--config", str(out / CONFIG_NAME), "--out", str(folder.path)]
        command += ["--set", "storage.url=off"]  # runs of other sweeps have the same names
        code, said = run_to_end(command, out / RUNS / f"{name}.log", keep_open=lock)
        run.wall_s = time.monotonic() - began
        if code != 0 or folder.status() != "completed":
            run.status, run.reason = "failed", f"exit code {code}: {said}"
            broken.add(size)
            tell(f"world size {size} failed ({run.reason}); the whole output is in {RUNS}/{name}.log")
    return runs


def _judge(plan: SweepPlan, out: Path, runs: list[SweepRun], warmup: int) -> SweepResult:
    try:
        collection = collect(out / RUNS, warmup)
    except RunFolderError:  # no run has come as far as a folder
        collection = Collection(())
    result = SweepResult(plan, out, runs, analyse(collection.points), collection)
    if collection.points or collection.excluded:
        try:
            result.files = list(write_report(out / RUNS, out, warmup, None).files)
        except MissingPackageError as error:
            result.notes.append(str(error))
    write_atomic(out / RESULT_NAME, json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
    return result


@contextlib.contextmanager
def _locked(out: Path, plan: SweepPlan, resume: bool, tell: Tell) -> Iterator[int]:
    """Lock the folder until the last of our processes has ended."""
    try:
        _check_folder(out, resume)
        make_folder_in(out, out / RUNS)
        file = os.fdopen(open_to_append(out / LOCK_NAME), "ab")
    except OSError as error:
        raise RunFolderError(f"cannot use {out}: {error.strerror or error}; give another --out") from error
    with file:
        _wait_for(file.fileno(), out, tell)
        _check_plan(out, plan, resume, tell)
        yield file.fileno()


def _check_folder(out: Path, resume: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise RunFolderError(f"{out} is a file; give a folder as --out")
    if (out / PLAN_NAME).exists():
        if not resume:
            raise RunFolderError(f"{out} already holds a sweep; continue it with --resume, or give another --out")
        return
    if any(entry.name not in (LOCK_NAME, RUNS) for entry in out.iterdir()):
        raise RunFolderError(f"{out} holds something other than a sweep; give a new or an empty folder as --out")


def _wait_for(lock: int, out: Path, tell: Tell) -> None:
    """A killed sweep leaves a training behind that is still saving: wait for that, but not for a running sweep."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise RunFolderError(f"another sweep works in {out}; wait for it, or give another --out") from None
        if not told:
            tell(f"waiting for processes of another sweep in {out}")
            told = True
        time.sleep(0.2)


def _check_plan(out: Path, plan: SweepPlan, resume: bool, tell: Tell) -> None:
    """Check that the folder's sweep is this one; write the plan to a new folder."""
    path = out / PLAN_NAME
    if path.exists():
        try:
            stored = read_json(path)
            fingerprint, mode = stored["fingerprint"], stored["mode"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} is damaged ({error}); give another --out") from error
        if fingerprint != plan.fingerprint:
            what = f"is a {mode} scaling sweep" if mode != plan.mode else "is a sweep of another config"
            raise RunFolderError(
                f"{out} {what}: its runs cannot be compared with these (its config is in {out / CONFIG_NAME}, its "
                "smallest world size counts too); give another --out"
            )
    elif resume:
        tell(f"{out} holds no sweep yet: it starts afresh")
    write_atomic(out / CONFIG_NAME, dump_config(plan.config))
    written = {"fingerprint": plan.fingerprint, "mode": plan.mode, "world_sizes": list(plan.world_sizes)}
    write_atomic(path, json.dumps({"schema_version": SCHEMA_VERSION, **written, "repeats": plan.repeats}) + "\n")
