"""Validation and prediction: every sample once, over all ranks; restores the model's mode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.data.batches.sizes import UNKNOWN
from frameworm.data.places import Place, places_of
from frameworm.data.prefetch import move_batch, tensors_in
from frameworm.data.steps import SizedBatch, sized
from frameworm.engine.model.modes import restore_modes, start_evaluation
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.metrics import Metrics
from frameworm.engine.step.outputs import Outputs, on_host
from frameworm.errors import DataError
from frameworm.launch.process_group import all_reduce_sums, broadcast_object
from frameworm.parallel.strategy import Strategy

NO_ACCURACY = (
    "this run has no accuracy: its loss does not take integer targets, one per sample, for classes of the model's "
    "output (accuracy=True counts right answers anyway, if there are class scores)"
)
_NOTHING: Any = object()


class Evaluation(NamedTuple):
    """Result of a validation over all ranks."""

    loss: float
    accuracy: float | None
    samples: int
    note: str | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never modified


def recorded_metrics(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return a validation's metrics by the names under which an epoch records them.

    Args:
        results: Results by name of the validation set; a single set has no name. Metrics of the first set are also
            recorded without its name, like its loss and accuracy.
    """
    found: dict[str, float] = {}
    for place, (name, result) in enumerate(results.items()):
        if place == 0:
            found.update((f"val_{metric}", value) for metric, value in result.metrics.items())
        if name:
            own = {"loss": result.loss, "accuracy": result.accuracy, **result.metrics}
            found.update((f"val_{name}_{metric}", value) for metric, value in own.items() if value is not None)
    return found


def why_unwatched(setting: str, metric: str, there: Collection[str]) -> str:
    """Explain that a setting watches a metric that validation does not produce."""
    if metric.endswith("accuracy"):
        return f"{setting} watches {metric}, and {NO_ACCURACY}"
    known = ", ".join(["val_loss", "train_loss", *there])
    return f"{setting} watches {metric}, which this training does not have; there are: {known}"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_function: LossFunction,
    precision: Precision,
    strategy: Strategy,
    metrics: Metrics | None = None,
) -> Evaluation:
    """Compute mean loss, accuracy if the model classifies, and the user's metrics over all samples of all ranks.

    The unwrapped model is called: ranks may have different numbers of batches, so forward must not contain collectives.
    If it does, because sharded parameters are gathered, all ranks make the same number of calls.
    """
    strategy.sync_buffers(model)
    modes = start_evaluation([model, *strategy.beside.modules.values()])
    # loss x count, count, right answers, answers, samples; loss and number of batches; batches of unknown size
    sums = torch.zeros(8, dtype=torch.float64, device=strategy.device)
    kind = ""
    places = None if not metrics else _Placed(batches, strategy)
    if metrics:
        metrics.start()
        loss_function.keeps_output = True
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
            if metrics and places is not None:
                output = None if computed.output is None else loss_function.answer(computed)
                metrics.add(output, computed.target, places.next(size, output))
    finally:
        loss_function.keeps_output = False
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
    found = metrics.finish() if metrics else {}
    return Evaluation(mean, right / answered if answered else None, int(samples_seen), note, found)


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[Any], loss_function: LossFunction, precision: Precision, strategy: Strategy
) -> Any:
    """Return the model's outputs for all samples of all ranks, in order, on every rank's host; see `Outputs.joined`.

    Raises:
        DataError: If the loader is empty, or each rank reads its own samples in an unknown order.
    """
    strategy.sync_buffers(model)
    placed, outputs = _Placed(batches, strategy), Outputs()
    if not placed.known:
        raise DataError(
            "each rank reads samples of its own from this loader, so its predictions cannot be put in order; pass a "
            "DataLoader without a distributed sampler, which is split here, or a data set that does not shard itself"
        )
    modes = start_evaluation([model])
    try:
        for (batch, size), counts in _in_step(batches, strategy) if strategy.shards_parameters else _alone(batches):
            with precision.autocast:
                output = loss_function.output_of(model, batch)
            if counts:
                outputs.add(on_host(output), placed.next(size, output))
    finally:
        restore_modes(modes)
        strategy.after_evaluation(model)
    found: Any = None
    try:
        found = outputs.joined()
    except DataError as error:  # the other ranks wait for the result
        found = error
    found = broadcast_object(found)
    if isinstance(found, DataError):
        raise found
    return found


class _Placed:
    """Tells for each batch in turn where its samples belong; if unknown, after those of earlier ranks."""

    def __init__(self, batches: Any, strategy: Strategy) -> None:
        found = places_of(batches, strategy.rank, strategy.world_size)
        self.known = found is not None
        self._places = repeat(None) if found is None else found
        self._rank = strategy.rank
        self._passed = 0

    def next(self, size: int | None, output: Any) -> list[Place]:
        """Return the places of the next batch, which has `size` samples; None means one per row of the output."""
        places = next(self._places, None)
        if size is None:
            first = next(tensors_in(output), None)
            size = 1 if first is None or not first.dim() else first.size(0)
        if places is not None:
            return places(size)
        self._passed += size
        return [(self._rank, self._passed - size + item) for item in range(size)]


def _alone(batches: Iterable[Any]) -> Iterator[tuple[SizedBatch, bool]]:
    return ((batch, True) for batch in sized(batches))


def _in_step(batches: Iterable[Any], strategy: Strategy) -> Iterator[tuple[SizedBatch, bool]]:
    """Yield as many batches on every rank as the longest has; fillers are marked as not counting."""
    source, filler = sized(batches), _NOTHING
    while True:
        batch, size = next(source, (_NOTHING, None))
        flags = [0.0] * strategy.world_size
        flags[strategy.rank] = float(batch is not _NOTHING)
        have = all_reduce_sums(flags, strategy.device)
        if not any(have):
            return
        if filler is _NOTHING and not all(have):
            # A rank can be without any batch only in the first round, and then all ranks see it.
            donor = next(rank for rank, count in enumerate(have) if count)
            shared = broadcast_object(move_batch(batch, "cpu") if strategy.rank == donor else None, donor)
            filler = move_batch(shared, strategy.device)
        if batch is not _NOTHING:
            filler = batch
        yield (filler, size), batch is not _NOTHING
