"""The server that trials are forked from: it has imported everything and run nothing, so that a trial starts at once.

This module imports nothing heavy: the server can import torch while its user still does the same.
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

BAD_FORK = 97  # exit code of a trial that cannot use CUDA because of what the server has imported

# The compiler too: DDP, most optimizers and of course compiling load it, and so would one trial after the other.
_IMPORTED = ("frameworm.tune.processes.batch_trial", "torch._dynamo", "frameworm.tune.processes.libraries")
# Some libraries ask for a GPU when they are imported. Asked of CUDA, no child could use it; asked of NVML, all can.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# A trial that had to be killed leaves semaphores behind; who cleans up after it need not say so on the terminal.
_CLEAN_UP_QUIETLY = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}

# multiprocessing starts its processes by `python -c`, with the working folder first on their path: a signal.py there
# would be imported (Python 3.10 knows no way around that). Trials get the path of the process that starts them.
_IMPORT_NOTHING_FROM_HERE = {"PYTHONSAFEPATH": "1"}

# Where the server is told what else to import; one variable may hold 128 KiB.
_LIBRARIES, _LONGEST = "FRAMEWORM_TRIAL_LIBRARIES", 100_000

_forks = True


def libraries_since(known: Collection[str]) -> list[str]:
    """Installed modules that were imported beside those known; not the user's own, which may do more than define."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in known]
    origins = [(name, getattr(getattr(module, "__spec__", None), "origin", None)) for name, module in new]
    return [name for name, origin in origins if origin and any(origin.startswith(folder) for folder in folders)]


def import_libraries() -> None:
    """In the server: import what `warm_up` was told to; what cannot be imported there is left to the trials."""
    for name in take_from_environment(_LIBRARIES).split():
        with suppress(Exception):
            importlib.import_module(name)


def stop_forking() -> None:
    """From now on trials are started from nothing: slower, but whatever the server holds is not in them."""
    global _forks
    _forks = False


def refers_to_main(payload: str | Path) -> bool:
    """Whether a file of `torch.save` holds something that was defined in the caller's script."""
    with zipfile.ZipFile(payload) as file:
        return any(b"__main__" in file.read(name) for name in file.namelist() if name.endswith("data.pkl"))


@contextmanager
def without_script() -> Iterator[None]:
    """Processes started inside do not run the caller's script again, as multiprocessing would have them do."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def warm_up(also: Sequence[str] = (), libraries: Sequence[str] = ()) -> ForkServerContext | SpawnContext:
    """Start the server if it is not there; it gets ready by itself.

    A server, not this process: what the caller has done here (CUDA, threads) must not be in the children.

    Args:
        also: Modules to import beside the trial's own.
        libraries: Modules that trials will import, if they can be.
    """
    if not _forks:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *also])  # of a server that is there already nothing changes
    wanted = {_LIBRARIES: " ".join(libraries)[:_LONGEST]}
    with added_to_environment({**_ASK_NVML, **_CLEAN_UP_QUIETLY, **_IMPORT_NOTHING_FROM_HERE, **wanted}):
        forkserver.ensure_running()
    return context


def wait_until_warm() -> None:
    """Wait for a server that was started: what it takes to import belongs to no trial."""
    context = warm_up()
    if isinstance(context, ForkServerContext):
        first = context.Process(target=_do_nothing)
        with without_script():
            start(first)
        first.join()


def _do_nothing() -> None:
    pass


def start(process: BaseProcess) -> None:
    """Start a process that `warm_up`'s context has made."""
    with added_to_environment(_IMPORT_NOTHING_FROM_HERE):
        process.start()
