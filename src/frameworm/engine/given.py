"""Check what a user passes to a `Trainer` before anything is built, and explain habits of other libraries."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.pretrained import saves_itself
from frameworm.engine.step.calls import takes_target_first
from frameworm.errors import ConfigError, DataError
from frameworm.observe.loggers.protocol import Logger
from frameworm.records.events import EVENTS, Events, Listener

log = logging.getLogger("frameworm")
_ORDER = "Trainer(model, optimizer, loss_fn, scheduler)"
_SET_NAME = re.compile(r"[A-Za-z0-9_][\w.@-]*")
_LOADERS = (DataLoader, OptimizedDataLoader, CudaDataLoader)
OWN_LOOP = (
    "A step of your own, or one that updates several optimizers in turn as that of a GAN does, stays in your own loop: "
    "`frameworm profile SCRIPT` and `frameworm tune SCRIPT` take that script as it is"
)
# Methods in which users of other trainers write the step; this one never calls them.
_STEP_METHODS = ("training_step", "train_step", "compute_loss", "optimizer_step", "configure_optimizers")


def check_given(model: Any, optimizer: Any, loss_fn: Any, scheduler: Any) -> None:
    """Check the order and types of the arguments.

    Raises:
        ConfigError: If one is wrong; the message says which.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch module, not {_word(model)}: {_ORDER}")
    own_step = next((name for name in _STEP_METHODS[:2] if callable(getattr(model, name, None))), None)
    if own_step is not None and loss_fn is None:
        raise ConfigError(
            f"{type(model).__name__} has a method {own_step}, which this trainer does not call: give the loss that it "
            f"computes as loss_fn(output, target) or loss_fn(model, batch). {OWN_LOOP}"
        )
    _check_optimizer(optimizer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(
                f"{name} is in fp16, in which updates underflow and overflow: leave the model in fp32 (model.float()) "
                "and call trainer.enable_mixed_precision(), or train it in bf16 (model.bfloat16())"
            )
    if loss_fn is not None and not callable(loss_fn):
        hint = " (give it by name: scheduler=...)" if hasattr(loss_fn, "step") else ""
        raise ConfigError(f"loss_fn must be a function or a module, not {_word(loss_fn)}{hint}: {_ORDER}")
    if loss_fn is not None and takes_target_first(getattr(loss_fn, "forward", loss_fn)):
        raise ConfigError(
            "loss_fn has parameters named as if the target came first, and is called as loss_fn(output, "
            "target): change their order, or wrap it (lambda output, target: f(target, output))"
        )
    if isinstance(scheduler, (list, tuple)):
        raise ConfigError(
            f"scheduler must be one scheduler, not {_word(scheduler)}: join them, for instance in a "
            "torch.optim.lr_scheduler.SequentialLR"
        )
    if not (scheduler is None or callable(scheduler) or _has(scheduler, "step") or _has(scheduler, "before_step")):
        raise ConfigError(f"scheduler must have a method step, and {_word(scheduler)} has none: {_ORDER}")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, (list, tuple, Mapping)):
        raise ConfigError(
            f"optimizer must be one optimizer, not {_word(optimizer)}: give its parameter groups the settings of each "
            f"(AdamW([{{'params': a, 'lr': 1e-3}}, {{'params': b, 'lr': 1e-4}}])). {OWN_LOOP}"
        )
    if isinstance(optimizer, type):
        raise ConfigError(
            f"optimizer is the class {optimizer.__name__}: build it, {optimizer.__name__}(model.parameters())"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) and not _has(optimizer, "param_groups", "step", "state_dict"):
        raise ConfigError(f"optimizer must be an optimizer of torch, not {_word(optimizer)}: {_ORDER}")
    # Check the class, as torch's schedulers replace `step` on the instance.
    if not _takes(type(optimizer).step, 1):
        raise ConfigError(
            f"{type(optimizer).__name__} calls the model several times in a step (its step needs a closure), and this "
            "training loop calls it once; use an optimizer that steps by gradients alone, such as AdamW or SGD"
        )


def check_subclass(kind: type, base: type) -> None:
    """Refuse a subclass that defines a step in a method of other libraries, which is not called here.

    Raises:
        ConfigError: If there is such a method.
    """
    for name in _STEP_METHODS:
        if hasattr(kind, name) and not hasattr(base, name):
            raise ConfigError(
                f"{kind.__name__}.{name} would never be called: the loss is loss_fn(output, target) or "
                f"loss_fn(model, batch), the optimizer an argument. {OWN_LOOP}"
            )


def check_callbacks(callbacks: Any) -> list[Listener]:
    """Validate the callbacks and return them as a list.

    Raises:
        ConfigError: If one has no callback method, or a method with a wrong signature.
    """
    if callbacks is None:
        return []
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks must be a list of callbacks, not {_word(callbacks)}")
    found = list(callbacks)
    for item in found:
        name = item.__name__ if isinstance(item, type) else type(item).__name__
        if isinstance(item, type):
            raise ConfigError(f"callback {name} is a class: give an object of it, {name}()")
        never = [method for method in dir(item) if method.startswith("on_") and not _is_event(method)]
        if never:
            log.warning(
                "callback %s: %s is never called; the methods of a callback are %s",
                name,
                ", ".join(never),
                ", ".join(EVENTS),
            )
        if isinstance(item, Listener):
            continue
        methods = [method for method in EVENTS if callable(getattr(item, method, None))]
        if not methods:
            raise ConfigError(f"{name} is not a callback: it has none of the methods {', '.join(EVENTS)}")
        for method in methods:
            if not _takes(getattr(item, method), EVENTS[method]):
                raise ConfigError(
                    f"callback {name}: {method} must take {EVENTS[method]} positional argument(s), as that of "
                    "frameworm.Callback does"
                )
    return found


def _is_event(method: str) -> bool:
    return method in EVENTS or hasattr(Listener, method) or hasattr(Events, method)


def check_loggers(loggers: Any) -> tuple[list[str], list[Logger]]:
    """Split loggers into names, for the config, and objects.

    Raises:
        ConfigError: If one is neither.
    """
    found = [loggers] if isinstance(loggers, (str, Logger)) else loggers
    if not isinstance(found, Iterable) or isinstance(found, Mapping):
        raise ConfigError(f"loggers must be a list of names or loggers, not {_word(loggers)}")
    names: list[str] = []
    objects: list[Logger] = []
    for item in found:
        if isinstance(item, str):
            names.append(item)
        elif isinstance(item, type):
            raise ConfigError(f"logger {item.__name__} is a class: give an object of it, {item.__name__}()")
        elif isinstance(item, Logger):
            objects.append(item)
        else:
            raise ConfigError(
                f"{type(item).__name__} is not a logger: it needs the methods start(run), log(values, step) and "
                "finish(status, summary), as frameworm.Logger has them"
            )
    return names, objects


def check_processing_class(given: Any) -> Any:
    """Return a tokenizer or processor that can be exported with the model, or None.

    Raises:
        ConfigError: If it has no method `save_pretrained`.
    """
    if given is not None and not saves_itself(given):
        raise ConfigError(
            f"processing_class is a {type(given).__name__}, which has no method save_pretrained to be exported with; "
            "give a tokenizer or processor of the model's library"
        )
    return given


def check_loss_reduction(loss_fn: Any) -> list[str]:
    """Return a note for the run if the loss sums over its batch."""
    if getattr(loss_fn, "reduction", None) != "sum":
        return []
    return [
        "loss_fn adds up its batch (reduction='sum') and is taken for a mean: recorded losses are means over batches "
        "of such sums, and micro-batches and ranks are weighted by their samples; reduction='mean' is what they are "
        "meant for"
    ]


def check_loader(loader: Any, name: str, *, several: bool = False) -> None:
    """Check that `loader` is one loader.

    Args:
        loader: What the user passed.
        name: Name of the argument, for messages.
        several: Whether a mapping from names to loaders is allowed.

    Raises:
        DataError: If it is not.
    """
    if several and isinstance(loader, Mapping):
        if not loader:
            raise DataError(f"{name} is an empty mapping; give loaders by name, or None")
        for key, item in loader.items():
            if not isinstance(key, str) or not _SET_NAME.fullmatch(key):
                raise DataError(f"{name}: {key!r} is not a name for a validation set; use letters, digits and _ . @ -")
            check_loader(item, f"{name}[{key!r}]")
            if item is None or isinstance(item, torch.Tensor):
                raise DataError(f"{name}[{key!r}] must be a loader, not {_word(item)}")
        return
    items = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(item, _LOADERS) for item in items):
        raise DataError(
            f"{name} must be one loader, not several in {_word(loader)}: "
            + ("give each a name ({'dev': loader, 'test': other}), " if several else "")
            + "join their data sets (torch.utils.data.ConcatDataset), or use one of them"
        )
    if isinstance(loader, Mapping):
        raise DataError(f"{name} must be a loader or an iterable of batches, not {_word(loader)}")


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _takes(call: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with this many positional arguments; True if unknown."""
    try:
        inspect.signature(call).bind(*([None] * arguments))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
