"""Sharding on a GPU: by NCCL with one rank, in fp32 and half precision, with and without state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_cases import apart, make_optimizer, whole_values
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


Values = dict[str, torch.Tensor]
# Rounded otherwise, AdamW turns gradients that are nothing but rounding into steps of full length; so what is computed
# in other numbers is compared by plain descent, and by how far it went rather than by single values.
FP32_APART, HALF_APART = 1e-4, 0.01


def _make_model() -> GPT:
    torch.manual_seed(3)
    return GPT(11, d_model=32, n_heads=2, num_layers=2, max_seq_len=8)


def _train(folder: Path | None, *, resume: bool = False, max_steps: int = 7, **settings: Any) -> tuple[Values, Any]:
    model = _make_model()
    half = "mixed_precision" in settings
    descent = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True) if half else None
    steps = Steps()
    trainer = Trainer(
        model,
        descent or make_optimizer("fused", model),
        clip_norm=0.05,
        max_steps=max_steps,
        run_dir=folder,
        callbacks=[steps],
        progress=False,
        **settings,
    )
    loader = OptimizedDataLoader.create(Sequences(52), 4, seed=2)
    trainer.train(loader, OptimizedDataLoader.create(Sequences(10), 4), epochs=2, resume="auto" if resume else None)
    values = {name: value.cpu() for name, value in whole_values(model).items()}
    return values, [(step.loss, step.grad_norm, step.skipped) for step in steps.records]


def _sharded(rank: int, world_size: int, folder: str, strategy: str, settings: dict[str, Any]) -> Any:
    from frameworm.launch.process_group import cleanup

    cleanup()  # the trainer makes a group of its own, by NCCL
    values, steps = _train(None, strategy=strategy, accumulation=2, **settings)
    _train(Path(folder), strategy=strategy, accumulation=2, max_steps=7, **settings)
    again, _ = _train(Path(folder), strategy=strategy, accumulation=2, max_steps=9, resume=True, **settings)
    assert torch.distributed.get_backend() == "nccl"
    return values, steps, again


@pytest.mark.parametrize(("strategy", "settings"), CASES, ids=lambda item: str(item))
def test_sharding_by_nccl_equals_one_process(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    found, steps, again = run_ranks(_sharded, 1, (str(tmp_path / "run"), strategy, settings), timeout_s=240)[0]
    plain = {name: value for name, value in settings.items() if name == "mixed_precision"}
    expected, expected_steps = _train(None, accumulation=2, **plain)
    longer, _ = _train(None, accumulation=2, max_steps=9, **plain)
    start = {name: value.clone() for name, value in _make_model().state_dict().items()}
    for reached, wanted, what in ((found, expected, "seven steps"), (again, longer, "seven steps, then two more")):
        share, where = apart(reached, wanted, start)
        assert share < (HALF_APART if plain else FP32_APART), f"{what}: {share:.2g} of the way apart; {where}"
    # A divided SGD is not fused and cannot be told on the device to leave out a step: there nothing is known.
    left_out = [[bool(step[2]) for step in some] for some in (steps, expected_steps)]
    assert left_out[0] == left_out[1], "other steps were left out"
    for place, name in enumerate(("loss", "grad_norm")):
        mine, theirs = ([step[place] for step in some if not step[2]] for some in (steps, expected_steps))
        assert mine == pytest.approx(theirs, rel=0.02 if plain else 1e-4), f"{name} in each step"
