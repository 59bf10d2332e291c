"""Validation: every sample once, sums over the ranks, nothing left changed in the model's mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.data.batches.sizes import UNKNOWN
from frameworm.data.prefetch import move_batch
from frameworm.data.steps import SizedBatch, sized
from frameworm.engine.model.modes import restore_modes, start_evaluation
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.loss import LossFunction
from frameworm.errors import DataError
from frameworm.launch.process_group import all_reduce_sums, broadcast_object
from frameworm.parallel.strategy import Strategy

NO_ACCURACY = (
    "this run has no accuracy: its loss does not take integer targets, one per sample, for classes of the model's "
    "output (accuracy=True counts right answers all the same, where there are class scores)"
)
_NOTHING: Any = object()


class Evaluation(NamedTuple):
    """Result of a validation over all ranks."""

    loss: float
    accuracy: float | None
    samples: int
    note: str | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Any], loss_function: LossFunction, precision: Precision, strategy: Strategy
) -> Evaluation:
    """Mean loss, and accuracy where the model classifies, over all samples of all ranks.

    The unwrapped model is called: ranks may hold different numbers of batches, so no collective may hide in forward.
    Where one does, because parameters are gathered for it, every rank makes as many calls.
    """
    strategy.sync_buffers(model)
    modes = start_evaluation([model, *strategy.beside.modules.values()])
    # loss x count, count, right answers, answers, samples; loss and number of batches; batches that tell no samples
    sums = torch.zeros(8, dtype=torch.float64, device=strategy.device)
    kind = ""
    try:
        for (batch, size), counts in _in_step(batches, strategy) if strategy.shards_parameters else _alone(batches):
            with precision.autocast:
                computed, answers = loss_function.scored(model, batch)
            if not counts:
                continue
            loss = computed.loss.double()
            count = size or 1 if computed.count is None else computed.count
            sums[0] += loss * count
            sums[1] += count
            sums[4] += size or 1
            sums[5] += loss
            sums[6] += 1
            if size is None and computed.count is None:
                sums[7] += 1
                kind = type(batch).__name__
            if answers is not None:
                sums[2] += answers[0]
                sums[3] += answers[1]
    finally:
        restore_modes(modes)
        strategy.after_evaluation(model)
    strategy.sum_over_ranks(sums)
    loss_sum, count_sum, right, answered, samples_seen, alike_sum, alike, unknown = sums.tolist()
    if not samples_seen:
        raise DataError("the validation set is empty: give at least one sample, or no validation set")
    note = None
    if unknown:
        loss_sum, count_sum = alike_sum, alike
        note = UNKNOWN.format(kind=kind or "on another rank", effect="in validation every batch weighs the same")
    mean = loss_sum / count_sum if count_sum else float("nan")
    return Evaluation(mean, right / answered if answered else None, int(samples_seen), note)


def _alone(batches: Iterable[Any]) -> Iterator[tuple[SizedBatch, bool]]:
    return ((batch, True) for batch in sized(batches))


def _in_step(batches: Iterable[Any], strategy: Strategy) -> Iterator[tuple[SizedBatch, bool]]:
    """As many batches on every rank as the one with the most has; those that only fill up do not count."""
    source, filler = sized(batches), _NOTHING
    while True:
        batch, size = next(source, (_NOTHING, None))
        flags = [0.0] * strategy.world_size
        flags[strategy.rank] = float(batch is not _NOTHING)
        have = all_reduce_sums(flags, strategy.device)
        if not any(have):
            return
        if filler is _NOTHING and not all(have):
            # Only in the first round can a rank have had nothing, and then all see it.
            donor = next(rank for rank, count in enumerate(have) if count)
            shared = broadcast_object(move_batch(batch, "cpu") if strategy.rank == donor else None, donor)
            filler = move_batch(shared, strategy.device)
        if batch is not _NOTHING:
            filler = batch
        yield (filler, size), batch is not _NOTHING
