"""One log file per rank."""

from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path

from frameworm.errors import EnvironmentSetupError
from frameworm.records.atomic import open_to_append


def log_file(folder: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return folder / f"rank-{rank:05d}.log"


def write_to_log_of(rank: int, world_size: int, folder: Path) -> None:
    """Append everything this process writes from now on, including its libraries' output, to its rank's log file.

    Raises:
        EnvironmentSetupError: The file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(log_file(folder, rank)), "ab", buffering=0) as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
    except OSError as error:
        raise EnvironmentSetupError(
            f"--log-dir {folder}: {error.strerror}; give a folder that can be written"
        ) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    print(f"rank {rank} of {world_size} on {socket.gethostname()}, process {os.getpid()}", flush=True)
