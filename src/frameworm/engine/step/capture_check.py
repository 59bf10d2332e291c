"""Check that the recorded step does the same as the eager one, from the same states, on different batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from frameworm.data.steps import StepBatch
from frameworm.engine.step.probe import GradientProbe
from frameworm.engine.step.step import TrainStep
from frameworm.guard.agreement import Agreement, StateErrors, judge_agreement
from frameworm.numerics.comparison import Sketches, errors_of, noise_of, outputs_of
from frameworm.numerics.plain_update import PlainUpdate
from frameworm.numerics.state import Named

TRIAL_STEPS = 4
COMPARED_STATES = 2

Compute = Callable[[StepBatch], torch.Tensor]


class Comparison(NamedTuple):
    """What is wrong with the recorded step, if anything, and the duration of an eager and a recorded step."""

    problem: str | None
    eager_s: float
    captured_s: float


class CaptureCheck:
    """Compares a recorded step with the eager one and restores the state of the training.

    Args:
        step: The eager step. A graph recorded while its probe is set copies the gradients.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._tensors = step.tensors()
        self._trained = {name: item for name, item in self._tensors.parameters.items() if item.requires_grad}
        self.probe = GradientProbe(self._trained)
        self._device = step.strategy.device

    def rehearse(self, batches: Sequence[StepBatch]) -> None:
        """Do once, on this rank alone, what needs memory in `compare`.

        In `compare` the other ranks would wait forever for a rank that runs out of memory. Sharded parameters are
        gathered from all ranks in forward, so there only the copies are tried.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory to compare.
        """
        step = self._step
        begun = self._tensors.copy(), self._random()
        try:
            start = self._tensors.copy()
            if step.strategy.shards_parameters:
                return
            for batch in batches:
                with step.alone():
                    result, factor = step.gradients(batch)
                self.probe(factor, None, step.update)
                outputs_of(result.loss, self.probe.gradients, self._tensors, start)
                step.update.clear()
            self._plain().errors(start, self.probe.gradients, self._tensors.live())
        finally:
            step.update.clear()
            self._restore(*begun)

    def compare(
        self, eagerly: Compute, unrecorded: Compute, replayed: Compute, batches: Sequence[StepBatch]
    ) -> Comparison:
        """Compute the same steps in three ways and compare them.

        Args:
            eagerly: Runs the step as without capture.
            unrecorded: Runs the recorded function without a graph.
            replayed: Replays the graph on a batch of its shape.
            batches: Different batches of that shape.
        """
        begun = self._tensors.copy(), self._random()
        states: list[StateErrors] = []
        updates: dict[str, float] = {}
        try:
            for place in range(COMPARED_STATES):
                start = self._tensors.copy(), self._random()
                for batch in batches:
                    eager, again = (self._outputs(eagerly, batch, *start) for _ in range(2))
                    expected = self._outputs(unrecorded, batch, *start)
                    captured = self._outputs(replayed, batch, *start)
                    counts = {name: value.numel() for name, value in eager.items()}
                    noise = noise_of(eager, [again])
                    states.append(StateErrors(place, errors_of(eager, expected, expected, captured, noise, counts)))
                updates = self._updates(start[0], updates)
                self._outputs(eagerly, batches[-1], *start)  # on to the next state
            times = [self._seconds(way, batches[0]) for way in (eagerly, replayed)]
        finally:
            self._restore(*begun)
        verdict = judge_agreement(Agreement(states, updates=updates))
        return Comparison(verdict.detail if verdict.passed is False else None, *times)

    def _outputs(self, compute: Compute, batch: StepBatch, saved: Named, random: torch.Tensor) -> Sketches:
        self._restore(saved, random)
        loss = compute(batch)
        return outputs_of(loss, self.probe.gradients, self._tensors, saved)

    def _updates(self, before: Named, known: dict[str, float]) -> dict[str, float]:
        """Compare the last, replayed step's update with that of torch's plain optimizer."""
        update = self._step.update
        if update.skipped is not None and bool(update.skipped):
            return known
        errors = self._plain().errors(before, self.probe.gradients, self._tensors.live())
        return {name: max(times, known.get(name, 0.0)) for name, times in errors.items()}

    def _plain(self) -> PlainUpdate:
        update, names = self._step.update, {item: name for name, item in self._trained.items()}
        return PlainUpdate(self._step.strategy.given(update.optimizer), names, update.clip_norm)

    def _seconds(self, compute: Compute, batch: StepBatch) -> float:
        self._wait()
        begin = perf_counter()
        for _ in range(TRIAL_STEPS):
            compute(batch)
        self._wait()
        return (perf_counter() - begin) / TRIAL_STEPS

    def _random(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _restore(self, saved: Named, random: torch.Tensor) -> None:
        self._tensors.restore(saved)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(random, self._device)
        else:
            torch.set_rng_state(random)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
