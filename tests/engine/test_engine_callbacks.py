"""Callbacks that are handed batches and outputs, and callbacks that end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from workbench import classification, mlp, parameters

from frameworm import Callback, Trainer, run
from frameworm.config.load import load_config_from_mapping
from frameworm.engine.step.recording import make_recorder
from frameworm.engine.step.step import TrainStep
from frameworm.parallel.strategy import Strategy

DATA = classification(22)


class Seen(Callback):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.outputs: list[Any] = []
        self.losses: list[float] = []
        self.weights: list[float] = []

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        self.batches.append(batch)
        self.outputs.append(outputs)
        self.losses.append(float(loss))
        self.weights.append(next(trainer.model.parameters()).sum().item())


class StopAt(Callback):
    """Ends the run at a step, or an epoch, on some ranks."""

    def __init__(self, step: int | None = None, epoch: int | None = None, batch: int | None = None) -> None:
        self.step, self.epoch, self.batch = step, epoch, batch
        self.ended = 0

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        self.ended += 1
        if self.ended == self.batch:
            trainer.stop()

    def on_step(self, step: Any) -> None:
        if step.step == self.step:
            self.trainer.stop()

    def on_epoch(self, epoch: Any) -> None:
        if epoch.epoch == self.epoch:
            self.trainer.stop()


def make(*callbacks: Any, model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, callbacks=callbacks, **{"run_dir": None, "device": "cpu", **settings})


def test_callbacks_see_every_micro_batch_of_a_step() -> None:
    seen = Seen()
    make(seen, accumulation=2).train(DataLoader(DATA, 5))
    assert [len(batch[0]) for batch in seen.batches] == [5, 5, 5, 5, 2]
    assert torch.equal(torch.cat([batch[0] for batch in seen.batches]), DATA.tensors[0])
    assert [tuple(output.shape) for output in seen.outputs] == [(5, 3)] * 4 + [(2, 3)]
    assert not any(output.requires_grad for output in seen.outputs)
    for batch, output, loss in zip(seen.batches, seen.outputs, seen.losses):
        assert loss == pytest.approx(float(nn.functional.cross_entropy(output, batch[1])))
    # Two of them make a step, after which they are told.
    assert seen.weights[0] == seen.weights[1] != seen.weights[2] == seen.weights[3] != seen.weights[4]


def test_batches_are_kept_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    whole = TrainStep.run

    def watched(self: TrainStep, step: int, batch: Any) -> Any:
        result = whole(self, step, batch)
        kept.append(self.seen)
        return result

    monkeypatch.setattr(TrainStep, "run", watched)

    class Plain(Callback):
        def on_step(self, step: Any) -> None:
            pass

    make(Plain()).train(DataLoader(DATA, 11))
    assert kept == [None, None]


def test_a_loss_that_calls_the_model_hands_out_no_outputs() -> None:
    seen = Seen()
    make(seen, loss_fn=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])).train(
        DataLoader(DATA, 11)
    )
    assert seen.outputs == [None, None]
    assert len(seen.losses) == 2


def test_logits_that_are_put_off_are_handed_out_as_they_were() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(4100, 4), nn.Linear(4, 4100)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(words))

    torch.manual_seed(0)
    seen, model = Seen(), Words()
    words = torch.arange(8)
    before = model(words).detach()
    make(seen, model=model, loss_fn=nn.functional.cross_entropy, fused_loss=True).train([(words, words)])
    torch.testing.assert_close(seen.outputs[0], before)
    assert type(seen.outputs[0]) is torch.Tensor


def test_any_object_may_be_handed_batches() -> None:
    class Duck:
        calls = 0

        def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
            self.calls += 1

    duck = Duck()
    make(duck).train(DataLoader(DATA, 11))
    assert duck.calls == 2


def test_a_captured_step_gives_way_to_a_callback_that_is_handed_batches() -> None:
    class Device:
        type = "cuda"

    strategy = Strategy(torch.device("cpu"))
    strategy.device = Device()  # type: ignore[assignment]
    recorder, note = make_recorder("step", strategy, ["Seen"])
    assert recorder is None
    assert note is not None
    assert "Seen.on_batch_end" in note


def _seen_by_rank_0(rank: int, world_size: int) -> tuple[torch.Tensor, list[str]]:
    trainer = make(*([Seen()] if rank == 0 else []), strategy="ddp", capture="rehearse")
    record = trainer.train(DataLoader(DATA, 4), epochs=4)
    return parameters(trainer.model), record.notes


@pytest.mark.slow
def test_a_callback_of_one_rank_keeps_all_ranks_from_capturing(run_ranks: Any) -> None:
    (weights, notes), (others, same) = run_ranks(_seen_by_rank_0)
    assert torch.equal(weights, others)
    assert any("Seen.on_batch_end" in note for note in notes + same)


@pytest.mark.parametrize(
    ("stop", "steps", "epochs"), [({"step": 3}, 3, 2), ({"batch": 3}, 3, 2), ({"epoch": 2}, 4, 2), ({"step": 2}, 2, 1)]
)
def test_a_callback_ends_the_run_at_a_steps_end(stop: dict[str, int], steps: int, epochs: int, tmp_path: Path) -> None:
    ended = make(StopAt(**stop), run_dir=tmp_path / "run")
    record = ended.train(DataLoader(DATA, 11), DataLoader(DATA, 11), epochs=9)
    assert (record.steps, len(record.epochs)) == (steps, epochs)
    assert record.status == "completed"
    assert record.stop_reason == "early_stop"
    assert any("trainer.stop()" in note for note in record.notes)
    assert record.epochs[-1].val_loss == pytest.approx(ended.evaluate(DataLoader(DATA, 11))["loss"])
    assert ended.load("latest") == steps
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = make()
    whole.train(DataLoader(DATA, 6), epochs=3)
    make(StopAt(step=6), run_dir=tmp_path / "run").train(DataLoader(DATA, 6), epochs=3)
    rest = make(run_dir=tmp_path / "run")
    record = rest.train(DataLoader(DATA, 6), epochs=3, resume=tmp_path / "run")
    assert record.steps == 12
    assert len(record.epochs) == 3
    for one, other in zip(whole.model.parameters(), rest.model.parameters()):
        assert torch.equal(one, other)


def test_the_last_step_needs_no_stop() -> None:
    record = make(StopAt(step=2)).train(DataLoader(DATA, 11))
    assert (record.steps, record.status) == (2, "completed")


def stopped_on_one(rank: int, stop: dict[str, int]) -> tuple[str, int, int, str | None]:
    callbacks = [StopAt(**stop)] if rank == 1 else [StopAt()]
    record = make(*callbacks).train(DataLoader(DATA, 2), DataLoader(DATA, 11), epochs=400)
    return record.status, record.steps, len(record.epochs), record.stop_reason


@pytest.mark.parametrize("stop", [{"step": 3}, {"epoch": 2}])
def test_one_rank_ends_the_run_of_all(pair: Any, stop: dict[str, int]) -> None:
    first, second = pair.call(stopped_on_one, stop)
    assert first == second
    status, steps, epochs, reason = first
    assert (status, reason) == ("completed", "early_stop")
    assert epochs < 400
    if "epoch" in stop:
        assert (steps, epochs) == (12, 2)


def test_a_run_from_a_config_hands_out_batches_too() -> None:
    seen, stop = Seen(), StopAt(batch=2)
    config = load_config_from_mapping(
        {
            "model": {"d_model": 16, "n_heads": 2, "num_layers": 1, "dim_feedforward": 32, "max_seq_len": 16},
            "data": {"limit": 64, "num_workers": 0},
            "gpu": {"device": "cpu"},
            "training": {"global_batch": 16},
        }
    )
    record = run(config, out=None, callbacks=[seen, stop])
    assert record.steps == 2
    assert len(seen.batches) == 2
