"""Which training loop runs: the class whose method is active when an optimizer steps, and its options.

Imports say little: Trainer uses Accelerate, and many scripts import libraries that they do not train with. So the
methods that run a loop, or a step of one, are watched; the outermost active one is the loop.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch.compiler import is_dynamo_compiling

from frameworm.attach.frames import FrameReader
from frameworm.attach.patches import Patches
from frameworm.attach.script import AfterImport
from frameworm.diagnose.rules.wording import (
    ACCELERATE,
    FABRIC,
    FSDP,
    FSDP2,
    LIGHTNING,
    TORCH,
    TRANSFORMERS,
    TRL,
    options_named,
)
from frameworm.records.observations import Framework

_OURS = "_frameworm_loop"


class Loop(NamedTuple):
    """A method that runs a loop.

    Attributes:
        module: Module of its class.
        owner: The class.
        method: The method.
        name: The framework's name in remedies.
        options: Returns, for an instance, the class that takes options, and the options with their values.
        taker: Module and name of that class; subclasses may take more options.
        overridden: Whether subclasses may override the method.
    """

    module: str
    owner: str
    method: str
    name: str
    options: Callable[[Any], tuple[str, Mapping[str, Any]]]
    taker: tuple[str, str]
    overridden: bool = False


def _of_arguments(trainer: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the options of a trainer with a dataclass of arguments."""
    arguments = trainer.args
    return type(arguments).__name__, {
        item.name: getattr(arguments, item.name, None) for item in dataclasses.fields(arguments) if item.init
    }


def _of_trainer(trainer: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the options of a trainer that takes them itself."""
    kind = next(kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    return kind.__name__, _parameters(kind, trainer)


def _of_module(module: str, name: str, values: str, optimizer: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the options of a class that prepares optimizers, read from an object that the optimizer refers to."""
    kind = getattr(sys.modules[module], name)
    return name, _parameters(kind, getattr(optimizer, values, None))


def _parameters(kind: type, holder: Any) -> dict[str, Any]:
    names = inspect.signature(kind).parameters
    return {name: getattr(holder, name, None) for name in names}


LOOPS = (
    Loop(
        "transformers.trainer",
        "Trainer",
        "train",
        TRANSFORMERS,
        _of_arguments,
        ("transformers.training_args", "TrainingArguments"),
        overridden=True,
    ),
    *(
        Loop(module, "Trainer", "fit", LIGHTNING, _of_trainer, (module, "Trainer"))
        for module in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    ),
    Loop(
        "accelerate.optimizer",
        "AcceleratedOptimizer",
        "step",
        ACCELERATE,
        functools.partial(_of_module, "accelerate", "Accelerator", "accelerator_state"),
        ("accelerate.accelerator", "Accelerator"),
    ),
    Loop(
        "lightning.fabric.wrappers",
        "_FabricOptimizer",
        "step",
        FABRIC,
        functools.partial(_of_module, "lightning.fabric", "Fabric", "_strategy"),
        ("lightning.fabric.fabric", "Fabric"),
    ),
)
# Packages whose classes derive from another package's and take more options.
_DERIVED = {TRL}


class Loops:
    """Tracks the active loops, outermost first.

    Args:
        script: The script's file, which counts as its own wherever it is.
    """

    def __init__(self, script: str) -> None:
        self._frames = FrameReader(script)
        self._running: list[tuple[Loop, Any]] = []

    def watch(self, patches: Patches, complain: Callable[[str], None]) -> list[AfterImport]:
        """Watch the loops of libraries as soon as the script imports them.

        Returns:
            Import hooks to `disarm` at the end.
        """
        finders = [AfterImport(loop.module, functools.partial(self._follow, patches, loop, complain)) for loop in LOOPS]
        for finder in finders:
            finder.arm()
        return finders

    def framework(self, frame: FrameType | None, optimizer: Any) -> Framework:
        """Return the framework whose loop has just stepped an optimizer, at this frame."""
        found = self._of_loop(*self._running[0]) if self._running else self._of_frames(frame)
        defaults = getattr(optimizer, "defaults", {})
        if "fused" in defaults and not any(group.get("fused") for group in optimizer.param_groups):
            found.unfused_optimizer = type(optimizer).__name__
        return found

    def _of_loop(self, loop: Loop, instance: Any) -> Framework:
        kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(instance).__mro__]
        derived = next((item for item in kinds if item[0] in _DERIVED), None)
        package = loop.module.partition(".")[0]
        name = loop.name if derived is None else derived[0]
        arguments, options = loop.options(instance)
        wanted = options_named(name)
        return Framework(
            name=name,
            version=_version(package if derived is None else derived[0]),
            loop=derived[1] if derived is not None else arguments if loop.method == "step" else loop.owner,
            arguments=arguments,
            options={key: _plain(value) for key, value in options.items() if key in wanted},
        )

    def _of_frames(self, frame: FrameType | None) -> Framework:
        package = self._frames.library_around(frame)
        return Framework(TORCH, _version(TORCH)) if package is None else Framework(package, _version(package), package)

    def _follow(self, patches: Patches, loop: Loop, complain: Callable[[str], None]) -> None:
        """Wrap a loop's method; errors must not reach the script, as library versions differ."""
        try:
            owner = getattr(sys.modules[loop.module], loop.owner)
            patches.set(owner, loop.method, functools.partial(self._around, loop))
            if loop.overridden:
                patches.set(owner, "__init__", functools.partial(self._around_making, patches, loop))
        except Exception as error:
            complain(f"{loop.owner} of {loop.module} is not recognised: {type(error).__name__}: {error}")

    def _around_making(self, patches: Patches, loop: Loop, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def initialise(instance: Any, *args: Any, **kwargs: Any) -> None:
            original(instance, *args, **kwargs)
            if not hasattr(getattr(type(instance), loop.method, None), _OURS):
                patches.set(type(instance), loop.method, functools.partial(self._around, loop))

        return initialise

    def _around(self, loop: Loop, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_loop(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(instance, *args, **kwargs)
            self._running.append((loop, instance))
            try:
                return original(instance, *args, **kwargs)
            finally:
                self._running.pop()

        setattr(run_loop, _OURS, loop)
        return run_loop


def strategy_of(module: Any) -> str | None:
    """Return the FSDP version that shards a model, if any."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    kinds = [
        (getattr(sharding, "FullyShardedDataParallel", None), FSDP),
        (getattr(sharding, "FSDPModule", None), FSDP2),
    ]
    parts = list(module.modules()) if sharding is not None else []
    return next((name for kind, name in kinds if kind and any(isinstance(part, kind) for part in parts)), None)


def _version(package: str) -> str | None:
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else str(version)


def _plain(value: Any) -> Any:
    """Convert a value for JSON; anything but strings and numbers becomes its class name."""
    value = value.value if isinstance(value, enum.Enum) else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
