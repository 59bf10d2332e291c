"""The whole step as one CUDA graph per shape of batch.

The first steps of a shape run eagerly: they are its warm-up, and real steps of the training. Then the step is recorded,
and from there on replayed: the batch is copied into the tensors the graph reads, the learning rates into a tensor on
the device, and one launch does the rest. Loss, gradient norm and the like come out as one small tensor.

What cannot be recorded goes on eagerly, and the summary says why. In `auto` mode the recorded step must first do what
the eager one does, from the same state, and be faster.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import torch

from frameworm.data.steps import StepBatch
from frameworm.engine.optim.adamw_kernel import FusedUpdate
from frameworm.engine.step.capture_check import CaptureCheck
from frameworm.engine.step.graphs import CaptureError, GraphRecorder, KeptFigures, Mark, Recorded, Recorder, in_words
from frameworm.engine.step.rates import DeviceRates
from frameworm.engine.step.static_batch import StaticInputs, own_copy, signature
from frameworm.engine.step.step import StepResult, TrainStep
from frameworm.errors import DeviceError
from frameworm.observe.clocks.compiling import compilations_so_far
from frameworm.observe.clocks.phases import StepClock
from frameworm.parallel.strategy import Strategy

log = logging.getLogger("frameworm")

MAX_SHAPES = 32
EAGER_STEPS = 2  # the very first makes the optimizer's state; compiling and autotuning may take another
SHARES_EVERY, SHARES_SELDOM = 64, 1024  # replays between two looks at a graph's phases: each look waits for the device
MAX_CHANGES = 3
MAX_WARM_UPS = 4
CLEARLY_FASTER = 0.97


class _Shape:
    """One shape of batch: whether it has run eagerly, and the graph once there is one."""

    def __init__(self) -> None:
        self.warm = False
        self.warmed = 0
        self.replays = self.look_at = 0
        self.figures = KeptFigures()
        self.eager_only = False
        self.graph: Recorded | None = None
        self.earlier: StepBatch | None = None
        self.inputs: StaticInputs | None = None
        self.shares: dict[str, float] | None = None
        self.slots: dict[str, int] = {}  # where in the graph's output loss, gradient norm and the like lie
        self.counts_samples = True
        self.fixed_count = 0.0


class CapturedStep:
    """Stands in for a `TrainStep` and replays it where it can.

    Args:
        eager: The step as written.
        recorder: Makes graphs.
        clock: Is told which phases a replay consisted of.
        trial: Compare with the eager step first.
    """

    def __init__(self, eager: TrainStep, recorder: Recorder, clock: StepClock, *, trial: bool) -> None:
        self.eager = eager
        self.update = eager.update
        self.wrapped = eager.wrapped
        self.captured_steps = 0
        self._recorder = recorder
        self._clock = clock
        self._trial = trial
        self._tried: str | None = None
        self._shapes: dict[Hashable, _Shape] = {}
        self._refused: str | None = None
        self._crowded = False
        self._changes = 0
        self._eager_steps = 0
        self._rates: DeviceRates | None = None
        self._one_pass: FusedUpdate | None = None

    @property
    def note(self) -> str:
        """What became of the capture, for the summary."""
        if self._refused is not None:
            return f"the step was not captured: {self._refused}"
        graphs = sum(shape.graph is not None for shape in self._shapes.values())
        if not graphs:
            return "the step was not captured: no shape of batch came often enough"
        shapes = "shape" if graphs == 1 else "shapes"
        text = f"{self.captured_steps} steps were replayed as CUDA graphs ({graphs} {shapes} of batch"
        text += f"; {self._tried})" if self._tried else ")"
        if self._crowded:
            text += f"; batches came in more than {MAX_SHAPES} shapes, the rest ran eagerly (data.batching: bucketed)"
        return text + "; phases inside a graph were timed in some replays"

    def run(self, step: int, batch: StepBatch) -> StepResult:
        """As `TrainStep.run`."""
        if self._refused is None and self.update.follow():
            self.update.halves = None  # they stand in for what was trained before
            self._refuse("parameters were frozen, unfrozen or given to the optimizer during training")
        if self._refused is not None:
            return self.eager.run(step, batch)
        shape = self._shape_of(batch)
        if self._rates is not None and self._rates.baked_in_changed():
            self._forget_graphs()
        if shape is None or shape.eager_only or self._refused is not None:
            return self.eager.run(step, batch)
        if shape.graph is None:
            if self._eager_steps < EAGER_STEPS:
                self._eager_steps += 1
                return self.eager.run(step, batch)
            if not shape.warm:
                shape.warm = True
                return self._warm_up(shape, step, batch)
            if not self._capture(shape, step, batch):
                return self.eager.run(step, batch)
        return self._replay(shape, step, batch)

    def _shape_of(self, batch: StepBatch) -> _Shape | None:
        try:
            key: Hashable = tuple([signature(micro) for micro in batch.batches])
        except CaptureError as error:
            self._refuse(str(error))
            return None
        if len(batch.batches) > 1:
            key = (key, tuple(batch.samples), batch.global_samples)  # these weigh the gradients
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape()
            if len(self._shapes) > MAX_SHAPES:
                shape.eager_only = self._crowded = True
        return shape

    def _warm_up(self, shape: _Shape, step: int, batch: StepBatch) -> StepResult:
        """The eager step before a shape is recorded: on the way that will be recorded, on which nothing may wait."""
        update = self.update
        shape.warmed += 1
        compiled = _compilations()
        if self._rates is None:
            self._rates = DeviceRates(update.optimizer)
            self._one_pass = update.find_one_pass()
        update.schedule.before_step(step)
        self._rates.send()
        if update.halves is not None:
            update.halves.follow()
        update.one_pass = self._one_pass
        counted = self._rates.counted_on_host()
        try:
            with _watching_for_waits() as waits, self._rates.on_device():
                result = self.eager.compute(batch)
        except Exception as error:
            # An optimizer may not take rates that lie on the device. Whatever else was wrong is so eagerly too.
            update.one_pass = None
            update.clear()
            self._refuse(in_words(error))
            return self.eager.run(step, batch)
        update.one_pass = None
        update.end_step()
        if self._trial and self._tried is None:
            shape.earlier = own_copy(batch)  # a graph that has one batch baked in shows on another
        if waits and _compilations() > compiled and shape.warmed < MAX_WARM_UPS:
            shape.warm = False  # the compiler waited, not the step: warm up once more
        elif waits:
            self._refuse(f"the host waits for the device inside the step ({waits[0]})")
        now = self._rates.counted_on_host()
        counting = next((key for key, value in counted.items() if now.get(key) != value), None)
        if counting is not None and self._refused is None:
            name = type(update.optimizer).__name__
            self._refuse(f"{name} keeps its {counting[2]} on the host, and a recorded step would never change it")
        return result

    def _capture(self, shape: _Shape, step: int, batch: StepBatch) -> bool:
        """Record the step for this shape; false when it cannot be, which is said once."""
        try:
            static = own_copy(batch)
            shape.inputs = StaticInputs(static)
            if self._trial and self._tried is None:
                self.update.schedule.before_step(step)
                refused = self._compare(shape, static, batch)
                if refused is not None:
                    shape.graph = None
                    self._refuse(refused)
                    return False
            shape.graph = self._record(shape, static)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self.update.clear()
            self._refuse(str(error).splitlines()[0])
            return False
        finally:
            self.update.one_pass = None
            shape.earlier = None
        return True

    def _record(self, shape: _Shape, static: StepBatch) -> Recorded:
        assert self._rates is not None
        self.update.one_pass = self._one_pass
        with self._rates.on_device():
            return self._recorder.record(lambda mark: self._recorded(shape, static, mark))

    def _recorded(self, shape: _Shape, static: StepBatch, mark: Mark) -> torch.Tensor:
        """What the graph holds: the step, and its figures in one tensor."""
        with self.eager.marking(mark):
            result = self.eager.compute(static)
        figures = {"loss": result.loss, "grad_norm": self.update.grad_norm, "skipped": self.update.skipped}
        shape.counts_samples = result.counts_samples
        if isinstance(result.count, torch.Tensor):
            figures["count"] = result.count
        else:
            shape.fixed_count = result.count
        present = {name: figure for name, figure in figures.items() if figure is not None}
        shape.slots = {name: place for place, name in enumerate(present)}
        return torch.stack([figure.detach().reshape(()).float() for figure in present.values()])

    def _replay(self, shape: _Shape, step: int, batch: StepBatch) -> StepResult:
        self.eager.count_step(batch)
        graph, update, rates = shape.graph, self.update, self._rates
        assert graph is not None
        assert rates is not None
        assert shape.inputs is not None
        update.schedule.before_step(step)
        rates.send()
        if update.halves is not None:
            update.halves.follow()
        shape.inputs.fill(batch)
        graph.replay()
        update.end_step()
        figures = shape.figures.keep(graph.output)  # the next replay overwrites the original
        slots = shape.slots
        update.grad_norm = figures[slots["grad_norm"]] if "grad_norm" in slots else None
        update.skipped = figures[slots["skipped"]] if "skipped" in slots else None
        if "count" in slots:
            count: torch.Tensor | float = figures[slots["count"]]
        else:
            count = batch.local_samples if shape.counts_samples else shape.fixed_count
        if shape.replays >= shape.look_at:
            shape.shares = graph.shares()
            shape.look_at += min(max(shape.look_at, SHARES_EVERY), SHARES_SELDOM)
        shape.replays += 1
        self.captured_steps += 1
        if shape.shares:
            self._clock.split(shape.shares)
        return StepResult(figures[slots["loss"]], count, shape.counts_samples)

    def _compare(self, shape: _Shape, static: StepBatch, batch: StepBatch) -> str | None:
        """Record the step with a probe, compare it with the eager one; a reason not to capture, or None."""
        update, rates, inputs = self.update, self._rates, shape.inputs
        assert rates is not None
        assert inputs is not None
        check = CaptureCheck(self.eager)
        self.eager.probe = check.probe
        try:
            graph = self._record(shape, static)

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

            rates.send()
            batches = [batch if shape.earlier is None else shape.earlier, batch]
            with self.eager.marking(None):
                compared = check.compare(eagerly, unrecorded, replayed, batches)
        except torch.OutOfMemoryError:
            update.clear()
            return "there is not enough memory to compare both ways (gpu.capture: step does without)"
        finally:
            self.eager.probe = None
        if compared.problem is not None:
            return f"the captured step does not do what the eager one does: {compared.problem}"
        captured_ms, eager_ms = 1e3 * compared.captured_s, 1e3 * compared.eager_s
        if captured_ms > CLEARLY_FASTER * eager_ms:
            return f"it gains nothing here ({captured_ms:.2f} ms captured, {eager_ms:.2f} ms eager)"
        self._tried = f"tried first: {captured_ms:.2f} ms captured against {eager_ms:.2f} ms eager"
        return None

    def _forget_graphs(self) -> None:
        """A constant of the recorded steps has changed: they are recorded again, but not for ever."""
        self._changes += 1
        for shape in self._shapes.values():
            shape.graph = None
        if self._changes > MAX_CHANGES:
            self._refuse("settings of the optimizer other than the learning rate change from step to step")

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        for shape in self._shapes.values():
            shape.graph = None
        log.warning("the step is not captured: %s; training goes on eagerly", reason)


def make_recorder(mode: str, strategy: Strategy, handed: Sequence[str] = ()) -> tuple[GraphRecorder | None, str | None]:
    """What records the steps of a run, or None; and what the summary has to say if it was asked for in vain.

    Args:
        handed: Callbacks that are handed batches and outputs, which a replayed graph does not give out.

    Raises:
        DeviceError: `step` was asked for where there is no GPU.
    """
    if mode == "off":
        return None, None
    if strategy.device.type != "cuda":
        if mode == "step":
            raise DeviceError(
                "gpu.capture: step records CUDA graphs, and this run is not on a GPU; set gpu.capture: off (or auto)"
            )
        return None, None
    if strategy.name != "single":
        reason = f"the step was not captured: strategy {strategy.name} works on several devices; capture is for one"
        log.warning("%s", reason)
        return None, reason
    if handed:
        reason = (
            f"the step was not captured: {handed[0]}.on_batch_end is handed batches and outputs, which a graph "
            "overwrites in its next replay; on_step does not keep a step from being captured"
        )
        log.warning("%s", reason)
        return None, reason
    return GraphRecorder(strategy.device), None


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Do everything on a stream of its own: what is recorded must have warmed up where it is recorded."""
    if stream is None:
        yield
        return
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def _compilations() -> int:
    return compilations_so_far() if "torch._dynamo" in sys.modules else 0  # asking would load the compiler


@contextlib.contextmanager
def _watching_for_waits() -> Iterator[list[str]]:
    """Notice where the host waits for the device; gives the places in the source."""
    places: list[str] = []
    if not torch.cuda.is_available():
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for item in caught:
        if "called a synchronizing CUDA operation" in str(item.message):
            places.append(f"{Path(item.filename).name}:{item.lineno}")
        elif "Synchronization debug mode" not in str(item.message):
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
