"""Validation: every sample once, sums over the ranks, nothing left changed in the model's mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.data.prefetch import batch_size_of, move_batch
from frameworm.engine.model.modes import restore_modes, start_evaluation
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.loss import LossFunction, correct_answers
from frameworm.errors import DataError
from frameworm.launch.process_group import all_reduce_sums, broadcast_object
from frameworm.parallel.strategy import Strategy

_NOTHING: Any = object()


class Evaluation(NamedTuple):
    """Result of a validation over all ranks."""

    loss: float
    accuracy: float | None
    samples: int


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
    # loss x count, count, right answers, answers, samples
    sums = torch.zeros(5, dtype=torch.float64, device=strategy.device)
    try:
        for batch, counts in _in_step(batches, strategy) if strategy.shards_parameters else _alone(batches):
            with precision.autocast:
                computed = loss_function(model, batch)
            if not counts:
                continue
            samples = batch_size_of(batch) or 1
            count = samples if computed.count is None else computed.count
            sums[0] += computed.loss.double() * count
            sums[1] += count
            sums[4] += samples
            answers = correct_answers(computed)
            if answers is not None:
                sums[2] += answers[0]
                sums[3] += answers[1]
    finally:
        restore_modes(modes)
        strategy.after_evaluation(model)
    strategy.sum_over_ranks(sums)
    loss_sum, count_sum, right, answered, samples_seen = sums.tolist()
    if not samples_seen:
        raise DataError("the validation set is empty: give at least one sample, or no validation set")
    return Evaluation(
        loss_sum / count_sum if count_sum else float("nan"), right / answered if answered else None, int(samples_seen)
    )


def _alone(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    return ((batch, True) for batch in batches)


def _in_step(batches: Iterable[Any], strategy: Strategy) -> Iterator[tuple[Any, bool]]:
    """As many batches on every rank as the one with the most has; those that only fill up do not count."""
    source, filler = iter(batches), _NOTHING
    while True:
        batch = next(source, _NOTHING)
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
        yield filler, batch is not _NOTHING
