"""The engine on a CUDA device: same numbers, honest phases, and a host that never waits inside a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from workbench import Steps, classification, mlp, parameters

from frameworm import Callback, Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import TrainingInterruptedError
from frameworm.records.schema import EpochRecord, StepRecord

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _repeatable() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    if torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")


def _loader(samples: int = 64, batch_size: int = 8) -> OptimizedDataLoader:
    return OptimizedDataLoader.create(classification(samples), batch_size, seed=3, num_workers=0)


def test_training_is_the_plain_loop() -> None:
    expected = mlp().cuda()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for inputs, target in _loader():
        optimizer.zero_grad()
        F.cross_entropy(expected(inputs.cuda()), target.cuda()).backward()
        optimizer.step()
    found = mlp()
    trainer = Trainer(found, torch.optim.AdamW(found.parameters(), lr=0.01), run_dir=None)
    record = trainer.train(_loader(), _loader(20))
    assert torch.equal(parameters(expected), parameters(found)), "bit for bit"
    assert record.quality.val_accuracy is not None
    assert record.memory.reserved_bytes is not None


class NoWaiting(Callback):
    """From the third step on any host wait for the device is an error."""

    def on_step(self, step: StepRecord) -> None:
        if step.step == 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_epoch(self, epoch: EpochRecord) -> None:
        torch.cuda.set_sync_debug_mode("default")  # the last checkpoint may wait


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_step_makes_the_host_wait(precision: str, accumulation: int, tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    steps = Steps()
    trainer = Trainer(
        model,
        optimizer,
        callbacks=[NoWaiting(), steps],
        clip_norm=1.0,
        accumulation=accumulation,
        mixed_precision=precision,
        run_dir=tmp_path / "run",
        every_steps=None,
    )
    trainer.train(OptimizedDataLoader.create(classification(400), 4, num_workers=0, pin_memory=True))
    assert len(steps.records) == -(-400 // (4 * accumulation))
    assert all(step.loss is not None and step.grad_norm is not None for step in steps.records)


def test_bad_gradients_are_skipped_without_asking() -> None:
    inputs, target = classification(40).tensors
    inputs = inputs.clone()
    inputs[17] = float("inf")
    model = mlp()
    steps = Steps()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        callbacks=[steps],
        clip_norm=1.0,
        run_dir=None,
    )
    record = trainer.train(DataLoader(TensorDataset(inputs, target), 4))
    assert [step.skipped for step in steps.records] == [False] * 4 + [True] + [False] * 5
    assert record.skipped_steps == 1
    assert torch.isfinite(parameters(model)).all()


class Busy(nn.Module):
    """Keeps the device, not the host, busy for a while in forward."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.cycles = cycles

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(self.cycles)
        return self.layer(inputs)


class SlowData(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.data = classification(160)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.data[index]


def _cycles_for(seconds: float) -> int:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return int(100_000_000 * seconds / (start.elapsed_time(end) * 1e-3))


def test_phases_add_up_and_find_the_device_time() -> None:
    steps = Steps()
    model = Busy(_cycles_for(0.03))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[steps], run_dir=None)
    record = trainer.train(_loader(240))
    for step in steps.records:
        assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=0.02)
    # Other tests may take turns on the device: it is not less than what was planted, and nothing else takes long.
    assert record.phases["forward"].mean_s > 0.027
    assert record.phases["forward"].share > 0.8
    assert record.phases["data_wait"].share < 0.05


def test_a_slow_loader_is_a_wait_for_data() -> None:
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None)
    record = trainer.train(DataLoader(SlowData(0.005), 8))
    assert record.phases["data_wait"].mean_s == pytest.approx(0.04, abs=0.006)


class StopAfter(Callback):
    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step(self, step: StepRecord) -> None:
        if step.step == self._step:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("precision", ["off", "fp16"])
def test_resume_is_exact(tmp_path: Path, precision: str) -> None:
    def train(folder: Path, stop_after: int | None = None, resume: str | None = None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
            callbacks=[StopAfter(stop_after)],
            clip_norm=1.0,
            seed=5,
            mixed_precision=precision,
            deterministic=True,
            run_dir=folder,
            every_steps=7,
        )
        trainer.train(_loader(160), _loader(16), epochs=3, resume=resume)
        return parameters(model)

    expected = train(tmp_path / "whole")
    with pytest.raises(TrainingInterruptedError):
        train(tmp_path / "parts", stop_after=23)
    assert torch.equal(expected, train(tmp_path / "parts", resume="auto"))


def _nccl(rank: int, world_size: int) -> Any:
    from frameworm.launch.process_group import cleanup

    cleanup()
    import torch.distributed as dist

    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp", run_dir=None)
    record = trainer.train(_loader(), _loader(20), epochs=2)
    return dist.get_backend(), record.losses, parameters(model).cpu()


def test_ddp_by_nccl_on_one_gpu_equals_single(run_ranks: Callable[..., list[Any]]) -> None:
    backend, losses, found = run_ranks(_nccl, 1, timeout_s=100)[0]
    assert backend == "nccl"
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None)
    record = trainer.train(_loader(), _loader(20), epochs=2)
    assert losses == pytest.approx(record.losses, abs=1e-6)
    assert torch.allclose(parameters(model).cpu(), found, atol=1e-6)


def _sharing(rank: int, world_size: int) -> Any:
    model = mlp()
    # Two ranks on one GPU: gloo carries CUDA tensors.
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_ids=[0, 0],
        tf32=False,
        backend="gloo",
        run_dir=None,
    )
    record = trainer.train(_loader(60, 4), _loader(20), epochs=2)
    return record.losses, parameters(model).cpu(), record.quality.val_loss


def test_two_ranks_on_one_gpu_equal_one(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(_sharing, 2, timeout_s=100)
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None)
    record = trainer.train(_loader(60, 8), _loader(20), epochs=2)
    for losses, found, val_loss in results:
        assert losses == pytest.approx(record.losses, abs=1e-5)
        assert torch.allclose(parameters(model).cpu(), found, atol=1e-6)
        assert val_loss == pytest.approx(record.quality.val_loss, abs=1e-5)


def test_data_parallel_on_the_gpus_there_are() -> None:
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None)
    record = trainer.enable_data_parallel().train(_loader(), _loader(20))
    single = mlp()
    expected = Trainer(single, torch.optim.SGD(single.parameters(), lr=0.1), run_dir=None).train(_loader(), _loader(20))
    assert record.strategy == "dp"
    assert record.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_training_follows_eager() -> None:
    losses = []
    for compiled in (False, True):
        model = mlp()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None)
        if compiled:
            trainer.enable_compile()
        losses.append(trainer.train(_loader(), epochs=2).losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
