"""The collector during training."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from workbench import classification, mlp

from frameworm import Callback, Trainer
from frameworm.engine.memory.garbage import Collector
from frameworm.records.schema import RunRecord, StepRecord


class Collections(Callback):
    """Counts what is frozen, and notes the step before which each collection came."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.frozen: list[int] = []
        self.before: list[int] = []
        self.step = 1
        model.register_forward_hook(self._ran)

    def on_run_start(self, record: RunRecord) -> None:
        self.frozen.append(gc.get_freeze_count())
        gc.callbacks.append(self._collected)

    def _ran(self, *_: Any) -> None:
        self.step += 1

    def on_run_end(self, record: RunRecord) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.before.append(self.step)


def _train(enabled: bool, steps: int = 2, **settings: Any) -> Collections:
    model = mlp()
    watch = Collections(model)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[watch],
        run_dir=None,
        device="cpu",
        enable_automatic_gc=enabled,
        **settings,
    )
    trainer.train(DataLoader(classification(4 * steps), 4))
    return watch


def test_the_heap_is_set_aside_while_training() -> None:
    assert _train(True).frozen[0] > 0
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()
    assert _train(False).frozen[0] == 0


@pytest.mark.parametrize("waited_for", [False, True])
def test_pythons_schedule_is_off_only_where_others_wait_for_this_process(
    waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    began = Collector.__enter__

    def entered(collector: Collector) -> Collector:
        collector._between_steps |= waited_for  # as with several ranks
        return began(collector)

    class Looks(Callback):
        def on_step(self, step: StepRecord) -> None:
            seen.append(gc.isenabled())

    monkeypatch.setattr(Collector, "__enter__", entered)
    model = mlp()
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Looks()], run_dir=None, device="cpu"
    )
    trainer.train(DataLoader(classification(16), 4))
    assert seen == [not waited_for] * 4
    assert gc.isenabled()


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        _train(True)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_python_itself_froze_is_no_frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as in a fresh Python 3.12
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    with Collector(True):
        assert frozen


def test_what_the_first_steps_bring_is_set_aside_too() -> None:
    looked_at: list[int] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(len(gc.get_objects()))

    late: list[list[Any]] = []
    try:
        with Collector(True) as collector:
            gc.callbacks.append(count)
            for number in range(301, 4301):  # a run that goes on
                collector.before_step(number)
                if number == 310:
                    late = [[] for _ in range(50_000)]  # as an import or a compiler does
    finally:
        gc.callbacks.remove(count)
    assert gc.get_freeze_count() == 0
    assert len(late) == 50_000
    assert looked_at[0] > 50_000  # once, at step 350
    assert len(looked_at) == 5  # 350, 1000, 2000, 3000, 4000
    assert max(looked_at[1:]) < 10_000


def _moments(rank: int, world_size: int) -> list[int]:
    # One rank makes far more garbage: by Python's own schedule it would collect at other moments.
    model = mlp()
    watch = Collections(model)
    make = (lambda: [[number] for number in range(400)]) if rank else list

    class Litter(Callback):
        def on_step(self, step: StepRecord) -> None:
            for part in (cycle := make()):
                part.append(cycle)

    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[watch, Litter()], run_dir=None, device="cpu"
    )
    trainer.train(DataLoader(classification(2 * 4 * 120), 4))
    return [step for step in watch.before if step <= 120]


@pytest.mark.slow
def test_ranks_collect_before_the_same_steps(run_ranks: Any) -> None:
    first, second = run_ranks(_moments)
    assert first == second == [1, 2, 4, 8, 16, 32, 50, 100]


def test_garbage_that_holds_memory_is_collected_more_often() -> None:
    held = [0]

    class Heavy:
        def __init__(self) -> None:
            self.itself = self
            held[0] += 100

        def __del__(self) -> None:
            held[0] -= 100

    most = 0
    with Collector(
        True, held_bytes=lambda: held[0], total_bytes=20_000
    ) as collector:  # 400 may be garbage: four of them
        for number in range(1, 60):
            collector.before_step(number)
            Heavy()
            most = max(most, held[0] if number > 16 else 0)
    assert most <= 500
    assert collector.note is not None
    assert "every 4 steps" in collector.note


def test_a_process_that_forks_off_collects_as_usual() -> None:
    with Collector(True):
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
