"""Recorders for the steps of a run, their stream, and detection of what must not happen in a recorded step."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from frameworm.engine.step.graphs import GraphRecorder, Recorder, RehearsalRecorder
from frameworm.errors import DeviceError
from frameworm.observe.clocks.compiling import compilations_so_far
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private.names import COMPILER

log = logging.getLogger("frameworm")


def make_recorder(mode: str, strategy: Strategy, handed: Sequence[str] = ()) -> tuple[Recorder | None, str | None]:
    """Create the recorder of a run, or return None with a note for the summary if capture is impossible.

    Args:
        mode: As `gpu.capture`.
        strategy: The strategy of the run.
        handed: Names of callbacks that receive batches and outputs, which a replayed graph does not expose.

    Raises:
        DeviceError: If the mode is `step` and there is no GPU.
    """
    if mode == "off":
        return None, None
    if strategy.device.type != "cuda" and mode != "rehearse":
        if mode == "step":
            raise DeviceError(
                "gpu.capture: step records CUDA graphs, and this run is not on a GPU; set gpu.capture: off (or auto)"
            )
        return None, None
    problem = None if mode == "rehearse" else strategy.why_not_captured()
    if problem is None and handed:
        problem = (
            f"{handed[0]}.on_batch_end is handed batches and outputs, which a graph overwrites in its next replay; "
            "on_step does not keep a step from being captured"
        )
    if problem is not None:
        reason = f"the step was not captured: {problem}"
        log.warning("%s", reason)
        return None, reason
    return RehearsalRecorder(strategy.device) if mode == "rehearse" else GraphRecorder(strategy.device), None


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on a separate stream, as work must be warmed up on the stream where it is recorded."""
    if stream is None:
        yield
        return
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def compilations() -> int:
    return compilations_so_far() if COMPILER in sys.modules else 0  # asking would import the compiler


@contextlib.contextmanager
def watching_for_waits() -> Iterator[list[str]]:
    """Detect where the host waits for the device; yields a list of source locations."""
    places: list[str] = []
    if not torch.cuda.is_available():
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for item in caught:
        if "called a synchronizing CUDA operation" in str(item.message):
            places.append(f"{Path(item.filename).name}:{item.lineno}")
        elif "Synchronization debug mode" not in str(item.message):
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
