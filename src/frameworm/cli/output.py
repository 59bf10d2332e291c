"""What the verbs print, and the runs that they read.

All words pass through here, because many come from files that anybody may have written. A run may be a folder or a URL.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from frameworm.records.printable import printable


def say(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text that cannot steer the terminal, to stdout unless another stream is given."""
    print(printable(text), end=end, file=file, flush=flush)


@contextlib.contextmanager
def telling(what: str) -> Iterator[Callable[[str], None] | None]:
    """A line on the terminal that changes with what is told; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(what) as status:
        yield lambda text: status.update(Text(printable(text)))


def run_folder(text: str) -> Path:
    """A run given on the command line; of a URL a local copy of its records."""
    from frameworm.records.objects.runs import local_run

    return local_run(text)


def runs_folder(text: str) -> Path:
    """The same for a folder of runs."""
    from frameworm.records.objects.runs import local_root

    return local_root(text)


def log_to_screen(leads: bool) -> None:
    """What the engine has to say goes to the screen, once for all ranks."""
    log = logging.getLogger("frameworm")
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if leads else logging.ERROR)
    log.propagate = False


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
