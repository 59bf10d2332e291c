"""Sharding on a GPU: by NCCL with one rank, in fp32 and half precision, with and without state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_cases import largest_difference, make_optimizer, whole_values
from workbench import Sequences, Steps

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.models.gpt import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}),
    ("zero2", {}),
    ("zero3", {}),
    ("zero3", {"offload_optimizer": True}),
    ("zero3", {"mixed_precision": "bf16"}),
    ("zero2", {"mixed_precision": "fp16"}),
]


def _train(folder: Path | None, *, resume: bool = False, max_steps: int = 7, **settings: Any) -> Any:
    torch.manual_seed(3)
    model = GPT(11, d_model=32, n_heads=2, num_layers=2, max_seq_len=8)
    steps = Steps()
    trainer = Trainer(
        model,
        make_optimizer("fused", model),
        clip_norm=0.05,
        max_steps=max_steps,
        run_dir=folder,
        callbacks=[steps],
        progress=False,
        **settings,
    )
    loader = OptimizedDataLoader.create(Sequences(52), 4, seed=2)
    trainer.train(loader, OptimizedDataLoader.create(Sequences(10), 4), epochs=2, resume="auto" if resume else None)
    return {name: value.cpu() for name, value in whole_values(model).items()}, [step.loss for step in steps.records]


def _sharded(rank: int, world_size: int, folder: str, strategy: str, settings: dict[str, Any]) -> Any:
    from frameworm.launch.process_group import cleanup

    cleanup()  # the trainer makes a group of its own, by NCCL
    values, losses = _train(None, strategy=strategy, accumulation=2, **settings)
    _train(Path(folder), strategy=strategy, accumulation=2, max_steps=7, **settings)
    again, _ = _train(Path(folder), strategy=strategy, accumulation=2, max_steps=9, resume=True, **settings)
    assert torch.distributed.get_backend() == "nccl"
    return values, losses, again


@pytest.mark.parametrize(("strategy", "settings"), CASES, ids=lambda item: str(item))
def test_sharding_by_nccl_equals_one_process(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    found, losses, again = run_ranks(_sharded, 1, (str(tmp_path / "run"), strategy, settings), timeout_s=100)[0]
    plain = {name: value for name, value in settings.items() if name == "mixed_precision"}
    expected, expected_losses = _train(None, accumulation=2, **plain)
    longer, _ = _train(None, accumulation=2, max_steps=9, **plain)
    close = 1e-5 if not plain else 0.05
    assert largest_difference(found, expected) < close
    assert largest_difference(again, longer) < close
    assert losses == pytest.approx(expected_losses, rel=1e-5 if not plain else 0.02)
