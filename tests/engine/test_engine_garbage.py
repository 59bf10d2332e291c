"""The collector during training."""

from __future__ import annotations

import gc

import torch
from torch.utils.data import DataLoader
from workbench import classification, mlp

from frameworm import Callback, Trainer
from frameworm.records.schema import RunRecord


class Frozen(Callback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_run_start(self, record: RunRecord) -> None:
        self.counts.append(gc.get_freeze_count())


def _train(enabled: bool) -> int:
    model = mlp()
    watch = Frozen()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[watch],
        run_dir=None,
        device="cpu",
        enable_automatic_gc=enabled,
    )
    trainer.train(DataLoader(classification(8), 4))
    return watch.counts[0]


def test_the_heap_is_set_aside_while_training() -> None:
    assert _train(True) > 0
    assert gc.get_freeze_count() == 0
    assert _train(False) == 0


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        _train(True)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
