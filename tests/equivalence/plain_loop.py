"""The references: the training loop that everybody writes, and the same for a group of ranks, played by one process.

Nothing here knows frameworm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from recipe import EPOCHS, Recipe


@dataclass
class Trained:
    """What a training leaves behind.

    Attributes:
        state: Parameters and buffers of model and loss.
        rates: The first group's rate in every step.
        train_losses: The mean loss of each epoch.
        val_losses: The validation loss after each epoch.
        seen: The samples of each forward pass, by rank.
    """

    state: dict[str, torch.Tensor]
    rates: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    seen: list[list[list[int]]] = field(default_factory=list)


def train_plain(recipe: Recipe, accumulation: int, epochs: int = EPOCHS) -> Trained:
    """Train as a tutorial does; several micro-batches make the step that one large batch would have made."""
    model, optimizer, scheduler = recipe.model, recipe.optimizer, recipe.scheduler
    trained = Trained({})
    for epoch in range(epochs):
        sampler = getattr(recipe.train, "batch_sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        model.train()
        total = weight = 0.0
        for batches in _groups(recipe.train, accumulation):
            trained.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            counts = [recipe.count(batch) for batch in batches]
            for batch, count in zip(batches, counts):
                loss = recipe.loss(model, batch)
                (loss if len(batches) == 1 else loss * (count / sum(counts))).backward()
                total += loss.item() * count
                weight += count
            optimizer.step()
            if scheduler is not None and recipe.per == "step":
                scheduler.step()
        trained.train_losses.append(total / weight)
        _end_epoch(recipe, trained)
    trained.state, trained.seen = recipe.state(), [model.seen]
    return trained


def train_plain_ranks(recipe: Recipe, shares: list[list[list[list[list[int]]]]], seeds: list[int]) -> Trained:
    """Train as DDP does, without processes: every rank computes on its own micro-batches, gradients are averaged.

    A rank draws its own random numbers. The model has the buffers of rank 0, which are what DDP keeps.

    Args:
        shares: Samples by epoch, step, rank and micro-batch.
        seeds: The seed of each rank's random numbers.
    """
    model, optimizer, scheduler = recipe.model, recipe.optimizer, recipe.scheduler
    random = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    trained = Trained({})
    for steps in shares:
        if recipe.splits_itself:  # a DataLoader that is begun draws a random number for its workers
            for rank, state in enumerate(random):
                torch.set_rng_state(state)
                iter(recipe.train)
                random[rank] = torch.get_rng_state()
        model.train()
        total = weight = 0.0
        for step in steps:
            trained.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            everything = sum(recipe.count(recipe.batch_of(micro)) for share in step for micro in share)
            for rank, share in enumerate(step):
                buffers = [buffer.clone() for buffer in model.buffers()]
                torch.set_rng_state(random[rank])
                for micro in share:
                    batch = recipe.batch_of(micro)
                    loss, count = recipe.loss(model, batch), recipe.count(batch)
                    (loss * (count / everything)).backward()
                    total += loss.item() * count
                    weight += count
                random[rank] = torch.get_rng_state()
                if rank > 0:
                    for buffer, before in zip(model.buffers(), buffers):
                        buffer.copy_(before)
            optimizer.step()
            if scheduler is not None and recipe.per == "step":
                scheduler.step()
        trained.train_losses.append(total / weight)
        _end_epoch(recipe, trained)
    trained.state = recipe.state()
    return trained


def _end_epoch(recipe: Recipe, trained: Trained) -> None:
    """Validate, and step a scheduler that waits for the end of an epoch."""
    model = recipe.model
    model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for batch in recipe.validation:
            count = recipe.count(batch)
            total += recipe.loss(model, batch).item() * count
            weight += count
    trained.val_losses.append(total / weight)
    if recipe.scheduler is not None and recipe.per == "epoch":
        recipe.scheduler.step()
    if recipe.scheduler is not None and recipe.per == "metric":
        recipe.scheduler.step(trained.val_losses[-1])


def _groups(loader: Any, size: int) -> Iterator[list[Any]]:
    """So many batches at a time; the last group may be smaller."""
    batches = iter(loader() if callable(loader) else loader)
    while group := list(islice(batches, size)):
        yield group
