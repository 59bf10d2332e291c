"""The user's metrics over a validation set: each equals what one process would compute over all of its samples.

A function gets the outputs and targets of the whole set at once, on the host of rank 0. An object of torchmetrics is
updated batch by batch where the batches are; at the end its states are brought together, also from ranks that had
fewer batches, or none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from frameworm.data.places import Place
from frameworm.engine.step.calls import takes_target_first
from frameworm.engine.step.outputs import Outputs, full_precision, on_host
from frameworm.errors import ConfigError, FramewormError
from frameworm.launch.process_group import broadcast_object, gather_objects
from frameworm.parallel.strategy import Strategy

_NAME = re.compile(r"[A-Za-z0-9_][\w.@-]*")
_TAKEN = ("loss", "accuracy")


def check_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics by name, a collection of torchmetrics taken apart.

    Raises:
        ConfigError: One is neither a function nor an object with update and compute, or its name is taken.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) and not _is_collection(metrics):
        raise ConfigError(f'metrics must be a mapping, such as {{"f1": f1_score}}, not a {type(metrics).__name__}')
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        if _is_collection(metric):
            found.update((f"{name}_{inner}", item) for inner, item in metric.items())
        else:
            found[name] = metric
    for name, metric in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"metrics: {name!r} is no name; use letters, digits and _ . @ -")
        if name in _TAKEN:
            raise ConfigError(f"metrics: {name} is what validation computes itself; choose another name")
        if isinstance(metric, type):
            raise ConfigError(f"metrics: {name} is the class {metric.__name__}: give an object of it")
        if not _is_running(metric) and not callable(metric):
            raise ConfigError(
                f"metrics: {name} must be a function of (outputs, targets) or an object with update and compute, not a "
                f"{type(metric).__name__}"
            )
    return found


def higher_is_better(metric: Any) -> bool | None:
    """What an object of torchmetrics says about itself; None of others."""
    found = getattr(metric, "higher_is_better", None)
    return found if isinstance(found, bool) else None


class Metrics:
    """Computes metrics over one validation set after the other.

    Args:
        given: As `check_metrics` returned them.
        strategy: Where and with whom this rank computes.

    Raises:
        ConfigError: A metric cannot be brought together from several ranks.
    """

    def __init__(self, given: Mapping[str, Any], strategy: Strategy) -> None:
        self._strategy = strategy
        self._running = {name: metric for name, metric in given.items() if _is_running(metric)}
        self._functions = {name: metric for name, metric in given.items() if name not in self._running}
        self._names = list(given)
        self._outputs = Outputs()
        for name, metric in self._running.items():
            if strategy.world_size > 1 and not _with_states(metric):
                raise ConfigError(
                    f"metrics: {name} ({type(metric).__name__}) has update and compute, but no states that can be "
                    "brought together from several ranks; make it a metric of torchmetrics, or a function of (outputs, "
                    "targets)"
                )

    def __bool__(self) -> bool:
        return bool(self._names)

    def start(self) -> None:
        """A validation begins."""
        self._outputs = Outputs()
        for metric in self._running.values():
            if callable(getattr(metric, "reset", None)):
                metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(self._strategy.device)

    def add(self, output: Any, target: Any, places: list[Place]) -> None:
        """Take in one batch.

        Raises:
            ConfigError: There is no output, or no target, for a metric to be about.
        """
        if output is None or target is None:
            what = "its loss alone" if output is None else "an output, but the batch has no target"
            raise ConfigError(
                f"metrics need outputs and targets, and of this model there is {what}: return (loss, outputs) from the "
                "model, or write loss_fn(output, target) for batches (input, target)"
            )
        if self._functions:
            self._outputs.add((on_host(output), on_host(target)), places)
        for metric in self._running.values():
            metric.update(full_precision(output), target)

    def finish(self) -> dict[str, float]:
        """The value of each metric over all samples of all ranks; all ranks must call it and get the same.

        Raises:
            ConfigError: A metric is not one number.
        """
        found: dict[str, float] | Exception = {}
        states = gather_objects([_states_of(metric) for metric in self._running.values()])
        try:
            joined = self._outputs.joined() if self._functions else None
            if self._strategy.rank == 0:
                found = self._compute(joined, states or [])
        except Exception as error:  # the other ranks wait for it
            found = error
        if self._strategy.world_size > 1:
            found = broadcast_object(_sendable(found))
        self._outputs = Outputs()
        if isinstance(found, Exception):
            raise found
        return found

    def _compute(self, joined: Any, states: list[list[Any]]) -> dict[str, float]:
        values: dict[str, dict[str, float]] = {}
        for name, function in self._functions.items():
            values[name] = _numbers(name, function(*reversed(joined) if takes_target_first(function) else joined))
        for place, (name, metric) in enumerate(self._running.items()):
            ranks = [own[place] for own in states] if self._strategy.world_size > 1 else []
            with _brought_together(metric, ranks, self._strategy.device):
                values[name] = _numbers(name, metric.compute())
        return {key: value for name in self._names for key, value in values[name].items()}


def _is_running(metric: Any) -> bool:
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def _is_collection(metrics: Any) -> bool:
    """Whether this is a MetricCollection: metrics by name that are no plain mapping."""
    return _is_running(metrics) and callable(getattr(metrics, "items", None))


def _with_states(metric: Any) -> list[Any]:
    """A metric of torchmetrics, and those inside of it: what holds states, and says how they are joined."""
    modules: Iterator[Any] = metric.modules() if isinstance(metric, nn.Module) else iter(())
    return [item for item in modules if isinstance(getattr(item, "_reductions", None), dict)]


def _states_of(metric: Any) -> list[dict[str, Any]]:
    """The states of a metric on the host, to be sent to rank 0; a rank without batches has none."""
    return [
        {name: on_host(getattr(item, name)) for name in item._reductions} if item.update_called else {}
        for item in _with_states(metric)
    ]


@contextlib.contextmanager
def _brought_together(metric: Any, ranks: list[list[dict[str, Any]]], device: torch.device) -> Iterator[None]:
    """Meanwhile a metric holds the states of all ranks, joined as it says, and does not ask the others itself."""
    kept = []
    for place, item in enumerate(_with_states(metric)):
        names = ("distributed_available_fn", "_update_count", *item._reductions)
        kept.append((item, {name: getattr(item, name) for name in names}))
        item.distributed_available_fn = _alone
        held = [own[place] for own in ranks if own[place]]
        item._update_count = max(item._update_count, len(held))
        for name, reduction in item._reductions.items() if held else ():
            setattr(item, name, _joined([state[name] for state in held], reduction, device))
    try:
        yield
    finally:
        for item, before in reversed(kept):  # a wrapper and what it wraps may hold the same states
            for name, value in before.items():
                setattr(item, name, value)


def _joined(values: list[Any], reduction: Any, device: torch.device) -> Any:
    """One state of several ranks: tensors are stacked, lists joined end to end, and then reduced."""
    joined: Any = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if isinstance(values[0], torch.Tensor):
        joined = torch.stack(values)
    if reduction is not None and len(joined):
        joined = reduction(joined)
    return [part.to(device) for part in joined] if isinstance(joined, list) else joined.to(device)


def _alone() -> bool:
    return False


def _numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's value as a number, or several under names of their own."""
    if isinstance(value, Mapping):
        return {
            key: number for inner, item in value.items() for key, number in _numbers(f"{name}_{inner}", item).items()
        }
    try:
        one = value.item() if callable(getattr(value, "item", None)) else value
        return {name: float(one)}
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        told = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
        raise ConfigError(f"metric {name} must be one number, or a mapping of numbers, not a {told}") from None


def _sendable(found: dict[str, float] | Exception) -> dict[str, float] | Exception:
    """An error as the other ranks can raise it: what the user's code raised need not survive a pickle."""
    if isinstance(found, Exception) and not isinstance(found, FramewormError):
        return ConfigError(f"a metric failed: {type(found).__name__}: {found}")
    return found
