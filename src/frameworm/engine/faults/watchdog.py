"""The watchdog of a training: reports the phase that the training thread is in, and ends a run that is stuck."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType

from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.step import TrainStep
from frameworm.errors import RunFolderError, StuckError
from frameworm.launch.environment import reported_by_launcher
from frameworm.launch.failures import report_error
from frameworm.launch.process_group import is_distributed, setup_ddp
from frameworm.launch.stores import Store
from frameworm.launch.watchdog import Watchdog
from frameworm.observe.clocks import phases
from frameworm.records.atomic import write_atomic

_FOLDERS = {"data": phases.DATA_WAIT}
_FILES = {
    "engine/step/evaluation.py": phases.VALIDATION,
    "engine/optim/update.py": phases.OPTIMIZER,
    "engine/checkpoint/store.py": phases.CHECKPOINT,
    "engine/checkpoint/training_state.py": phases.CHECKPOINT,
}
_FUNCTIONS = {
    ("engine/step/step.py", "_forward"): phases.FORWARD,
    ("engine/step/step.py", "_backward"): phases.BACKWARD,
    ("engine/step/step.py", "_over_ranks"): phases.COMMUNICATION_EXPOSED,
    ("engine/session.py", "_save"): phases.CHECKPOINT,
    ("engine/loop.py", "_run_validation"): phases.VALIDATION,
    ("engine/loop.py", "_run_steps"): phases.OTHER,
}


def phase_of(frame: FrameType | None) -> str:
    """Find the phase that a training thread is in, searching from its innermost frame outwards."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/frameworm/" in path:
            name = path.rsplit("/frameworm/", 1)[1]
            found = _FUNCTIONS.get((name, frame.f_code.co_name)) or _FILES.get(name) or _FOLDERS.get(name.split("/")[0])
            if found is not None:
                return found
        frame = frame.f_back
    return "between steps"


def make_watchdog(
    limit_s: float | None,
    store: Store | None,
    state: TrainingState,
    folder: Path | None,
    step: TrainStep | CapturedStep | None = None,
) -> contextlib.AbstractContextManager[object]:
    """Create the watchdog of a run; a null context with one rank, or if it is off.

    Args:
        limit_s: How long a run may make no progress; None turns the watchdog off.
        store: Shared by the ranks.
        state: Holds the strategy and the run's position.
        folder: Where the report on each rank's position is written; None for stderr.
        step: The train step; replays of a captured one count as progress.
    """
    rank, world_size = state.strategy.rank, state.strategy.world_size
    if limit_s is None or store is None or world_size == 1 or not is_distributed():
        return contextlib.nullcontext()
    one_machine = setup_ddp().num_nodes == 1

    def end(error: StuckError, account: str) -> None:
        message = str(error)
        if folder is not None:
            path = folder / f"stuck-rank{rank}.txt"
            with contextlib.suppress(RunFolderError):
                write_atomic(path, f"{message}\n\n{account}")
                message = f"{message}. Where each rank is: {path}"
        else:
            print(account, file=sys.stderr, flush=True)
        end_process(StuckError(message))

    def replays() -> int:
        return step.captured_steps if isinstance(step, CapturedStep) else 0

    return Watchdog(store, rank, world_size, limit_s, lambda: state.progress.step, phase_of, end, one_machine, replays)


def end_process(error: StuckError) -> None:
    """Exit at once: the training thread is stuck and cannot raise."""
    report_error(error)
    if not reported_by_launcher():
        print(f"frameworm: {error}", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(error.exit_code)
