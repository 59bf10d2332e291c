"""Does the recorded step do what the eager one does? A few steps both ways, from the same state, on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from frameworm.engine.step.step import TrainStep

TRIAL_STEPS = 4
# Two eager trials differ where kernels add up in any order; the recorded one may differ by a few times as much.
NOISE_ALLOWED = 4.0
ROUNDING_ALLOWED = 1e-3
KERNELS_ALLOWED = 1e-2


class DeviceState:
    """The tensors a step changes, and the state of the generator it draws from."""

    def __init__(self, parameters: list[torch.Tensor], others: list[torch.Tensor], random: torch.Tensor | None) -> None:
        self.parameters = parameters
        self.others = others
        self.random = random

    @classmethod
    def of(cls, step: TrainStep) -> DeviceState:
        """The live state of a step; copies must be asked for."""
        beside = step.strategy.beside
        others = [*step.model.buffers(), *beside.buffers()]
        for state in step.update.optimizer.state.values():
            others += [value for value in state.values() if isinstance(value, torch.Tensor)]
        if step.update.halves is not None:
            others += step.update.halves.tensors
        if step.scaler is not None:
            scale, growth = step.scaler._scale, step.scaler._growth_tracker
            others += [tensor for tensor in (scale, growth) if tensor is not None]
        return cls([*step.model.parameters(), *beside.parameters.values()], others, None)

    @torch.no_grad()
    def copy(self) -> DeviceState:
        """What the tensors hold now."""
        device = self.parameters[0].device
        random = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return DeviceState([item.clone() for item in self.parameters], [item.clone() for item in self.others], random)

    @torch.no_grad()
    def restore(self, saved: DeviceState) -> None:
        """Write what a copy holds into the live tensors, whose addresses a graph knows."""
        for live, kept in zip(self.parameters + self.others, saved.parameters + saved.others):
            live.copy_(kept)
        assert saved.random is not None
        device = self.parameters[0].device
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved.random, device)
        else:
            torch.set_rng_state(saved.random)


@dataclass
class Outcome:
    """What a few steps led to."""

    losses: torch.Tensor
    state: DeviceState
    step_s: float


def try_steps(step: Callable[[], torch.Tensor], state: DeviceState, saved: DeviceState) -> Outcome:
    """Run a few steps and put the state back as it was saved."""
    device = state.parameters[0].device
    _wait(device)
    begin = perf_counter()
    losses = [step() for _ in range(TRIAL_STEPS)]
    _wait(device)
    step_s = (perf_counter() - begin) / TRIAL_STEPS
    outcome = Outcome(torch.stack([loss.detach().reshape(()).float() for loss in losses]), state.copy(), step_s)
    state.restore(saved)
    return outcome


def disagreement(
    saved: DeviceState, eager: Outcome, unrecorded: tuple[Outcome, Outcome], captured: Outcome
) -> str | None:
    """In which figure the captured steps are not what they should be, or None.

    Args:
        saved: Where all began.
        eager: The step as it runs without capture; kernels of its own may round otherwise, so only losses are compared.
        unrecorded: What was recorded, run without a graph, twice: how far these are apart is what chance does.
        captured: The replays.
    """
    one, other = unrecorded
    noise = _distance(one.state.parameters, other.state.parameters)
    moved = _distance(one.state.parameters, saved.parameters)
    apart = _distance(one.state.parameters, captured.state.parameters)
    if not apart <= NOISE_ALLOWED * noise + ROUNDING_ALLOWED * moved:
        return f"after {TRIAL_STEPS} steps the parameters are {apart:.3g} apart, having moved by {moved:.3g}"
    size = float(eager.losses.abs().max())
    for reference, allowed in ((one, ROUNDING_ALLOWED), (eager, KERNELS_ALLOWED)):
        loss_noise = float((one.losses - other.losses).abs().max())
        loss_apart = float((reference.losses - captured.losses).abs().max())
        if not loss_apart <= NOISE_ALLOWED * loss_noise + allowed * size:
            return f"the losses are {reference.losses.tolist()} eagerly and {captured.losses.tolist()} captured"
    return None


def _distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    with torch.no_grad():
        squares = [(a.detach().float() - b.detach().float()).pow(2).sum() for a, b in zip(one, other)]
        return float(torch.stack(squares).sum().sqrt())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
