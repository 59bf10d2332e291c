"""The server that trials are forked from: it has imported everything and run nothing, so that trials start at once.

This module imports nothing heavy, so that the server can import torch while its user does the same.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import sysconfig
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from frameworm.launch.environment import added_to_environment, take_from_environment
from frameworm.torch_private.names import COMPILER

BAD_FORK = 97  # exit code of a trial that cannot use CUDA because of something the server has imported

# Including the compiler: DDP, most optimizers and compilation load it, which each trial would otherwise do itself.
_IMPORTED = ("frameworm.tune.processes.batch_trial", COMPILER, "frameworm.tune.processes.libraries")
# Some libraries look for a GPU at import. If that goes through CUDA no child can use it; through NVML all can.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# A trial that had to be killed leaves semaphores behind; cleaning them up should not print warnings.
_CLEAN_UP_QUIETLY = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}

# multiprocessing starts processes by `python -c`, with the working folder first on the path: a local signal.py would
# be imported (Python 3.10 cannot avoid that). Trials get the path of the process that starts them.
_IMPORT_NOTHING_FROM_HERE = {"PYTHONSAFEPATH": "1"}

# Tells the server what else to import; an environment variable may hold 128 KiB.
_LIBRARIES, _LONGEST = "FRAMEWORM_TRIAL_LIBRARIES", 100_000

_forks = True


def libraries_since(known: Collection[str]) -> list[str]:
    """Installed modules that were imported since `known`, without the user's own, which may have side effects."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in known]
    origins = [(name, getattr(getattr(module, "__spec__", None), "origin", None)) for name, module in new]
    return [name for name, origin in origins if origin and any(origin.startswith(folder) for folder in folders)]


def import_libraries() -> None:
    """Runs in the server: import what `warm_up` was told; failures are left to the trials."""
    for name in take_from_environment(_LIBRARIES).split():
        with suppress(Exception):
            importlib.import_module(name)


def stop_forking() -> None:
    """Start trials without the server from now on: slower, but free of whatever the server has loaded."""
    global _forks
    _forks = False


def refers_to_main(payload: str | Path) -> bool:
    """Whether a file written by `torch.save` refers to something defined in the caller's script."""
    with zipfile.ZipFile(payload) as file:
        return any(b"__main__" in file.read(name) for name in file.namelist() if name.endswith("data.pkl"))


@contextmanager
def without_script() -> Iterator[None]:
    """Keep processes started in this block from importing the caller's script, as multiprocessing would make them."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def warm_up(also: Sequence[str] = (), libraries: Sequence[str] = ()) -> ForkServerContext | SpawnContext:
    """Start the server if it is not running; it warms up in the background.

    A server is used because children must not inherit what the caller has done in this process (CUDA, threads).

    Args:
        also: Modules to import in addition to the trial's own.
        libraries: Modules that trials will import, if they can be imported.
    """
    if not _forks:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *also])  # no effect on a server that is already running
    wanted = {_LIBRARIES: " ".join(libraries)[:_LONGEST]}
    with added_to_environment({**_ASK_NVML, **_CLEAN_UP_QUIETLY, **_IMPORT_NOTHING_FROM_HERE, **wanted}):
        forkserver.ensure_running()
    return context


def wait_until_warm() -> None:
    """Wait for a started server, so that its imports do not count for a trial."""
    context = warm_up()
    if isinstance(context, ForkServerContext):
        first = context.Process(target=_do_nothing)
        with without_script():
            start(first)
        first.join()


def _do_nothing() -> None:
    pass


def start(process: BaseProcess) -> None:
    """Start a process made by `warm_up`'s context."""
    with added_to_environment(_IMPORT_NOTHING_FROM_HERE):
        process.start()
