"""FLOPs, MFU and roofline on a GPU, by the kernels that run only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from frameworm import RunRecord, Trainer
from frameworm.config.load import load_config
from frameworm.engine.run import run
from frameworm.hardware.devices import peak_flops
from frameworm.models.gpt import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY = 8, 256, 128, 2, 8192
FLOPS = BATCH * (
    6 * LENGTH * (LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH) + 12 * LAYERS * WIDTH * LENGTH * (LENGTH + 1) / 2
)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "targets": ids}


def train(tmp_path: Path, **settings: Any) -> RunRecord:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, WIDTH, WIDTH // 64, LAYERS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Trainer(model, optimizer, run_dir=tmp_path / "run", mixed_precision="bf16", **settings)
    return trainer.train(DataLoader(Tokens(), batch_size=BATCH), epochs=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"capture": "step"},
        {"compile_model": True},
        {"compile_model": True, "compile_mode": "max-autotune"},
        {"compile_model": True, "activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_flops_and_mfu_of_gpt(settings: dict[str, Any], tmp_path: Path) -> None:
    record = train(tmp_path, **settings)
    assert record.flops is not None, record.notes
    assert record.flops.per_step == pytest.approx(FLOPS, rel=0.02)
    assert record.flops.precision == "bf16"
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    assert record.flops.peak_per_s == peak
    if peak is None:
        assert record.mfu is None
    else:
        assert record.mfu == pytest.approx(record.flops.per_s / peak)  # type: ignore[operator]
        assert 0 < record.mfu < 1


def test_packed_and_padded_texts_take_the_same_flops_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    found = {}
    for name, changes in {
        "cpu": ["gpu.device=cpu", "data.batching=padded"],
        "padded": ["gpu.device=cuda", "gpu.mixed_precision=bf16", "data.batching=padded"],
        "packed": ["gpu.device=cuda", "gpu.mixed_precision=bf16", "data.batching=packed"],
    }.items():
        limits = ["training.epochs=1", "training.max_steps=20", "training.global_batch=32"]
        record = run(load_config("configs/quickstart.yaml", [*limits, *changes]), out=tmp_path / name)
        assert record.flops is not None, record.notes
        found[name] = record.flops.per_step
    assert found["padded"] == pytest.approx(found["cpu"], rel=0.05)
    assert found["packed"] == pytest.approx(found["cpu"], rel=0.05)


def test_a_trace_gives_a_roofline(tmp_path: Path) -> None:
    record = train(tmp_path, trace="window", trace_wait=4)
    assert record.roofline is not None
    assert sum(record.roofline.shares.values()) == pytest.approx(1, abs=0.01)
    assert record.roofline.shares["matrix_products"] > 0
    assert record.roofline.shares["attention"] > 0
    assert record.roofline.ceilings
    assert record.flops is not None
    assert record.flops.achievable_per_s
    assert record.flops.achievable_per_s > record.flops.per_s  # type: ignore[operator]
