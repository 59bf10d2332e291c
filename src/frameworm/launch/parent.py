"""Notices when the parent process has ended."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait


def call_after_parent(act: Callable[[], None]) -> None:
    """Call `act` in a thread once the process that started this one through multiprocessing has ended.

    That is not always the parent process of the operating system: with a fork server it would be the server, which
    lives as long as any of its children.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        act()

    threading.Thread(target=watch, name="parent", daemon=True).start()
