"""Trials to compare: one run of the script saves states, others continue from the same states.

All of them run the unmodified script. Before some of its steps, the leading run saves parameters, buffers, optimizer
state and random state; a following run loads them before the same step. Each records the results of its step: the loss,
gradients before clipping, and changes of buffers. Dropout is off in all of them, since other kernels draw other masks.
Further runs load the first state with dropout on, and call the model many times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from frameworm.attach.padding import trimmed
from frameworm.attach.trial.interception import ModelSwitches
from frameworm.attach.trial.job import ScriptJob
from frameworm.attach.trial.steps import Listener, StepCounter
from frameworm.data.prefetch import tensors_in
from frameworm.numerics.comparison import Sketches, outputs_of
from frameworm.numerics.draws import draw_calls
from frameworm.numerics.dropout import DropoutOff
from frameworm.numerics.plain_update import PlainUpdate, settings_of
from frameworm.numerics.randomness import random_state, restore_random_state, seed_everything
from frameworm.numerics.sample_hash import add_hashes, batch_hash
from frameworm.numerics.state import Named, StepTensors, own_shard, read, write

_POLL_S = 0.01
_WAIT_S = 300.0
_SEED = 20


class ComparedRun(Listener):
    """Saves or loads states, and records the results of steps.

    Args:
        switches: Switches to set in the models that are found.
        job: The steps to compare, and the role.
        place: Returns the folder for this process's results, once it trains.
        report: Receives a message after each compared step, and when all are done.
    """

    def __init__(self, switches: ModelSwitches, job: ScriptJob, place: Callable[[], Path], report: Any) -> None:
        self.counter = StepCounter(self)
        self._switches = switches
        self._job = job
        self._report = report
        self._place = place
        self._dropout: list[DropoutOff] = []
        self._before: Named | None = None
        self._turn = 0
        self._counts: dict[str, int] = {}
        self._outputs: Sketches | None = None
        self._loss: torch.Tensor | None = None
        self._hashes: list[int | None] = []
        self._updates: dict[str, float] = {}
        self._settings: dict[str, Any] = {}
        self._start: Named | None = None
        self._given: Named = {}
        # An unseeded script would draw other samples in each run; torch itself always starts with the same seed.
        random.seed(_SEED)
        np.random.seed(_SEED)

    @property
    def _folder(self) -> Path:
        return self._place()

    def model_found(self, module: nn.Module) -> None:
        """Set the model's switches, and turn dropout off."""
        if not self._job.draws:
            self._dropout.append(DropoutOff(module))
            self._dropout[-1].start()
        self._switches.found(module)

    def step_begins(self, number: int) -> None:
        """Save the last step's results; before a compared step, save or load the state."""
        self._finish(number - 1)
        self._hashes, self._loss, self._turn = [], None, 0
        if number > self._job.steps[-1]:
            self._end(number - 1)
        if number not in self._job.steps:
            return
        tensors = self._tensors()
        path = self._folder / f"state-{number}.pt"
        if self._job.role == "lead":
            write(path, {"tensors": tensors.copy(), "random": random_state(self._device())})
        else:
            self._take_over(path, tensors)
        self._before = tensors.copy()

    def _end(self, steps: int) -> None:
        self._report({"event": "compared", "steps": steps})
        time.sleep(_WAIT_S)  # the tuner kills this process

    def _take_over(self, path: Path, tensors: StepTensors) -> None:
        ends = time.monotonic() + _WAIT_S
        while not path.exists():
            if time.monotonic() > ends:
                raise TimeoutError(f"no state was left in {path.name}")
            time.sleep(_POLL_S)
        found = read(path)
        tensors.restore(found["tensors"])
        if self._job.perturbed:
            self._perturb(tensors)
        restore_random_state(found["random"], self._device())

    @torch.no_grad()
    def _perturb(self, tensors: StepTensors) -> None:
        """Move each parameter by at most one unit roundoff."""
        generator = torch.Generator(self._device()).manual_seed(self._job.perturbed)
        for name, tensor in tensors.live().items():
            if name.startswith("parameter ") and tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, device=generator.device) * 2 - 1
                tensor.mul_(1 + self._job.unit * noise.to(tensor))

    def called(self, module: nn.Module, call: Callable[[], Any]) -> None:
        """If draws are compared, call the model repeatedly instead of continuing."""
        if self._before is None or not self._job.draws:
            return
        tensors = self._tensors()

        def again() -> list[torch.Tensor]:
            tensors.restore(self._before or {})
            return list(tensors_in(call()))

        seed_everything(_SEED)
        learning = [item for item in module.parameters() if item.requires_grad]
        write(self._folder / f"{self._job.name}-draws.pt", {"draws": draw_calls(again, learning, self._job.draws)})
        self._end(self.counter.step)

    def fetched(self, iterator: Any, batch: Any, seconds: float) -> None:
        """Record which samples were fetched."""
        if self._before is not None:
            self._hashes.append(batch_hash(trimmed(batch)))  # padding is not part of a sample

    def goes_back(self, loss: torch.Tensor) -> None:
        """Sum the losses that are differentiated."""
        if self._before is not None and loss.numel() == 1:
            own = loss.detach().double()
            self._loss = own if self._loss is None else self._loss + own

    def before_update(self) -> None:
        """Record the gradients; if a step has several updates, those of each."""
        if self._before is None:
            return
        self._turn += 1
        turn = "" if self._turn == 1 else f", update {self._turn}"
        tensors = self._tensors()
        gradients = {
            name: own_shard(item.grad.detach()) for name, item in tensors.parameters.items() if item.grad is not None
        }
        loss = torch.zeros((), dtype=torch.float64) if self._loss is None else self._loss
        found = outputs_of(loss, {f"{name}{turn}": item for name, item in gradients.items()}, tensors, self._before)
        self._outputs = {**(self._outputs or {}), **found}
        self._counts.update((f"gradient of {name}{turn}", item.numel()) for name, item in gradients.items())

    def updates(self, optimizer: torch.optim.Optimizer, *, evaluates: bool) -> None:
        """Record the optimizer's settings, and the state from which the update starts."""
        self._start = None
        if self._before is None:
            return
        names = self._names()
        self._settings.update(settings_of(optimizer, names))
        scales = getattr(optimizer, "grad_scale", None) is not None  # unscaling is then part of the update
        if self._job.role == "follow" and optimizer.state and not evaluates and not scales:
            self._start = self._tensors().copy()
            mine = {item for group in optimizer.param_groups for item in group["params"] if item.grad is not None}
            self._given = {names[item]: own_shard(item.grad.detach()).clone() for item in mine if item.grad is not None}

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the update with that of torch's plain optimizer for the same gradient."""
        if self._before is not None and self._start is not None:
            mine = {
                item: name
                for item, name in self._names().items()
                if name in self._given and not self._is_first(optimizer, item, name)
            }
            errors = PlainUpdate(optimizer, mine, None).errors(self._start, self._given, self._tensors().copy())
            self._updates.update(errors)

    def _is_first(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str) -> bool:
        """Whether this update has created the parameter's state, as when models are trained in turns."""
        state = optimizer.state.get(parameter, {})
        tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
        return any(f"optimizer {name} {key}" not in (self._start or {}) for key in tensors)

    def _finish(self, number: int) -> None:
        """Save the results of a compared step."""
        if self._before is None or self._outputs is None:
            self._before = None
            return
        counts = {f"change of {name}": item.numel() for name, item in self._tensors().buffers.items()}
        content = {
            "outputs": self._outputs,
            "counts": {**self._counts, **counts, "loss": 1},
            "samples": add_hashes(self._hashes) if self._hashes else None,
            "loss": None if self._loss is None else float(self._loss),
            "settings": self._settings,
            "updates": self._updates,
        }
        write(self._folder / f"{self._job.name}-{number}.pt", content)
        self._before = self._outputs = None
        self._settings, self._updates, self._counts = {}, {}, {}
        self._report({"event": "noted", "step": number})

    def _names(self) -> dict[nn.Parameter, str]:
        found: dict[nn.Parameter, str] = {}
        for place, model in enumerate(self.counter.models):
            prefix = "" if place == 0 else f"({place + 1}) "
            for name, item in model.named_parameters():
                found.setdefault(item, prefix + name.replace("_orig_mod.", ""))
        for optimizer in self.counter.optimizers:
            for group in optimizer.param_groups:
                for item in group["params"]:
                    found.setdefault(item, f"parameter {len(found)}")
        return found

    def _tensors(self) -> StepTensors:
        buffers = {
            ("" if place == 0 else f"({place + 1}) ") + name: item
            for place, model in enumerate(self.counter.models)
            for name, item in model.named_buffers()
        }
        parameters = ((name, item) for item, name in self._names().items())
        states: Any = SimpleNamespace(state={})
        for optimizer in self.counter.optimizers:
            states.state.update(optimizer.state)
        return StepTensors(parameters, buffers.items(), states, own_shards=True)

    def _device(self) -> torch.device:
        return next((item.device for item in self._names()), torch.device("cpu"))
