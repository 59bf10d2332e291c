"""Two runs in lockstep: one leads, the other computes the same steps from the same states.

The leading run trains as its config says. At some of its steps it saves its state, computes the step in higher
precision and in the other run's precision, and records its own result. The following run loads each state, computes the
step on its own batch in its own way, and measures the divergence of the results. `guard.agreement` judges it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from frameworm.data.steps import StepBatch
from frameworm.engine.gate import Gate, Passage, Session
from frameworm.engine.model.precision import Precision, allow_tf32
from frameworm.engine.optim.noted_rates import NotedRates
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.precise import PreciseStep, copied
from frameworm.engine.step.probe import GradientProbe
from frameworm.engine.step.step import TrainStep
from frameworm.guard.agreement import ROUNDING_UNITS, Agreement, Draws, OutputErrors, StateErrors
from frameworm.numerics.comparison import Sketches, errors_of, noise_of, outputs_of
from frameworm.numerics.draws import figures_of
from frameworm.numerics.dropout import DropoutOff
from frameworm.numerics.plain_update import PlainUpdate
from frameworm.numerics.randomness import has_drawn, random_state, restore_random_state, seed_everything
from frameworm.numerics.sketch import dense, sketch
from frameworm.numerics.state import Named, read, whole, write
from frameworm.torch_private.compiler import draw_as_eager

_POLL_S = 0.005
_SEED = 20_000
# Learning rates at which updates are compared: at training's rates, missing decay would vanish in rounding. Without a
# gradient, each step shrinks the parameters by about this fraction.
_LARGE_RATE, _LARGE_DECAY = 1.0, 0.1
_PERTURBATIONS = 2


@dataclass(frozen=True)
class Plan:
    """What two runs compare.

    Attributes:
        folder: Where the leading run leaves the states of rank 0, and what each rank computed from them.
        steps: Numbers of the steps at which states are compared, from 1.
        early: For the first of these, the number of steps after which their starting state is taken.
        updates: Indices of the compared states at which the optimizer's update is compared.
        precision: The following run's `gpu.mixed_precision`, resolved.
        tf32: Whether the following run uses TF32.
        unit: Unit roundoff of the leading run's precision.
        draws: Number of random draws to compare at the first of the steps; 0 to compare outputs without dropout.
        wait_s: How long the following run waits for a state.
    """

    folder: str
    steps: tuple[int, ...]
    early: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    precision: str = "off"
    tf32: bool = False
    unit: float = 2.0**-24
    draws: int = 0
    wait_s: float = 300.0


class _Lockstep(Gate):
    """What both runs have in common: computing a step from any state, and its results."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._folder = Path(plan.folder)
        self._number = 0
        self._dropout: DropoutOff | None = None
        self._draws_itself: bool | None = None
        self._same_draws = contextlib.ExitStack()

    def begin(self, session: Session) -> None:
        """Take hold of the run's internals before its first step."""
        self._step = session.step
        self._eager: TrainStep = session.step.eager if isinstance(session.step, CapturedStep) else session.step
        self._session = session
        self._device, self._rank = self._eager.strategy.device, self._eager.strategy.rank
        model, update = self._eager.model, self._eager.update
        self._tensors = self._eager.tensors()
        self._parameters = {name: item for name, item in self._tensors.parameters.items() if item.requires_grad}
        names = {item: name for name, item in self._parameters.items()}
        self._names = names
        update.schedule = self._rates = NotedRates(update.schedule, update.optimizer, names)  # type: ignore[assignment]
        self._probe = self._eager.probe = GradientProbe(self._parameters)
        if not self.plan.draws:
            self._dropout = DropoutOff(model)
            self._dropout.start()

    def enter(self, step: int) -> Passage:
        """End the run after the last compared step."""
        self._number = step
        return "end" if step > self.plan.steps[-1] else "go"

    def admit(self, batch: StepBatch) -> None:
        """Before the first step, find out whether the model draws random numbers although dropout is off.

        If so, compiled kernels are set to draw the same numbers as eager ones. Otherwise nothing is set, so that the
        compiler's cache from other runs still applies.
        """
        if self._draws_itself is None and not self.plan.draws:
            with self._kept() as now:
                self._draws_itself = self._is_random(batch, now)
            if self._draws_itself and self._session.compiler.enabled:
                self._same_draws.enter_context(draw_as_eager())

    def end(self) -> None:
        """Restore the process's settings."""
        self._same_draws.close()
        if self._dropout is not None:
            self._dropout.stop()

    def _own(self, batch: StepBatch, saved: Named, seed: int | None) -> Sketches:
        """Compute the step from a saved state as this run does."""
        self._load(saved, seed)
        with self._eager.marking(None):
            result = self._step.run(self._number - 1, copied(batch))
        return self._outputs(result.loss, saved)

    def _load(self, saved: Named, seed: int | None) -> None:
        self._tensors.restore(saved)
        if seed is not None:
            seed_everything(_SEED + seed, self._rank)

    def _eagerly(self, batch: StepBatch, precision: Precision, state: Named) -> Sketches:
        with self._eager.in_precision(precision), self._session.compiler.uncompiled(), self._eager.marking(None):
            result, factor = self._eager.gradients(copied(batch))
            self._eager.meet_beside()
            self._probe(factor, precision.loss_scale(), self._eager.update)
            self._eager.update.clear()
        return self._outputs(result.loss, state)

    def _outputs(self, loss: torch.Tensor, before: Named) -> Sketches:
        found = outputs_of(loss, self._probe.gradients, self._tensors, before)
        if self._rank == 0:
            return found
        # Only rank 0's buffers count: strategies send them to the other ranks at different times.
        return {name: value for name, value in found.items() if not name.startswith("change of ")}

    def _is_random(self, batch: StepBatch, state: Named) -> bool:
        """Whether an eager step depends on the seed; all ranks agree.

        It must really draw numbers, as sums in varying order also change results now and then.
        """
        seen, draws = [], False
        for seed in (0, 1, 0):
            self._load(state, seed)
            random = random_state(self._device)
            seen.append(self._eagerly(batch, self._session.precision, state))
            draws = draws or has_drawn(random, self._device)
        depends = draws and _distance(seen[0], seen[1]) > 100 * _distance(seen[0], seen[2]) + 1e-5
        ranks = torch.tensor(float(depends), device=self._device)
        if self._eager.strategy.world_size > 1:
            self._eager.strategy.sum_over_ranks(ranks)
        return bool(ranks > 0)

    def _decisions(self) -> dict[str, Any]:
        """Return what must be equal on both sides after a step."""
        update, scaler = self._eager.update, self._eager.scaler
        counters = {
            name: dense(buffer).double().sum().item()
            for name, buffer in self._tensors.buffers.items()
            if not buffer.is_floating_point() and not buffer.is_complex()
        }
        return {
            "settings": self._rates.settings,
            "skipped": bool(update.skipped) if update.skipped is not None else False,
            "scale": None if scaler is None else float(scaler.get_scale()),
            "clip_norm": update.clip_norm,
            "counters": counters,
        }

    @contextlib.contextmanager
    def _kept(self) -> Iterator[Named]:
        """Restore the run on exit, so that it continues as if nothing had been compared."""
        saved, random = self._tensors.copy(), random_state(self._device)
        groups = [
            {key: _value(group[key]) for key in group if key != "params"} for group in self._optimizer.param_groups
        ]
        schedule = copy.deepcopy(self._rates.state_dict())
        try:
            yield saved
        finally:
            self._tensors.restore(saved)
            if self._step is self._eager:  # a graph refers to its state by address
                self._tensors.forget_new(saved)
            for group, values in zip(self._optimizer.param_groups, groups):
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        group[key].copy_(value)  # a graph may refer to its address
                    else:
                        group[key] = value
            self._rates.load_state_dict(schedule)
            restore_random_state(random, self._device)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._eager.update.optimizer

    def _draw(self, batch: StepBatch, saved: Named) -> dict[str, Any]:
        """Compute many steps from one state, each with different random numbers."""
        seed_everything(_SEED, self._rank)
        losses, drawn = [], []
        for _ in range(self.plan.draws):
            outputs = self._own(batch, saved, None)
            losses.append(float(outputs["loss"]))
            drawn.append(sketch(torch.cat([value for name, value in outputs.items() if name.startswith("gradient")])))
        return figures_of(losses, drawn)


class LeadingGate(_Lockstep):
    """Saves states of the run and the expected results of their steps.

    Attributes:
        random: Whether the step draws random numbers with dropout as in training; None if not checked.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._early: dict[int, Named] = {}
        self._precise: PreciseStep | None = None
        self.random: bool | None = None

    def admit(self, batch: StepBatch) -> None:
        """Save state and expected results before a step that is compared."""
        super().admit(batch)
        done = self._number - 1
        if done in self.plan.early:
            self._early[done] = whole(self._tensors.copy())
        if self._number not in self.plan.steps:
            return
        place = self.plan.steps.index(self._number)
        with self._kept() as now:
            if self.plan.draws:
                content = {"tensors": whole(now), **self._draw(batch, now)}
            else:
                content = self._measure(batch, place, now)
        tensors = content.pop("tensors")
        write(self._folder / f"rank-{self._rank}-{place}.pt", content)
        if self._rank == 0:
            write(self._folder / f"state-{place}.pt", tensors)

    def _measure(self, batch: StepBatch, place: int, now: Named) -> dict[str, Any]:
        at = self.plan.early[place] if place < len(self.plan.early) else self._number - 1
        early = self._early.pop(at, None)
        state = now if early is None else self._on_device(early)
        if self.random is None:
            with self._dropout.lifted() if self._dropout is not None else contextlib.nullcontext():
                self.random = self._is_random(batch, state)
        own = self._own(batch, state, place)
        decisions = self._decisions()
        again = self._own(batch, state, place)
        expected = self._expected(batch, state, place)
        if self._draws_itself:
            # In another precision it would draw other numbers, so errors are relative to an eager step in the same one.
            unit = ROUNDING_UNITS[self._expected_precision]
            pushed = [self._perturbed(state, seed, unit) for seed in range(_PERTURBATIONS)]
            moved = [self._expected(batch, other, place) for other in pushed]
            baseline = reference = expected
            kind, noise = "eager", noise_of(expected, moved)
        else:
            pushed = [self._perturbed(state, seed, self.plan.unit) for seed in range(_PERTURBATIONS)]
            moved = [self._own(batch, other, place) for other in pushed]
            baseline = own
            reference, kind = self._reference(batch, state, place)
            noise = noise_of(own, [again, *moved])
        sent = state if place in self.plan.updates else _without_optimizer(state)
        return {
            "at": at,
            "tensors": whole(sent),
            "decisions": decisions,
            "baseline": baseline,
            "expected": expected,
            "reference": reference,
            "kind": kind,
            "noise": noise,
            "repeats": _distance(own, again),
            "counts": self._counts(),
        }

    def _on_device(self, state: Named) -> Named:
        """Move a state that is loaded many times to the device, if there is one rank and enough memory."""
        if self._eager.strategy.world_size > 1:
            return state
        try:
            return {name: tensor.to(self._device) for name, tensor in state.items()}
        except torch.OutOfMemoryError:
            return state

    def _counts(self) -> dict[str, int]:
        counts = {f"gradient of {name}": item.numel() for name, item in self._parameters.items()}
        counts.update((f"change of {name}", item.numel()) for name, item in self._tensors.buffers.items())
        return {**counts, "loss": 1}

    @property
    def _expected_precision(self) -> str:
        """The following run's precision, by its name in `ROUNDING_UNITS`."""
        name = Precision(self.plan.precision, self._device).name
        return name if name != "off" else "tf32" if self.plan.tf32 and self._device.type == "cuda" else "fp32"

    def _perturbed(self, state: Named, seed: int, unit: float) -> Named:
        """Perturb a state's parameters by at most one unit roundoff."""
        generator = torch.Generator(self._device).manual_seed(seed)
        moved = dict(state)
        for name, tensor in state.items():
            if name.startswith("parameter ") and tensor.is_floating_point():
                # On the device, as a CPU would take seconds.
                noise = torch.rand(tensor.shape, generator=generator, device=self._device) * 2 - 1
                moved[name] = tensor * (1 + unit * noise.to(tensor.device, tensor.dtype))
        return moved

    def _expected(self, batch: StepBatch, state: Named, seed: int) -> Sketches:
        """Compute an eager step in the following run's precision."""
        precision = Precision(self.plan.precision, self._device)
        for _ in range(8):
            self._load(state, seed)
            with allow_tf32(self.plan.tf32):
                outputs = self._eagerly(batch, precision, state)
            if precision.scaler is None or all(bool(value.isfinite().all()) for value in outputs.values()):
                break
            precision.scaler.update(precision.scaler.get_scale() / 8)  # as in training after a few skipped steps
        return outputs

    def _reference(self, batch: StepBatch, state: Named, seed: int) -> tuple[Sketches, str]:
        """Compute the step in fp64 if the model can, else in strict fp32."""
        if self._precise is None:
            self._precise = PreciseStep.of(self._eager, self._session.loss_fn)
        if self._precise.works:
            seed_everything(_SEED + seed, self._rank)
            outputs = self._precise.outputs(batch, state)
            if outputs is not None:
                return outputs, "fp64"
        self._load(state, seed)
        with allow_tf32(False), sdpa_kernel(SDPBackend.MATH):
            return self._eagerly(batch, Precision("off", self._device), state), "fp32"


class FollowingGate(_Lockstep):
    """Computes the steps of a leading run from its states, and measures the divergence of the outputs."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.states: list[StateErrors] = []
        self._differences: list[str] = []
        self._updates: dict[str, float] = {}
        self._kinds: set[str] = set()
        self._repeats = 0.0
        self._draws: Draws | None = None

    def admit(self, batch: StepBatch) -> None:
        """Compare before a step that is to be compared."""
        super().admit(batch)
        if self._number not in self.plan.steps:
            return
        place = self.plan.steps.index(self._number)
        told = self._wait_for(self._folder / f"rank-{self._rank}-{place}.pt")
        state: Named = self._wait_for(self._folder / f"state-{place}.pt")
        with self._kept():
            if self.plan.draws:
                mine = self._draw(batch, state)
                before, after = tuple(told["figures"]), tuple(mine["figures"])
                self._draws = Draws(self.plan.draws, before, after, mine["repeated"], told["repeated"])
                return
            own = self._own(batch, state, place)
            self._compare(told, own, self._decisions())
            if place in self.plan.updates:
                self._compare_update(batch, state, place)

    def agreement(self) -> Agreement:
        """Return what was measured."""
        kind = next((kind for kind in ("eager", "fp32") if kind in self._kinds), "fp64")
        return Agreement(
            self.states, self._differences, self._updates, kind, self.plan.unit, self._repeats, self._draws
        )

    def _compare(self, told: dict[str, Any], own: Sketches, decisions: dict[str, Any]) -> None:
        outputs: list[OutputErrors] = errors_of(
            told["reference"], told["baseline"], told["expected"], own, told["noise"], told["counts"]
        )
        self.states.append(StateErrors(told["at"], outputs))
        self._kinds.add(told["kind"])
        self._repeats = max(self._repeats, told["repeats"])
        missing = sorted(set(told["baseline"]) ^ set(own))
        if missing:
            self._differences.append(f"only one side computes the {missing[0]}")
        for text in _unequal(told["decisions"], decisions):
            if text not in self._differences:
                self._differences.append(text)

    def _compare_update(self, batch: StepBatch, state: Named, place: int) -> None:
        """Compare steps at a large rate, with and without a gradient, with torch's plain optimizer."""
        optimizer = self._eager.strategy.given(self._optimizer)
        decays = [float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups]
        decay_rate = _LARGE_DECAY / max(decays) if max(decays, default=0.0) > 0 else _LARGE_RATE
        plain = PlainUpdate(optimizer, self._names, self._eager.update.clip_norm)
        for rate, passed_on, start in ((_LARGE_RATE, 1.0, state), (decay_rate, 0.0, _without_moments(state))):
            self._load(start, place)
            before = self._tensors.copy()
            self._rates.raised = rate
            self._probe.pass_on(passed_on)
            try:
                self._own(batch, start, place)
                if self._eager.update.skipped is not None and bool(self._eager.update.skipped):
                    continue
                gradients = {name: value * passed_on for name, value in self._probe.gradients.items()}
                errors = plain.errors(before, gradients, self._tensors.live())
            finally:
                self._rates.raised = None
                self._probe.pass_on(1.0)
            for name, times in errors.items():
                self._updates[name] = max(self._updates.get(name, 0.0), times)

    def _wait_for(self, path: Path) -> dict[str, Any]:
        deadline = time.monotonic() + self.plan.wait_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no state to compare came within {self.plan.wait_s:.0f} s")
            time.sleep(_POLL_S)
        return read(path)


def _without_moments(state: Named) -> Named:
    """Return a state whose optimizer moments are zero."""
    shapes = {name.removeprefix("parameter "): value.shape for name, value in state.items()}
    cleared = dict(state)
    for name, value in state.items():
        if name.startswith("optimizer ") and value.is_floating_point():
            parameter = name.removeprefix("optimizer ").rpartition(" ")[0]
            if value.shape == shapes.get(parameter) and value.dim() > 0:
                cleared[name] = torch.zeros_like(value)
    return cleared


def _without_optimizer(state: Named) -> Named:
    return {name: tensor for name, tensor in state.items() if not name.startswith("optimizer ")}


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the relative distance of all outputs together."""
    apart = sum(float((other[name] - value).square().sum()) for name, value in one.items() if name in other)
    size = sum(float(value.square().sum()) for value in one.values())
    return float((apart / size) ** 0.5) if size else 0.0


def _unequal(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Describe decisions that differ."""
    for name, settings in before["settings"].items():
        other = after["settings"].get(name)
        if other is None:
            yield f"{name} is no longer given to the optimizer"
            continue
        for key, value in settings.items():
            if key in other and other[key] != value:
                yield f"{key} of {name} is {other[key]} instead of {value}"
    for name in after["settings"]:
        if name not in before["settings"]:
            yield f"{name} is now given to the optimizer"
    if before["skipped"] != after["skipped"]:
        yield "a step is now skipped" if after["skipped"] else "a step is no longer skipped"
    if before["clip_norm"] != after["clip_norm"]:
        yield f"gradients are clipped at {after['clip_norm']} instead of {before['clip_norm']}"
    if None not in (before["scale"], after["scale"]) and before["scale"] != after["scale"]:
        yield f"the loss scale is {after['scale']} instead of {before['scale']}"
    for name, value in before["counters"].items():
        if after["counters"].get(name, value) != value:
            yield f"{name} is {after['counters'][name]:.0f} instead of {value:.0f}"


def _value(setting: Any) -> Any:
    return setting.clone() if isinstance(setting, torch.Tensor) else setting
