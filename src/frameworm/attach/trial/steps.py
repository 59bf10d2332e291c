"""Count the steps of a script's training loop as it runs, and report when each begins and is about to update.

A step begins with the first batch fetched after an optimizer has stepped; in a loop that fetches nothing, with the
first training pass of a model. That is not always where the loop's own step begins: a validation belongs to the step
after it. But it is the same in every run of the script, which is what matters when comparing two runs.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.utils.data.dataloader as dataloader
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from frameworm.attach.patches import Patches
from frameworm.attach.trial.host_waits import copies_to_gpu
from frameworm.attach.trial.interception import can_fuse
from frameworm.attach.trial.loading import can_have_processes
from frameworm.torch_private.compiler import keep_compiler_out
from frameworm.torch_private.loaders import any_iterator

_Function = Callable[..., Any]
Place = Literal[
    "optimizer", "loader", "other_loader", "model", "data_parallel", "zeroing", "copy", "backward", "update"
]
# Files of frames between a line of the script and what it calls.
_OWN_AND_TORCH = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_OURS = "_frameworm_counts"
# A loop that has made this many updates since the last fetch takes its data from elsewhere.
_MOST_UPDATES = 16


class Listener:
    """Receives events of the loop; for subclasses."""

    def model_found(self, module: nn.Module) -> None:
        """Called before the first training pass of an outermost module."""

    def step_begins(self, number: int) -> None:
        """Called when a step begins; steps are numbered from 1."""

    def passes(self) -> None:
        """Called when a module is called in a training pass."""

    def fetched(self, iterator: Any, batch: Any, seconds: float) -> None:
        """Called when a loader's iterator has returned a batch, after `seconds`."""

    def goes_back(self, loss: torch.Tensor) -> None:
        """Called when a backward pass begins at this tensor."""

    def called(self, module: nn.Module, call: Callable[[], Any]) -> None:
        """Called before a model is called in training; `call` makes the same call."""

    def before_update(self) -> None:
        """Called once per step when gradients are complete and not clipped yet."""

    def updates(self, optimizer: torch.optim.Optimizer, *, evaluates: bool) -> None:
        """Called before an optimizer steps; `evaluates` if it calls a closure, perhaps several times."""

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer has stepped."""


class StepCounter:
    """Watches the calls that a training loop must make, in the thread that makes the first of them.

    Args:
        listener: Receives the events.
        script: The file whose lines are recorded in `places`.

    Attributes:
        step: Number of the current step.
        updates: Number of optimizer updates so far.
        models: Trained modules, in the order in which they were found.
        own_models: Those of `models` that a line of the script calls.
        optimizers: Optimizers that have stepped, in that order.
        zeroes: Whether gradients were filled with zeros instead of dropped.
        copies: Whether tensors were copied to a GPU in a step while the host waited.
        places: Lines of the script where optimizers and loaders are created, models are called, gradients are computed
            and optimizers step, as kind, line and name: a model's name in the script, or the class of what is created.
            Loaders not used for training are `other_loader`.
    """

    def __init__(self, listener: Listener, script: str = "") -> None:
        self.step = self.updates = 0
        self.models: list[nn.Module] = []
        self.own_models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.places: list[tuple[Place, int, str]] = []
        self.zeroes = self.copies = False
        self._script = script
        self._listener = listener
        self._is_over = True
        self._since_fetch: int | None = None  # updates since the last fetch; None if there was none, or long ago
        self._complete = False
        self._depth = 0
        self._thread: int | None = None
        self._inside = False  # whether the listener computes, which is not part of the script
        self._patches, self._closer = Patches(), Patches()

    def install(self) -> None:
        """Start watching."""
        patches, closer = self._patches, self._closer
        patches.set(any_iterator(), "__next__", self._fetching)
        patches.set(torch.optim.Optimizer, "__init__", self._making)
        closer.set(dataloader.DataLoader, "__init__", self._loading)
        closer.set(DistributedDataParallel, "__init__", self._dividing)
        for zeroing in (torch.optim.Optimizer, nn.Module):
            closer.set(zeroing, "zero_grad", self._zeroing)
        if torch.cuda.is_available():
            for name in ("to", "cuda"):
                closer.set(torch.Tensor, name, self._copying)
        closer.set(nn.Module, "__call__", self._calling)
        closer.set(torch.autograd, "backward", self._going_back)
        for owner in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                closer.set(owner, name, self._clipping)
        closer.set(torch.amp.GradScaler, "unscale_", self._clipping)

    def look_away(self) -> None:
        """Watch only what is needed to count steps, as everything else costs the script time."""
        self._closer.remove()

    def remove(self) -> None:
        """Restore torch."""
        self.look_away()
        self._patches.remove()

    def _mine(self) -> bool:
        if self._inside:
            return False
        if self._thread is None:
            self._thread = threading.get_ident()
        return threading.get_ident() == self._thread

    def _tell(self, method: _Function, *args: Any) -> None:
        self._inside = True
        try:
            method(*args)
        finally:
            self._inside = False

    def _begin(self) -> None:
        if self._is_over:
            self._is_over = self._complete = False
            self.step += 1
            self._tell(self._listener.step_begins, self.step)

    def _completed(self) -> None:
        if not self._complete:
            self._complete = True
            self._tell(self._listener.before_update)

    def _fetching(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def fetch(iterator: Any) -> Any:
            if not self._mine():
                return original(iterator)
            self._since_fetch = 0
            self._begin()
            begin_s = perf_counter()
            batch = original(iterator)
            self._tell(self._listener.fetched, iterator, batch, perf_counter() - begin_s)
            return batch

        return fetch

    def _calling(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(module, *args, **kwargs)
            if self._depth:
                self._listener.passes()
                return original(module, *args, **kwargs)
            if not (module.training and torch.is_grad_enabled() and self._mine()):
                return original(module, *args, **kwargs)
            is_known = any(module is known for known in self.models)
            if is_known:
                self._note_place("model", module)
            elif _learns(module):
                self.models.append(module)
                if self._note_place("model", module):
                    self.own_models.append(module)
                self._tell(self._listener.model_found, module)
            if self._since_fetch is None:  # otherwise several updates, and their passes, may share a batch
                self._begin()
            self._listener.passes()
            self._depth += 1
            try:
                self._listener.called(module, functools.partial(original, module, *args, **kwargs))
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _going_back(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling() and self._mine():
                first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
                if isinstance(first, torch.Tensor):
                    self._note_place("backward")
                    self._tell(self._listener.goes_back, first)
            return original(tensors, *args, **kwargs)

        return backward

    def _clipping(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling() and self._mine():
                self._completed()
            return original(*args, **kwargs)

        return clip

    def _making(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def initialise(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if can_fuse(optimizer):
                self._note_place("optimizer", name=type(optimizer).__name__)
            kind = type(optimizer)
            if getattr(kind, "step", None) is not None and getattr(kind.step, _OURS, None) is not self:
                wrapper: Any = self._stepping(kind.step)
                setattr(wrapper, _OURS, self)
                self._patches.set(kind, "step", lambda _: wrapper)  # outside torch's own wrapper

        return initialise

    def _loading(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def initialise(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            kind: Place = "loader" if can_have_processes(loader) else "other_loader"
            self._note_place(kind, name=type(loader).__name__)

        return initialise

    def _dividing(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def initialise(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._note_place("data_parallel", name=type(model).__name__)

        return initialise

    def _zeroing(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            if not set_to_none and self._mine():
                self.zeroes = True
                self._note_place("zeroing")
            original(owner, set_to_none)

        return zero_grad

    def _copying(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            waits = tensor.device.type == "cpu" and result.is_cuda and copies_to_gpu(original.__name__, args, kwargs)
            if waits and self.step > 0 and self._mine():
                self.copies = True
                self._note_place("copy")
            return result

        return copy

    def _note_place(self, kind: Place, made: object = None, name: str = "") -> bool:
        """Record the script's current line if the script itself, not a library, makes the call; return whether it does.

        Args:
            kind: What happens there.
            made: A model, which may have a name in the script even if a library calls it.
            name: What to record with the line; for a model, its name is used.
        """
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN_AND_TORCH):
            frame = frame.f_back
        own = frame is not None and frame.f_code.co_filename == self._script
        if not own and made is None:
            return False
        around = [item for item in _outwards(frame) if item.f_code.co_filename == self._script]
        if not around:
            return False
        name = name if made is None else _name_in(around, made)
        if (own or name) and (kind, around[0].f_lineno, name) not in self.places:
            self.places.append((kind, around[0].f_lineno, name))
        return own

    def _stepping(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def step(optimizer: Any, closure: _Function | None = None, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._mine():
                return (
                    original(optimizer, closure, *args, **kwargs) if closure else original(optimizer, *args, **kwargs)
                )
            if self.step == 0 or self._since_fetch is None:
                self._begin()
            if closure is None:
                self._completed()
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)
                self._note_place("update")
            self._tell(functools.partial(self._listener.updates, evaluates=closure is not None), optimizer)
            if closure is None:
                result = original(optimizer, *args, **kwargs)
            else:
                result = original(optimizer, self._evaluating(closure), *args, **kwargs)
            self._tell(self._listener.updated, optimizer)
            self._is_over = True
            self._complete = False  # another optimizer of this step has its own gradients
            self.updates += 1
            if self._since_fetch is not None:
                self._since_fetch = self._since_fetch + 1 if self._since_fetch < _MOST_UPDATES else None
            return result

        return keep_compiler_out(step)

    def _evaluating(self, closure: _Function) -> _Function:
        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self._completed()
            return result

        return evaluate


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name_in(frames: Sequence[types.FrameType], made: object) -> str:
    """Return an object's name in some frames, given from the inside out; empty if it has no name.

    Names in outer frames come first, as the object comes from there. Function arguments have their names from
    elsewhere, so they come last, after attributes such as `self.model`.
    """
    own, given = [], []
    for frame in frames:
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        held = {**frame.f_globals, **frame.f_locals}
        names = [name for name, value in held.items() if value is made]
        own += [name for name in names if name not in arguments][:1]
        given += [name for name in names if name in arguments][:1]
    attributes = [
        f"{name}.{attribute}"
        for name, value in frames[0].f_locals.items()
        if not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__")
        for attribute, item in {**vars(value), **vars(value).get("_modules", {})}.items()
        if item is made
    ]
    return next(iter((*own[::-1], *attributes, *given[::-1])), "")


def _learns(module: nn.Module) -> bool:
    return any(item.requires_grad for item in module.parameters())
