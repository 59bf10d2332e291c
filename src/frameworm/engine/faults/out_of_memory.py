"""When a step runs out of memory: where it happened, what held the memory, and what would fit.

The message is built while the process is in trouble: parts that fail are left out, and nothing takes long, because the
other ranks are waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.memory.holdings import held_by, mebibytes
from frameworm.engine.memory.planner import MemoryPlanner, detect_memory
from frameworm.engine.model.activations import find_layers
from frameworm.engine.optim.update import Update
from frameworm.engine.step.evaluation import evaluate
from frameworm.engine.step.step import TrainStep
from frameworm.errors import OutOfMemoryError, TrainingFailedError
from frameworm.launch.failures import is_consequence
from frameworm.launch.stores import Store
from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OPTIMIZER, VALIDATION
from frameworm.parallel.strategy import Strategy
from frameworm.records.schema import Batch

# Together with a worker's shutdown this stays well below the 30 s within which all ranks must have ended.
ADVICE_WITHIN_S = 12.0
_MOST_ADVICE = 3
# The plan said that the step would fit, and it did not: advice must stay below this fraction of that plan.
_MARGIN = 0.95
_SHARES = (1.0, 0.8, 0.6)
_TOLD = "out_of_memory"
_ADVICE = "out_of_memory_advice"

_HOST_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE_SIGNS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

# Maps the phase that failed to settings that would fit, cheapest first.
Advise = Callable[[str | None], list[str]]


def memory_that_ran_out(error: BaseException) -> str | None:
    """Return `GPU memory` or `host memory` for an out-of-memory error; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError):
        return "host memory"
    if isinstance(error, RuntimeError):
        text = str(error)
        if any(sign in text for sign in _HOST_SIGNS):
            return "host memory"
        if any(sign in text for sign in _DEVICE_SIGNS):
            return "GPU memory"
    return None


@dataclass(frozen=True)
class Place:
    """Where in a step an error happened."""

    phase: str | None = None
    micro_batch: int | None = None  # from 0
    micro_batches: int | None = None
    samples: int | None = None

    def in_words(self) -> str:
        """Format for use in a sentence; empty if nothing is known."""
        words = [] if self.phase is None else [self.phase]
        if self.micro_batch is not None:
            words.append(f"micro-batch {self.micro_batch + 1} of {self.micro_batches}")
        if self.samples is not None:
            words.append(f"{self.samples} samples")
        return f" ({', '.join(words)})" if words else ""


def place_of(error: BaseException) -> Place:
    """Find where a step failed from the traceback, so that successful steps pay nothing for it."""
    phase, index, count, samples = None, None, None, None
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        phase = _PHASES.get(frame.f_code, phase)
        if frame.f_code is TrainStep._several.__code__:
            index, count = frame.f_locals.get("index"), len(frame.f_locals["batch"].batches)
        elif frame.f_code is TrainStep._only.__code__:
            index, count = 0, 1
        elif frame.f_code is TrainStep._forward.__code__:
            samples = batch_size_of(frame.f_locals["micro"])
        trace = trace.tb_next
    if phase in (FORWARD, BACKWARD):
        return Place(phase, index, count, samples)
    return Place(phase)


_PHASES = {
    TrainStep._forward.__code__: FORWARD,
    TrainStep._backward.__code__: BACKWARD,
    Update.apply.__code__: OPTIMIZER,
    evaluate.__code__: VALIDATION,
    CheckpointStore.save.__code__: CHECKPOINT,
    TrainingState.capture.__code__: CHECKPOINT,
    CudaDataLoader._to_gpu.__code__: DATA_WAIT,
}


class Explainer:
    """Context around training that turns an out-of-memory error into one that says what to do about it.

    A rank that runs out first tells the others through the store; they see the connection break and can name the cause.

    Args:
        state: Holds model, optimizer and progress.
        config: The settings in force.
        batch: The run's batch sizes.
        advise: Returns the cheapest settings that fit; None if the config does not describe the model.
        store: Shared by the ranks; None with one process.
    """

    def __init__(
        self, state: TrainingState, config: Config, batch: Batch, advise: Advise | None, store: Store | None
    ) -> None:
        self._state = state
        self._config = config
        self._batch = batch
        self._advise = advise
        self._store = store if state.strategy.world_size > 1 else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Wrap everything that may run out of memory."""
        try:
            yield
        except Exception as error:
            kind = memory_that_ran_out(error)
            if kind is not None:
                raise self._explain(error, kind) from error
            cause = self._told() if is_consequence(error) else None
            if cause is None:
                raise
            raise TrainingFailedError(f"{cause}; this rank ({self._state.strategy.rank}) ended with it") from error

    def _told(self) -> str | None:
        """Return another rank's message about running out, if any."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                if self._store.check([_TOLD]):
                    return bytes(self._store.get(_TOLD)).decode()
        return None

    def _explain(self, error: Exception, kind: str) -> OutOfMemoryError:
        strategy, step = self._state.strategy, self._state.progress.step + 1
        place = Place()
        with contextlib.suppress(Exception):
            place = place_of(error)
        headline = f"rank {strategy.rank} ran out of {kind} in step {step}{place.in_words()}"
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(_TOLD, headline)
        lines = [f"{headline}: {_first_line(error)}"]
        held: dict[str, int] = {}
        with contextlib.suppress(Exception):
            holdings = held_by(self._state.model, self._state.optimizer, strategy.device, peak=True)
            held = holdings.to_dict()
            lines.append(f"it held {mebibytes(holdings.total)}: {holdings.in_words()}")
        advice: list[str] = []
        with contextlib.suppress(Exception):
            advice = self._advice(place.phase)
        if advice:
            lines += ["what would fit, by the plan of `frameworm memory`, cheapest first:", *_numbered(advice)]
        else:
            with contextlib.suppress(Exception):
                advice = general_advice(self._state.model, self._config, self._batch, strategy, place.phase)
                lines += ["what takes less (not planned for this model), cheapest first:", *_numbered(advice)]
        if self._config.memory.on_oom == "stop" and place.phase in (FORWARD, BACKWARD):
            lines.append("memory.on_oom: halve_micro_batch continues by itself, with the same global batch")
        return OutOfMemoryError(
            "\n".join(lines), rank=strategy.rank, step=step, phase=place.phase, held=held, advice=advice
        )

    def _advice(self, phase: str | None) -> list[str]:
        """Plan once for all ranks: if all run out at the same time, the first plans and the others wait."""
        if self._advise is None:
            return []
        if self._store is None:
            return _within(self._advise, phase, ADVICE_WITHIN_S)
        if self._store.add(f"{_ADVICE}_asked", 1) > 1:
            self._store.wait([_ADVICE], timedelta(seconds=ADVICE_WITHIN_S + 1))
            return [line for line in self._store.get(_ADVICE).decode().split("\n") if line]
        advice: list[str] = []
        try:
            advice = _within(self._advise, phase, ADVICE_WITHIN_S)
        finally:
            self._store.set(_ADVICE, "\n".join(advice))
        return advice


def planned_advice(config: Config, world_size: int, phase: str | None) -> list[str]:
    """Describe the cheapest settings that fit a resolved config's own device, with their memory and cost."""
    if phase == VALIDATION and isinstance(config.data.eval_batch, int) and config.data.eval_batch > 1:
        return [f"batches of half the size in validation (--set data.eval_batch={config.data.eval_batch // 2})"]
    planner = MemoryPlanner(config, world_size, validation=False)
    plan = planner.plan()
    memory_bytes = detect_memory(planner.device)[0]
    # It did not fit, whatever the plan says: the plan does not know about memory that others used.
    wanted = int(plan.total * _MARGIN)
    most = max(int(wanted / planner.memory_fraction), wanted + plan.context)
    memory_bytes = most if memory_bytes is None else min(memory_bytes, most)
    found: dict[str, str] = {}
    for share in _SHARES:  # if there are few kinds of change, add stronger ones of the same kind
        for change in planner.changes(int(memory_bytes * share), _MOST_ADVICE):
            settings = " ".join(f"--set {item}" for item in change.overrides)
            need = f"{mebibytes(change.plan.total)} instead of {mebibytes(plan.total)}"
            found.setdefault(change.words, f"{change.words} ({settings}): {need}; {change.cost}")
        if len(found) >= _MOST_ADVICE:
            break
    return list(found.values())[:_MOST_ADVICE]


def general_advice(model: nn.Module, config: Config, batch: Batch, strategy: Strategy, phase: str | None) -> list[str]:
    """Advice for models without a memory plan, excluding settings already in use."""
    if phase == VALIDATION:
        return ["smaller batches in the validation loader"]
    advice: list[str] = []
    if batch.micro is None or batch.micro > 1:
        size = "a smaller batch" if batch.micro is None else f"batch size {batch.micro // 2}"
        advice.append(f"{size} in the loader and accumulation={batch.accumulation * 2}: the same global batch")
    if config.gpu.mixed_precision == "off" and strategy.device.type == "cuda":
        advice.append("enable_mixed_precision(): activations of half the size")
    if config.memory.activation_checkpointing == "off":
        with contextlib.suppress(Exception):
            find_layers(model, config.memory.checkpoint_modules)
            advice.append("enable_gradient_checkpointing(): layers are computed twice instead of kept")
    if strategy.world_size > 1 and strategy.name in ("ddp", "zero1", "zero2"):
        better = "zero1" if strategy.name == "ddp" else "zero3"
        advice.append(f"strategy={better!r}: the optimizer's state divided among the ranks")
    return advice[:_MOST_ADVICE]


def _within(advise: Advise, phase: str | None, limit_s: float) -> list[str]:
    """Return the advice if it is ready in time; otherwise abandon the thread, as the process is about to end."""
    found: list[str] = []

    def work() -> None:
        with contextlib.suppress(BaseException):
            found.extend(advise(phase))

    thread = threading.Thread(target=work, name="memory_advice", daemon=True)
    thread.start()
    thread.join(limit_s)
    return list(found)


def _numbered(lines: list[str]) -> list[str]:
    return [f"  {number}. {line}" for number, line in enumerate(lines, 1)]


def _first_line(error: BaseException) -> str:
    text: Any = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
