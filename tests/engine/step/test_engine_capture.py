"""When a step is recorded, replayed and refused, with a recorder that runs the function again at every replay."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
from fake_graphs import Again, FakeRecorder
from torch import nn
from workbench import classification, mlp, parameters

from frameworm import Trainer
from frameworm.config.load import load_config_from_mapping
from frameworm.config.resolve import resolve
from frameworm.data.steps import StepBatch
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import NoSchedule, Schedule
from frameworm.engine.optim.update import Update
from frameworm.engine.step import capture
from frameworm.engine.step.capture import EAGER_STEPS, MAX_CHANGES, CapturedStep
from frameworm.engine.step.capture_check import COMPARED_STATES, TRIAL_STEPS, CaptureCheck
from frameworm.engine.step.graphs import KEPT_STEPS, KeptFigures, Mark, ReplaySample
from frameworm.engine.step.joint import JointDecisions
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.recording import make_recorder
from frameworm.engine.step.shapes import MAX_SHAPES
from frameworm.engine.step.static_batch import StaticInputs, own_copy
from frameworm.engine.step.step import TrainStep
from frameworm.errors import ConfigError, DeviceError
from frameworm.observe.clocks import gradient_times
from frameworm.observe.clocks.device_clock import MAX_STEPS_AHEAD
from frameworm.observe.clocks.gradient_times import REPLAYS, GradientWatch, ReplayedGradients
from frameworm.observe.clocks.phases import HostClock
from frameworm.parallel.strategy import Strategy

CPU = torch.device("cpu")


class Bench:
    """A model with an eager and a captured step."""

    def __init__(
        self, *, trial: bool = False, recorder: FakeRecorder | None = None, model: nn.Module | None = None
    ) -> None:
        self.model = mlp() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        strategy = Strategy(CPU)
        precision = Precision("off", CPU)
        schedule = Schedule(self.optimizer, "linear", 200, 0.0)
        update = Update(self.model.parameters(), self.optimizer, schedule, precision, 1.0, CPU)
        clock = HostClock()
        self.eager = TrainStep(self.model, self.model, LossFunction(self.model), update, strategy, precision, clock)
        self.recorder = recorder or FakeRecorder()
        self.step = CapturedStep(self.eager, self.recorder, clock, trial=trial)
        self.number = 0

    def train(self, *batches: Any) -> list[float]:
        losses = []
        for batch in batches:
            micros = batch if isinstance(batch, list) else [batch]
            samples = [len(micro[0]) for micro in micros]
            result = self.step.run(self.number, StepBatch(micros, samples, sum(samples)))
            self.number += 1
            losses.append(float(result.loss))
        return losses


def _batches(count: int, size: int = 4) -> list[Any]:
    inputs, target = classification(count * size).tensors
    return [(inputs[i * size : (i + 1) * size], target[i * size : (i + 1) * size]) for i in range(count)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_replays_train_as_the_eager_step_does(accumulation: int) -> None:
    batches = _batches(12)
    groups = [batches[i : i + accumulation] for i in range(0, 12, accumulation)]
    captured, eager = Bench(), Bench()
    found = captured.train(*groups)
    eager.step._refused = "for comparison"
    expected = eager.train(*groups)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(parameters(captured.model), parameters(eager.model), rtol=1e-5, atol=1e-6)
    assert captured.step.captured_steps == len(groups) - EAGER_STEPS - 1
    assert eager.step.captured_steps == 0


@pytest.mark.parametrize("trial", [False, True])
def test_replays_keep_averages_and_a_trial_leaves_them_alone(trial: bool) -> None:
    batches = _batches(12)
    captured, eager = Bench(trial=trial), Bench()
    for bench in (captured, eager):
        bench.eager.update.average(AveragedWeights(0.9, bench.model, bench.optimizer, Strategy(CPU)))
    captured.train(*batches)
    eager.step._refused = "for comparison"
    eager.train(*batches)
    first, second = (bench.eager.update.averages for bench in (captured, eager))
    assert first is not None
    assert second is not None
    for name, average in first.tensors.items():
        torch.testing.assert_close(average, second.tensors[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(average, dict(captured.model.named_parameters())[name])


@pytest.mark.parametrize("where", ["state", "group"])
def test_an_optimizer_that_counts_on_the_host_is_refused(where: str) -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                holders = [group] if where == "group" else [self.state[item] for item in group["params"]]
                for holder in holders:
                    holder["count"] = holder.get("count", 0) + 1
            return super().step(closure)

    bench = Bench()
    bench.optimizer = bench.eager.update.optimizer = Counts(bench.model.parameters(), lr=0.1)
    bench.train(*_batches(8))
    assert bench.step.captured_steps == 0
    assert "Counts keeps its count on the host" in bench.step.note


def test_each_shape_is_recorded_once_and_a_step_counts_its_own_samples() -> None:
    bench = Bench()
    short = (torch.randn(2, 6), torch.zeros(2, dtype=torch.int64))
    whole = _batches(1)[0]
    bench.train(*[whole] * 6, *[short] * 4, *[whole] * 2)
    assert [graph.replays for graph in bench.recorder.graphs] == [6 - EAGER_STEPS - 1 + 2, 4 - 1]
    result = bench.step.run(bench.number, StepBatch([short], [1], 1))
    assert result.count == 1, "a padded batch of the same shape may hold fewer samples"
    assert "2 shapes" in bench.step.note


def test_figures_stay_as_long_as_a_clock_holds_them() -> None:
    kept = KeptFigures()
    found = [kept.keep(torch.tensor([float(step), -float(step)])) for step in range(KEPT_STEPS)]
    assert [(float(loss), float(norm)) for loss, norm in found] == [(float(step), -float(step)) for step in range(64)]
    assert kept.keep(torch.tensor([9.0, 9.0]))[0] is found[0][0], "made once"
    assert KEPT_STEPS > MAX_STEPS_AHEAD


def test_a_graphs_phases_are_looked_at_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look waits for the device."""
    monkeypatch.setattr(capture, "SHARES_EVERY", 2)
    monkeypatch.setattr(capture, "SHARES_SELDOM", 8)
    bench = Bench()
    looked: list[int] = []
    monkeypatch.setattr(Again, "sample", lambda graph: looked.append(graph.replays - 1) or ReplaySample({}))
    bench.train(*_batches(1) * (EAGER_STEPS + 1 + 35))
    assert looked == [0, 2, 4, 8, 16, 24, 32]


@pytest.mark.parametrize("dtypes", [(torch.int64,) * 3, (torch.int64, torch.float32, torch.int64)])
def test_a_batch_is_filled_anew(dtypes: tuple[torch.dtype, ...]) -> None:
    """Whatever its tensors hold: those of one type are copied together."""
    given = {str(place): torch.arange(place, place + 4).to(dtype) for place, dtype in enumerate(dtypes)}
    first, *others = given.values()
    for batch in (
        given,
        {"nested": given},
        [first, others],
        {"a": {"x": first, "y": others[0]}, "b": 5, "c": others[1]},
    ):
        step = StepBatch([batch], [4], 4)
        inputs = StaticInputs(own_copy(step))
        for tensor in inputs.tensors:
            tensor.zero_()
        inputs.fill(step)
        assert all(torch.equal(target, source) for target, source in zip(inputs.tensors, given.values(), strict=True))


class Moment:
    """An event on the host's clock."""

    def __init__(self) -> None:
        self.at_s = perf_counter()

    def synchronize(self) -> None:
        """It is over."""

    def elapsed_time(self, other: Moment) -> float:
        return 1e3 * (other.at_s - self.at_s)


def test_the_first_replays_tell_when_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_times, "_event_in_graph", Moment)
    plain, bench = Bench(), Bench()
    watch = GradientWatch(bench.model, CPU, unseen="steps are replayed")
    bench.step._gradients = ReplayedGradients(watch)
    batches = _batches(EAGER_STEPS + 1 + REPLAYS + 6)
    recorded = FakeRecorder.record

    def record(recorder: FakeRecorder, function: Callable[[Mark], torch.Tensor]) -> Again:
        """What a real recorder does at once: run the function, with its hooks in place, and undo its effects."""
        kept = copy.deepcopy((bench.model.state_dict(), bench.optimizer.state_dict()))
        function(lambda name: None)
        bench.model.load_state_dict(kept[0])
        bench.optimizer.load_state_dict(kept[1])
        return recorded(recorder, function)

    monkeypatch.setattr(FakeRecorder, "record", record)
    bench.train(*batches)
    monkeypatch.undo()
    plain.train(*batches)
    torch.testing.assert_close(parameters(bench.model), parameters(plain.model), rtol=1e-5, atol=1e-6)
    times = watch.result()
    assert times.steps == REPLAYS
    assert times.note is None
    assert times.backward_s is not None
    first, *_, last = [item.ready_s for item in times.gradients]
    assert first is not None
    assert last is not None
    assert 0 < last < first <= times.backward_s, "the last layer's come first"
    assert len(bench.recorder.graphs) == 2, "recorded again, without the events"
    assert bench.recorder.graphs[1].replays == 6


def test_only_the_first_shapes_graph_holds_events_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events go once they are read, and a GPU that records one of them later writes into freed memory."""
    bench = Bench()
    watched: list[int] = []

    class Watched(ReplayedGradients):
        @contextlib.contextmanager
        def recorded(self, leaves: Any) -> Iterator[None]:
            watched.append(len(bench.recorder.graphs))
            yield

        def read(self) -> None:
            self._left -= 1

    bench.step._gradients = Watched(GradientWatch(bench.model, CPU, unseen="steps are replayed"))
    short = (torch.randn(2, 6), torch.zeros(2, dtype=torch.int64))
    whole = _batches(1)[0]
    bench.train(*[whole] * (EAGER_STEPS + 3), *[short] * 4, *[whole] * REPLAYS, *[short] * 2)
    assert watched == [0], "the second shape was recorded while the first was watched"
    assert len(bench.recorder.graphs) == 3, "both shapes, and the first again without events"
    assert bench.step._gradients is None


def test_shapes_beyond_the_limit_run_eagerly() -> None:
    bench = Bench()
    sizes = range(1, MAX_SHAPES + 3)
    for _ in range(3):
        bench.train(*[(torch.randn(size, 6), torch.zeros(size, dtype=torch.int64)) for size in sizes])
    assert len(bench.recorder.graphs) == MAX_SHAPES
    assert "more than" in bench.step.note
    assert "bucketed" in bench.step.note


def test_what_cannot_be_recorded_goes_on_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(recorder=FakeRecorder(fails=True))
    expected = Bench()
    expected.step._refused = "for comparison"
    assert bench.train(*_batches(8)) == pytest.approx(expected.train(*_batches(8)), rel=1e-5)
    assert bench.step.note == "the step was not captured: RuntimeError: not while capturing"
    assert sum("not while capturing" in message for message in caplog.messages) == 1


def test_a_batch_with_more_than_tensors_is_refused() -> None:
    bench = Bench(model=_Takes())
    batch = {"x": torch.randn(4, 6), "names": {1, 2}, "labels": torch.zeros(4, dtype=torch.int64)}
    for number in range(5):
        bench.step.run(number, StepBatch([batch], [4], 4))
    assert "a set" in bench.step.note
    assert not bench.recorder.graphs


class _Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, names: Any) -> torch.Tensor:
        return self.layer(x)


def test_a_plain_value_in_the_batch_is_a_shape_of_its_own() -> None:
    bench = Bench(model=_Takes())
    for number, name in enumerate(["a"] * 5 + ["b"] * 3):
        batch = {"x": torch.randn(4, 6), "names": name, "labels": torch.zeros(4, dtype=torch.int64)}
        bench.step.run(number, StepBatch([batch], [4], 4))
    assert len(bench.recorder.graphs) == 2


def test_a_trial_leaves_the_training_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CLEARLY_FASTER", math.inf)  # what stands for a graph is no faster
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
    reference = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
    reference.load_state_dict(model.state_dict())
    tried, plain = Bench(trial=True, model=model), Bench(model=reference)
    torch.manual_seed(1)
    found = tried.train(*_batches(8))
    torch.manual_seed(1)
    expected = plain.train(*_batches(8))
    assert found == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    replays = sum(graph.replays for graph in tried.recorder.graphs)
    assert replays == tried.step.captured_steps + TRIAL_STEPS + 2 * COMPARED_STATES  # on two batches


def test_a_trial_that_disagrees_is_not_captured() -> None:
    bench = Bench(trial=True, recorder=FakeRecorder(error=0.5))
    expected = Bench()
    expected.step._refused = "for comparison"
    assert bench.train(*_batches(8)) == pytest.approx(expected.train(*_batches(8)), rel=1e-5)
    assert "the captured step and the eager one disagree" in bench.step.note


def test_a_constant_that_changes_records_anew_and_not_for_ever() -> None:
    bench = Bench()
    batch = _batches(1)[0]
    bench.train(*[batch] * 5)
    assert len(bench.recorder.graphs) == 1
    bench.optimizer.param_groups[0]["momentum"] = 0.5
    bench.train(*[batch] * 3)
    assert len(bench.recorder.graphs) == 2
    for change in range(MAX_CHANGES + 1):
        bench.optimizer.param_groups[0]["momentum"] = 0.1 * change
        bench.train(batch)
    assert "change from step to step" in bench.step.note


def test_off_the_gpu_step_is_refused_and_auto_is_off() -> None:
    with pytest.raises(DeviceError, match=r"gpu\.capture: off"):
        make_recorder("step", Strategy(CPU))
    assert make_recorder("auto", Strategy(CPU)) == (None, None)
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, capture="step", device="cpu")
    with pytest.raises(DeviceError, match="CUDA graphs"):
        trainer.train(_batches(2))


def test_resolving_a_config_refuses_or_decides_capture() -> None:
    step = load_config_from_mapping({"gpu": {"capture": "step"}})
    with pytest.raises(ConfigError, match=r"gpu\.capture.*no GPU"):
        resolve(step, world_size=1, device="cpu", bf16=True)
    assert resolve(step, world_size=1, device="cuda", bf16=True).gpu.capture == "step"
    auto = load_config_from_mapping({"gpu": {"capture": "auto"}})
    assert resolve(auto, world_size=1, device="cpu", bf16=True).gpu.capture == "off"
    assert resolve(auto, world_size=1, device="cuda", bf16=True).gpu.capture == "auto"
    settled = load_config_from_mapping({"gpu": {"capture": "auto", "deterministic": True}})
    resolved = resolve(settled, world_size=1, device="cuda", bf16=True)
    assert (resolved.gpu.capture, resolved.gpu.tf32, resolved.gpu.benchmark) == ("off", False, False)
    with pytest.raises(ConfigError, match=r"gpu\.capture"):
        resolve(
            load_config_from_mapping({"gpu": {"capture": "step", "device": "cpu"}}),
            world_size=1,
            device="cuda",
            bf16=True,
        )


def test_no_schedule_is_needed() -> None:
    bench = Bench()
    bench.eager.update.schedule = NoSchedule()
    losses = bench.train(*[_batches(1)[0]] * 8)
    assert losses[-1] < losses[0]
    assert bench.optimizer.param_groups[0]["lr"] == 0.1, "the groups keep plain numbers"


def test_an_optimizer_that_wants_plain_rates_falls_back() -> None:
    class Plain(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(isinstance(group["lr"], torch.Tensor) for group in self.param_groups):
                raise ValueError("a rate must be a number")
            return super().step(closure)

    bench, expected = Bench(), Bench()
    for item in (bench, expected):
        made = Plain(item.model.parameters(), lr=0.1)
        item.eager.update.optimizer = made
        item.eager.update.schedule = Schedule(made, "linear", 200, 0.0)
    expected.step._refused = "for comparison"
    assert bench.train(*_batches(8)) == pytest.approx(expected.train(*_batches(8)), rel=1e-5)
    assert "a rate must be a number" in bench.step.note


def test_a_rehearsal_runs_what_would_be_recorded() -> None:
    models, records = [], []
    for mode in ("rehearse", "off"):
        models.append(mlp())
        made = torch.optim.AdamW(models[-1].parameters(), lr=0.01)
        trainer = Trainer(models[-1], made, capture=mode, device="cpu", seed=3, progress=False)
        records.append(trainer.train(torch.utils.data.DataLoader(classification(80), 4)))
    torch.testing.assert_close(parameters(models[0]), parameters(models[1]), rtol=0, atol=0)
    rehearsed, plain = records
    assert rehearsed.captured_steps == 20 - EAGER_STEPS - 1
    assert "rehearsed, not recorded" in " ".join(rehearsed.notes)
    assert not plain.captured_steps


class RunsOut(nn.Module):
    """Runs out of memory in one of its forward passes."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.inner, self.left = mlp(), at

    def forward(self, inputs: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory left")
        return self.inner(inputs)


def test_no_memory_to_compare_means_no_capture() -> None:
    bench = Bench(trial=True, model=RunsOut(EAGER_STEPS + 2))
    bench.train(*_batches(8))
    assert bench.step.note.startswith("the step was not captured: there is not enough memory to compare both ways")


class Alike(JointDecisions):
    """Two ranks that always say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]


def test_a_rank_that_runs_out_of_memory_between_collectives_stops() -> None:
    """The others cannot be told: they wait for what it would send."""
    rehearsed = 2
    bench = Bench(model=RunsOut(capture.EAGER_STEPS_OF_RANKS + 1 + rehearsed + 1))
    bench.step = CapturedStep(bench.eager, bench.recorder, HostClock(), trial=True, joint=Alike())
    with pytest.raises(torch.OutOfMemoryError):
        bench.train(*_batches(16))


def test_what_ranks_only_do_together_is_not_rehearsed() -> None:
    bench = Bench()
    bench.train(*_batches(2))
    bench.eager.model.register_forward_pre_hook(lambda *_: pytest.fail("a collective where parameters are sharded"))
    bench.eager.strategy.shards_parameters = True
    before = parameters(bench.model)
    inputs, target = classification(4).tensors
    CaptureCheck(bench.eager).rehearse([StepBatch([(inputs, target)], [4], 4)])
    assert torch.equal(parameters(bench.model), before)
