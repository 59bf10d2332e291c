"""Fused linear head and cross-entropy for any model: logits are computed only if something else needs them.

During training, the wide last layer of a model returns `Logits`: a tensor that has the right shape and dtype but no
values. Operations that select or rearrange rows are applied to the head's input instead. When the logits reach
`F.cross_entropy`, `models.linear_loss` computes loss and gradients in chunks of tokens. Any other operation gets the
real logits with their gradients, so it works as the model was written, only no faster.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.errors import ConfigError, ModelError
from frameworm.models.linear_loss import summed_cross_entropy
from frameworm.torch_private.tensors import (
    is_traceable_wrapper_subclass,
    make_wrapper,
    parse_to,
    schema_of,
    tree_map,
    without_subclass_functions,
)

WIDE = 4096  # fewest outputs of a head; below, logits are small compared with other activations


@dataclass
class HeadUse:
    """What happened to a head's logits.

    Attributes:
        name: The head's name in the model.
        active: Whether its logits are deferred; no longer once gradients needed the real ones.
        fused: Whether a loss was computed without them.
        needed_for: The first operation that needed the real logits.
    """

    name: str
    active: bool = True
    fused: bool = False
    needed_for: str | None = None


def find_heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Find layers that may score words: wide ones with as many outputs as an embedding has rows, or of unique shape.

    This excludes wide layers in repeated blocks. Whether a layer really feeds a cross-entropy shows only when the model
    runs.
    """
    words = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    shapes = Counter((module.in_features, module.out_features) for module in linear.values())
    return {
        name: module
        for name, module in linear.items()
        if module.out_features >= WIDE
        and (module.out_features in words or shapes[module.in_features, module.out_features] == 1)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
    }


@contextlib.contextmanager
def fused_heads(model: nn.Module, wanted: bool, *, compiled: bool = False) -> Iterator[list[HeadUse]]:
    """Apply `fuse_heads` inside the context if `wanted`."""
    uses = fuse_heads(model, compiled=compiled) if wanted else {}
    try:
        yield list(uses.values())
    finally:
        for head in uses:
            del head.forward


def fuse_heads(model: nn.Module, *, compiled: bool = False) -> dict[nn.Linear, HeadUse]:
    """Make a model's heads defer their logits in training.

    Args:
        model: The model.
        compiled: Whether the model will be compiled. Logits without values cannot be traced, so the compiled part then
            ends at the head, and everything after it runs eagerly.

    Returns:
        The heads, with a record of what happens to their logits.

    Raises:
        ConfigError: If the model has no head.
    """
    heads = find_heads(model)
    if not heads:
        raise ConfigError(
            f"training.fused_loss: {type(model).__name__} has no nn.Linear with {WIDE:,} outputs or more that could "
            "score words (those of a class with a forward of its own do not count); leave it out"
        )
    uses = {head: HeadUse(name) for name, head in heads.items()}
    put_off = _put_off
    if compiled:  # only then, as marking functions imports the compiler
        put_off = torch.compiler.disable(_put_off)
        Logits.answer = staticmethod(torch.compiler.disable(_answer))
    for head, use in uses.items():
        head.forward = functools.partial(_forward, put_off, head, use)  # type: ignore[method-assign]
    return uses


def head_notes(uses: Sequence[HeadUse]) -> list[str]:
    """A run's notes about its heads; none if losses were computed without logits, as asked."""
    if any(use.fused for use in uses):
        return [
            f"training.fused_loss: the logits of {use.name} are also used for {use.needed_for}, so they were computed "
            "in full as well"
            for use in uses
            if use.fused and use.needed_for
        ]
    found = [use for use in uses if use.needed_for]
    if found:
        used = "; ".join(f"those of {use.name} are used for {use.needed_for}" for use in found)
        return [f"training.fused_loss changed nothing, because the logits were computed in full: {used}"]
    names = ", ".join(use.name for use in uses)
    return [f"training.fused_loss changed nothing: no loss used the output of {names}"] if uses else []


def _forward(put_off: Callable[..., Tensor], head: nn.Linear, use: HeadUse, input: Tensor) -> Tensor:
    """The head's forward; the compiler traces it up to the deferred logits."""
    inputs = input  # nn.Linear's name for the argument
    weight = head.weight
    suits = (
        use.active
        and head.training
        and torch.is_grad_enabled()
        and inputs.dim() > 1
        and inputs.is_floating_point()
        and inputs.dtype is not torch.float64  # the fused loss is computed in fp32
        and (inputs.dtype == weight.dtype or torch.is_autocast_enabled(inputs.device.type))
    )
    return put_off(head, use, inputs) if suits else nn.Linear.forward(head, inputs)


def _put_off(head: nn.Linear, use: HeadUse, inputs: Tensor) -> Tensor:
    given: tuple[Any, Any] = (head.weight, inputs)
    if any(is_traceable_wrapper_subclass(item) for item in given):
        return nn.Linear.forward(head, inputs)  # sharded or quantised tensors define their own product
    device_type, dtype = inputs.device.type, inputs.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return _logits(_Recipe(use, inputs, head.weight, head.bias, dtype, dtype))


@dataclass
class _Recipe:
    """How logits are computed: `inputs @ weight.T + bias` in `computed`, then cast to `dtype`.

    Attributes:
        classes_second: Whether the classes are in dimension 1, as torch's losses expect, instead of the last.
        relatives: How many `Logits` are views of the same logits.
    """

    use: HeadUse
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    computed: torch.dtype
    dtype: torch.dtype
    classes_second: bool = False
    relatives: list[int] = field(default_factory=lambda: [0])

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        shape = [*self.inputs.shape[:-1], self.weight.size(0)]
        if self.classes_second:
            shape.insert(1, shape.pop())
        return torch.Size(shape)

    def values(self) -> Tensor:
        """Compute the real logits as the model would have."""
        with torch.autocast(self.inputs.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.computed)
            result = F.linear(self.inputs.to(self.computed), self.weight.to(self.computed), bias).to(self.dtype)
        return result.movedim(-1, 1) if self.classes_second else result


class Logits(Tensor):
    """Logits without values.

    They have a real node in autograd's graph, so code that bypasses `__torch_function__`, such as DDP's, can follow it.
    """

    answer: ClassVar[Callable[..., Any]]
    _recipe: _Recipe
    _real: Tensor | None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.answer(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle operations that bypass `__torch_function__`; autograd has already recorded them."""
        name = function.name().partition("::")[2].partition(".")[0]
        if schema_of(function).is_mutable:
            raise ModelError(
                f"training.fused_loss: logits are changed in place by {name}, which it cannot follow; set it to false"
            )

        def real(item: Any) -> Any:
            return item.real_values(name) if isinstance(item, Logits) else item

        with torch.no_grad():
            args, kwargs = tree_map(real, args), tree_map(real, kwargs or {})
        return function(*args, **kwargs)

    def real_values(self, operation: str) -> Tensor:
        """Return the real logits for an operation, attached to autograd's graph if gradients are enabled."""
        recipe = self._recipe
        use = recipe.use
        use.needed_for = use.needed_for or operation
        if self._real is not None:
            return self._real
        if not torch.is_grad_enabled():
            return recipe.values()
        if recipe.relatives[0] > 1 and (operation == "__setitem__" or (operation[-1] == "_" != operation[-2:-1])):
            raise ModelError(
                f"the logits of {use.name} are changed in place ({operation}) after a part of them was taken, which "
                "training.fused_loss cannot follow; set it to false"
            )
        self._real = recipe.values()
        if self._real.requires_grad:
            use.active = False
        return self._real


class _Place(torch.autograd.Function):
    """Autograd node of deferred logits; gradients arrive here only from code that never needed values."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        ctx.computed, ctx.classes_second = recipe.computed, recipe.classes_second
        made = make_wrapper(Logits, recipe.shape, recipe.dtype, inputs.device)
        made._recipe, made._real = recipe, None
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias = ctx.saved_tensors
        gradient = gradients[0].movedim(1, -1) if ctx.classes_second else gradients[0]
        rows = gradient.flatten(0, -2).to(ctx.computed)
        return (
            (rows @ weight.to(ctx.computed)).view(inputs.shape).to(inputs.dtype),
            (rows.t() @ inputs.flatten(0, -2).to(ctx.computed)).to(weight.dtype),
            None if bias is None else rows.sum(0).to(bias.dtype),
            None,
        )


def _logits(recipe: _Recipe) -> Tensor:
    recipe.relatives[0] += 1
    result: Tensor = _Place.apply(recipe.inputs, recipe.weight, recipe.bias, recipe)  # type: ignore[no-untyped-call]
    return result


def _answer(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Apply a torch function to logits: gives new logits, a loss, metadata, or its result for the real logits."""
    if function not in _DESCRIBING:
        first = args[0] if args else named.get("input")
        rule = _RULES.get(function)
        name = _name_of(function)
        if rule is not None and isinstance(first, Logits) and first._real is None:
            rest = {key: value for key, value in named.items() if key != "input"}
            result = rule(first, *args[1:], **rest)
            if isinstance(result, Tensor):
                return result
            name = result or name

        def real(item: Any) -> Any:
            return item.real_values(name) if isinstance(item, Logits) else item

        args, named = tree_map(real, tuple(args)), tree_map(real, dict(named))
    with without_subclass_functions():
        return function(*args, **named)


Logits.answer = staticmethod(_answer)


# Rules apply an operation to the head's input instead of the logits. They return new logits, a loss, or why they
# cannot.
Outcome = Tensor | str | None


def _cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Outcome:
    recipe = logits._recipe
    if weight is not None or label_smoothing:
        return "cross_entropy with label smoothing or weights of the classes"
    if reduction not in ("mean", "sum") or size_average is not None or reduce is not None:
        return "cross_entropy without mean or sum"
    by_row = recipe.classes_second or recipe.inputs.dim() == 2
    if not by_row or target.dtype is not torch.int64 or target.shape != recipe.inputs.shape[:-1]:
        return "cross_entropy with targets that are not one class per row"
    rows = recipe.inputs.flatten(0, -2).to(recipe.computed)
    loss = summed_cross_entropy(rows, recipe.weight, target.flatten(), ignore_index, bias=recipe.bias)
    recipe.use.fused = True
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    # Under autocast, torch computes the loss in fp32 from logits of any dtype.
    return loss if torch.is_autocast_enabled(recipe.inputs.device.type) else loss.to(recipe.dtype)


def _with_inputs(logits: Logits, inputs: Tensor) -> Tensor:
    return _logits(replace(logits._recipe, inputs=inputs))


def _reshape(logits: Logits, *sizes: Any, shape: Any = (), **others: Any) -> Outcome:
    recipe = logits._recipe
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes or shape
    wanted = list(given)
    if recipe.classes_second or others or not wanted or not all(isinstance(size, int) for size in wanted):
        return None
    if -1 in wanted:
        wanted[wanted.index(-1)] = logits.numel() // max(-math.prod(wanted), 1)
    if wanted[-1] != recipe.weight.size(0) or math.prod(wanted) != logits.numel() or len(wanted) < 2:
        return None
    return _with_inputs(logits, recipe.inputs.reshape(*wanted[:-1], recipe.inputs.size(-1)))


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Outcome:
    recipe = logits._recipe
    if recipe.classes_second or end_dim in (-1, logits.dim() - 1):
        return None
    return _with_inputs(logits, recipe.inputs.flatten(start_dim, end_dim))


def _select_rows(logits: Logits, index: Any) -> Outcome:
    """Index the head's input instead, if the index leaves the last dimension whole."""
    recipe = logits._recipe
    items = index if isinstance(index, tuple) else (index,)
    if recipe.classes_second or not items or any(isinstance(item, (list, Logits)) for item in items):
        return None
    given = [item for item in items if item is not None and item is not Ellipsis]
    taken = sum(item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in given)
    last = items[-1]
    reaches_last = taken >= logits.dim() or (last is not Ellipsis and any(item is Ellipsis for item in items))
    if reaches_last and not (isinstance(last, slice) and last == slice(None)):
        return None
    rows = recipe.inputs[index]
    return _with_inputs(logits, rows) if rows.dim() > 1 else None


def _cast(logits: Logits, *args: Any, **named: Any) -> Outcome:
    recipe = logits._recipe
    try:
        device, dtype, _, memory_format = parse_to(*args, **named)
    except (TypeError, RuntimeError):
        return None  # such as copy=True
    here = recipe.inputs.device
    stays = device is None or device == here or (device.type == here.type and device.index is None)
    if memory_format is not None or not stays:
        return None
    if dtype in (None, recipe.dtype):
        return logits
    return _logits(replace(recipe, dtype=dtype)) if dtype is torch.float32 else None


def _to_float(logits: Logits, **named: Any) -> Outcome:
    return None if named else _cast(logits, torch.float32)


def _as_it_is(logits: Logits, **named: Any) -> Outcome:
    return None if named else logits


def _detach(logits: Logits) -> Outcome:
    recipe = logits._recipe
    bias = None if recipe.bias is None else recipe.bias.detach()
    return _logits(replace(recipe, inputs=recipe.inputs.detach(), weight=recipe.weight.detach(), bias=bias))


def _swap(logits: Logits, *dimensions: Any) -> Outcome:
    """Move the classes to dimension 1, where torch's losses expect them, or back."""
    if logits.dim() != 3 or not all(isinstance(item, int) for item in dimensions):
        return None
    recipe = logits._recipe
    if dimensions and sorted(item % 3 for item in dimensions) != [1, 2]:
        return None
    return _logits(replace(recipe, classes_second=not recipe.classes_second))


def _permute(logits: Logits, *dimensions: Any, **named: Any) -> Outcome:
    order = dimensions[0] if len(dimensions) == 1 else dimensions
    if named or logits.dim() != 3 or not isinstance(order, (tuple, list)):
        return None
    return _swap(logits) if [item % 3 for item in order] == [0, 2, 1] else None


_RULES: dict[Any, Callable[..., Outcome]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes), _swap),
    **dict.fromkeys((Tensor.permute, torch.permute), _permute),
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    getattr(Tensor, "mT").__get__: _swap,  # noqa: B009 - the type checker takes it for a tensor
    Tensor.__getitem__: _select_rows,
    Tensor.contiguous: _as_it_is,
    Tensor.float: _to_float,
    Tensor.to: _cast,
}
_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "ndim", "layout", "grad_fn", "is_leaf", "is_cuda", "is_cpu")
_QUESTIONS = ("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size")
# Functions that need no values.
_DESCRIBING: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, "is_meta", "is_sparse", "is_quantized")),
    *(getattr(Tensor, name) for name in (*_QUESTIONS, "__len__", "__hash__", "get_device", "is_contiguous")),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    return str(getattr(function.__self__, "__name__", name)) if name == "__get__" else name
