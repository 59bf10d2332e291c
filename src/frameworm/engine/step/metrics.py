"""The user's metrics over a validation set, equal to what one process would compute over all samples.

A function gets the outputs and targets of the whole set at once, on rank 0's host. A torchmetrics object is updated
batch by batch on each rank; at the end its states are joined, including those of ranks with fewer batches or none.
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
    """Validate metrics and return them by name, with torchmetrics collections expanded.

    Raises:
        ConfigError: If one is neither a function nor an object with update and compute, or its name is invalid or
            taken.
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
            raise ConfigError(f"metrics: {name!r} is not a name; use letters, digits and _ . @ -")
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
    """Return a torchmetrics object's `higher_is_better`; None if it has none."""
    found = getattr(metric, "higher_is_better", None)
    return found if isinstance(found, bool) else None


class Metrics:
    """Computes metrics over one validation set at a time.

    Args:
        given: The metrics, from `check_metrics`.
        strategy: The strategy of the run.

    Raises:
        ConfigError: If a metric cannot be combined over several ranks.
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
        """Begin a validation."""
        self._outputs = Outputs()
        for metric in self._running.values():
            if callable(getattr(metric, "reset", None)):
                metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(self._strategy.device)

    def add(self, output: Any, target: Any, places: list[Place]) -> None:
        """Add one batch.

        Raises:
            ConfigError: If there is no output or no target.
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
        """Return the value of each metric over all samples of all ranks. All ranks must call it and get the same.

        Raises:
            ConfigError: If a metric is not a number or a mapping of numbers.
        """
        found: dict[str, float] | Exception = {}
        states = gather_objects([_states_of(metric) for metric in self._running.values()])
        try:
            joined = self._outputs.joined() if self._functions else None
            if self._strategy.rank == 0:
                found = self._compute(joined, states or [])
        except Exception as error:  # the other ranks wait for the result
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
    """Whether this is a MetricCollection rather than a plain mapping."""
    return _is_running(metrics) and callable(getattr(metrics, "items", None))


def _with_states(metric: Any) -> list[Any]:
    """Return a torchmetrics object and those nested in it, which hold states and say how to join them."""
    modules: Iterator[Any] = metric.modules() if isinstance(metric, nn.Module) else iter(())
    return [item for item in modules if isinstance(getattr(item, "_reductions", None), dict)]


def _states_of(metric: Any) -> list[dict[str, Any]]:
    """Return a metric's states on the host, to send to rank 0; empty on a rank without batches."""
    return [
        {name: on_host(getattr(item, name)) for name in item._reductions} if item.update_called else {}
        for item in _with_states(metric)
    ]


@contextlib.contextmanager
def _brought_together(metric: Any, ranks: list[list[dict[str, Any]]], device: torch.device) -> Iterator[None]:
    """Put the joined states of all ranks into a metric, and keep it from synchronizing by itself."""
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
        for item, before in reversed(kept):  # a wrapper and the metric that it wraps may hold the same states
            for name, value in before.items():
                setattr(item, name, value)


def _joined(values: list[Any], reduction: Any, device: torch.device) -> Any:
    """Join one state of several ranks: stack tensors or concatenate lists, then reduce."""
    joined: Any = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if isinstance(values[0], torch.Tensor):
        joined = torch.stack(values)
    if reduction is not None and len(joined):
        joined = reduction(joined)
    return [part.to(device) for part in joined] if isinstance(joined, list) else joined.to(device)


def _alone() -> bool:
    return False


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Convert a metric's value to numbers by name."""
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
    """Wrap an error so that other ranks can raise it: the user's own error may not be picklable."""
    if isinstance(found, Exception) and not isinstance(found, FramewormError):
        return ConfigError(f"a metric failed: {type(found).__name__}: {found}")
    return found
