"""From a cell to live objects: what a user would build, and how a plain loop would use it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cells import Cell
from options import (
    BATCH,
    BATCHES,
    LAYERS,
    LOADERS,
    LOSSES,
    OPTIMIZERS,
    OUTPUTS,
    SAMPLES,
    SCHEDULERS,
    VALIDATION,
    Criterion,
    Network,
    Samples,
)
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 2
SEED = 7


@dataclass
class Recipe:
    """Everything that one training needs.

    Attributes:
        loss_fn: As a user hands it over: `(output, target)`, or `(model, batch)` where a batch shows no target.
        criterion: The module that holds the loss's own parameters.
        per: When the scheduler is to be stepped: per step, per epoch, or per epoch with the metric.
        loss: The loss of a model and a batch, as a plain loop writes it.
        count: What that loss is the mean over.
        batch_of: The batch that a loader makes of some samples.
        splits_itself: Whether ranks read the loader as it is.
    """

    model: Network
    optimizer: torch.optim.Optimizer
    scheduler: Any
    per: str
    train: Any
    validation: Any
    loss_fn: Callable[..., Any] | None
    criterion: nn.Module | None
    loss: Callable[[nn.Module, Any], torch.Tensor]
    count: Callable[[Any], float]
    batch_of: Callable[[list[int]], Any]
    splits_itself: bool = False

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers of model and loss, whole, with the rates the optimizer has in the end."""
        state = {f"model.{name}": item for name, item in self.model.state_dict().items()}
        if self.criterion is not None:
            state.update({f"loss.{name}": item for name, item in self.criterion.state_dict().items()})
        whole = {name: item.full_tensor() if hasattr(item, "full_tensor") else item for name, item in state.items()}
        whole["final rates"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        return {name: item.detach().clone() for name, item in whole.items()}

    def close(self) -> None:
        """Stop workers now; left to the garbage collector they would take seconds to end."""
        workers = getattr(self.train, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()


def steps_per_epoch(accumulation: int) -> int:
    """Steps in an epoch, the same on one rank and on two."""
    return math.ceil(math.ceil(SAMPLES / BATCH) / accumulation)


def build(cell: Cell, rank: int = 0) -> Recipe:
    """Run the part of a script that comes before the training."""
    torch.manual_seed(SEED)
    batch, loss, loader = BATCHES[cell.batch], LOSSES[cell.loss], LOADERS[cell.loader]
    output, optimizers, schedulers = OUTPUTS[cell.output], OPTIMIZERS[cell.optimizer], SCHEDULERS[cell.scheduler]
    forward = batch.forward_with_loss if loss.of_model else batch.forward
    model = _model_class(forward)(LAYERS[cell.layer], output, tied=optimizers.ties)
    criterion = loss.module()
    loss_fn = _loss_function(loss, batch, output, criterion) if loss.given else None
    if criterion is not None:
        criterion = loss_fn
    optimizer = optimizers.build(model, [] if criterion is None else list(criterion.parameters()))
    total_steps = EPOCHS * steps_per_epoch(cell.accumulation)
    scheduler = schedulers.build(optimizer, total_steps)
    samples = Samples(SAMPLES, SEED, augmented=loader.augments and cell.ranks == 1)
    train = loader.build(samples, BATCH // cell.ranks, batch.collate, rank, cell.ranks)

    def compute(called: nn.Module, given: Any) -> torch.Tensor:
        if loss.of_model:
            return output.loss(batch.call_with_loss(called, given))
        labels = batch.labels(batch.target(given))
        return loss.compute(criterion, output.scores(batch.call(called, given)), labels)

    return Recipe(
        model,
        optimizer,
        scheduler,
        schedulers.per,
        train,
        DataLoader(Samples(VALIDATION, SEED + 1), 4, collate_fn=batch.collate),
        loss_fn,
        criterion,
        compute,
        lambda given: loss.count(batch.labels(batch.target(given))),
        lambda indices: batch.collate([samples[index] for index in indices]),
        loader.splits_itself,
    )


@functools.cache
def _model_class(forward: Callable[..., Any]) -> type[Network]:
    """A model whose `forward` has the parameters that the batch asks for."""

    @functools.wraps(forward)
    def method(self: Network, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return type("Model", (Network,), {"forward": method})


def _loss_function(loss: Any, batch: Any, output: Any, criterion: nn.Module | None) -> Any:
    """The loss function that a user would hand over."""

    def of_pair(result: Any, target: Any, module: nn.Module | None = criterion) -> Any:
        labels = batch.labels(target)
        return loss.result(loss.compute(module, output.scores(result), labels), labels)

    def of_batch(model: nn.Module, given: Any, module: nn.Module | None = criterion) -> Any:
        return of_pair(batch.call(model, given), batch.target(given), module)

    if criterion is None:
        return (
            (lambda result, target: of_pair(result, target))
            if batch.has_target
            else (lambda model, given: of_batch(model, given))
        )

    class PairCriterion(Criterion):
        def forward(self, result: Any, target: Any) -> Any:
            return of_pair(result, target, self)

    class BatchCriterion(Criterion):
        def forward(self, model: nn.Module, given: Any) -> Any:
            return of_batch(model, given, self)

    return PairCriterion() if batch.has_target else BatchCriterion()
