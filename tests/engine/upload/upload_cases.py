"""A small training that uploads, for the tests of uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from workbench import classification, make_optimizer, mlp

from frameworm import RunRecord, Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.records.objects.place import Place

STEPS = 12


def train(
    out: str | Path | None, /, *, resume: str | None = None, callbacks: Any = (), epochs: int = 2, **settings: Any
) -> tuple[RunRecord, torch.Tensor]:
    """Twelve steps in two epochs, a checkpoint after every second; its record and its weights."""
    model = mlp()
    trainer = Trainer(
        model,
        make_optimizer("adamw", model),
        run_dir=out,
        **{"every_steps": 2, "keep": 2, "when_busy": "wait", "mode": "sync", **settings},
        seed=1,
        device="cpu",
        system_interval_s=None,
        callbacks=list(callbacks),
    )
    loader = OptimizedDataLoader.create(classification(48), 8, seed=2, num_workers=0)
    record = trainer.train(loader, DataLoader(classification(16), 16), epochs=epochs, resume=resume)
    return record, torch.cat([item.detach().flatten() for item in model.parameters()])


def names(url: str) -> list[str]:
    """The objects of a run."""
    return sorted(Place(url).find())
