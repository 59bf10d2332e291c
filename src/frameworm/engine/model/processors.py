"""Threads, cores and CPU kernels of a training process."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import TrainingConfig
from frameworm.engine.model.host_gelu import gelu
from frameworm.errors import ConfigError

log = logging.getLogger("frameworm")

# How long a thread may hold the GIL: the default of 5 ms is many steps of a small model on a GPU. Chosen, not measured.
TURN_S = 2e-4


def apply_processors(training: TrainingConfig, local_rank: int, local_world_size: int) -> None:
    """Bind the process to its cores, set torch's thread counts and turn oneDNN on or off, as the config asks."""
    if training.cpu_affinity and local_world_size > 1:
        bind_to_share(local_rank, local_world_size)
    if training.cpu_threads != "auto":
        torch.set_num_threads(training.cpu_threads)
    interop = training.cpu_interop_threads
    if interop != "auto" and torch.get_num_interop_threads() != interop:
        _set_interop_threads(interop)
    torch.backends.mkldnn.enabled = _onednn_at_first() and training.cpu_onednn is not False  # type: ignore[assignment]


def _set_interop_threads(count: int) -> None:
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:  # torch accepts one value per process, before the first thread starts
        raise ConfigError(
            f"training.cpu_interop_threads: {count} comes too late, torch has fixed {torch.get_num_interop_threads()} "
            f"for this process; call torch.set_num_interop_threads({count}) at the top of the script, or leave it auto"
        ) from None


@contextmanager
def host_layers(model: nn.Module, training: TrainingConfig) -> Iterator[None]:
    """Apply the config's CPU settings to layers: Linear without oneDNN, GELU that keeps its slope."""
    # Not with hooks: calling a module that has any takes longer than a small matrix product.
    found: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        own = vars(module).get("forward")
        if training.cpu_onednn == "except_linear" and _onednn_at_first() and isinstance(module, nn.Linear):
            found.append((module, own))
            module.forward = functools.partial(_without_onednn, module.forward)  # type: ignore[method-assign]
        elif training.cpu_gelu == "keep_slope" and type(module) is nn.GELU and own is None:
            found.append((module, own))
            module.forward = functools.partial(gelu, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, own in found:
            del module.forward
            if own is not None:
                module.forward = own


@contextmanager
def quick_turns() -> Iterator[None]:
    """Shorten Python's thread switch interval, so helper threads (samples, checkpoints) soon yield to training."""
    usual_s = sys.getswitchinterval()
    if usual_s <= TURN_S:
        yield
        return
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def cores_of_rank(cores: list[int], index: int, count: int) -> list[int]:
    """Return one of `count` nearly equal slices of the cores; empty if there are fewer than `count` cores."""
    if len(cores) < count:
        return []
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def bind_to_share(local_rank: int, local_world_size: int) -> None:
    """Bind this process's threads, and all that they start, to its slice of the cores."""
    if not hasattr(os, "sched_setaffinity"):
        log.warning("training.cpu_affinity: this system cannot bind processes to cores")
        return
    share = cores_of_rank(_cores_at_first(), local_rank, local_world_size)
    if not share:
        log.warning("training.cpu_affinity: %d processes share fewer cores than that", local_world_size)
        return
    # The call binds a single thread, so repeat it for those that torch has already started.
    for thread in _threads():
        try:
            os.sched_setaffinity(thread, share)
        except ProcessLookupError:
            continue


def _without_onednn(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


@functools.cache
def _onednn_at_first() -> bool:
    """Whether oneDNN was enabled before the first training in this process."""
    return bool(torch.backends.mkldnn.enabled)


@functools.cache
def _cores_at_first() -> list[int]:
    """The cores before any binding, for a second training in this process to divide again."""
    return sorted(os.sched_getaffinity(0))


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]
