"""Bad numbers: left out, counted, and after too many a stop that says where; spikes; samples that cannot be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workbench import Steps, classification, mlp, parameters

from frameworm import Trainer
from frameworm.data.loader import OptimizedDataLoader
from frameworm.engine import loop
from frameworm.engine.faults.spikes import FEWEST, SpikeWatch, spike_begins
from frameworm.errors import BadNumbersError, DataError
from frameworm.observe.clocks import phases
from frameworm.records.writer import read_steps


def poisoned(count: int, *bad: int) -> TensorDataset:
    inputs, target = classification(count).tensors
    inputs = inputs.clone()
    inputs[list(bad)] = math.nan
    return TensorDataset(inputs, target)


def loader(data: Any, **more: Any) -> OptimizedDataLoader:
    return OptimizedDataLoader.create(data, 4, num_workers=0, shuffle=False, **more)


def trainer(model: nn.Module, run_dir: Path | None = None, **settings: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Trainer(model, optimizer, run_dir=run_dir, device="cpu", seed=0, **settings)


def test_gradients_too_large_to_be_squared_are_still_numbers() -> None:
    model, steps = nn.Linear(6, 3), Steps()
    huge = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-30),
        lambda model, batch: model(batch[0]).sum() * 1e25,
        device="cpu",
        run_dir=None,
        callbacks=[steps],
    )
    huge.train(loader(classification(8)))
    assert [step.skipped for step in steps.records] == [False, False]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_bad_step_is_left_out_with_and_without_clipping(clip_norm: float | None) -> None:
    model, plain, steps = mlp(), mlp(), Steps()
    record = trainer(model, clip_norm=clip_norm, callbacks=[steps]).train(loader(poisoned(20, 9)))
    assert [step.skipped for step in steps.records] == [False, False, True, False, False]
    assert record.skipped_steps == 1
    kept = [index for index in range(20) if not 8 <= index < 12]
    clean = TensorDataset(*(item[kept] for item in poisoned(20, 9).tensors))
    trainer(plain, clip_norm=clip_norm).train(loader(clean))
    assert torch.equal(parameters(model), parameters(plain)), "as if the bad step had not been"


class Sparse(nn.Module):
    """Rows of an embedding that were used have gradients; word 3 has a bad one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words)
        large = torch.where(words == 3, 3e38, 0.0).unsqueeze(-1)
        result: torch.Tensor = self.out(found + (found - found.detach()) * large * large)
        return result


def test_sparse_gradients_are_looked_at_too() -> None:
    model, steps = Sparse(), Steps()
    words = torch.tensor([0, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 2])
    data = TensorDataset(words, torch.zeros(12, dtype=torch.long))
    trainer(model, callbacks=[steps], max_bad_steps=3).train(loader(data))
    assert [step.skipped for step in steps.records] == [False, True, False]
    assert torch.isfinite(parameters(model)).all()


def test_too_many_in_a_row_stop_the_training_and_say_where(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(BadNumbersError) as caught:
        trainer(model, tmp_path / "run", max_bad_steps=3).train(loader(poisoned(40, 5, 14, 17, 21, 25)))
    message = str(caught.value)
    assert message.startswith("step 6 was the 3rd bad one in a row: the loss is not finite on rank 0.")
    assert "20, 21, 22, 23" in message
    account = json.loads((tmp_path / "run/bad-numbers-rank0.json").read_text())
    assert str(tmp_path / "run/bad-numbers-rank0.json") in message
    assert (account["step"], account["rank"], account["loss"]) == (6, 0, "nan")
    assert account["sample_ids"] == [[20, 21, 22, 23]]
    assert set(account["parameters_with_bad_gradients"]) == {name for name, _ in model.named_parameters()}
    assert torch.isfinite(parameters(model)).all()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_what_becomes_known_late_is_still_told_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deliver, waiting = loop.TrainingLoop._deliver, []
    seen = [0]

    def late(self: Any, finished: list[Any]) -> None:
        seen[0] += len(finished)
        waiting.extend(finished)
        if seen[0] <= 2 or seen[0] > 8:  # the first bad step is known at once; after the others good ones have followed
            known = waiting[:]
            waiting.clear()
            deliver(self, known)

    monkeypatch.setattr(phases, "HAND_OUT_EVERY_S", 0.0)
    monkeypatch.setattr(loop.TrainingLoop, "_deliver", late)
    model = mlp()
    with pytest.raises(BadNumbersError, match="step 6 was the 3rd bad one in a row"):
        trainer(model, tmp_path / "run", max_bad_steps=3).train(loader(poisoned(60, 5, 14, 17, 21)))
    account = json.loads((tmp_path / "run/bad-numbers-rank0.json").read_text())
    assert set(account["parameters_with_bad_gradients"]) == {name for name, _ in model.named_parameters()}


class OneBadGradient(nn.Module):
    """The loss is fine; the gradient of one parameter is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.spoiled = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) + torch.sqrt(self.spoiled * 0.0)


def test_the_parameter_is_named_where_only_gradients_are_bad() -> None:
    with pytest.raises(BadNumbersError, match=r"the losses are finite, gradients are not\. Bad gradients: spoiled\."):
        trainer(OneBadGradient(), max_bad_steps=2).train(loader(classification(20)))


def test_off_never_stops() -> None:
    record = trainer(mlp(), max_bad_steps=None, clip_norm=1.0).train(loader(poisoned(80, *range(0, 80, 4))))
    assert (record.status, record.skipped_steps) == ("completed", 20)


def stop_on_rank_one(rank: int, world_size: int, folder: str) -> str:
    data = poisoned(64, *range(2, 64, 4))  # of each step of four, the third is rank 1's
    batches = OptimizedDataLoader.create(data, 2, num_workers=0, shuffle=False, global_batch=4)
    try:
        trainer(mlp(), Path(folder) / "run", max_bad_steps=4, strategy="ddp").train(batches)
    except BadNumbersError as error:
        return str(error)
    return "no error"


def test_both_ranks_stop_at_the_same_step_and_name_the_rank(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(stop_on_rank_one, args=(str(tmp_path),))):
        assert message.startswith("step 4 was the 4th bad one in a row: the loss is not finite on rank 1.")
        account = json.loads((tmp_path / f"run/bad-numbers-rank{rank}.json").read_text())
        assert account["ranks_with_bad_loss"] == [1]
        assert account["sample_ids"] == [[12 + 2 * rank, 13 + 2 * rank]]


def test_what_counts_as_a_spike() -> None:
    usual = [2.0 + 0.1 * math.sin(step) for step in range(FEWEST)]
    assert spike_begins(usual, [2.0, 9.0, 9.0, 9.0]) == 1
    assert spike_begins(usual, [2.0, math.nan, 9.0, math.inf]) == 1
    assert spike_begins(usual, [9.0, 9.0, 2.0, 9.0, 9.0]) is None, "one bad batch is no spike"
    assert spike_begins(usual, [2.9] * 5) is None, "less than half above the usual"
    assert spike_begins(usual[1:], [9.0] * 5) is None, "too little is known"
    assert spike_begins([0.0] * FEWEST, [0.0] * 5) is None


def test_a_spike_is_judged_by_all_ranks_and_across_looks() -> None:
    told: list[int] = []
    watch = SpikeWatch(lambda values: [2 * value for value in values], lambda: told.append(1) or 7)
    for step in range(1, 100):
        watch.add(step, 2.0 if step < 95 else 8.0, 4.0)
        if watch.due(step) or step == 99:
            watch.look()
    assert told == [1]
    assert watch.notes == [
        "the loss jumped to 8 in step 95, from 2; the model is that of step 7 again, and training continues with the "
        "next samples"
    ]


class Spoil:
    """Adds noise to the weights once, after a step: the loss jumps and does not come back by itself soon."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self._model, self._left = model, step

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            with torch.no_grad():
                for item in self._model.parameters():
                    item.mul_(40.0)


@pytest.mark.parametrize("mode", ["warn", "rollback"])
def test_a_jump_is_told_or_undone(tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    model.register_forward_pre_hook(Spoil(model, 70))
    run = trainer(model, tmp_path / "run", on_spike=mode, every_steps=20, when_busy="wait", clip_norm=0.1)
    record = run.train(loader(classification(400)), epochs=1)
    losses = [step.loss for step in read_steps(tmp_path / "run/steps-rank0.jsonl")]
    assert len(losses) == 100, "no step is missing, none there twice"
    note = next(note for note in record.notes if "jumped" in note)
    assert re.search("in step 7[0-4], ", note)
    usual = sum(losses[40:60]) / 20
    assert max(losses[70:75]) > 4 * usual
    if mode == "rollback":
        assert "the model is that of step 60 again" in note
        assert sum(losses[-15:]) / 15 < 1.5 * usual
    else:
        assert sum(losses[-15:]) / 15 > 1.5 * usual


class Torn(torch.utils.data.Dataset[Any]):
    """Some samples cannot be read."""

    def __init__(self, count: int, *bad: int) -> None:
        self._data, self._bad = classification(count), bad

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            raise ValueError(f"sample {index} is torn")
        return self._data[index]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_that_cannot_be_read_are_left_out_and_named(tmp_path: Path, workers: int) -> None:
    data = Torn(40, 3, 4, 17)
    batches = OptimizedDataLoader.create(data, 4, num_workers=workers, shuffle=False, on_error="skip")
    record = trainer(mlp(), tmp_path / "run").train(batches, epochs=2)
    assert record.skipped_samples == 3
    note = next(note for note in record.notes if "could not be read" in note)
    assert note.startswith("3 samples could not be read")
    assert "3 (ValueError: sample 3 is torn), 4 (ValueError: sample 4 is torn), 17" in note
    assert "3 samples could not be read" in (tmp_path / "run/summary.txt").read_text()
    filled = next(iter(batches))
    assert torch.equal(filled[0][3], data[5][0]), "the next sample that can be read takes the place"


@pytest.mark.slow
def test_by_default_such_a_sample_ends_the_training() -> None:
    with pytest.raises(ValueError, match="sample 3 is torn"):
        trainer(mlp()).train(loader(Torn(40, 3)))


def test_only_the_first_ten_are_named_and_none_readable_is_an_error() -> None:
    record = trainer(mlp()).train(loader(Torn(40, *range(0, 40, 2)), on_error="skip"))
    note = next(note for note in record.notes if "could not be read" in note)
    assert note.startswith("20 samples")
    assert note.endswith("and 10 more")
    with pytest.raises(DataError, match="40 samples in a row from 0 on cannot be read"):
        trainer(mlp()).train(loader(Torn(40, *range(40)), on_error="skip"))
