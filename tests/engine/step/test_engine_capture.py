"""When a step is recorded, replayed and refused, with a recorder that runs the function again at every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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
from frameworm.engine.step.capture import EAGER_STEPS, MAX_CHANGES, MAX_SHAPES, CapturedStep, make_recorder
from frameworm.engine.step.capture_check import COMPARED_STATES, TRIAL_STEPS
from frameworm.engine.step.graphs import KEPT_STEPS, CaptureError, KeptFigures, Mark
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.static_batch import StaticInputs, own_copy
from frameworm.engine.step.step import TrainStep
from frameworm.errors import ConfigError, DeviceError
from frameworm.observe.clocks.device_clock import MAX_STEPS_AHEAD
from frameworm.observe.clocks.phases import HostClock
from frameworm.parallel.strategy import Strategy

CPU = torch.device("cpu")


class Again:
    """A graph that is a function, run again."""

    def __init__(self, function: Callable[[Mark], torch.Tensor]) -> None:
        self.function = function
        self.output = torch.zeros(3)
        self.replays = 0
        self.error = 0.0

    def replay(self) -> None:
        self.replays += 1
        self.output = self.function(lambda name: None) + self.error

    def shares(self) -> dict[str, float]:
        return {"forward": 0.25, "backward": 0.75}


class FakeRecorder:
    def __init__(self, error: float = 0.0, fails: bool = False) -> None:
        self.graphs: list[Again] = []
        self._error = error
        self._fails = fails

    def record(self, function: Callable[[Mark], torch.Tensor]) -> Again:
        if self._fails:
            raise CaptureError("RuntimeError: not while capturing")
        made = Again(function)
        made.error = self._error
        # A real recorder runs the function without effect; here only what it says about its output is wanted.
        self.graphs.append(made)
        return made


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
    monkeypatch.setattr(Again, "shares", lambda graph: looked.append(graph.replays - 1) or {})
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


def test_a_trial_leaves_the_training_as_it_was() -> None:
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
    assert "does not do what the eager one does" in bench.step.note


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
