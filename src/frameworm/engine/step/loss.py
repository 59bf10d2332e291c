"""From a batch to a loss: the ways a model and a loss function may be written.

The way is found once, from the loss function's and the model's signatures and the first batch; after that a step costs
no inspection. `targets` and `output` are handed on where they are known, so that validation can count correct answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from frameworm.errors import LossError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
IGNORED_TARGET = -100
_PAIRS = (tuple, list)  # what loaders mostly yield, told apart without asking an abstract class

THREE_WAYS = """frameworm needs a loss. Three ways to give it one:
  1. Trainer(model, optimizer, loss_fn=f) with f(output, target) for batches (input, target);
  2. Trainer(model, optimizer, loss_fn=f) with f(model, batch), the first parameter named `model`;
  3. a model that returns a scalar loss, or an object with `.loss`.
With integer targets and class scores as output, cross-entropy is used without asking."""


@dataclass(slots=True)
class Computed:
    """The loss of one micro-batch."""

    loss: torch.Tensor
    count: torch.Tensor | float | None  # what the loss is the mean over, if the loss says so
    output: Any
    target: torch.Tensor | None


class LossFunction:
    """Computes the loss of a batch in the way that fits; the way is settled at the first batch."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self._model = model  # unwrapped: its signature tells how batches are meant
        self._loss_fn = loss_fn
        self._takes_model = loss_fn is not None and _first_parameter(loss_fn) == "model"
        self._forward_names = _parameter_names(model.forward)
        self._takes_any_keyword = _takes_any_keyword(model.forward)
        self._found_to_classify = False
        self._way: Callable[[nn.Module, Any], Computed] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Computed:
        """Loss of a batch; `model` is the module to call, which may be wrapped."""
        if self._way is None:
            self._way = self._find_way(batch)
        return self._way(model, batch)

    def _find_way(self, batch: Any) -> Callable[[nn.Module, Any], Computed]:
        if self._takes_model:
            return self._by_user_whole
        target = self._split(batch)[1]
        if self._loss_fn is not None:
            if target is None:
                raise LossError(
                    f"loss_fn(output, target) needs a target, but {_describe(batch)} has none; give batches "
                    f"(input, target), a mapping with one of {', '.join(TARGET_KEYS)}, or write loss_fn(model, batch)"
                )
            return self._by_user_pair
        if self._model_takes_target(batch):
            return self._by_model
        if target is None:
            return self._by_model
        return self._by_output

    def _model_takes_target(self, batch: Any) -> bool:
        """Whether the model wants the target itself, and so is expected to return its own loss."""
        if isinstance(batch, Mapping):
            key = _target_key(batch)
            return key is not None and key in self._forward_names
        if _is_sequence(batch):
            return len(batch) > 1 and _required_parameters(self._model.forward) >= len(batch)
        return False

    def _by_user_whole(self, model: nn.Module, batch: Any) -> Computed:
        assert self._loss_fn is not None
        loss, count = _loss_and_count(self._loss_fn(model, batch), "loss_fn(model, batch)")
        return Computed(loss, count, None, None)

    def _by_user_pair(self, model: nn.Module, batch: Any) -> Computed:
        assert self._loss_fn is not None
        inputs, target = self._split(batch)
        output = self._call(model, inputs)
        loss, count = _loss_and_count(self._loss_fn(_scores(output), target), "loss_fn(output, target)")
        return Computed(loss, count, output, target)

    def _by_model(self, model: nn.Module, batch: Any) -> Computed:
        output = self._call(model, batch, whole=True)
        loss = _own_loss(output)
        if loss is None:
            raise LossError(f"the model returned {_describe(output)} for {_describe(batch)}.\n{THREE_WAYS}")
        target = self._split(batch)[1]
        return Computed(loss, None, output if _scores(output) is not output else None, target)

    def _by_output(self, model: nn.Module, batch: Any) -> Computed:
        inputs, target = self._split(batch)
        output = self._call(model, inputs)
        # A tensor of several dimensions is neither a loss nor something that holds one.
        scores = output
        if not isinstance(output, torch.Tensor) or output.dim() < 2:
            own = _own_loss(output)
            if own is not None:
                return Computed(own, None, output, target)
            scores = _scores(output)
        if not self._found_to_classify:
            if not _classifies(scores, target):
                raise LossError(
                    f"the model returned {_describe(output)} for a target {_describe(target)}.\n{THREE_WAYS}"
                )
            self._found_to_classify = True
        loss, count = _cross_entropy(scores, target)
        return Computed(loss, count, output, target)

    def _split(self, batch: Any) -> tuple[Any, Any]:
        """The batch as (inputs, target); target None when there is none."""
        if type(batch) in _PAIRS and len(batch) == 2:
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            key = _target_key(batch)
            if key is None:
                return batch, None
            return {name: value for name, value in batch.items() if name != key}, batch[key]
        if _is_sequence(batch) and len(batch) >= 2:
            return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
        if _is_sequence(batch) and len(batch) == 1:
            return batch[0], None
        return batch, None

    def _call(self, model: nn.Module, inputs: Any, whole: bool = False) -> Any:
        if isinstance(inputs, torch.Tensor):
            return model(inputs)
        if isinstance(inputs, Mapping):
            # A model that takes one mapping gets it whole; one that names the keys gets them by name.
            if self._takes_any_keyword or not self._forward_names.isdisjoint(inputs):
                return model(**inputs)
            return model(inputs)
        if isinstance(inputs, tuple) or (whole and _is_sequence(inputs)):
            return model(*inputs)
        return model(inputs)


def _cross_entropy(scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mean over samples; over real positions when there is one target per position."""
    if target.ndim == 1:
        return F.cross_entropy(scores, target), None
    if scores.shape[:-1] == target.shape:
        scores = scores.flatten(0, -2)
        target = target.flatten()
    loss = F.cross_entropy(scores, target, ignore_index=IGNORED_TARGET)
    return loss, (target != IGNORED_TARGET).sum()


def _classifies(scores: Any, target: Any) -> bool:
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    if target.is_floating_point() or target.dtype == torch.bool or scores.ndim < 2:
        return False
    per_position = scores.ndim == target.ndim + 1
    return per_position and (scores.shape[:-1] == target.shape or scores.shape[:1] + scores.shape[2:] == target.shape)


def _loss_and_count(result: Any, source: str) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    count = None
    if isinstance(result, (tuple, list)) and len(result) == 2:
        result, count = result
    if not isinstance(result, torch.Tensor) or (result.ndim > 0 and result.numel() != 1):
        raise LossError(
            f"{source} returned {_describe(result)}; return one number as a tensor (the mean over the batch), "
            "or (loss, count)"
        )
    return result.reshape(()), count


def _own_loss(output: Any) -> torch.Tensor | None:
    """The scalar a model returned as its loss, if it did."""
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point() and loss.ndim <= 1:
        return loss.reshape(())
    return None


def _scores(output: Any) -> Any:
    """The tensor of scores inside a model's output."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def correct_answers(computed: Computed) -> tuple[torch.Tensor, int] | None:
    """How many samples were classified right, and of how many; None when this is not a classification.

    The first is a tensor on the device, so that counting does not make the host wait.
    """
    scores = _scores(computed.output)
    target = computed.target
    if not _classifies(scores, target) or target is None or target.ndim != 1:
        return None
    return (scores.argmax(-1) == target).sum(), len(target)


def _target_key(batch: Mapping[str, Any]) -> str | None:
    return next((key for key in TARGET_KEYS if key in batch), None)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _first_parameter(function: Callable[..., Any]) -> str | None:
    parameters = _signature(function)
    return parameters[0].name if parameters else None


def _parameter_names(function: Callable[..., Any]) -> set[str]:
    return {item.name for item in _signature(function) if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}


def _takes_any_keyword(function: Callable[..., Any]) -> bool:
    return any(item.kind is item.VAR_KEYWORD for item in _signature(function))


def _required_parameters(function: Callable[..., Any]) -> int:
    return sum(
        item.default is item.empty and item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
        for item in _signature(function)
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {', '.join(map(str, value))}"
    if _is_sequence(value):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
