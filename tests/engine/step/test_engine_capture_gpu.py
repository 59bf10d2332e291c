"""Captured steps on a CUDA device: the same training, and an honest way back where a step cannot be captured."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workbench import Steps, classification, parameters

from frameworm import Callback, RunRecord, Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.muon import MuonAdamW, hidden_matrices
from frameworm.engine.optim.schedule import Schedule
from frameworm.errors import TrainingInterruptedError, TrainingPreemptedError
from frameworm.observe.clocks.gradient_times import REPLAYS
from frameworm.records.gradients import GradientTimes
from frameworm.records.schema import StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _net(dropout: float = 0.0, norm: bool = False, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(32)] if norm else []
    # A bias before a batch norm has no gradient but rounding, which Adam blows up to steps of full size.
    return nn.Sequential(nn.Linear(6, 32, bias=not norm), *middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 3))


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "muon":
        hidden = hidden_matrices(model)
        rest = [item for item in model.parameters() if all(item is not one for one in hidden)]
        return MuonAdamW([{"params": hidden, "rule": "muon"}, {"params": rest}], lr=0.01, fused=True)
    if kind == "adamw-foreach":
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def _train(
    model: nn.Module, capture: str, *, optimizer: str = "adamw", epochs: int = 1, data: Any = None, **settings: Any
) -> tuple[RunRecord, list[StepRecord]]:
    steps = Steps()
    made = _optimizer(optimizer, model)
    settings = {"run_dir": None, "seed": 7, "clip_norm": 1.0, "callbacks": [], **settings}
    callbacks = [steps, *settings.pop("callbacks")]
    trainer = Trainer(
        model,
        made,
        scheduler=lambda total: Schedule(made, "onecycle", total, 0.0),
        capture=capture,
        callbacks=callbacks,
        **settings,
    )
    loader = OptimizedDataLoader.create(classification(800) if data is None else data, 4, seed=3, num_workers=0)
    resume = settings.get("resume")
    return trainer.train(loader, epochs=epochs, resume=resume), steps.records


CASES = {
    "changing lr": {},
    "dropout": {"dropout": 0.3},
    "batch norm": {"norm": True},
    "accumulation": {"accumulation": 2, "dropout": 0.2},
    "no clipping": {"clip_norm": None},
    "sgd": {"optimizer": "sgd"},
    "adamw, not fused": {"optimizer": "adamw-foreach"},
    "muon": {"optimizer": "muon"},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
}


@pytest.mark.parametrize("case", CASES)
def test_captured_steps_are_the_eager_ones_for_200_steps(case: str) -> None:
    settings = dict(CASES[case])
    shape = {name: settings.pop(name) for name in ("dropout", "norm") if name in settings}
    accumulation = settings.get("accumulation", 1)
    epochs = accumulation
    eager_model, captured_model = _net(**shape), _net(**shape)
    _, eager = _train(eager_model, "off", epochs=epochs, **settings)
    record, captured = _train(captured_model, "step", epochs=epochs, **settings)
    assert len(captured) == 200
    assert record.captured_steps is not None
    assert record.captured_steps >= 195, record.notes
    assert [step.lr for step in captured] == [step.lr for step in eager]
    assert len({step.lr for step in captured}) > 100
    assert [step.count for step in captured] == [step.count for step in eager]
    losses = torch.tensor([[step.loss, step.grad_norm or 0.0] for step in captured])
    expected = torch.tensor([[step.loss, step.grad_norm or 0.0] for step in eager])
    # A batch norm over four samples divides by small numbers, and Muon iterates in bf16: rounding grows on its way.
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if case in ("batch norm", "muon") else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(losses, expected, **tolerance)
    torch.testing.assert_close(parameters(captured_model), parameters(eager_model), **tolerance)
    for (name, found), wanted in zip(captured_model.named_buffers(), eager_model.buffers()):
        torch.testing.assert_close(found, wanted, **tolerance, msg=name)


class Named(nn.Module):
    """Says which of its parameters autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _net(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(inputs)
        return result

    def autocast_parameters(self) -> list[tuple[nn.Module, str]]:
        linear = [module for module in self.inner.modules() if isinstance(module, nn.Linear)]
        return [(module, name) for module in linear for name in ("weight", "bias")]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_kept_in_bf16_change_nothing(
    monkeypatch: pytest.MonkeyPatch, accumulation: int, optimizer: str, compiled: bool
) -> None:
    settings = {"mixed_precision": "bf16", "accumulation": accumulation, "compile_model": compiled}
    kept, cast = Named(), Named()
    record, kept_steps = _train(kept, "step", optimizer=optimizer, **settings)
    assert record.captured_steps
    with monkeypatch.context() as patch:
        patch.setattr(HalfWeights, "of", classmethod(lambda *_: None))
        _, cast_steps = _train(cast, "step", optimizer=optimizer, **settings)
    # Compiled, a gradient that is cast on the spot may keep digits that bf16 has not; what that does grows with time.
    allowed = {"rtol": 0.02, "atol": 0.01} if compiled else {"rtol": 0.0, "atol": 0.0}
    early = 50 if compiled else len(kept_steps)
    losses, others = (torch.tensor([step.loss for step in steps[:early]]) for steps in (kept_steps, cast_steps))
    torch.testing.assert_close(losses, others, **allowed)
    if not compiled:
        torch.testing.assert_close(parameters(kept), parameters(cast), **allowed)
    assert {item.dtype for item in kept.parameters()} == {torch.float32}


def test_dropout_draws_new_masks_in_every_replay() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.dropout = nn.Dropout(0.25)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            kept = self.dropout(torch.ones(64, 64, device=inputs.device))
            return (kept * 0.75).mean() + 0 * self.weight.sum()

    steps = Steps()
    model = Shows()
    loader = DataLoader(torch.zeros(400, 1), 4)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: model(batch),
        run_dir=None,
        capture="step",
        callbacks=[steps],
    )
    record = trainer.train(loader)
    kept = torch.tensor([step.loss for step in steps.records[5:]])  # the share of values that were kept
    assert record.captured_steps == 97
    assert len(set(kept.tolist())) > 45  # of 95 draws, many of which fall on the same number of 4,096
    assert abs(float(kept.mean()) - 0.75) < 0.005


@pytest.mark.parametrize(("precision", "capture"), [("fp16", "step"), ("bf16", "step"), ("fp16", "auto")])
def test_planted_overflows_are_skipped_inside_the_graph(precision: str, capture: str) -> None:
    inputs, target = classification(120).tensors
    inputs = inputs.clone()
    inputs[60] = float("inf")
    model = _net()
    steps = Steps()
    trainer = Trainer(
        model,
        _optimizer("adamw", model),
        callbacks=[steps],
        clip_norm=1.0,
        run_dir=None,
        capture=capture,
        mixed_precision=precision,
    )
    record = trainer.train(DataLoader(TensorDataset(inputs, target), 4))
    skipped = [step.step for step in steps.records if step.skipped]
    assert 16 in skipped
    assert all(number in (1, 2, 3, 16) for number in skipped), "the first loss scale may be too large"
    assert torch.isfinite(parameters(model)).all()
    if capture == "step":
        assert record.captured_steps == 27
    assert record.skipped_steps == len(skipped)


def test_auto_captures_a_small_step_and_says_what_it_found(tmp_path: Path) -> None:
    eager_model, model = _net(dropout=0.2, norm=True), _net(dropout=0.2, norm=True)
    _train(eager_model, "off")
    record, _ = _train(model, "auto", run_dir=tmp_path / "run")
    assert record.captured_steps, record.notes
    assert any("tried first" in note for note in record.notes)
    torch.testing.assert_close(parameters(model), parameters(eager_model), rtol=2e-2, atol=2e-3)
    shares = sum(phase.share for phase in record.phases.values())
    assert abs(shares - 1) < 0.02
    assert record.phases["forward"].share > 0.0
    assert record.phases["backward"].share > 0.0


class Asks(nn.Module):
    """Waits for the device in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _net(dropout=0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.inner(inputs)
        return scores * 2 if scores.sum().item() > 1e9 else scores


@pytest.mark.parametrize("capture", ["step", "auto"])
def test_a_model_that_asks_for_a_value_falls_back_and_says_so(capture: str) -> None:
    expected, model = Asks(), Asks()
    _train(expected, "off")
    record, steps = _train(model, capture)
    assert record.captured_steps == 0
    assert len(steps) == 200
    assert any("waits for the device" in note and "test_engine_capture_gpu.py" in note for note in record.notes)
    torch.testing.assert_close(parameters(model), parameters(expected), rtol=2e-3, atol=2e-4)


class Hostile(nn.Module):
    """Does what a graph cannot hold, and only while one is recorded, so that no warning comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _net(dropout=0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return self.inner(inputs)


def test_a_capture_that_breaks_leaves_training_whole() -> None:
    expected, model = Hostile(), Hostile()
    _train(expected, "off")
    record, steps = _train(model, "step")
    assert record.captured_steps == 0
    assert len(steps) == 200
    assert any("not captured" in note for note in record.notes)
    # Other dropout masks would lead elsewhere.
    torch.testing.assert_close(parameters(model), parameters(expected), rtol=2e-3, atol=2e-4)
    again = _net(dropout=0.1)
    assert _train(again, "step")[0].captured_steps, "another run in this process can capture"


class StopAt(Callback):
    """Stops at a step: at once, or by SIGTERM, while the host is ahead of the device."""

    def __init__(self, step: int, signalled: bool) -> None:
        self._step = step
        self._signalled = signalled

    def on_step(self, step: StepRecord) -> None:
        if step.step == self._step:
            if not self._signalled:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_captured_run_resumes_as_if_it_had_never_stopped(tmp_path: Path, signalled: bool) -> None:
    whole = _net(dropout=0.3, norm=True)
    _train(whole, "step", run_dir=tmp_path / "whole", epochs=2, every_steps=50)
    stopped = _net(dropout=0.3, norm=True)
    stop = StopAt(230, signalled)
    with pytest.raises(TrainingPreemptedError if signalled else (TrainingInterruptedError, KeyboardInterrupt)):
        _train(stopped, "step", run_dir=tmp_path / "run", epochs=2, every_steps=50, callbacks=[stop])
    resumed = _net(dropout=0.3, norm=True, seed=9)
    steps = Steps()
    optimizer = _optimizer("adamw", resumed)
    trainer = Trainer(
        resumed,
        optimizer,
        scheduler=lambda total: Schedule(optimizer, "onecycle", total, 0.0),
        capture="step",
        clip_norm=1.0,
        seed=7,
        every_steps=50,
        run_dir=tmp_path / "run",
        callbacks=[steps],
    )
    loader = OptimizedDataLoader.create(classification(800), 4, seed=3, num_workers=0)
    record = trainer.train(loader, epochs=2, resume=tmp_path / "run")
    first = steps.records[0].step
    assert 230 < first < 260 if signalled else first in (201, 231, 251), "the host is ahead of what it hears of"
    assert record.captured_steps
    torch.testing.assert_close(parameters(resumed), parameters(whole), rtol=2e-3, atol=2e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_captured_together(tmp_path: Path) -> None:
    class Named(nn.Module):  # torch does not compile what consists of its own modules alone
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

    eager_model, model = Named(), Named()
    _train(eager_model, "off")
    record, _ = _train(model, "step", compile_model=True)
    assert record.captured_steps
    assert record.compilation is not None
    assert record.compilation.graphs >= 1
    assert record.compilation.time_s > 0
    torch.testing.assert_close(parameters(model), parameters(eager_model), rtol=5e-3, atol=5e-4)


def test_validation_between_captured_epochs_changes_nothing() -> None:
    alone, validated = _net(dropout=0.2), _net(dropout=0.2)
    _train(alone, "step", epochs=2)
    steps = Steps()
    made = _optimizer("adamw", validated)
    trainer = Trainer(
        validated,
        made,
        scheduler=lambda total: Schedule(made, "onecycle", total, 0.0),
        capture="step",
        clip_norm=1.0,
        seed=7,
        run_dir=None,
        callbacks=[steps],
    )
    loader = OptimizedDataLoader.create(classification(800), 4, seed=3, num_workers=0)
    record = trainer.train(loader, DataLoader(classification(50, seed=2), 8), epochs=2)
    assert record.quality.val_accuracy is not None
    assert torch.equal(parameters(validated), parameters(alone))


def test_a_captured_run_tells_when_its_gradients_are_there(tmp_path: Path) -> None:
    usual, model = _net(dropout=0.2), _net(dropout=0.2)
    _train(usual, "step")
    record, _ = _train(model, "step", run_dir=tmp_path / "run")
    assert record.captured_steps == 197
    times = GradientTimes.load(tmp_path / "run")
    assert times is not None
    assert times.steps == REPLAYS
    assert times.backward_s is not None
    first, *_, last = [item.ready_s for item in times.gradients]
    assert first is not None
    assert last is not None
    assert 0 < last < first <= times.backward_s
    torch.testing.assert_close(parameters(model), parameters(usual), rtol=2e-3, atol=2e-4)
