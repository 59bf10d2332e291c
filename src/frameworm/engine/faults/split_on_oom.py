"""`memory.on_oom: halve_micro_batch`: repeat a step that does not fit in smaller pieces.

The loaded micro-batches are cut along their first dimension: same samples, same global batch, gradients weighted by
count as for any accumulation. No rank may wait for one that has run out of memory, so every rank computes its gradients
alone; then all ranks exchange the outcome, and average gradients only if all succeeded.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.steps import StepBatch
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.faults.out_of_memory import memory_that_ran_out, place_of
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.step import StepResult, TrainStep
from frameworm.errors import OutOfMemoryError
from frameworm.launch.process_group import all_reduce_sums
from frameworm.parallel.beside import average
from frameworm.parallel.strategy import Strategy
from frameworm.records.schema import Batch

log = logging.getLogger("frameworm")


class CannotDivideError(Exception):
    """The micro-batches of a step cannot be cut any further."""


class _OtherRankFailedError(Exception):
    """This rank's gradients are fine, but another rank's are not; the message says whose."""


class BatchSplitter:
    """Computes the gradients of steps in as many pieces as memory requires.

    Args:
        strategy: If it averages gradients over ranks, the ranks agree on every step.
        batch: The run's batch sizes; micro-batch and accumulation are updated when it splits further.
        progress: The run's position.
    """

    def __init__(self, strategy: Strategy, batch: Batch, progress: Progress) -> None:
        self._strategy = strategy
        self._batch = batch
        self._agrees = strategy.gradient_ranks > 1
        self._micro, self._accumulation = batch.micro, batch.accumulation
        self._progress = progress
        self._has_met = False
        self.pieces = 1
        self.notes: list[str] = []

    def gradients(self, step: TrainStep, batch: StepBatch) -> tuple[StepResult, torch.Tensor | None]:
        """Like `TrainStep.gradients`, but retried in smaller pieces when a rank runs out of memory."""
        while True:
            divided = batch if self.pieces == 1 else divide(batch, self.pieces)
            self._has_met = False
            try:
                return step.gradients(divided, (lambda: self._meet(step)) if self._agrees else None)
            except _OtherRankFailedError as other:
                failure = str(other)
            except Exception as error:
                kind = memory_that_ran_out(error)
                if kind is None or self._has_met:
                    raise
                failure = f"rank {self._strategy.rank} ran out of {kind}{place_of(error).in_words()}"
                impossible = _largest(batch, self.pieces) <= 1 or not _can_divide(batch)
                if not impossible:
                    traceback.clear_frames(error.__traceback__)  # their memory is needed to tell the others
                if self._agrees:
                    impossible = bool(self._say(step, failed=True, impossible=impossible)[1])
                if impossible:
                    raise
            # Outside the except block the error is gone, and with it everything that its frames held.
            step.update.clear()
            gc.collect()
            if self._strategy.device.type == "cuda":
                torch.cuda.empty_cache()
            self._halve(failure)

    def _halve(self, failure: str) -> None:
        self.pieces *= 2
        batch = self._batch
        batch.accumulation = self._accumulation * self.pieces
        if self._micro is not None:
            batch.micro = -(-self._micro // self.pieces)
        size = "half the micro-batch" if batch.micro is None else f"micro-batch {batch.micro}"
        text = (
            f"{failure} in step {self._progress.step + 1}: it was done again, and training continued, with {size} and "
            f"accumulation {batch.accumulation}; the global batch is the same"
        )
        self.notes.append(text)
        log.warning("%s", text)

    def _say(
        self, step: TrainStep, *, failed: bool, impossible: bool = False
    ) -> tuple[list[int], list[int], list[float]]:
        """Exchange the outcome: which ranks failed, which cannot split further, how many have each gradient."""
        world_size, rank = self._strategy.world_size, self._strategy.rank
        parameters = [item for item in step.model.parameters() if item.requires_grad]
        present = [float(item.grad is not None) for item in parameters]
        flags = [0.0] * (2 * world_size)
        flags[rank], flags[world_size + rank] = float(failed), float(impossible)
        sums = all_reduce_sums([*flags, *present], self._strategy.device)
        failures = [other for other in range(world_size) if sums[other]]
        ends = [other for other in range(world_size) if sums[world_size + other]]
        return failures, ends, sums[2 * world_size :]

    def _meet(self, step: TrainStep) -> None:
        """Agree on the outcome once this rank's gradients are ready, and average them over the ranks."""
        failures, ends, present = self._say(step, failed=False)
        if ends:
            text = f"rank {ends[0]} ran out of memory, and its micro-batch cannot be halved any further"
            raise OutOfMemoryError(text, rank=ends[0]) from dist.DistError("another rank failed")
        if failures:
            raise _OtherRankFailedError(f"rank {', '.join(map(str, failures))} ran out of memory")
        self._has_met = True
        parameters = [item for item in step.model.parameters() if item.requires_grad]
        gradients: list[torch.Tensor] = []
        for parameter, ranks in zip(parameters, present):
            if ranks:  # a parameter that no rank used gets none
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        average(gradients, self._strategy.sum_over_ranks, self._strategy.world_size)
        if next(step.model.buffers(), None) is not None:
            self._strategy.sync_buffers(step.model)


def make_splitter(
    on_oom: str, step: TrainStep | CapturedStep, batch: Batch, state: TrainingState
) -> tuple[BatchSplitter | None, str | None]:
    """Set up what `memory.on_oom` asks for; if that is impossible, return None and a note for the summary."""
    if on_oom == "stop":
        return None, None
    if isinstance(step, CapturedStep):
        note = "memory.on_oom: halve_micro_batch cannot change a captured step: the run stops when memory runs out"
        log.warning("%s (with gpu.capture: off, training continues)", note)
        return None, note
    step.splitter = splitter = BatchSplitter(state.strategy, batch, state.progress)
    return splitter, None


def divide(batch: StepBatch, pieces: int) -> StepBatch:
    """Cut every micro-batch of a step into `pieces`, or fewer if it has fewer samples.

    Raises:
        CannotDivideError: If it holds something that cannot be split by sample.
    """
    batches: list[Any] = []
    samples: list[int] = []
    for micro, count in zip(batch.batches, batch.samples):
        size = _size(micro)
        number = min(pieces, size)
        begin = 0
        for index in range(number):
            end = begin + size // number + (index < size % number)
            batches.append(_part(micro, size, begin, end))
            samples.append(end - begin if count else 0)
            begin = end
            if not count:
                break  # an empty batch that only keeps this rank in step with the others
    return StepBatch(batches, samples, batch.global_samples, batch.tokens, batch.padded_tokens)


def _size(micro: Any) -> int:
    size = batch_size_of(micro)
    if not size:
        raise CannotDivideError
    return size


def _largest(batch: StepBatch, pieces: int) -> int:
    """Samples in the largest piece."""
    return max(-(-(batch_size_of(micro) or 1) // pieces) for micro in batch.batches)


def _can_divide(batch: StepBatch) -> bool:
    try:
        divide(batch, 2)
    except CannotDivideError:
        return False
    return True


def _part(item: Any, size: int, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of a nested batch."""
    if isinstance(item, torch.Tensor):
        if item.dim() == 0 or item.size(0) != size:
            raise CannotDivideError
        return item[begin:end]
    if isinstance(item, Mapping):
        return {name: _part(value, size, begin, end) for name, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_part(value, size, begin, end) for value in item))
    if isinstance(item, (tuple, list)):
        if len(item) == size and not any(isinstance(value, (torch.Tensor, Mapping, tuple, list)) for value in item):
            return item[begin:end]  # one plain value per sample
        return type(item)(_part(value, size, begin, end) for value in item)
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise CannotDivideError
