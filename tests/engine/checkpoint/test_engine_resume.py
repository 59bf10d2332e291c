"""Stop at any step and go on: bit for bit what an uninterrupted run gives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from workbench import StopAfter, classification, parameters

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import CheckpointError, TrainingInterruptedError, TrainingPreemptedError
from frameworm.records.events import Listener
from frameworm.records.schema import StepRecord

EPOCHS = 3
STEPS = 21  # 52 samples in batches of 8: 7 steps an epoch


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.data = classification(52)

    def __iter__(self) -> Any:
        return iter(self.data)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def _loader(kind: str, batch_size: int) -> Any:
    if kind == "ours":
        return OptimizedDataLoader.create(classification(52), batch_size, seed=2)
    if kind == "stream":
        return DataLoader(Stream(), batch_size)
    return DataLoader(classification(52), batch_size, shuffle=True)


def _train(
    folder: Path,
    *,
    stop_after: int | None = None,
    number: signal.Signals = signal.SIGINT,
    resume: bool = False,
    loader: str = "ours",
    precision: str = "off",
    scheduler: bool = True,
    batch_size: int = 8,
    model: nn.Module | None = None,
    every_steps: int | None = 4,
    pause_s: float = 0.0,
) -> tuple[torch.Tensor, Any]:
    model = model or _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=precision == "fp16")
    trainer = Trainer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS) if scheduler else None,
        callbacks=[StopAfter(stop_after, number, pause_s)],
        seed=11,
        run_dir=folder,
        mixed_precision=precision,
        every_steps=every_steps,
        when_busy="wait",
        clip_norm=0.5,
        device="cpu",
    )
    validation = DataLoader(classification(9, seed=8), 4)
    record = trainer.train(_loader(loader, batch_size), validation, EPOCHS, resume="auto" if resume else None)
    return torch.cat([parameters(model), *(item.flatten().float() for item in model.buffers())]), record


def _steps(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"steps-rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "precision", "stop_after"),
    [
        ("ours", "off", 1),
        ("ours", "off", 7),
        ("ours", "fp16", 10),
        ("ours", "off", 20),
        ("foreign", "off", 3),
        ("foreign", "off", 14),
        ("stream", "off", 9),
    ],
)
def test_resume_is_exact(tmp_path: Path, loader: str, precision: str, stop_after: int) -> None:
    expected, whole = _train(tmp_path / "whole", loader=loader, precision=precision)
    with pytest.raises(TrainingInterruptedError, match=f"saved after step {stop_after} "):
        _train(tmp_path / "parts", stop_after=stop_after, loader=loader, precision=precision)
    assert json.loads((tmp_path / "parts/summary.json").read_text())["status"] == "interrupted"
    found, record = _train(tmp_path / "parts", resume=True, loader=loader, precision=precision)
    assert torch.equal(expected, found)
    assert record.losses == whole.losses
    assert record.quality == whole.quality
    assert record.status == "completed"
    whole_steps, part_steps = _steps(tmp_path / "whole"), _steps(tmp_path / "parts")
    assert [step["step"] for step in part_steps] == list(range(1, STEPS + 1)), "no step twice, none missing"
    for name in ("loss", "lr", "samples", "grad_norm", "skipped"):
        assert [step[name] for step in part_steps] == [step[name] for step in whole_steps]


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    expected, _ = _train(tmp_path / "whole")

    class Boom(Listener):
        def on_step(self, step: StepRecord) -> None:
            if step.step == 10:
                raise ValueError("planted")

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(
        model,
        optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS),
        callbacks=[Boom()],
        seed=11,
        run_dir=tmp_path / "parts",
        every_steps=4,
        clip_norm=0.5,
        device="cpu",
    )
    with pytest.raises(ValueError, match="planted"):
        trainer.train(_loader("ours", 8), DataLoader(classification(9, seed=8), 4), EPOCHS)
    summary = json.loads((tmp_path / "parts/summary.json").read_text())
    assert summary["status"] == "failed"
    assert any("planted" in note for note in summary["notes"])
    found, _ = _train(tmp_path / "parts", resume=True)
    assert torch.equal(expected, found)


def test_sigterm_is_preemption(tmp_path: Path) -> None:
    with pytest.raises(TrainingPreemptedError) as caught:
        _train(tmp_path / "run", stop_after=5, number=signal.SIGTERM)
    assert caught.value.exit_code == 75
    assert caught.value.record.status == "preempted"  # type: ignore[attr-defined]


class Failing(Listener):
    def on_step(self, step: StepRecord) -> None:
        raise ValueError("planted")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_sigterm_while_results_are_written_takes_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def render_while_stopped(*given: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)  # what a launcher sends to the other ranks when one has failed
        time.sleep(0.01)
        return "rendered"

    def on_signal(*given: Any) -> None:
        raise AssertionError("the signal got through")

    monkeypatch.setattr("frameworm.engine.run_output.render_text", render_while_stopped)
    monkeypatch.setattr("frameworm.engine.run_output.render_html", render_while_stopped)
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        model, callbacks = _model(), [Failing()] if fails else []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        trainer = Trainer(model, optimizer, callbacks=callbacks, run_dir=tmp_path / "run", device="cpu")
        with pytest.raises(ValueError, match="planted") if fails else contextlib.nullcontext():
            trainer.train(_loader("ours", 8), None, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["status"] == ("failed" if fails else "completed")
    assert (tmp_path / "run" / "report.html").read_text() == "rendered"


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = _train(tmp_path / "whole")
    with pytest.raises(TrainingInterruptedError):
        _train(tmp_path / "parts", stop_after=10)
    newest = tmp_path / "parts/checkpoints/step-00000010/rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    with caplog.at_level(logging.INFO, "frameworm"):
        found, _ = _train(tmp_path / "parts", resume=True)
    assert "step-00000010/rank-00000.safetensors is truncated" in caplog.text
    assert "after step 8" in caplog.text
    assert torch.equal(expected, found)
    assert [step["step"] for step in _steps(tmp_path / "parts")] == list(range(1, STEPS + 1))


def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterruptedError):
        _train(tmp_path / "run", stop_after=10)
    before = sorted((item.name, item.read_bytes()) for item in tmp_path.rglob("*") if item.is_file())
    other = nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Dropout(0.3), nn.Linear(17, 3))
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(16, 6\) there and \(17, 6\) here"):
        _train(tmp_path / "run", resume=True, model=other)
    assert sorted((item.name, item.read_bytes()) for item in tmp_path.rglob("*") if item.is_file()) == before


def _rank(rank: int, world_size: int, folder: str, stop_after: int | None, resume: bool, precision: str) -> Any:
    try:
        # Only rank 1 gets the signal; the ranks must agree on a step nevertheless.
        found, record = _train(
            Path(folder),
            stop_after=stop_after if rank == 1 else None,
            resume=resume,
            precision=precision,
            batch_size=4,
            # A rank without the signal looks for the wish to stop once a second.
            pause_s=0.12 if stop_after else 0.0,
        )
        return found, record.losses, None
    except TrainingInterruptedError as error:
        return None, None, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["off", "fp16"])
def test_resume_is_exact_on_two_ranks(run_ranks: Callable[..., Any], tmp_path: Path, precision: str) -> None:
    expected = run_ranks(_rank, 2, (str(tmp_path / "whole"), None, False, precision))
    stopped = run_ranks(_rank, 2, (str(tmp_path / "parts"), 5, False, precision))
    assert stopped[0][2] == stopped[1][2]
    assert "interrupted: saved after step" in stopped[0][2]
    found = run_ranks(_rank, 2, (str(tmp_path / "parts"), None, True, precision))
    for rank in range(2):
        assert torch.equal(expected[rank][0], found[rank][0])
        assert expected[rank][1] == found[rank][1]
        assert [step["step"] for step in _steps(tmp_path / "parts", rank)] == list(range(1, STEPS + 1))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that carry their own number."""

    def __len__(self) -> int:
        return 52

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index % 3)


class Remembers(nn.Module):
    """Knows which samples it was trained on, one list per step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(1, 3)
        self.seen: list[list[int]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append([int(item) for item in inputs[:, 0]])
        result: torch.Tensor = self.inner(inputs / 52)
        return result


def _numbered(folder: Path, batch_size: int, stop_after: int | None, resume: bool) -> tuple[list[list[int]], Any]:
    model = Remembers()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[StopAfter(stop_after, signal.SIGUSR1, 0.12 if stop_after else 0.0)],
        seed=11,
        run_dir=folder,
        every_steps=4,
        device="cpu",
    )
    loader = OptimizedDataLoader.create(Samples(), batch_size, seed=2, num_workers=0)
    try:
        return model.seen, trainer.train(loader, epochs=EPOCHS, resume="auto" if resume else None)
    except TrainingPreemptedError as error:
        return model.seen, error.record  # type: ignore[attr-defined]


def _numbered_rank(rank: int, world_size: int, folder: str, stop_after: int | None, resume: bool) -> Any:
    seen, record = _numbered(Path(folder), 8 // world_size, stop_after if rank == 1 else None, resume)
    return seen, record.status, record.steps


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    run_ranks: Callable[..., Any], tmp_path: Path, ranks: tuple[int, int]
) -> None:
    """SIGUSR1 to one rank in the middle of an epoch; what all ranks together take in each step stays what it was."""
    expected, _ = _numbered(tmp_path / "whole", 8, None, False)
    before, after = ranks

    def run(count: int, stop_after: int | None, resume: bool) -> tuple[list[list[int]], list[str], int]:
        if count == 1:
            seen, record = _numbered(tmp_path / "run", 8, stop_after, resume)
            return seen, [record.status], record.steps
        told = run_ranks(_numbered_rank, count, (str(tmp_path / "run"), stop_after, resume))
        together = [
            [item for part in parts for item in part] for parts in zip(*(item[0] for item in told), strict=True)
        ]
        return together, [item[1] for item in told], told[0][2]

    first, statuses, stopped = run(before, 5, False)
    assert set(statuses) == {"preempted"}
    assert 5 <= stopped < STEPS
    rest, statuses, steps = run(after, None, True)
    assert set(statuses) == {"completed"}
    assert steps == STEPS
    assert [sorted(step) for step in [*first[:stopped], *rest]] == [sorted(step) for step in expected]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert any(f"{after} processes instead of {before}" in note for note in summary["notes"])


@pytest.mark.slow
def test_a_signal_within_a_compiled_step_saves_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes while step 4 computes: that step is finished, saved, and not repeated."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend="aot_eager"))

    def train(folder: Path, signal_at: int | None, resume: bool) -> tuple[torch.Tensor, Any]:
        model = Signalled(_model(), signal_at)
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            seed=11,
            run_dir=folder,
            every_steps=None,
            clip_norm=0.5,
            device="cpu",
            compile_model=True,
        )
        record = trainer.train(_loader("ours", 4), epochs=1, resume="auto" if resume else None)
        return parameters(model), record

    expected, whole = train(tmp_path / "whole", None, False)
    with pytest.raises(TrainingPreemptedError, match="saved after step 4 "):
        train(tmp_path / "parts", 4, False)
    found, record = train(tmp_path / "parts", None, True)
    assert record.steps == whole.steps
    assert torch.equal(expected, found)


class Signalled(nn.Module):
    """Sends its process SIGTERM in one of its calls."""

    def __init__(self, inner: nn.Module, call: int | None) -> None:
        super().__init__()
        self.inner = inner
        self._call = call
        self._calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._count()
        result: torch.Tensor = self.inner(inputs)
        return result

    @torch.compiler.disable
    def _count(self) -> None:
        self._calls += 1
        if self._calls == self._call:
            os.kill(os.getpid(), signal.SIGTERM)
