"""FLOPs of a run: counted in an early step, scaled by what the other steps hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine.workbench import classification, mlp
from frameworm import Trainer
from frameworm.attach.record import stored_record
from frameworm.config.load import load_config
from frameworm.engine.memory.dry_run import DryRun
from frameworm.engine.run import run
from frameworm.records.observations import Flops, ModelFlops
from frameworm.records.store import RunFolder

MLP_FLOPS = 4 * 6 * 16 + 6 * 16 * 3  # of a sample; the input of the first layer has no gradient


def train(model: nn.Module, data: Any = None, batch: int = 8, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data or classification(64), batch_size=batch)
    return Trainer(model, optimizer, **{"run_dir": None, **settings}).train(loader, epochs=1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_says_its_flops_and_on_a_cpu_no_share_of_a_peak(accumulation: int, tmp_path: Path) -> None:
    record = train(mlp(), accumulation=accumulation, run_dir=tmp_path / "run")
    assert record.flops.per_step == 8 * accumulation * MLP_FLOPS
    assert record.flops.per_s == pytest.approx(record.throughput.samples_per_s * MLP_FLOPS)
    assert (record.flops.precision, record.flops.peak_per_s, record.mfu) == ("fp32", None, None)
    assert sum(item.share for item in record.flops.products) == pytest.approx(1)
    stored = RunFolder.open(tmp_path / "run").read_summary()
    assert stored.flops == record.flops


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_what_a_run_says_while_it_goes_on_is_what_its_summary_says(kind: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    seen: list[tuple[int, Flops | None]] = []

    class Reader:
        def on_step(self, step: Any) -> None:
            seen.append((step.step, folder.read_begun().flops))

    if kind == "tokens":
        config = load_config("configs/quickstart.yaml", settings(**{"data.limit": 2000, "training.epochs": 1}))
        record = run(config, out=folder.path, callbacks=[Reader()])
    else:
        record = train(mlp(), run_dir=folder.path, callbacks=[Reader()])
    assert [step for step, flops in seen if flops is None] == ([1] if kind == "tokens" else [1, 2])
    early = seen[-1][1]
    assert early is not None
    assert early.model == record.flops.model
    assert early.per_step == pytest.approx(record.flops.per_step, rel=0.3 if kind == "tokens" else 0)
    (folder.path / "summary.json").unlink()
    killed = stored_record(folder)
    assert killed.flops is not None
    assert killed.flops.per_step == pytest.approx(record.flops.per_step)
    assert killed.flops.per_s == pytest.approx(record.flops.per_s)
    assert (killed.device, killed.parameters, killed.started) == (record.device, record.parameters, record.started)


def test_products_of_the_optimizer_do_not_count() -> None:
    class Multiplying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.ones(50, 50) @ torch.ones(50, 50)
            return super().step(closure)

    model = mlp()
    loader = DataLoader(classification(64), batch_size=8)
    record = Trainer(model, Multiplying(model.parameters(), lr=0.01), run_dir=None).train(loader, epochs=1)
    assert record.flops is not None
    assert record.flops.per_step == 8 * MLP_FLOPS


def test_short_last_batches_count_by_their_samples() -> None:
    record = train(mlp(), classification(60), batch=8)  # seven of 8, one of 4; the last four are measured
    assert record.flops.per_step == pytest.approx((3 * 8 + 4) / 4 * MLP_FLOPS)


def test_half_precision_is_seen_where_it_is_computed() -> None:
    record = train(mlp(), mixed_precision="bf16")
    assert record.flops.precision == "bf16"


def test_recomputed_activations_are_no_work_of_the_model() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs

    kept, recomputed = Deep(), Deep()
    trainer = Trainer(recomputed, torch.optim.SGD(recomputed.parameters(), lr=0.01), run_dir=None)
    trainer.enable_gradient_checkpointing()
    again = trainer.train(DataLoader(classification(64), batch_size=8), epochs=1)
    assert again.flops is not None
    assert again.flops.per_step == train(kept).flops.per_step


class Padded(nn.Module):
    """A linear layer on every token of a batch with an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.embed(input_ids)).square().mean()


def test_padding_that_a_mask_tells_does_not_count() -> None:
    ids, mask = torch.zeros(32, 12, dtype=torch.long), torch.ones(32, 12, dtype=torch.long)
    mask[:, 3:] = 0
    rows = [{"input_ids": one, "attention_mask": two} for one, two in zip(ids, mask)]
    record = train(Padded(), rows, batch=4)
    assert record.flops.per_step == pytest.approx(4 * 3 * 6 * 8 * 8)


def settings(**changes: Any) -> list[str]:
    base = {"training.epochs": 1, "training.max_steps": 20, "training.global_batch": 32}
    return [f"{key}={value}" for key, value in {**base, **changes}.items()]


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["padded", "bucketed", "packed"])
def test_all_ways_to_batch_texts_take_about_the_same_flops(batching: str) -> None:
    config = load_config("configs/quickstart.yaml", settings(**{"data.batching": batching}))
    record = run(config, out=None)
    flops, model = record.flops, config.model
    assert flops is not None
    assert record.throughput.tokens_per_s
    width, inner = model.d_model, model.dim_feedforward  # type: ignore[union-attr]
    per_token = 6 * model.num_layers * (4 * width**2 + 2 * width * inner)  # type: ignore[union-attr]
    linear = flops.per_s * (1 - flops.attention_share)
    # Packed batches pool by a product, which shows in a model this small.
    assert linear == pytest.approx(record.throughput.tokens_per_s * per_token, rel=0.03)


def test_flops_of_texts_grow_with_the_square_of_their_length() -> None:
    model = ModelFlops(per_sample=1, per_token=10, per_squared_token=2)
    assert model.of(4, 12, 12 * 12 / 4) == 10 * 12 + 2 * 36
    assert model.of(4, None, None) == 4


def test_mfu_is_the_share_of_a_known_peak() -> None:
    assert Flops(per_step=1e12, per_s=4e14, peak_per_s=1e15).mfu == 0.4
    assert Flops(per_step=1e12, per_s=4e14).mfu is None


def test_a_dry_run_counts_what_a_real_step_does() -> None:
    model, data = mlp(), classification(8)
    dry = DryRun(model, lambda _: data.tensors, device="cpu")
    assert dry.count_flops().total == 8 * MLP_FLOPS


def test_a_model_without_products_has_no_flops_and_says_so() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(6))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs * self.factor).square().mean()

    record = train(Scale(), [(item,) for item in classification(64).tensors[0]])
    assert record.flops is None
    assert any("FLOPs were not counted" in note for note in record.notes)


def test_a_run_of_one_step_has_no_count() -> None:
    record = train(mlp(), TensorDataset(*classification(8).tensors), batch=8)
    assert record.flops is None
    assert dataclasses.asdict(record)["mfu"] is None
