"""Schedule-free optimizers (package schedulefree): the weights to use differ from those that are trained.

Such an optimizer keeps a second point `z` beside every parameter; the weights to use are a mean of both. Its own
`optimizer.eval()` swaps them in place, which rounds in both directions. Here the mean is computed into the model for as
long as it is needed, and the training weights are restored bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.config.schema import Config
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.errors import ConfigError
from frameworm.parallel.shards import HeldState, own_part
from frameworm.parallel.strategy import Strategy


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps one set of weights for training and another for use."""
    has_modes = callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    return has_modes and all("train_mode" in group and "betas" in group for group in optimizer.param_groups)


class ScheduleFreeWeights(AveragedWeights):
    """The weights to use, computed on demand, so that they take no memory of their own.

    Args:
        model: The model as the strategy has placed it.
        optimizer: The optimizer that updates it.
        strategy: Knows which part of which parameters this rank updates.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        super().__init__(0.0, model, optimizer, strategy)
        self._given = strategy.given(optimizer)
        self._given.train()  # type: ignore[attr-defined]

    @property
    def note(self) -> str:
        name = type(self._given).__name__
        return f"validation scores the averaged weights of {name}; the model keeps the trained ones"

    def _begin(self, names: Iterable[str]) -> None:
        self._averaged.update((name, self._named[name]) for name in names)

    def update(self, skipped: Tensor | None) -> None:
        """Do nothing: the optimizer averages."""

    def take_over(self, earlier: AveragedWeights) -> None:
        """Do nothing: the optimizer's state holds everything."""

    def load_state(self, saved: dict[str, Any] | None) -> list[str]:
        """Do nothing: the optimizer's state holds everything."""
        return []

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the optimizer's second point to the current weights."""
        for parameter in self._averaged.values():
            other = self._given.state.get(parameter, {}).get("z")
            if other is not None:
                own_part(other).copy_(own_part(parameter))

    def _shares(self) -> dict[nn.Parameter, float]:
        """Weight of `z` in the mean that gives each parameter's weights to use."""
        return {item: 1 - 1 / group["betas"][0] for group in self._given.param_groups for item in group["params"]}

    @torch.no_grad()
    def _means(self) -> dict[str, Tensor]:
        shares, found = self._shares(), {}
        for name, parameter in self._averaged.items():
            other = self._given.state.get(parameter, {}).get("z")
            if self._strategy.owner_of(self._optimizer, parameter) in (None, self._strategy.rank):
                part = own_part(parameter)
                mean = part.clone() if other is None else part.lerp(own_part(other), shares[parameter])
                found[name] = mean
        return found

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        self._own = self._means()
        try:
            with super().in_place():
                yield
        finally:
            self._own = {}

    def held_state(self) -> HeldState:
        self._own = self._means()
        try:
            return super().held_state()
        finally:
            self._own = {}


def make_averages(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> AveragedWeights | None:
    """Create the weight averages that a config or an optimizer asks for; None if neither does.

    Raises:
        ConfigError: If both ask for them, or if a schedule-free optimizer would run on ranks with separate weights.
    """
    decay, given = config.training.ema, strategy.given(optimizer)
    if is_schedule_free(given):
        if decay is not None:
            raise ConfigError(f"training.ema: {type(given).__name__} averages the weights itself; leave it out")
        if strategy.keeps_own_copy:
            raise ConfigError("parallel.sync_every: above 1 every rank would average weights of its own; use 1")
        return ScheduleFreeWeights(model, optimizer, strategy)
    return None if decay is None else AveragedWeights(decay, model, optimizer, strategy)
