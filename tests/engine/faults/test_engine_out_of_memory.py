"""Out of memory in training: what the error says, that all ranks end, and going on with half the micro-batch."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from workbench import Sequences, classification, fit, make_optimizer, mlp, parameters, tagger

from frameworm import Trainer
from frameworm.data.steps import StepBatch
from frameworm.engine.faults import out_of_memory
from frameworm.engine.faults.out_of_memory import memory_that_ran_out
from frameworm.engine.faults.split_on_oom import CannotDivideError, divide
from frameworm.engine.job import Ingredients
from frameworm.errors import OutOfMemoryError, TrainingFailedError

PLANTED = "CUDA out of memory. Tried to allocate 2.00 GiB.\nsecond line"


class Small(nn.Module):
    """Runs out of memory when it is given more than so many samples, forward or backward."""

    def __init__(self, inner: nn.Module, most: int, backward: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.most = most
        self.backward = backward
        self.sizes: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(inputs))
        output: torch.Tensor = self.inner(inputs)
        if len(inputs) > self.most and self.training:
            if not self.backward:
                raise torch.OutOfMemoryError(PLANTED)
            output.register_hook(self._fail)
        return output

    @staticmethod
    def _fail(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(PLANTED)


def test_what_counts_as_out_of_memory() -> None:
    assert memory_that_ran_out(torch.OutOfMemoryError(PLANTED)) == "GPU memory"
    assert memory_that_ran_out(MemoryError()) == "host memory"
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**58, dtype=torch.uint8)
    assert memory_that_ran_out(real.value) == "host memory"
    assert memory_that_ran_out(RuntimeError("shapes do not match")) is None


@pytest.mark.parametrize("backward", [False, True])
def test_the_error_says_where_what_and_what_to_do(tmp_path: Path, backward: bool) -> None:
    model = Small(mlp(), most=3, backward=backward)
    trainer = Trainer(model, make_optimizer("adamw", model), run_dir=tmp_path / "run", device="cpu", accumulation=2)
    with pytest.raises(OutOfMemoryError) as failure:
        trainer.train(DataLoader(classification(15), 4))
    error = failure.value
    text = str(error)
    phase = "backward" if backward else "forward"
    assert f"rank 0 ran out of GPU memory in step 1 ({phase}, micro-batch 1 of 2" in text
    assert "CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert "second line" not in text
    assert "parameters 0.0 MiB, gradients" in text
    assert "1. batch size 2 in the loader and accumulation=4" in text
    assert "halve_micro_batch" in text
    assert (error.exit_code, error.rank, error.step, error.phase) == (1, 0, 1, phase)
    assert error.held["parameters"] == sum(item.nbytes for item in model.parameters())
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert any("ran out of GPU memory" in note for note in summary["notes"])


def test_explaining_never_fails_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    for name in ("held_by", "general_advice", "place_of"):
        monkeypatch.setattr(out_of_memory, name, broken)
    model = Small(mlp(), most=3)
    monkeypatch.setattr("frameworm.engine.trainer.Ingredients", partial(Ingredients, advise=broken))
    trainer = Trainer(model, make_optimizer("sgd", model), run_dir=None, device="cpu")
    with pytest.raises(OutOfMemoryError, match="rank 0 ran out of GPU memory in step 1: CUDA out of memory"):
        trainer.train(DataLoader(classification(8), 4))


def test_advice_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "ADVICE_WITHIN_S", 0.1)
    model = Small(mlp(), most=3)
    late = partial(Ingredients, advise=lambda phase: time.sleep(20) or ["late"])  # type: ignore[func-returns-value]
    monkeypatch.setattr("frameworm.engine.trainer.Ingredients", late)
    trainer = Trainer(model, make_optimizer("sgd", model), run_dir=None, device="cpu")
    begin = time.monotonic()
    with pytest.raises(OutOfMemoryError, match="not planned"):
        trainer.train(DataLoader(classification(8), 4))
    assert time.monotonic() - begin < 15


@pytest.mark.slow
def test_a_run_from_a_config_is_advised_by_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frameworm.config.load import load_config
    from frameworm.engine.run import run
    from frameworm.models.text_classifier import TextClassifier

    forward = TextClassifier.forward

    def fail(*args: Any, **settings: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return forward(*args, **settings)  # the plan runs the model too, on tensors that hold nothing
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(TextClassifier, "forward", fail)
    monkeypatch.setattr(out_of_memory, "ADVICE_WITHIN_S", 60.0)
    source = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    with pytest.raises(OutOfMemoryError) as failure:
        run(load_config(source, ["data.vocab_size=512"]), out=tmp_path / "run")
    text = str(failure.value)
    assert "rank 0 ran out of host memory in step 1 (forward, micro-batch 1 of 1, 64 samples)" in text
    assert "by the plan of `frameworm memory`" in text
    assert failure.value.advice[0].startswith("micro-batch 32 with accumulation 2 (--set training.micro_batch=32): ")
    assert len(failure.value.advice) == 3


def _one_runs_out(rank: int, world_size: int) -> tuple[str, float]:
    model = Small(mlp(), most=3 if rank == 1 else 100)
    trainer = Trainer(model, make_optimizer("sgd", model), run_dir=None, device="cpu", accumulation=2)
    begin = time.monotonic()
    try:
        trainer.train(DataLoader(classification(64), 4))
    except TrainingFailedError as error:
        # The process ends here, as any script does; its peers see the connection close.
        torch.distributed.destroy_process_group()
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    raise AssertionError("it trained")


def test_all_ranks_end_and_know_the_cause(run_ranks: Any) -> None:
    (first, first_s), (second, second_s) = run_ranks(_one_runs_out)
    assert "OutOfMemoryError: rank 1 ran out of GPU memory in step 1 (forward, micro-batch 1 of 2" in second
    assert first.startswith("TrainingFailedError: rank 1 ran out of GPU memory in step 1")
    assert max(first_s, second_s) < 30


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.slow
def test_half_the_micro_batch_trains_the_same(accumulation: int, backward: bool) -> None:
    data = classification(50)  # the last step is short
    _, expected, steps = fit(mlp(), data, optimizer="adamw", batch_size=2, accumulation=4 * accumulation, epochs=2)
    model = Small(mlp(), most=2, backward=backward)
    record, after, halved = fit(
        model,
        data,
        optimizer="adamw",
        batch_size=8,
        accumulation=accumulation,
        epochs=2,
        on_oom="halve_micro_batch",
    )
    assert torch.allclose(after, expected, atol=1e-6)
    assert [step.samples for step in halved] == [step.samples for step in steps]
    assert [step.loss for step in halved] == pytest.approx([step.loss for step in steps], abs=1e-6)
    assert (record.batch.micro, record.batch.accumulation) == (2, 4 * accumulation)
    assert record.batch.global_ == 8 * accumulation
    assert sum("it was done again" in note for note in record.notes) == 2
    assert max(model.sizes[4:]) <= 2, "once found, the size stays"


def test_losses_that_count_tokens_stay_right() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()), (target != -100).sum()

    results = []
    for model, size, settings in (
        (tagger(), 3, {"accumulation": 2}),
        (Small(tagger(), most=3), 6, {"on_oom": "halve_micro_batch"}),
    ):
        trainer = Trainer(model, make_optimizer("sgd", model), loss_fn, run_dir=None, device="cpu", **settings)
        trainer.train(DataLoader(Sequences(22), size), epochs=2)
        results.append(parameters(model))
    assert torch.allclose(results[0], results[1], atol=1e-6)


@pytest.mark.slow
def test_one_sample_cannot_be_halved() -> None:
    model = Small(mlp(), most=0)
    with pytest.raises(OutOfMemoryError, match="1 samples"):
        fit(model, classification(8), batch_size=4, on_oom="halve_micro_batch")
    assert model.sizes == [4, 2, 1]


class Pair(NamedTuple):
    inputs: torch.Tensor
    names: list[str]


def test_batches_are_cut_without_losing_a_sample() -> None:
    rows = torch.arange(5)
    batch = StepBatch([{"pair": Pair(rows, list("abcde")), "width": 7}], [5], 10)
    divided = divide(batch, 2)
    assert divided.samples == [3, 2]
    assert divided.global_samples == 10
    assert torch.equal(torch.cat([item["pair"].inputs for item in divided.batches]), rows)
    assert [item["pair"].names for item in divided.batches] == [["a", "b", "c"], ["d", "e"]]
    assert divided.batches[1]["width"] == 7
    assert divide(batch, 8).samples == [1] * 5
    filler = divide(StepBatch([rows], [0], 4), 2)
    assert filler.samples == [0]
    assert len(filler.batches[0]) == 3
    packed = StepBatch([{"labels": rows, "input_ids": torch.arange(40)}], [5], 5)
    with pytest.raises(CannotDivideError):
        divide(packed, 2)


def _halved(rank: int, world_size: int, most: int, size: int, accumulation: int) -> dict[str, Any]:
    # Rank 1 alone is too small; the shares are unequal at the end (27 samples).
    model = Small(mlp(), most=most if rank == 1 else 1000)
    record, after, steps = fit(
        model,
        classification(27),
        optimizer="adamw",
        batch_size=size,
        accumulation=accumulation,
        epochs=2,
        clip_norm=0.5,
        on_oom="halve_micro_batch",
    )
    return {
        "after": after,
        "samples": [step.samples for step in steps],
        "batch": (record.batch.micro, record.batch.accumulation, record.batch.global_),
        "notes": [note for note in record.notes if "done again" in note],
        "sizes": model.sizes,
    }


def _plain(rank: int, world_size: int) -> torch.Tensor:
    return fit(mlp(), classification(27), optimizer="adamw", batch_size=2, accumulation=2, epochs=2, clip_norm=0.5)[1]


@pytest.mark.slow
def test_two_ranks_halve_together(run_ranks: Any) -> None:
    expected = run_ranks(_plain)[0]
    first, second = run_ranks(_halved, args=(2, 4, 1))
    assert torch.equal(first["after"], second["after"])
    assert torch.allclose(first["after"], expected, atol=1e-6)
    assert first["batch"] == second["batch"] == (2, 2, 8)
    assert sum(first["samples"]) + sum(second["samples"]) == 2 * 27
    assert max(first["sizes"][1:]) == 2, "the rank that had room follows"
    assert "rank 1 ran out of memory in step 1" in first["notes"][0]


def _cannot_halve(rank: int, world_size: int) -> str:
    model = Small(mlp(), most=0 if rank == 1 else 100)
    with pytest.raises(TrainingFailedError) as failure:
        fit(model, classification(16), batch_size=2, on_oom="halve_micro_batch")
    return str(failure.value)


def test_two_ranks_stop_together_where_one_cannot_halve(run_ranks: Any) -> None:
    first, second = run_ranks(_cannot_halve)
    assert "rank 1 ran out of" in first
    assert "rank 1 ran out of GPU memory in step 1" in second


OWN_WORKLOAD = """
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(4), 1

class Model(torch.nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Planted.")
        return super().forward(inputs)

def build(config):
    return Model(4, 2), Numbers(), None
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_launched_run_ends_within_30_s_of_the_failure(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_WORKLOAD)
    (tmp_path / "own.yaml").write_text(
        "workload: own:build\ngpu: {device: cpu}\ndata: {num_workers: 0}\ntraining: {global_batch: 8}\n"
    )
    arguments = ("--config", "own.yaml", "--distributed", "--nproc-per-node", "2", "--out", "run")
    ended = cli("train", *arguments, cwd=tmp_path, timeout_s=120)
    over = time.time()
    assert ended.returncode == 1, ended.stderr
    assert "rank 1 ran out of GPU memory in step 3 (forward, micro-batch 1 of 1, 4 samples)" in ended.stderr
    assert "Traceback" not in ended.stderr
    last = json.loads((tmp_path / "run" / "steps-rank1.jsonl").read_text().splitlines()[-1])
    assert over - last["time"] < 30
