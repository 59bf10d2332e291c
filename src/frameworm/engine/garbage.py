"""Python's garbage collector during training."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled_heap(enabled: bool) -> Iterator[None]:
    """Set aside everything that exists when training begins.

    A full collection goes through all objects of the process: with torch and its friends imported that takes as long
    as many small steps, at a moment nobody chose. Inside this context the collector looks only at what training itself
    has made, which is little. A heap that the user has frozen already stays as it is.
    """
    if not enabled or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
