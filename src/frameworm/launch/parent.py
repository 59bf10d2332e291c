"""Noticing that the process which this one works for has ended."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait


def call_after_parent(act: Callable[[], None]) -> None:
    """Call something, in a thread, once the process that started this one through multiprocessing has ended.

    That is not always the parent of the operating system: with a fork server that is the server, which stays for as
    long as one of its children does.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
