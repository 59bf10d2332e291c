"""What the verbs print: all words pass through here, because many come from files that anybody may have written."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
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
