"""A timed trial: it pauses between two steps, runs as many as it is told, and reports how long they took."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from frameworm.attach.framework import Loops
from frameworm.attach.padding import tokens_of
from frameworm.attach.patches import Patches
from frameworm.attach.trial.data_parallel import facts_of_data_parallel, gathers_twice, shard_calls
from frameworm.attach.trial.framework_options import FrameworkOptions
from frameworm.attach.trial.interception import ModelSwitches, attention_of, can_fuse
from frameworm.attach.trial.loading import reads_in_own_order
from frameworm.attach.trial.padding_layout import layout_of
from frameworm.attach.trial.steps import Listener, StepCounter
from frameworm.attach.trial.whole_batches import can_be_indexed
from frameworm.attach.watch import leading_size
from frameworm.errors import EnvironmentSetupError
from frameworm.models.blocks import find_block_classes
from frameworm.numerics.randomness import has_drawn, random_state
from frameworm.torch_private.loaders import collate_of, dataset_of, is_pinned, order_of, workers_of
from frameworm.torch_private.modules import compiled_call, is_wrapped_by_compiler

# The first steps create states, compile and fill caches; the script is inspected closely in them.
FIRST_STEPS = 3


class TimedRun(Listener):
    """Runs and pauses on command.

    Args:
        switches: Switches to set in the models that are found.
        report: Sends a message to the tuner.
        receive: Returns the next command, `{"go": steps}`.
        script: See `StepCounter`.
        options: Records what the script passes to its framework, and where.
    """

    def __init__(
        self,
        switches: ModelSwitches,
        report: Callable[[dict[str, Any]], None],
        receive: Callable[[], dict[str, Any]],
        script: str,
        options: FrameworkOptions,
    ) -> None:
        self.counter = StepCounter(self, script)
        self._options = options
        self._switches = switches
        self._report, self._receive = report, receive
        self._stop_before = FIRST_STEPS + 1
        self._seen = Seen()
        self._loops = Loops(script)
        self._loops.watch(Patches(), lambda note: None)
        self._framework: dict[str, Any] | None = None
        self._passes = 0
        self._random: dict[str, Any] | None = None
        self._begun: float | None = None
        self._born = perf_counter()
        self._waited_s, self._samples = 0.0, 0

    def model_found(self, module: nn.Module) -> None:
        """Set the model's switches."""
        self._switches.found(module)

    def passes(self) -> None:
        """Check the precision, and record the random state before the first pass."""
        self._seen.look()
        if self._random is None and not self._seen.draws:
            self._random = random_state(self._device())

    def fetched(self, iterator: Any, batch: Any, seconds: float) -> None:
        """Count the wait and the samples; inspect batches of the first steps."""
        self._waited_s += seconds
        self._samples += leading_size(batch) or 0
        if self.counter.step <= FIRST_STEPS:
            self._seen.look_at(iterator, batch)

    def goes_back(self, loss: torch.Tensor) -> None:
        """Count the passes of the first steps, and check whether they drew random numbers."""
        self._passes += 1
        if self.counter.step == 1:
            self._seen.attention = self._seen.attention or attention_of(loss)
        if self._random is not None:
            self._seen.draws = has_drawn(self._random, self._device())
            self._random = None

    def _device(self) -> torch.device:
        return next((item.device for model in self.counter.models for item in model.parameters()), torch.device("cpu"))

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """At the first update, find out whose loop it is."""
        if self._framework is None:
            self._framework = asdict(self._loops.framework(sys._getframe(1), optimizer))

    def step_begins(self, number: int) -> None:
        """Pause if this is the step to pause before."""
        if number != self._stop_before:
            return
        if number == FIRST_STEPS + 1:
            self.counter.look_away()
        now = self._now()
        told: dict[str, Any] = {
            "event": "stand",
            "done": number - 1,
            "wait_s": self._waited_s,
            "samples": self._samples,
        }
        told["seconds"] = None if self._begun is None else now - self._begun
        told["age_s"] = now - self._born
        if self._begun is None:
            told["facts"] = self._facts()
        self._report(told)
        self._stop_before = number + int(self._receive()["go"])
        self._waited_s, self._samples = 0.0, 0
        self._begun = self._now()

    def _facts(self) -> dict[str, Any]:
        facts, arguments = facts_of(self.counter, self._seen), (self._framework or {}).get("arguments")
        facts["places"] = [*facts["places"], *self._options.places(arguments)]
        passes = self._passes / max(1, self.counter.updates)
        return {
            **facts,
            **self._options.facts(arguments),
            "data_parallel": facts_of_data_parallel(self.counter.models, passes),
            "framework": self._framework,
        }

    def _now(self) -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return perf_counter()


class SwitchedRun(Listener):
    """Sets the switches of the models found in the first steps, then stops watching.

    Args:
        switches: The switches to set.
        device_name: The device on which they were tuned; None for any.
    """

    def __init__(self, switches: ModelSwitches, device_name: str | None) -> None:
        self.counter = StepCounter(self)
        self._switches = switches
        self._device_name = device_name

    def model_found(self, module: nn.Module) -> None:
        """Set the model's switches, if it is on the device that was tuned for.

        Raises:
            EnvironmentSetupError: If it is on another device.
        """
        name = name_of(next((item.device for item in module.parameters()), torch.device("cpu")))
        if self._device_name not in (None, name):
            raise EnvironmentSetupError(
                f"the script was tuned on {self._device_name} and trains on {name}; tune it again here, or run it "
                "without `--with`"
            )
        self._switches.found(module)

    def step_begins(self, number: int) -> None:
        """Stop watching after the first steps, which have called all models."""
        if number > FIRST_STEPS:
            self.counter.remove()


def name_of(device: torch.device) -> str:
    """Return a device's name for results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass
class Seen:
    """What the first steps showed besides models and optimizers.

    Attributes:
        autocast: Whether autocast is in use.
        workers: Number of processes of each training loader.
        pinned: Whether each of these loaders page-locks batches.
        padded: Per batch of these loaders, the fraction of positions beyond the longest sample.
        layouts: Padding layouts of batches that have such positions.
        indexable: Whether their batches can be indexed at once.
        attention: The attention back end in the first step, from `attention_of`.
        draws: Whether random numbers are drawn between a model's call and its backward pass.
    """

    autocast: bool = False
    workers: list[int] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=list)
    padded: list[float] = field(default_factory=list)
    layouts: list[dict[str, Any] | None] = field(default_factory=list)
    indexable: list[bool] = field(default_factory=list)
    attention: str | None = None
    draws: bool = False

    def look(self) -> None:
        """Check for autocast; call inside a model's call."""
        self.autocast = self.autocast or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    def look_at(self, iterator: Any, batch: Any) -> None:
        """Inspect an iterator and the batch that it has just returned."""
        if reads_in_own_order(dataset_of(iterator), order_of(iterator)):
            self.workers.append(workers_of(iterator))
            self.pinned.append(is_pinned(iterator))
            self.indexable.append(can_be_indexed(dataset_of(iterator), collate_of(iterator)))
            tokens = tokens_of(batch)
            if tokens is not None:
                self.padded.append(tokens.beyond_longest / tokens.positions)
                if tokens.beyond_longest:
                    self.layouts.append(layout_of(batch))


def _list_of_blocks(models: list[nn.Module]) -> str | None:
    """Return the name of the module list that holds all blocks of the only model; None if it is not this simple."""
    kinds = find_block_classes(models[0]) if len(models) == 1 else []
    if len(kinds) != 1:
        return None
    lists = [
        (name, item) for name, item in models[0].named_modules() if isinstance(item, (nn.ModuleList, nn.Sequential))
    ]
    return next((name for name, item in lists if name and list(item) == kinds[0]), None)


def _classes_of_blocks(models: list[nn.Module]) -> list[list[str]]:
    """Return the importable classes of the blocks that models repeat, as module and name."""
    kinds = {type(blocks[0]) for model in models for blocks in find_block_classes(model)}
    # `fully_shard` changes a module's class to a subclass of the one that the script knows.
    found = {_own_class(kind) for kind in kinds}
    return [] if nn.Module in found else sorted([kind.__module__, kind.__name__] for kind in found)


def _own_class(made: type[nn.Module]) -> type[nn.Module]:
    return next(kind for kind in made.__mro__ if issubclass(kind, nn.Module) and _can_be_imported(kind))


def _can_be_imported(kind: type) -> bool:
    found: object = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    return found is kind


def facts_of(counter: StepCounter, seen: Seen) -> dict[str, Any]:
    """Return what decides which switches apply to a script, after its first steps."""
    models, optimizers = counter.models, counter.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [item for group in groups for item in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    on_gpu = device.type == "cuda"
    modules = [item for model in models for item in model.modules()]
    return {
        "device": device.type,
        "device_name": name_of(device),
        "device_memory_share": _memory_share(device) if on_gpu else None,
        "capability": torch.cuda.get_device_capability(device)[0] if on_gpu else None,
        "parameters": sum(item.numel() for item in parameters),
        "models": [type(item).__name__ for item in models],
        "optimizers": [type(item).__name__ for item in optimizers],
        "half": seen.autocast or any(item.dtype in (torch.float16, torch.bfloat16) for item in parameters),
        "tf32": _uses_tf32(),
        "threads": torch.get_num_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "can_fuse": any(can_fuse(item) for item in optimizers),
        "compiled": any(compiled_call(item) is not None or is_wrapped_by_compiler(item) for item in models),
        "blocks": max((len(blocks) for model in models for blocks in find_block_classes(model)), default=0),
        "block_list": _list_of_blocks(models),
        "block_classes": _classes_of_blocks(models),
        "gathers_twice": gathers_twice(models),
        "shard_calls": shard_calls(models),
        "convolutions": any(isinstance(item, nn.Conv2d) for item in modules),
        "workers": max(seen.workers, default=None),
        "pinned": all(seen.pinned) if seen.pinned else None,
        "indexable": any(seen.indexable),
        "padded_share": sum(seen.padded) / len(seen.padded) if seen.padded else None,
        "padding": seen.layouts[0] if seen.layouts and all(item == seen.layouts[0] for item in seen.layouts) else None,
        "attention": seen.attention,
        "zeroes": counter.zeroes,
        "copies": counter.copies,
        "draws": seen.draws,
        "places": counter.places,
        "own_names": _digest([[name for name, _ in item.named_parameters()] for item in counter.own_models]),
    }


def _memory_share(device: torch.device) -> float:
    """Return the peak fraction of a GPU's memory that the process reserved, without CUDA's own use."""
    return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory


def _digest(names: list[list[str]]) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()


def _uses_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set through the newer API, which the older one cannot read
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
