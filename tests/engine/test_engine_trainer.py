"""Models and batches of all kinds: trained correctly, or refused clearly before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from workbench import Steps, classification, fit, mlp, parameters

from frameworm import Callback, GPUConfig, RunRecord, Trainer
from frameworm.config.schema import Config
from frameworm.distributed import DistributedTrainer
from frameworm.engine.optim.schedule import Schedule
from frameworm.errors import ConfigError, DataError, DeviceError, LossError, ModelError, StateError
from frameworm.records.schema import EpochRecord, StepRecord


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _trainer(model: nn.Module, **settings: Any) -> Trainer:
    return Trainer(model, _sgd(model), **{"run_dir": None, "device": "cpu", **settings})


def test_one_epoch_is_the_plain_loop(tmp_path: Path) -> None:
    data = DataLoader(classification(20), 4)
    model = mlp()
    optimizer = _sgd(model)
    for inputs, target in data:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    record, found, _ = fit(mlp(), classification(20), batch_size=4, loader="foreign", validation=classification(7))
    assert torch.equal(found, parameters(model)), "bit for bit"
    with torch.no_grad():
        inputs, target = classification(7).tensors
        assert record.quality.val_loss == pytest.approx(float(F.cross_entropy(model(inputs), target)), abs=1e-6)
        assert record.accuracy == pytest.approx(float((model(inputs).argmax(-1) == target).float().mean()))


def test_batch_norm_and_buffers_follow_the_plain_loop() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    expected, found = model(), model()
    optimizer = _sgd(expected)
    for inputs, target in DataLoader(classification(20), 5):
        optimizer.zero_grad()
        F.cross_entropy(expected(inputs), target).backward()
        optimizer.step()
    _trainer(found).train(DataLoader(classification(20), 5), DataLoader(classification(6), 3))
    for (name, first), second in zip(expected.state_dict().items(), found.state_dict().values()):
        assert torch.equal(first, second), name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def _token_batches(samples: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 7, (samples, 4), generator=generator)
    return [{"tokens": tokens[i : i + 4], "labels": (tokens[i : i + 4] + 1) % 7} for i in range(0, samples, 4)]


def test_tied_weights_unused_parameters_and_mapping_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    before = model.unused.weight.detach().clone()
    trainer = _trainer(model, run_dir=tmp_path / "run")
    record = trainer.train(_token_batches(), epochs=20)
    assert record.losses[-1] < record.losses[0] / 2  # type: ignore[operator]
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.unused.weight, before)
    torch.manual_seed(1)
    other = Tied()
    _trainer(other, run_dir=tmp_path / "run").train(_token_batches(), epochs=20, resume="auto")
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight


def _unused_on_ranks(rank: int, world_size: int, find_unused: bool) -> Any:
    torch.manual_seed(0)
    model = Tied()
    try:
        record = _trainer(model, find_unused_parameters=find_unused).train(_token_batches(16), epochs=3)
    except ModelError as error:
        return str(error)
    return record.losses, model.head.weight.detach()


@pytest.mark.slow
def test_unused_parameters_on_two_ranks(run_ranks: Callable[..., Any]) -> None:
    refused = run_ranks(_unused_on_ranks, 2, (False,))
    assert all("unused.weight, unused.bias" in text and "find_unused_parameters" in text for text in refused)
    trained = run_ranks(_unused_on_ranks, 2, (True,))
    assert trained[0][0][-1] < trained[0][0][0]
    assert torch.equal(trained[0][1], trained[1][1])


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3, device="meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs)


class Nothing(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (TwoDevices(), "second.weight is on the meta device"),
        (nn.LazyLinear(3), "is not initialised yet"),
        (nn.Linear(6, 3).requires_grad_(False), "nothing to train"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_trained_are_refused(model: nn.Module, words: str) -> None:
    trainer = Trainer(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), run_dir=None, device="cpu")
    with pytest.raises(ModelError, match=words):
        trainer.train(DataLoader(classification(8), 4))


def test_a_single_sample_for_batch_norm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ModelError, match="drop_last"):
        _trainer(model).train(DataLoader(classification(9), 4))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(classification(10))


def test_iterable_data_sets_train_with_and_without_a_length() -> None:
    record, _, steps = fit(mlp(), Stream(), batch_size=4, loader="ours", epochs=2, validation=classification(5))
    assert [step.samples for step in steps] == [4, 4, 2, 4, 4, 2]
    assert record.quality.val_loss is not None
    model = mlp()
    optimizer = _sgd(model)
    trainer = _trainer(model, scheduler=lambda total: Schedule(optimizer, "cosine", total, 0.0))
    with pytest.raises(ConfigError, match="max_steps"):
        trainer.train(DataLoader(Stream(), 4))


@pytest.mark.parametrize(
    ("loader", "words"),
    [(iter([1]), "read only once"), (7, "cannot be iterated"), (DataLoader(classification(4), 2), None)],
)
def test_loaders_that_cannot_serve(loader: Any, words: str | None) -> None:
    if words is None:
        _trainer(mlp()).train(loader)
        return
    with pytest.raises(DataError, match=words):
        _trainer(mlp()).train(loader)


def test_settings_are_checked_and_the_nearest_named() -> None:
    with pytest.raises(ConfigError, match=r"clip_nrom.*clip_norm"):
        _trainer(mlp(), clip_nrom=1.0)
    with pytest.raises(ConfigError, match="accumulation"):
        _trainer(mlp(), accumulation=0)
    trainer = _trainer(mlp(), gpu=GPUConfig(device="cpu", deterministic=True), keep=7, name="abc")
    assert trainer.config.checkpoint.keep == 7
    assert trainer.config.gpu.deterministic


def test_enabling_comes_before_training() -> None:
    trainer = _trainer(mlp())
    trainer.train(DataLoader(classification(8), 4))
    with pytest.raises(StateError, match="too late"):
        trainer.enable_mixed_precision()
    with pytest.raises(StateError, match="too late"):
        trainer.enable_compile()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    model = mlp()
    with pytest.raises(DeviceError, match="torch sees none"):
        Trainer(model, _sgd(model), run_dir=None).enable_data_parallel(device_ids=[0, 1])
    with pytest.raises(DeviceError):
        Trainer(model, _sgd(model), run_dir=None, device="cuda").train(DataLoader(classification(8), 4))


def test_distributed_trainer_works_alone() -> None:
    model = mlp()
    trainer = DistributedTrainer(
        model, _sgd(model), gradient_accumulation_steps=2, use_amp=True, run_dir=None, device="cpu"
    )
    record = trainer.train(DataLoader(classification(16), 4))
    assert record.steps == 2
    assert record.precision == "bf16"
    assert record.batch.global_ == 8
    trainer.cleanup()


def test_distributed_trainer_takes_what_a_trainer_takes() -> None:
    model = mlp()
    assert DistributedTrainer(model, _sgd(model), accumulation=2, run_dir=None).config.training.accumulation == 2
    config = Config.model_validate({"training": {"accumulation": 4}, "parallel": {"find_unused_parameters": True}})
    kept = DistributedTrainer(model, _sgd(model), config=config, run_dir=None).config
    assert (kept.training.accumulation, kept.parallel.find_unused_parameters) == (4, True)
    won = DistributedTrainer(model, _sgd(model), config=config, gradient_accumulation_steps=2, run_dir=None).config
    assert won.training.accumulation == 2


def test_max_steps_and_early_stop() -> None:
    record, _, steps = fit(mlp(), classification(20), batch_size=4, epochs=5, max_steps=7)
    assert len(steps) == record.steps == 7
    assert record.status == "completed"
    assert len(record.epochs) == 2
    frozen = {"lr": 1e-12}
    model = mlp()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), **frozen),
        run_dir=None,
        device="cpu",
        early_stop={"metric": "val_loss", "patience": 2, "min_delta": 1e-6},
    )
    record = trainer.train(DataLoader(classification(20), 4), DataLoader(classification(8), 4), epochs=50)
    assert len(record.epochs) == 3


def test_non_finite_gradients_are_skipped_and_counted(tmp_path: Path) -> None:
    inputs, target = classification(20).tensors
    inputs = inputs.clone()
    inputs[9] = float("inf")
    data = torch.utils.data.TensorDataset(inputs, target)
    model = mlp()
    steps = Steps()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    trainer = Trainer(
        model, optimizer, scheduler=schedule, callbacks=[steps], clip_norm=1.0, run_dir=tmp_path / "run", device="cpu"
    )
    record = trainer.train(DataLoader(data, 4))
    assert [step.skipped for step in steps.records] == [False, False, True, False, False]
    assert record.skipped_steps == 1
    assert torch.isfinite(parameters(model)).all()
    assert schedule.last_epoch == 5, "the schedule counts attempted steps"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["skipped_steps"] == 1


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_skips_an_overflow_and_lowers_its_scale(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    steps = Steps()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    trainer = Trainer(model, optimizer, callbacks=[steps], mixed_precision="fp16", run_dir=None, device="cpu")
    inputs = torch.randn(12, 4)
    inputs[5] = float("inf")
    record = trainer.train(DataLoader(torch.utils.data.TensorDataset(inputs, torch.arange(12) % 2), 4))
    skipped = [step.skipped for step in steps.records]
    assert skipped[1] is True
    assert skipped.count(True) < 3
    assert torch.isfinite(parameters(model)).all()
    assert record.precision == "fp16"


class Watcher(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_run_start(self, record: RunRecord) -> None:
        self.heard.append("start")

    def on_step(self, step: StepRecord) -> None:
        self.heard.append(f"step {step.step}")

    def on_epoch(self, epoch: EpochRecord) -> None:
        self.heard.append(f"epoch {epoch.epoch}")

    def on_checkpoint(self, path: str, step: int) -> None:
        self.heard.append(f"checkpoint {step}")

    def on_run_end(self, record: RunRecord) -> None:
        self.heard.append(record.status)


def test_callbacks_hear_everything_in_order(tmp_path: Path) -> None:
    watcher = Watcher()
    model = mlp()
    trainer = Trainer(model, _sgd(model), callbacks=[watcher], run_dir=tmp_path / "run", every_steps=2, device="cpu")
    trainer.train(DataLoader(classification(12), 4))
    assert watcher.heard == [
        "start",
        "step 1",
        "step 2",
        "checkpoint 2",
        "step 3",
        "epoch 1",
        "checkpoint 3",
        "completed",
    ]


def test_a_loss_that_fits_nothing_leaves_a_failed_run(tmp_path: Path) -> None:
    trainer = _trainer(nn.Linear(6, 3), run_dir=tmp_path / "run")
    with pytest.raises(LossError, match="Three ways"):
        trainer.train([(torch.randn(4, 6), torch.randn(4, 1))])
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_phases_add_up_and_see_what_was_planted() -> None:
    import statistics
    import time

    slept_s: list[float] = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            before = time.perf_counter()
            time.sleep(0.03)
            slept_s.append(time.perf_counter() - before)
            return self.layer(inputs)

    class SlowData(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.005)
            return classification(48)[index]

    steps = Steps()
    trainer = _trainer(Slow(), callbacks=[steps])
    record = trainer.train(DataLoader(SlowData(), 4))
    for step in steps.records:
        assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=0.02)
    # What a sleep really took is compared: on a busy machine it is more than was asked for.
    forward_s = [step.phases["forward"] for step in steps.records]
    assert len(forward_s) == len(slept_s) == 12
    beside_s = [found - slept for found, slept in zip(forward_s, slept_s)]
    assert 0 <= min(beside_s) < 0.003, "what belongs elsewhere would be in every step"
    assert record.phases["forward"].mean_s == pytest.approx(statistics.mean(forward_s[5:]), rel=1e-6)
    assert record.phases["data_wait"].mean_s >= 0.02
    assert record.throughput.step_s is not None
    total = sum(phase.mean_s for phase in record.phases.values())
    assert total == pytest.approx(record.throughput.step_s.mean, rel=0.02)


def test_deterministic_runs_are_bitwise_equal() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(99)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        return fit(model, classification(40), batch_size=8, seed=4, deterministic=True, epochs=2)[1]

    try:
        assert torch.equal(run(), run())
    finally:
        torch.use_deterministic_algorithms(False)


def _list_of_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, target = classification(30).tensors
    sizes = [4, 8, 3, 6, 9]
    return list(zip(inputs.split(sizes), target.split(sizes)))


def _uneven(rank: int, world_size: int) -> Any:
    model = mlp()
    validation = [(inputs, target) for inputs, target in _list_of_batches()[:3]]
    record = _trainer(model).train(_list_of_batches(), validation, epochs=2)
    return parameters(model), record.steps, record.losses, record.quality.val_loss


@pytest.mark.slow
def test_ranks_with_unequally_many_batches_end_together(run_ranks: Callable[..., Any]) -> None:
    """Five batches on two ranks: three steps, in the last of which one rank only keeps company."""
    model = mlp()
    validation = _list_of_batches()[:3]
    expected = _trainer(model, accumulation=2).train(_list_of_batches(), validation, epochs=2)
    for found, steps, losses, val_loss in run_ranks(_uneven, 2):
        assert steps == expected.steps == 6
        assert torch.allclose(found, parameters(model), atol=1e-6)
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        assert val_loss == pytest.approx(expected.quality.val_loss, abs=1e-5)
