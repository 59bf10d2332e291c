"""The server that trials are forked from: it has imported everything and run nothing, so that a trial starts at once.

This module imports nothing heavy: the server can import torch while its user still does the same.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_IMPORTED = "frameworm.tune.batch_trial"


def warm_up(also: Sequence[str] = ()) -> ForkServerContext:
    """Start the server if it is not there; it gets ready by itself.

    A server, not this process: what the caller has done here (CUDA, threads) must not be in the children.

    Args:
        also: Modules to import beside the trial's own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_IMPORTED, *also])  # of a server that is there already nothing changes
    forkserver.ensure_running()
    return context
