"""The whole step as one CUDA graph per batch shape.

The first steps of a shape run eagerly: they are its warm-up, and real training steps. Then the step is recorded and
from there on replayed: the batch is copied into the tensors that the graph reads, the learning rates into a tensor on
the device, and one launch does the rest. Loss, gradient norm and so on come out as one small tensor.

A step that cannot be recorded continues eagerly, and the summary says why. In `auto` mode the recorded step must first
agree with the eager one from the same state, and be faster.

With several ranks, the step's collectives are part of the graph, and all ranks replay or none does (see `joint`). They
decide this without communicating in every step: after some eager steps they compare at which steps their batch shapes
changed; if those are the same, each rank can decide by its own shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from frameworm.config.schema import Config
from frameworm.data.steps import StepBatch
from frameworm.engine.optim.adamw_kernel import FusedUpdate
from frameworm.engine.step.capture_check import CaptureCheck
from frameworm.engine.step.graphs import (
    CaptureError,
    Mark,
    Recorded,
    Recorder,
    RehearsalRecorder,
    in_words,
)
from frameworm.engine.step.joint import JointDecisions, first_reason
from frameworm.engine.step.rates import DeviceRates
from frameworm.engine.step.recording import compilations, watching_for_waits
from frameworm.engine.step.shapes import MAX_SHAPES, Shape, Shapes
from frameworm.engine.step.static_batch import StaticInputs, own_copy
from frameworm.engine.step.step import StepResult, TrainStep
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.observe.clocks.gradient_times import ReplayedGradients
from frameworm.observe.clocks.phases import COMMUNICATION_EXPOSED, StepClock

log = logging.getLogger("frameworm")

EAGER_STEPS = 2  # the first creates the optimizer's state; compiling and autotuning may take another
EAGER_STEPS_OF_RANKS = 12  # enough to see whether the ranks' batches have the same shape
SHARES_EVERY, SHARES_SELDOM = 64, 1024  # replays between samples of a graph's phases; sampling waits for the device
MAX_CHANGES = 3
MAX_WARM_UPS = 4
CLEARLY_FASTER = 0.97
_NO_MEMORY = "there is not enough memory to compare both ways (gpu.capture: step does without)"


def steps_before_replay(config: Config, world_size: int) -> int:
    """Number of steps before a run replays its first recorded step; 0 if nothing is recorded."""
    if config.gpu.capture == "off":
        return 0
    alone = world_size == 1 and config.parallel.strategy in ("auto", "single")
    return (EAGER_STEPS if alone else EAGER_STEPS_OF_RANKS) + 2


class CapturedStep:
    """Replaces a `TrainStep` and replays it when possible.

    Args:
        eager: The eager step.
        recorder: Creates graphs.
        clock: Receives the phases of each replay.
        trial: Whether to compare with the eager step first.
        joint: Decides together with the other ranks whose collectives are in the step; None if there are none.
        alike: Whether all ranks' batches are certain to change shape at the same steps. Otherwise only the first shape
            is recorded, and only if the first steps have no other.
        gradients: Times gradients inside the first replays; None if not needed.

    Attributes:
        retreat: Agrees with the other ranks on the step from which to continue eagerly; None with one rank.
    """

    def __init__(
        self,
        eager: TrainStep,
        recorder: Recorder,
        clock: StepClock,
        *,
        trial: bool,
        joint: JointDecisions | None = None,
        alike: bool = True,
        gradients: ReplayedGradients | None = None,
    ) -> None:
        self.eager = eager
        self.update = eager.update
        self.wrapped = eager.wrapped
        self.captured_steps = 0
        self.retreat: StopAgreement | None = None
        self._recorder = recorder
        self._clock = clock
        self._trial = trial
        self._joint = joint or JointDecisions()
        self._several = self._joint.world_size > 1
        own_steps = EAGER_STEPS_OF_RANKS if self._several else EAGER_STEPS
        self._first_steps = max(own_steps, eager.strategy.settling_steps)
        self._strategy = eager.strategy
        self._after_step = eager.strategy.after_step if eager.strategy.acts_after_steps else None
        self._tried: str | None = None
        self._shapes = Shapes(self._several, alike or not self._several)
        self._refused: str | None = None
        self._problem: str | None = None  # why this rank cannot record, to be told in the next joint decision
        self._changes = 0
        self._wish = StopRequest()
        self._rates: DeviceRates | None = None
        self._one_pass: FusedUpdate | None = None
        self._gradients = gradients

    @property
    def note(self) -> str:
        """Outcome of the capture, for the summary."""
        if self._refused is not None and not self.captured_steps:
            return f"the step was not captured: {self._refused}"
        graphs = sum(shape.replays > 0 for shape in self._shapes)
        if not graphs:
            return "the step was not captured: no batch shape came often enough"
        shapes = "shape" if graphs == 1 else "shapes"
        how = "rehearsed, not recorded" if isinstance(self._recorder, RehearsalRecorder) else "replayed as CUDA graphs"
        text = f"{self.captured_steps} steps were {how} ({graphs} {shapes} of batch"
        text += f"; {self._tried})" if self._tried else ")"
        if self._refused is not None:
            text += f", until {self._refused}"
        if self._shapes.crowded:
            text += f"; batches came in more than {MAX_SHAPES} shapes, the rest ran eagerly (data.batching: bucketed)"
        return text + "; phases inside a graph were timed in some replays"

    def agree_by(self, agreement: StopAgreement) -> None:
        """Set up the agreement through which a rank that can no longer replay returns all ranks to eager steps."""
        if self._several:
            self.retreat = agreement.for_another(self._wish, "capture")

    def run(self, step: int, batch: StepBatch) -> StepResult:
        """Train on one step's micro-batches, like `TrainStep.run`."""
        if self._refused is None and self.eager.follow():
            self._refuse("parameters were frozen, unfrozen or given to the optimizer during training")
        if self._refused is None and self.retreat is not None and self.retreat.stop_before(step + 1) is not None:
            self._refuse(next(iter(self.retreat.details), "another rank continued eagerly"))
        if self._refused is not None:
            return self.eager.run(step, batch)
        if self._rates is not None and self._rates.baked_in_changed():
            self._forget_graphs()
        shape = None if self._refused is not None else self._shape_of(batch)
        if self._refused is not None or (not self._shapes.begun and not self._begin(shape, batch)):
            return self.eager.run(step, batch)
        if shape is None or shape.eager_only:
            return self._unrecorded(step, batch) if self._several else self.eager.run(step, batch)
        if shape.graph is None:
            if not shape.warm:
                return self._warm_up(shape, step, batch)
            if not self._capture(shape, step, batch):
                return self.eager.run(step, batch)
        return self._replay(shape, step, batch)

    def close(self) -> None:
        """Free the graphs; call before destroying the process group whose collectives they hold."""
        for shape in self._shapes:
            if shape.graph is not None:
                shape.graph.close()
                shape.graph = None

    def _begin(self, shape: Shape | None, batch: StepBatch) -> bool:
        """Call in the first steps; return whether the ranks may start recording with this one.

        Args:
            shape: Of the batch; None if it has none.
            batch: The step's batch.
        """
        shapes = self._shapes
        shapes.passes(shape, batch)
        if len(shapes.order) <= self._first_steps or not self._strategy.is_settled:
            return False
        self._strategy.freeze()
        shapes.begun = True
        if not self._several:
            return True
        try:
            if shape is not None:
                shapes.check(shape, batch)
        except CaptureError as error:
            self._problem = self._problem or str(error)
        told = self._joint.exchange([self._problem, shapes.order])
        reason = first_reason([item[0] for item in told])
        unlike = next((rank for rank, item in enumerate(told) if item[1] != told[0][1]), None)
        if reason is None and unlike is not None:
            reason = f"the batches of ranks 0 and {unlike} change their shapes at different steps"
        if reason is None:
            self._device_rates()  # the ranks decide in it how they update
        else:
            self._refuse(reason)
        return reason is None

    def _shape_of(self, batch: StepBatch) -> Shape | None:
        """Return the shape of a batch; None if it cannot be recorded.

        Where the other ranks may be about to decide on the shape that they have, this rank joins them with its reason:
        they would wait for it.
        """
        try:
            return self._shapes.of(batch)
        except CaptureError as error:
            reason = str(error)
        if not self._several:
            self._refuse(reason)
            return None
        awaited = self._shapes.awaited(batch) if self._shapes.begun else None
        if awaited is not None or not self._shapes.begun:
            self._problem = self._problem or reason
        else:
            self._give_up(reason)
        return awaited

    def _give_up(self, reason: str) -> None:
        """Stop capturing. The ranks agree on a later step; until then, replayed and eager steps can meet."""
        if self.retreat is None:
            self._refuse(reason)
        elif self._wish.reason is None:
            log.warning("%s: all ranks will soon continue eagerly", reason)
            self._wish.ask("stopped", reason)

    def _warm_up(self, shape: Shape, step: int, batch: StepBatch) -> StepResult:
        """Run a shape's last eager step the way that will be recorded, in which nothing may wait for the device."""
        shape.warm, shape.warmed = True, shape.warmed + 1
        result, again, reason = self._warmed(shape, step, batch)
        told = self._joint.exchange([again, self._problem or reason])
        reason = first_reason([item[1] for item in told])
        if reason is not None:
            self._refuse(reason)
        elif any(item[0] for item in told):
            shape.warm = False
        return result

    def _warmed(self, shape: Shape, step: int, batch: StepBatch) -> tuple[StepResult, bool, str | None]:
        """Return the step's result, whether to warm up again, and why it cannot be recorded, if so."""
        update, rates = self.update, self._device_rates()
        compiled = compilations()
        counted = rates.counted_on_host()
        try:
            with watching_for_waits() as waits:
                result = self._unrecorded(step, batch)
        except Exception as error:
            # The optimizer may not accept rates on the device. Any other error occurs eagerly too.
            update.clear()
            return self.eager.run(step, batch), False, in_words(error)
        if self._trial and self._tried is None and self._problem is None:
            shape.earlier = own_copy(batch)  # a second batch reveals a graph that has one baked in
        if waits and compilations() > compiled and shape.warmed < MAX_WARM_UPS:
            return result, True, None  # the compiler waited, not the step
        if waits:
            return result, False, f"the host waits for the device inside the step ({waits[0]})"
        now = rates.counted_on_host()
        counting = next((key for key, value in counted.items() if now.get(key) != value), None)
        if counting is None:
            return result, False, None
        name = type(update.optimizer).__name__
        reason = f"{name} keeps its {counting[2]} on the host, and a recorded step would never change it"
        return result, False, reason

    def _unrecorded(self, step: int, batch: StepBatch) -> StepResult:
        """Run what would be recorded, once; bit-identical to what other ranks may replay in this step."""
        update, rates = self.update, self._device_rates()
        update.schedule.before_step(step)
        rates.send()
        if update.half_weights is not None:
            update.half_weights.follow()
        update.one_pass = self._one_pass
        try:
            with rates.on_device():
                result = self.eager.compute(batch)
        finally:
            update.one_pass = None
        self._end_step(step)
        return result

    def _device_rates(self) -> DeviceRates:
        if self._rates is None:
            self._rates = DeviceRates(self.update.optimizer)
            one_pass = self.update.find_one_pass()
            # It rounds in another way than torch's optimizer, so all ranks use it or none.
            self._one_pass = one_pass if all(self._joint.exchange(one_pass is not None)) else None
        return self._rates

    def _end_step(self, step: int) -> None:
        """Do what follows a step outside the graph; see `TrainStep.run`."""
        if self._after_step is not None and self._after_step(self.eager.model, step + 1):
            self._clock.mark(COMMUNICATION_EXPOSED)
        self.update.end_step()

    def _capture(self, shape: Shape, step: int, batch: StepBatch) -> bool:
        """Record the step for this shape; return False, after one warning, if that is impossible."""
        trying = self._trial and self._tried is None
        check: CaptureCheck | None = None
        reason: str | None = None
        try:
            if trying:
                self.update.schedule.before_step(step)
                check = CaptureCheck(self.eager)
                reason = self._tried_graph(shape, check, batch)
            if reason is None:
                reason = self._record_jointly(shape, None if trying else batch)
        finally:
            self.update.one_pass = None
            self.eager.probe = None
            shape.earlier = None
        if reason is not None:
            self.update.clear()
            self._refuse(reason)
        return reason is None

    def _record_jointly(self, shape: Shape, batch: StepBatch | None = None) -> str | None:
        """Record on all ranks; return why it failed on one, if it did.

        Args:
            shape: The shape to record.
            batch: Copied for the graph to read; None to read the same copy as the last graph.
        """
        reason = self._problem
        try:
            if reason is None:
                if batch is not None:
                    shape.static = own_copy(batch)
                    shape.inputs = StaticInputs(shape.static)
                assert shape.static is not None
                shape.graph = self._record(shape, shape.static)
        except (CaptureError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
        return self._joint.any_reason(reason)

    def _tried_graph(self, shape: Shape, check: CaptureCheck, batch: StepBatch) -> str | None:
        """Record the step with a probe and compare it with the eager one; return a reason not to capture, if any."""
        self.eager.probe = check.probe
        reason = self._record_jointly(shape, batch)
        batches = [batch if shape.earlier is None else shape.earlier, batch]
        if reason is None and self._several:
            reason = self._joint.any_reason(self._rehearse(check, batches))
        if reason is None:
            reason = self._joint.any_reason(self._compare(shape, check, batches))
        if shape.graph is not None:
            shape.graph.close()
            shape.graph = None
        self.eager.probe = None
        return reason

    def _record(self, shape: Shape, static: StepBatch) -> Recorded:
        gradients = self._gradients
        # In the first shape only: a graph with events must not be replayed once the watch, which owns them, is gone.
        if gradients is None or gradients.over or self.eager.probe is not None or shape.number != 0:
            return self._recorder.record(lambda mark: self._recorded(shape, static, mark))
        with gradients.recorded(self._leaves()):
            return self._recorder.record(lambda mark: self._recorded(shape, static, gradients.marked(mark)))

    def _leaves(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensors that get gradients in a step: each parameter, or its half-precision replacement."""
        halves = self.update.half_weights
        trained = [item for item in self.eager.model.parameters() if item.requires_grad]
        for index, parameter in enumerate(trained):
            yield index, parameter if halves is None else halves.leaf(parameter)

    def _read_gradients(self, shape: Shape) -> None:
        """Read the gradient times of a replay; after enough of them, record the step again without the events."""
        assert self._gradients is not None
        self._gradients.read()
        if not self._gradients.over:
            return
        earlier, watched, self._gradients = shape.graph, self._gradients, None
        figures = self.update.grad_norm, self.update.skipped  # of this step; recording overwrites them with the graph's
        reason = self._record_jointly(shape)
        self.update.grad_norm, self.update.skipped = figures
        if reason is not None:
            self.update.clear()
            self._refuse(reason)
        elif earlier is not None:
            earlier.close()
        del watched  # only now, as the earlier graph records its events

    def _recorded(self, shape: Shape, static: StepBatch, mark: Mark) -> torch.Tensor:
        """The function to record: the step, with its outputs in one tensor."""
        assert self._rates is not None
        self.update.one_pass = self._one_pass
        try:
            with self._rates.on_device(), self.eager.marking(mark):
                result = self.eager.compute(static)
        finally:
            self.update.one_pass = None
        figures = {"loss": result.loss, "grad_norm": self.update.grad_norm, "skipped": self.update.skipped}
        shape.counts_samples = result.counts_samples
        if isinstance(result.count, torch.Tensor):
            figures["count"] = result.count
        else:
            shape.fixed_count = result.count
        present = {name: figure for name, figure in figures.items() if figure is not None}
        shape.slots = {name: place for place, name in enumerate(present)}
        return torch.stack([figure.detach().reshape(()).float() for figure in present.values()])

    def _replay(self, shape: Shape, step: int, batch: StepBatch) -> StepResult:
        self.eager.count_step(batch)
        graph, update, rates = shape.graph, self.update, self._rates
        assert graph is not None
        assert rates is not None
        assert shape.inputs is not None
        update.schedule.before_step(step)
        rates.send()
        if update.half_weights is not None:
            update.half_weights.follow()
        shape.inputs.fill(batch)
        graph.replay()
        figures = shape.figures.keep(graph.output)  # the next replay overwrites the original
        slots = shape.slots
        update.grad_norm = figures[slots["grad_norm"]] if "grad_norm" in slots else None
        update.skipped = figures[slots["skipped"]] if "skipped" in slots else None
        if "count" in slots:
            count: torch.Tensor | float = figures[slots["count"]]
        else:
            count = batch.local_samples if shape.counts_samples else shape.fixed_count
        communication = None
        if shape.replays >= shape.look_at and self._clock.divides:
            shape.sample = graph.sample()
            communication = shape.sample.communication
            shape.look_at += min(max(shape.look_at, SHARES_EVERY), SHARES_SELDOM)
        shape.replays += 1
        self.captured_steps += 1
        if shape.sample.shares:
            self._clock.split(shape.sample.shares, communication)
        self._end_step(step)
        if self._gradients is not None and shape.number == 0:
            self._read_gradients(shape)
        return StepResult(figures[slots["loss"]], count, shape.counts_samples)

    def _rehearse(self, check: CaptureCheck, batches: Sequence[StepBatch]) -> str | None:
        """Try on this rank alone what the comparison needs; return why it cannot be done, if so."""
        try:
            with self.eager.marking(None):
                check.rehearse(batches)
        except torch.OutOfMemoryError:
            return _NO_MEMORY
        except Exception as error:  # a model may raise anything; all ranks continue eagerly then
            return f"it could not be compared with the eager step: {in_words(error)}"
        return None

    def _compare(self, shape: Shape, check: CaptureCheck, batches: Sequence[StepBatch]) -> str | None:
        """Compare the recorded step with the eager one; a reason not to capture, or None."""
        update, rates, inputs, graph = self.update, self._rates, shape.inputs, shape.graph
        assert rates is not None
        assert inputs is not None
        assert graph is not None

        def eagerly(given: StepBatch) -> torch.Tensor:
            update.one_pass = None
            return self.eager.compute(given).loss

        def unrecorded(given: StepBatch) -> torch.Tensor:
            update.one_pass = self._one_pass
            with rates.on_device():
                return self.eager.compute(given).loss

        def replayed(given: StepBatch) -> torch.Tensor:
            inputs.fill(given)
            graph.replay()
            return graph.output[shape.slots["loss"]].clone()

        try:
            rates.send()
            with self.eager.marking(None):
                compared = check.compare(eagerly, unrecorded, replayed, batches)
        except torch.OutOfMemoryError:
            if self._several:
                raise  # other ranks wait in the middle of a step, which this rank cannot finish
            update.clear()
            return _NO_MEMORY
        if compared.problem is not None:
            return f"the captured step and the eager one disagree: {compared.problem}"
        captured_ms, eager_ms = 1e3 * compared.captured_s, 1e3 * compared.eager_s
        if captured_ms > CLEARLY_FASTER * eager_ms:
            return f"it gains nothing here ({captured_ms:.2f} ms captured, {eager_ms:.2f} ms eager)"
        self._tried = f"tried first: {captured_ms:.2f} ms captured against {eager_ms:.2f} ms eager"
        return None

    def _forget_graphs(self) -> None:
        """Drop the graphs after a baked-in setting changed; they are recorded again, at most `MAX_CHANGES` times."""
        self._changes += 1
        self.close()
        for shape in self._shapes:
            shape.warm = False  # the update makes a new plan, which it cannot do while it is recorded
        if self._changes > MAX_CHANGES:
            self._refuse("settings of the optimizer other than the learning rate change from step to step")

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        self.close()
        log.warning("the step is not captured: %s; training continues eagerly", reason)
