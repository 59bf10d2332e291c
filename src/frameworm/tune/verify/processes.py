"""One command of the verification: run to its end or its deadline, watched, and removed with everything it started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from frameworm.records.atomic import written_anew
from frameworm.records.reading import read_tail

_LAST_BYTES = 2**14
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; None: it was killed at its deadline.
        wall_s: Its duration.
        log: The end of its output.
    """

    code: int | None
    wall_s: float
    log: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def run(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environ: Mapping[str, str],
    watch: Callable[[psutil.Process], None] | None = None,
) -> Ended:
    """Run a command; no process is left behind.

    Args:
        command: Program and arguments.
        log: Receives its output.
        limit_s: Time limit.
        environ: Its environment variables.
        watch: Called repeatedly with the process while it runs.
    """
    begun = time.monotonic()
    code: int | None = None
    with written_anew(log) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        family: dict[int, psutil.Process] = {}
        try:
            seen = psutil.Process(process.pid)
            while code is None and time.monotonic() < begun + limit_s:
                family.update({item.pid: item for item in descendants(seen)})
                if watch is not None:
                    watch(seen)
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_EVERY_S)
        finally:
            family.update({item.pid: item for item in descendants(seen)})
            for item in [*family.values(), seen]:
                with suppress(psutil.Error):
                    item.kill()
            process.wait()
            psutil.wait_procs(list(family.values()), timeout=5)
    return Ended(code, time.monotonic() - begun, read_tail(log, _LAST_BYTES))


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def ranks_of(process: psutil.Process) -> dict[int, psutil.Process]:
    """The workers started by a launcher, by rank; their loader processes inherit RANK and are not included."""
    found = {}
    with suppress(psutil.Error):
        for child in process.children():
            with suppress(psutil.Error, KeyError, TypeError, ValueError):
                found[int(child.as_dict(["environ"])["environ"]["RANK"])] = child
    return found
