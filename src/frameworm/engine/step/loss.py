"""From a batch to a loss: the ways a model and a loss function may be written.

The way is determined once, from the signatures of the loss function and the model and from the first batch; later steps
inspect nothing. Targets and outputs are passed on if known, so that validation can count correct answers.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from frameworm.data.batches.sizes import TARGET_KEYS
from frameworm.engine.model.padding_free import is_planned, take_plan
from frameworm.engine.step.accuracy import IGNORED_TARGET, ClassLosses, class_dimensions, right_answers
from frameworm.engine.step.calls import (
    describe,
    first_parameter,
    is_sequence,
    names_after,
    parameter_names,
    positional_parameters,
    takes_any_keyword,
)
from frameworm.errors import FramewormError, LossError

log = logging.getLogger("frameworm")
_NOTHING_MORE: Mapping[str, Any] = {}
WRONG_KIND = (TypeError, AttributeError, LookupError)  # what Python raises for a value of the wrong kind
_PAIRS = (tuple, list)  # what loaders mostly yield, checked without an abstract class

THREE_WAYS = """frameworm needs a loss. Three ways to give it one:
  1. Trainer(model, optimizer, loss_fn=f) with f(output, target) for batches (input, target);
  2. Trainer(model, optimizer, loss_fn=f) with f(model, batch), the first parameter named `model`;
  3. a model that returns a scalar loss, an object or mapping with `loss`, or a tuple with its loss first.
With integer targets and class scores as output, cross-entropy is used without asking."""

RETURNS = (
    "return one number as a tensor (the mean over the batch): alone, as `loss` in a mapping or object, or first in a "
    "tuple. A number after it is the count that the loss averages over: a whole number, or a float above 1 at first. "
    'Anything else after the loss is ignored, such as (loss, outputs) or (loss, {"accuracy": value}). A fractional '
    'weight needs a name: {"loss": loss, "count": 7.5}'
)


@dataclass(slots=True)
class Computed:
    """Loss, output and target of one micro-batch."""

    loss: torch.Tensor
    count: torch.Tensor | float | None  # what the loss is averaged over, if the loss function returns it
    output: Any
    target: torch.Tensor | None


class LossFunction:
    """Computes the loss of a batch in the way that fits, which the first batch determines.

    Args:
        model: The unwrapped model, whose signature shows how to pass batches.
        loss_fn: As for `Trainer`.
        accuracy: Whether validation counts right answers; auto does if the loss treats the target as a class.

    Attributes:
        notes: What the summary says about the loss.
        first_look: Called once, with the first batch to compute without padding and a function that computes a loss.
        keeps_output: Whether to capture the model's output and the target even if loss_fn(model, batch) calls it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        accuracy: bool | Literal["auto"] = "auto",
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        self._takes_model = called is not None and first_parameter(called) == "model"
        self._forward_names = parameter_names(model.forward)
        self._required, self._most = positional_parameters(model.forward)
        self._takes_any_keyword = takes_any_keyword(model.forward)
        self._target_name: str | None = None
        self._class_dimension: int | None = None
        self._counts: bool | None = None
        self._takes_logits: bool | None = None
        self._way: Callable[[nn.Module, Any], Computed] | None = None
        self._accuracy = accuracy
        self._scoring: tuple[int, int] | None = None  # dimension of the classes, and ignored target
        self._asked_for_scoring = not self.may_score
        self.notes: list[str] = []
        self.first_look: Callable[[Any, Callable[[Any], torch.Tensor]], None] | None = None
        self.keeps_output = False
        self._asks_whole = False
        if accuracy is True and self._takes_model:
            raise LossError(
                "accuracy=True needs to see the model's output: write loss_fn(output, target) instead of "
                "loss_fn(model, batch), or leave accuracy out"
            )

    @property
    def may_score(self) -> bool:
        """Whether there may be an accuracy; certain only after the first validation batch."""
        return self._accuracy is not False and not self._takes_model

    def __call__(self, model: nn.Module, batch: Any) -> Computed:
        """Compute the loss of a batch; `model` is the module to call, which may be wrapped."""
        if self.first_look is not None and is_planned(batch):
            look, self.first_look = self.first_look, None
            look(batch, lambda given: self(self._model, given).loss)
        batch = take_plan(batch)
        if self._way is None:
            self._way = self._find_way(batch)
            if self._loss_fn is None and self._most == 1 and not isinstance(batch, torch.Tensor):
                return self._by_part_or_whole(model, batch, self._way)
        return self._way(model, batch)

    def _by_part_or_whole(
        self, model: nn.Module, batch: Any, by_part: Callable[[nn.Module, Any], Computed]
    ) -> Computed:
        """Compute the first batch of a model with one parameter, which may be the input or the whole batch."""
        random = torch.get_rng_state()
        try:
            return by_part(model, batch)
        except (*WRONG_KIND, RuntimeError, ValueError) as error:
            if isinstance(error, FramewormError) or "memory" in str(error):
                raise
            torch.set_rng_state(random)
            computed = None
            try:
                computed = self._by_whole(model, batch)
            except LossError:
                raise
            except (*WRONG_KIND, RuntimeError, ValueError):
                log.debug("the model takes neither the input nor the whole batch", exc_info=True)
            if computed is None:
                raise
        self._way = self._by_whole
        return computed

    def _by_whole(self, model: nn.Module, batch: Any) -> Computed:
        return self._own(model(batch), batch)

    def output_of(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch, without a loss: its logits if it has any, else all that it returns.

        The batch's target, if any, is not passed unless the model requires it.
        """
        batch = take_plan(batch)
        inputs, _ = self._split(batch)
        if self._needs_all_of(batch, inputs):
            inputs = _Inputs(batch)
        if not self._asks_whole:
            try:
                return _logits(self._call(model, inputs))
            except (*WRONG_KIND, RuntimeError, ValueError) as error:
                if self._most != 1 or isinstance(batch, torch.Tensor) or "memory" in str(error):
                    raise
                try:
                    output = model(batch)
                except (*WRONG_KIND, RuntimeError, ValueError):
                    log.debug("the model takes neither the input nor the whole batch", exc_info=True)
                    output = None
                if output is None:
                    raise
                self._asks_whole = True
                return _logits(output)
        return _logits(model(batch))

    def answer(self, computed: Computed) -> Any:
        """Return what a metric gets of a model's output: what the loss was computed from."""
        output = computed.output
        if self._way == self._by_user_pair:
            return _logits(output) if self._takes_logits else output
        found = _logits(output) if self._way == self._by_user_whole else _scores(output)
        return None if _is_scalar(found) else found  # a loss is not an output

    def scored(self, model: nn.Module, batch: Any) -> tuple[Computed, tuple[torch.Tensor, torch.Tensor] | None]:
        """Compute the loss of a batch, and if there are class scores, the numbers of right and of all answers."""
        if self._asked_for_scoring:
            computed = self(model, batch)
        else:
            self._asked_for_scoring = True
            computed, self._scoring = self._watched(model, batch)
        if self._scoring is None or computed.target is None:
            return computed, None
        return computed, right_answers(_scores(computed.output), computed.target, *self._scoring)

    def _watched(self, model: nn.Module, batch: Any) -> tuple[Computed, tuple[int, int] | None]:
        """Compute the first validation batch's loss; also return how to count answers from now on."""
        target = self._split(batch)[1]
        watch = None
        by_class = isinstance(target, torch.Tensor) and target.ndim == 1 and not target.is_floating_point()
        if by_class and self._accuracy == "auto" and self._class_dimension is not None:
            # Training has chosen our own cross-entropy; observing a loss would import torch's compiler.
            return self(model, batch), (self._class_dimension, IGNORED_TARGET)
        if by_class:
            watch = ClassLosses(target)
            with watch:
                computed = self(model, batch)
        else:
            computed = self(model, batch)
        scores = _scores(computed.output)
        dimensions = class_dimensions(scores, target)
        if self._accuracy is True:
            if not dimensions:
                raise LossError(
                    f"accuracy=True, but {describe(computed.output)} for a target {describe(target)} is not a set of "
                    "class scores, which take integer targets and scores for at least two classes"
                )
            return computed, (self._class_dimension or dimensions[0], IGNORED_TARGET)
        ignored = None if watch is None or not dimensions else watch.ignored_target(scores)
        return computed, None if ignored is None else (dimensions[0], ignored)

    def _find_way(self, batch: Any) -> Callable[[nn.Module, Any], Computed]:
        if self._takes_model:
            return self._by_user_whole
        inputs, target = self._split(batch)
        if self._loss_fn is not None:
            if target is None:
                raise LossError(
                    f"loss_fn(output, target) needs a target, but {describe(batch)} has none; give batches "
                    f"(input, target), a mapping with one of {', '.join(TARGET_KEYS)}, or write loss_fn(model, batch)"
                )
            return self._by_user_pair
        self._target_name = self._find_target_name(batch, inputs)
        if target is None or (self._target_name is None and self._needs_all_of(batch, inputs)):
            return self._by_model
        return self._by_output

    def _find_target_name(self, batch: Any, inputs: Any) -> str | None:
        """Find the model's parameter for the target; such a model is expected to return its own loss."""
        if isinstance(batch, Mapping):
            key = _target_key(batch)
            return key if key in self._forward_names or self._takes_any_keyword else None
        taken = len(self._arguments(inputs))
        return next((name for name in TARGET_KEYS if name in names_after(self._model.forward, taken)), None)

    def _needs_all_of(self, batch: Any, inputs: Any) -> bool:
        """Whether the model requires every item of the batch, including the last."""
        needed = self._required
        return is_sequence(batch) and needed >= len(batch) > 1 and len(self._arguments(inputs)) < needed

    def _by_user_whole(self, model: nn.Module, batch: Any) -> Computed:
        assert self._loss_fn is not None
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda *call: outputs.append(call[-1])) if self.keeps_output else None
        try:
            loss, count = self._loss_and_count(self._loss_fn(model, batch), "loss_fn(model, batch)")
        finally:
            if hook is not None:
                hook.remove()
        if len(outputs) > 1:
            raise LossError(
                f"loss_fn(model, batch) calls the model {len(outputs)} times, so it is unclear which output a metric "
                "means; write loss_fn(output, target), or give no metrics"
            )
        if not outputs:
            return Computed(loss, count, None, None)
        return Computed(loss, count, outputs[0], self._split(batch)[1])

    def _by_user_pair(self, model: nn.Module, batch: Any) -> Computed:
        assert self._loss_fn is not None
        inputs, target = self._split(batch)
        output = self._call(model, inputs)
        loss, count = self._loss_and_count(self._apply(output, target), "loss_fn(output, target)")
        return Computed(loss, count, output, target)

    def _apply(self, output: Any, target: Any) -> Any:
        """Call the loss function with the model's output, or with its logits if it does not accept the whole."""
        assert self._loss_fn is not None
        logits = _logits(output)
        if logits is output or self._takes_logits is False:
            return self._loss_fn(output, target)
        if self._takes_logits:
            return self._loss_fn(logits, target)
        try:
            result = self._loss_fn(output, target)
        except WRONG_KIND:
            result = self._loss_fn(logits, target)
            self._takes_logits = True
        else:
            self._takes_logits = False
        return result

    def _by_model(self, model: nn.Module, batch: Any) -> Computed:
        spread = is_sequence(batch) and (self._most > 1 or len(batch) == 1)
        output = self._call(model, _Inputs(batch) if spread else batch)
        return self._own(output, batch)

    def _own(self, output: Any, batch: Any) -> Computed:
        """Extract the loss from a model's output."""
        loss = _own_loss(output, anywhere=True)
        if loss is None:
            raise LossError(f"the model returned {describe(output)} for {describe(batch)}.\n{THREE_WAYS}")
        return Computed(loss, None, None if isinstance(output, torch.Tensor) else output, self._split(batch)[1])

    def _by_output(self, model: nn.Module, batch: Any) -> Computed:
        inputs, target = self._split(batch)
        name = self._target_name
        try:
            output = self._call(model, inputs) if name is None else self._call(model, inputs, {name: target})
        except TypeError as error:
            # For a forward(**kwargs), only a call shows whether it takes the target.
            if name in self._forward_names or f"unexpected keyword argument '{name}'" not in str(error):
                raise
            name = self._target_name = None
            output = self._call(model, inputs)
        # A tensor with several dimensions neither is a loss nor contains one.
        scores = output
        if not isinstance(output, torch.Tensor) or output.dim() < 2:
            own = _own_loss(output, anywhere=name is not None)
            if own is not None:
                return Computed(own, None, output, target)
            scores = _scores(output)
        if self._class_dimension is None:
            self._class_dimension = self._find_class_dimension(output, scores, target)
        loss, count = _cross_entropy(scores, target, self._class_dimension)
        return Computed(loss, count, output, target)

    def _find_class_dimension(self, output: Any, scores: Any, target: Any) -> int:
        dimensions = class_dimensions(scores, target)
        unclear = isinstance(output, _PAIRS) and any(_is_scalar(item) for item in output)
        if not dimensions or unclear:
            raise LossError(f"the model returned {describe(output)} for a target {describe(target)}.\n{THREE_WAYS}")
        if len(dimensions) > 1:
            note = (
                f"scores of shape {tuple(scores.shape)} are read as torch's losses read them, with the classes in "
                "dimension 1; give a loss_fn if they are in the last"
            )
            self.notes.append(note)
            log.warning("%s", note)
        return dimensions[0]

    def _split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into (inputs, target); the target is None if there is none."""
        if type(batch) in _PAIRS and len(batch) == 2:
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            key = _target_key(batch)
            if key is None:
                return batch, None
            return {name: value for name, value in batch.items() if name != key}, batch[key]
        if is_sequence(batch) and len(batch) >= 2:
            return (batch[0] if len(batch) == 2 else _Inputs(batch[:-1])), batch[-1]
        if is_sequence(batch) and len(batch) == 1:
            return batch[0], None
        return batch, _target_attribute(batch)

    def _call(self, model: nn.Module, inputs: Any, more: Mapping[str, Any] = _NOTHING_MORE) -> Any:
        if isinstance(inputs, torch.Tensor):
            return model(inputs, **more)
        # A model with one parameter gets a mapping whole; one whose parameters are named like the keys gets keywords.
        if isinstance(inputs, Mapping) and (self._takes_any_keyword or not self._forward_names.isdisjoint(inputs)):
            return model(**inputs, **more)
        return model(*self._arguments(inputs), **more)

    def _arguments(self, inputs: Any) -> Sequence[Any]:
        """Return the positional arguments of the model: inputs as they were collated.

        Several inputs are passed one by one, unless forward takes only one. A nested input is passed whole, unless
        forward requires several.
        """
        if isinstance(inputs, _Inputs):
            return inputs if self._most > 1 or len(inputs) == 1 else (tuple(inputs),)
        if type(inputs) in _PAIRS and 1 < self._required <= len(inputs):
            nested: Sequence[Any] = inputs
            return nested
        return (inputs,)

    def _loss_and_count(self, result: Any, source: str) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        """Extract loss and count from what a loss function returned; see `RETURNS`."""
        count = None
        if isinstance(result, torch.Tensor):
            loss: Any = result
        elif isinstance(result, _PAIRS) and result:
            loss = result[0]
            if len(result) > 1:
                count = self._count(result[1], source)
        else:
            loss = _own_loss(result)
            count = result.get("count") if isinstance(result, Mapping) else getattr(result, "count", None)
            if callable(count) or (count is not None and not _is_number(count)):
                count = None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise LossError(f"{source} returned {describe(result)}; {RETURNS}")
        return loss.reshape(()), count

    def _count(self, value: Any, source: str) -> torch.Tensor | float | None:
        """Return a loss function's second value if it is a count; the first batch determines whether it is."""
        is_number = _is_number(value)
        first = self._counts is None
        if first:
            self._counts = is_number
        if not self._counts:
            return None
        whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        known = not isinstance(value, torch.Tensor) or (type(value) is torch.Tensor and (first or value.is_cpu))
        if not is_number:
            raise LossError(f"{source} returned {describe(value)} where it had returned a count before; {RETURNS}")
        if known and (first or not whole):
            number = float(value)
            is_float = value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
            if not math.isfinite(number) or number < 0 or number % 1 or (first and is_float and number <= 1):
                raise LossError(f"{source} returned (loss, {number:g}), and {number:g} is not a count; {RETURNS}")
            if first:
                note = (
                    f"micro-batches are weighted by the count that loss_fn returns after the loss ({number:g} at first)"
                )
                self.notes.append(note)
                log.info("%s", note)
        count: torch.Tensor | float = value
        return count


class _Inputs(tuple[Any, ...]):
    """Items of a batch that are passed to a model as separate arguments."""

    __slots__ = ()


def _cross_entropy(
    scores: torch.Tensor, target: torch.Tensor, dimension: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Average over samples, or over real positions if there is one target per position."""
    if target.ndim == 1:
        return F.cross_entropy(scores, target), None
    if dimension != 1:
        scores = scores.flatten(0, -2)
        target = target.flatten()
    loss = F.cross_entropy(scores, target, ignore_index=IGNORED_TARGET)
    return loss, (target != IGNORED_TARGET).sum()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _is_number(value: Any) -> bool:
    """Whether a loss function's second value is a number, rather than the predictions for a single sample."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bool or value.is_complex():
            return False
        return value.ndim == 0 or (value.numel() == 1 and value.ndim == 1 and not value.is_floating_point())
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _own_loss(output: Any, anywhere: bool = False) -> torch.Tensor | None:
    """Find the loss that a model returned: a scalar, under the name `loss`, or first in a tuple.

    Args:
        output: What the model returned.
        anywhere: Whether it may be anywhere in the tuple if no other item is a scalar.
    """
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, _PAIRS):
            scalars = [item for item in output if _is_scalar(item)]
            first = bool(scalars) and scalars[0] is output[0]
            loss = scalars[0] if first or (anywhere and len(scalars) == 1) else None
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point() and loss.ndim <= 1:
        return loss.reshape(())
    return None


def _logits(output: Any) -> Any:
    """Return the `logits` of a model's output if it has any, else the output itself."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def _scores(output: Any) -> Any:
    """Return the tensor of scores inside a model's output."""
    found = _logits(output)
    if isinstance(found, _PAIRS):
        return next((item for item in found if isinstance(item, torch.Tensor) and item.ndim > 1), None)
    return found


def _target_key(batch: Mapping[str, Any]) -> str | None:
    return next((key for key in TARGET_KEYS if key in batch), None)


def _target_attribute(batch: Any) -> Any:
    """Return the target of a batch that is an object, such as a dataclass, which the model takes whole."""
    if isinstance(batch, torch.Tensor):
        return None
    return next((found for key in TARGET_KEYS if (found := getattr(batch, key, None)) is not None), None)
