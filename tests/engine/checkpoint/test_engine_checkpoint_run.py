"""Checkpoints of whole runs: when they are taken, which stay, what the summary says, and what export makes of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from workbench import classification, mlp, parameters

from frameworm import Callback, Trainer
from frameworm.cli.main import app
from frameworm.config.schema import CheckpointConfig, Config
from frameworm.engine.checkpoint import store as store_module
from frameworm.engine.checkpoint.load import list_checkpoints
from frameworm.engine.checkpoint.progress import among_best
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.engine.checkpoint.timed_saves import SaveTurns, TimedSaves
from frameworm.engine.checkpoint.writer_client import Writer
from frameworm.engine.export import export_weights
from frameworm.engine.settings import apply_settings
from frameworm.errors import CheckpointError, ConfigError, MissingPackageError, RunFolderError, TrainingPreemptedError
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.models.weight_files import load_weights
from frameworm.records.schema import EpochRecord, StepRecord


def _train(
    folder: Path, *, resume: bool = False, epochs: int = 2, model: nn.Module | None = None, **settings: Any
) -> Any:
    model = model or mlp()
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), run_dir=folder, device="cpu", seed=4, **settings
    )
    train = DataLoader(classification(32), 4)
    record = trainer.train(train, DataLoader(classification(8, 1), 4), epochs, resume="auto" if resume else None)
    return parameters(model), record


def _steps(folder: Path) -> list[int]:
    return [item.step for item in list_checkpoints(folder / "checkpoints")]


@pytest.mark.slow
def test_storage_that_fails_is_in_the_summary_and_training_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frameworm.engine.checkpoint import rank_writer as share_writing

    write, calls = share_writing.write_file, [0]

    def sometimes(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] in (2, 3):
            raise OSError(28, "No space left on device")
        return write(*args, **more)

    expected, _ = _train(tmp_path / "well", every_steps=4, mode="sync")
    monkeypatch.setattr(share_writing, "write_file", sometimes)
    found, record = _train(tmp_path / "run", every_steps=4, mode="sync")
    assert torch.equal(expected, found)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]["count"]) == ("completed", 2)
    assert any("step 12 could not be written: No space left on device (2 could" in note for note in summary["notes"])
    assert record.checkpoint.stall_s > 0
    assert _steps(tmp_path / "run") == [4, 16]


@pytest.mark.slow
def test_a_run_that_could_save_nothing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from frameworm.engine.checkpoint import rank_writer

    def never(*args: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    expected, _ = _train(tmp_path / "well", every_steps=4, mode="sync")
    monkeypatch.setattr(rank_writer, "write_file", never)
    found, record = _train(tmp_path / "run", every_steps=4, mode="sync")
    assert torch.equal(expected, found)  # the model is trained, and can still be saved by hand
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]["count"]) == ("failed", 0)
    assert record.status == "failed"
    assert "no checkpoint was written: the checkpoint of step 16 could not be written: No space" in caplog.text


def test_a_stopped_run_does_not_say_that_it_saved_what_it_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frameworm.engine.checkpoint import rank_writer

    class Stop(Callback):
        def on_step(self, step: StepRecord) -> None:
            if step.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def never(*args: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_writer, "write_file", never)
    with pytest.raises(TrainingPreemptedError, match="could not be written: No space left") as stopped:
        _train(tmp_path / "run", every_steps=None, mode="sync", callbacks=[Stop()])
    assert "saved after" not in str(stopped.value)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"


@pytest.mark.slow
def test_the_best_epoch_is_saved_and_stays(tmp_path: Path) -> None:
    _, record = _train(tmp_path / "run", epochs=5, every_steps=8, keep=1, keep_best=1)
    losses = [epoch.val_loss for epoch in record.epochs]
    best = 8 * (1 + losses.index(min(losses)))
    assert set(_steps(tmp_path / "run")) == {best, 40}
    done = export_weights(tmp_path / "run", tmp_path / "best.safetensors", which="best")
    assert done.step == best
    # It goes on from there, as from any other.
    expected, _ = _train(tmp_path / "whole", epochs=6, every_steps=None)
    found, _ = _train(tmp_path / "run", epochs=6, resume=True, every_steps=8, keep=1, keep_best=1)
    assert torch.equal(expected, found)


@pytest.mark.slow
def test_a_best_checkpoint_by_a_metric_that_never_comes_is_refused(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(classification(8), 4)
    best = Trainer(model, optimizer, run_dir=tmp_path / "run", device="cpu", keep_best=1)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best watches val_loss, and there is no validation set"):
        best.train(loader, epochs=1)
    assert not (tmp_path / "run").exists()
    trained = Trainer(model, optimizer, run_dir=tmp_path / "run", device="cpu", keep_best=1, metric="train_loss")
    assert trained.train(loader, epochs=1).status == "completed"
    # Nothing is saved without a run folder, so nothing has to be the best.
    assert Trainer(model, optimizer, run_dir=None, device="cpu", keep_best=1).train(loader, epochs=1).steps == 2


def test_which_epochs_are_among_the_best() -> None:
    def epochs(*figures: float | None) -> list[EpochRecord]:
        return [EpochRecord(number, 1.0, None, figure, figure, None) for number, figure in enumerate(figures, 1)]

    assert among_best(epochs(0.5), "val_loss", 1)
    assert among_best(epochs(0.5, 0.4), "val_loss", 1)
    assert not among_best(epochs(0.5, 0.6), "val_loss", 1)
    assert among_best(epochs(0.5, 0.6), "val_loss", 2)
    assert among_best(epochs(0.5, 0.6), "val_accuracy", 1, highest=True)
    assert not among_best(epochs(0.5, None), "val_loss", 3)
    assert not among_best(epochs(0.5, float("nan")), "val_loss", 3)


def test_saves_by_the_clock() -> None:
    now = [0.0]
    timed = TimedSaves(60.0, StopAgreement(StopRequest(), None, 0, 1), lambda: now[0])
    due = []
    for step in range(1, 10):
        now[0] += 25.0
        due.append(timed.due(step))
    assert due == [False, False, True, False, False, True, False, False, True]


def _timed(rank: int, world_size: int, folder: str) -> list[int]:
    _train(Path(folder), epochs=8, every_steps=None, every_minutes=0.0002, keep=50, when_busy="wait")
    return _steps(Path(folder))


@pytest.mark.slow
def test_ranks_save_by_the_clock_after_the_same_steps(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    ranks = run_ranks(_timed, 2, (str(tmp_path / "run"),))
    assert len(ranks[0]) > 2, "all but the last one are due by the clock"
    for stored in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert len(stored.read().ranks) == 2


def test_a_save_that_is_put_off_starts_when_storage_is_free() -> None:
    busy, now, late = [False], [0.0], []
    turns = SaveTurns(lambda: busy[0], StopAgreement(StopRequest(), None, 0, 1), late.append, lambda: now[0])
    saved = []
    for step in range(1, 13):
        now[0] += 1.0
        busy[0] = step in (5, 6, 7)
        if turns.due(step):
            saved.append(step - 1)
            turns.started()
        if step in (4, 5, 12) and turns.admit():  # due after these steps; storage is busy until after step 7
            saved.append(step)
            turns.started()
    assert saved == [4, 7, 12]
    assert late == [3.0]


class _Paced(nn.Module):
    """Takes a while for each step of training, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.begun = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.begun += 1
            time.sleep(0.02)
        scores: torch.Tensor = self.inner(inputs)
        return scores


def _on_slow_storage(rank: int, world_size: int, folder: str) -> tuple[list[int], Any, float]:
    saves = CheckpointStore.save
    taken: list[int] = []

    def save(self: CheckpointStore, step: int, *args: Any, **more: Any) -> None:
        taken.append(step)
        saves(self, step, *args, **more)

    CheckpointStore.save = save  # type: ignore[method-assign]
    perform, model = Writer.perform, _Paced()

    def slow(self: Writer, *args: Any) -> Any:
        """On one of the ranks storage takes as long as five steps, or until the last one."""
        enough = min(16, model.begun + 5 * rank)
        while model.begun < enough:
            time.sleep(0.005)
        return perform(self, *args)

    Writer.perform = slow  # type: ignore[method-assign]
    _, record = _train(Path(folder), model=model, epochs=4, every_steps=2, keep=50)
    return taken, record.checkpoint, record.checkpoint.stall_s


@pytest.mark.slow
def test_ranks_put_off_the_same_saves(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    ranks = run_ranks(_on_slow_storage, 2, (str(tmp_path / "run"),))
    taken, statistics, _ = ranks[0]
    assert ranks[1][0] == taken, "storage is slow on one rank only"
    assert _steps(tmp_path / "run") == taken
    assert taken[-1] == 16, "the last state is never left out"
    assert 2 <= len(taken) < 8
    assert statistics.largest_gap_steps == max(after - before for before, after in zip([0, *taken], taken)) > 2
    assert statistics.largest_gap_s > 0.05
    for stored in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert len(stored.read().ranks) == 2


def test_the_best_epoch_is_saved_as_it_was_however_slow_storage_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = Writer.perform

    def slow(self: Writer, *args: Any) -> Any:
        time.sleep(0.2)
        return perform(self, *args)

    monkeypatch.setattr(Writer, "perform", slow)
    _, record = _train(tmp_path / "run", epochs=3, every_steps=2, keep=1, keep_best=1)
    losses = [epoch.val_loss for epoch in record.epochs]
    done = export_weights(tmp_path / "run", tmp_path / "best.safetensors", which="best")
    assert done.step == 8 * (1 + losses.index(min(losses)))


def test_the_gap_to_the_end_counts_where_the_last_checkpoint_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frameworm.engine.checkpoint import rank_writer as share_writing

    write, calls = share_writing.write_file, [0]

    def once(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(28, "No space left on device")
        return write(*args, **more)

    monkeypatch.setattr(share_writing, "write_file", once)
    _, record = _train(tmp_path / "run", every_steps=4, mode="sync")
    assert (record.checkpoint.count, record.checkpoint.largest_gap_steps) == (1, 12)


class _TermInBackward(nn.Module):
    """Gets the signal in the middle of a step's micro-batches."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.inner = mlp()
        self._calls = 0
        self._at = at_call

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._calls += self.training
        if self._calls == self._at:
            os.kill(os.getpid(), signal.SIGTERM)
        result: torch.Tensor = self.inner(inputs)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_sigterm_while_gradients_accumulate_saves_after_the_step(tmp_path: Path, mode: str) -> None:
    expected, _ = _train(tmp_path / "whole", model=_TermInBackward(0), accumulation=4, every_steps=None)
    with pytest.raises(TrainingPreemptedError, match="saved after step 2 "):
        # The sixth micro-batch is the second one of step 2.
        _train(tmp_path / "run", model=_TermInBackward(6), accumulation=4, every_steps=None, mode=mode)
    assert _steps(tmp_path / "run") == [2]
    found, _ = _train(tmp_path / "run", model=_TermInBackward(0), accumulation=4, resume=True, every_steps=None)
    assert torch.equal(expected, found)


def test_a_run_that_saves_at_its_end_only_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frameworm.engine.checkpoint.writer_client import ProcessWriter

    monkeypatch.setattr(ProcessWriter, "start", lambda self: pytest.fail("a process was started"))
    _train(tmp_path / "run", every_steps=None)
    assert _steps(tmp_path / "run") == [16]


def test_compression_alone_is_that_of_gradients() -> None:
    config = apply_settings(Config(), {"compression": "int8", "checkpoint": CheckpointConfig(compression="zstd")})
    assert (config.parallel.compression, config.checkpoint.compression) == ("int8", "zstd")


def test_export_writes_what_was_trained(tmp_path: Path) -> None:
    trained, _ = _train(tmp_path / "run", every_steps=5, when_busy="wait")
    out = tmp_path / "sub" / "model.safetensors"
    done = export_weights(tmp_path / "run", out)
    assert (done.step, done.tensors, done.size_bytes) == (16, 4, out.stat().st_size)
    other = mlp(seed=9)
    load_weights(other, out)
    assert torch.equal(parameters(other), trained)
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "16"
    half = export_weights(tmp_path / "run", tmp_path / "half.safetensors", which="10", dtype="bfloat16")
    assert half.step == 10
    assert {item.dtype for item in load_file(tmp_path / "half.safetensors").values()} == {torch.bfloat16}
    with pytest.raises(RunFolderError, match="exists"):
        export_weights(tmp_path / "run", out)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are: 10, 15, 16"):
        export_weights(tmp_path / "run", tmp_path / "x", which="3")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000016")  # the one at the end of an epoch
    with pytest.raises(CheckpointError, match="end of an epoch"):
        export_weights(tmp_path / "run", tmp_path / "x", which="best")


def test_export_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.cli.train.log_to_screen", lambda leads: None)  # it would outlive this screen
    from typer.testing import CliRunner

    _train(tmp_path / "run")
    result = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "m.safetensors"), "--json"]
    )
    assert json.loads(result.stdout)["step"] == 16
    wrong = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "n"), "--dtype", "int8"])
    assert "float32, bfloat16, float16" in str(wrong.exception)


def test_what_cannot_be_compiled_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frameworm.engine.export import export_compiled
    from frameworm.errors import ModelError
    from frameworm.models.workloads import Workload

    _train(tmp_path / "run")

    def refuse(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch.export, "export", refuse)
    batch = next(iter(DataLoader(classification(8), 4)))
    with pytest.raises(ModelError, match=r"no compiler here.*without --compiled"):
        export_compiled(tmp_path / "run", tmp_path / "m.pt2", Workload(mlp(), None), batch, device="cpu")
    with pytest.raises(RunFolderError, match=r"--out .*m\.pt2"):
        export_compiled(tmp_path / "run", tmp_path / "m", Workload(mlp(), None), batch, device="cpu")


def test_compressed_checkpoints_without_the_package_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingPackageError("checkpoint.compression needs zstd, which is not installed")

    monkeypatch.setattr(store_module, "zstd_functions", missing)
    model = mlp()
    before = parameters(model)
    config = Config(checkpoint=CheckpointConfig(compression="zstd"))
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), config=config, run_dir=tmp_path / "run", device="cpu")
    with pytest.raises(MissingPackageError, match="zstd"):
        trainer.train(DataLoader(classification(16), 4))
    assert torch.equal(parameters(model), before)
