"""Validation: every sample once, sums over the ranks, nothing left changed in the model's mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.data.prefetch import batch_size_of
from frameworm.engine.loss import LossFunction, correct_answers
from frameworm.engine.precision import Precision
from frameworm.errors import DataError
from frameworm.parallel.strategy import Strategy


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
    """
    strategy.sync_buffers(model)
    was_training = model.training
    model.eval()
    # loss x count, count, right answers, answers, samples
    sums = torch.zeros(5, dtype=torch.float64, device=strategy.device)
    try:
        for batch in batches:
            with precision.autocast:
                computed = loss_function(model, batch)
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
        model.train(was_training)
    strategy.sum_over_ranks(sums)
    loss_sum, count_sum, right, answered, samples_seen = sums.tolist()
    if not samples_seen:
        raise DataError("the validation set is empty: give at least one sample, or no validation set")
    return Evaluation(
        loss_sum / count_sum if count_sum else float("nan"), right / answered if answered else None, int(samples_seen)
    )
