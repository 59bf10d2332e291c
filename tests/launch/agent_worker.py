"""A worker for the tests of the launcher; without torch unless it joins a group, so that it starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])


def write_down(folder: str) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    draft = Path(folder) / f"draft-{RANK}"
    draft.write_text("\n".join(f"{name}={os.environ[name]}" for name in names))
    draft.replace(Path(folder) / f"rank-{RANK}")


def wait_for_signal(folder: str) -> None:
    """Save on the first signal, like a training run does."""
    got: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: got.append(number))
    write_down(folder)
    while not got:
        time.sleep(0.01)
    time.sleep(0.3)
    (Path(folder) / f"saved-{RANK}").write_text(signal.Signals(got[0]).name)
    sys.exit(130)


def stop(folder: str) -> None:
    """The ranks agreed to stop; rank 0 has more to write than the others."""
    if RANK == 0:
        time.sleep(0.7)
        write_down(folder)
    sys.exit(75)


def fail(code: str, folder: str) -> None:
    """The highest rank fails; the others do not care for SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_down(folder)
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        while len(list(Path(folder).glob("rank-*"))) <= RANK:
            time.sleep(0.01)
        sys.exit(int(code))
    time.sleep(300)


def fail_in_group(kind: str) -> None:
    """Rank 1 fails in the middle of collectives, so that rank 0 falls over the lost connection."""
    from frameworm.errors import DataError
    from frameworm.launch.failures import worker_errors
    from frameworm.launch.process_group import all_reduce_sums, process_group

    with worker_errors(), process_group(backend="gloo") as info:
        assert all_reduce_sums([1.0, float(info.rank)]) == [2.0, 1.0]
        if info.rank == 1:
            if kind == "data":
                raise DataError("the data set is gone; bring it back")
            if kind == "value":
                raise ValueError("a batch of the wrong shape")
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            all_reduce_sums([1.0])


MODES = {"stop": stop, "write": write_down, "wait": wait_for_signal, "fail": fail, "group": fail_in_group}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:])
