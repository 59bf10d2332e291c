"""The watch over memory: a planted leak is seen before the limit, and the run stops with its state saved."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from workbench import classification, mlp, parameters

from frameworm import Callback, RunRecord, Trainer
from frameworm.config.schema import MemoryConfig
from frameworm.engine.memory import guard as memory_guard
from frameworm.engine.memory.guard import Gauge, MemoryGuard
from frameworm.engine.memory.holdings import held_by, largest_tensors, snapshot
from frameworm.errors import MemoryLimitError
from frameworm.hardware import host
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.records.schema import StepRecord

MEBIBYTE = 2**20


class Leak(Callback):
    """Keeps a tensor of 8 MiB per step, on one rank or all."""

    def __init__(self, grows: bool = True) -> None:
        self.kept: list[torch.Tensor] = []
        self._grows = grows

    def on_step(self, step: StepRecord) -> None:
        if self._grows:
            self.kept.append(torch.ones(2 * MEBIBYTE))


def _small_machine(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """The machine has what the process holds now, twice, and the room that is left for a leak."""
    base = host.process_tree_bytes()
    monkeypatch.setattr(memory_guard, "memory_total_bytes", lambda: 2 * (base + room_bytes))
    monkeypatch.setattr(memory_guard, "memory_used_bytes", lambda processes: host.process_tree_bytes())


def _train(run_dir: Path, leak: Leak, resume: Path | None = None, **settings: Any) -> tuple[RunRecord, torch.Tensor]:
    model = mlp()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[leak],
        run_dir=run_dir,
        device="cpu",
        seed=1,
        monitoring_interval=0.001,
        **settings,
    )
    return trainer.train(DataLoader(classification(160), 4), epochs=2, resume=resume), parameters(model)


@pytest.mark.slow
def test_a_leak_is_warned_of_and_the_run_stops_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _train(tmp_path / "whole", Leak(grows=False))[1]
    _small_machine(monkeypatch, 160 * MEBIBYTE)
    leak = Leak()
    with caplog.at_level(logging.WARNING, "frameworm"), pytest.raises(MemoryLimitError) as stop:
        _train(tmp_path / "leaking", leak, max_memory_percent=50, gc_threshold=40)
    assert stop.value.exit_code == 75
    warnings = [item.getMessage() for item in caplog.records if "rank 0:" in item.getMessage()]
    assert "saves its state and stops" in warnings[0]
    assert "beyond 50%" in warnings[0], "the first word is a warning, before the limit"
    assert "parameters" in warnings[0]
    assert "x [2097152] float32" in warnings[0], "the largest holder is named"
    assert ": beyond memory.max_memory_percent" in warnings[-1]
    assert len(leak.kept) < 60
    summary = json.loads((tmp_path / "leaking" / "summary.json").read_text())
    assert summary["status"] == "preempted"
    assert summary["stop_reason"] == "memory"
    assert any("beyond memory.max_memory_percent" in note for note in summary["notes"])
    assert 4 < summary["steps"] < 80
    leak.kept.clear()
    monkeypatch.undo()
    record, after = _train(tmp_path / "leaking", Leak(grows=False), resume=tmp_path / "leaking")
    assert record.status == "completed"
    assert record.steps == 80
    assert torch.equal(after, expected)


def test_a_full_memory_that_does_not_grow_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard, "memory_total_bytes", host.process_tree_bytes)
    monkeypatch.setattr(memory_guard, "memory_used_bytes", lambda processes: int(1e9))
    record, _ = _train(tmp_path / "run", Leak(grows=False), max_memory_percent=50, gc_threshold=40)
    assert record.status == "completed"
    assert any("from the beginning" in note for note in record.notes)


class Fake(Gauge):
    """A memory of 1000 bytes whose filling the test decides."""

    name = "fake"

    def __init__(self) -> None:
        self.total_bytes = 1000
        self.held = 100
        self.garbage = 0
        self.unused = 0
        self.trims = 0

    def held_bytes(self) -> int:
        return self.held

    own_bytes = held_bytes

    def unused_bytes(self) -> int:
        return self.unused

    def trim(self) -> None:
        self.trims += 1
        self.held -= self.garbage
        self.garbage = 0


def _guard(gauge: Gauge, **settings: Any) -> tuple[MemoryGuard, StopRequest]:
    request = StopRequest()
    config = MemoryConfig(monitoring_interval=1e-9, **settings)
    guard = MemoryGuard(config, [gauge], request, lambda: "")
    for number in range(1, 5):
        guard.before_step(number)
    return guard, request


def test_garbage_above_the_threshold_is_collected_and_stops_nobody() -> None:
    gauge = Fake()
    guard, request = _guard(gauge)
    gauge.held, gauge.garbage = 900, 800
    guard.before_step(5)
    assert (gauge.trims, request.reason, guard.notes) == (1, None, [])


def test_the_cache_is_trimmed_beyond_its_limit_and_more_rarely_where_it_comes_back() -> None:
    gauge = Fake()
    guard, _ = _guard(gauge, cache_size_limit=50)
    gauge.unused = 50
    guard.before_step(5)
    assert gauge.trims == 0
    gauge.unused = 51
    for number in range(6, 106):
        guard.before_step(number)
    assert 3 <= gauge.trims <= 8


def test_a_fast_leak_is_warned_of_below_the_threshold() -> None:
    gauge = Fake()
    guard, request = _guard(gauge)
    gauge.held = 450  # 350 more at one look: the next but one would be beyond 850
    guard.before_step(5)
    assert request.reason is None
    assert len(guard.notes) == 1
    gauge.held = 870
    guard.before_step(6)
    assert request.reason == "memory"


def test_it_looks_only_when_the_interval_is_over() -> None:
    gauge = Fake()
    request = StopRequest()
    guard = MemoryGuard(MemoryConfig(monitoring_interval=3600), [gauge], request, lambda: "")
    for number in range(1, 6):
        guard.before_step(number)
    gauge.held = 990
    for number in range(6, 100):
        guard.before_step(number)
    assert request.reason is None


def _stop_of_one(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    host_bytes = {"used": 100}
    memory_guard.memory_total_bytes = lambda: 1000  # type: ignore[attr-defined]
    memory_guard.memory_used_bytes = lambda processes: host_bytes["used"]  # type: ignore[attr-defined]

    class Grow(Callback):
        def on_step(self, step: StepRecord) -> None:
            if rank == 1 and step.step >= 10:
                host_bytes["used"] = 900

    model = mlp()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Grow()],
        run_dir=Path(folder) / "run",
        device="cpu",
        monitoring_interval=0.001,
        max_steps=5000,
    )
    with pytest.raises(MemoryLimitError) as stop:
        trainer.train(DataLoader(classification(80), 4), epochs=500)
    record = stop.value.record
    assert isinstance(record, RunRecord)
    return record.steps, record.notes


@pytest.mark.slow
def test_the_full_rank_decides_for_all(run_ranks: Any, tmp_path: Path) -> None:
    (first, notes), (second, _) = run_ranks(_stop_of_one, args=(str(tmp_path),))
    assert first == second
    assert any("rank 1: 90% of the host memory" in note for note in notes), "rank 0's summary names the rank"


def test_two_wishes_meet_and_the_detail_reaches_all() -> None:
    alone = StopRequest()
    alone.ask("memory", "too full")
    agreement = StopAgreement(alone, None, 0, 1)
    assert agreement.stop_before(3) == "memory"
    assert agreement.details == ["too full"]


def test_holders_are_told_apart() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    held = held_by(model, optimizer, torch.device("cpu"))
    assert (held.parameters, held.gradients) == (256 * 256 * 4, 256 * 256 * 4)
    assert 2 * 256 * 256 * 4 <= held.optimizer_state <= 2 * 256 * 256 * 4 + 64
    assert held.rest > 0
    kept = [torch.ones(3, 5, 1024) for _ in range(7)]
    losses = [model(torch.ones(1, 256)).sum() for _ in range(120)]
    text = snapshot(model, optimizer, torch.device("cpu"))
    assert "7 x [3, 5, 1024] float32: 0.4 MiB" in "\n".join(largest_tensors(torch.device("cpu"), 50))
    assert "keep loss.detach()" in text
    assert len(kept) + len(losses) == 127


def test_memory_in_use_is_that_of_the_tightest_cgroup(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/inner\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000\n")
    (group.parent / "memory.current").write_text("700\n")
    (group.parent / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert host.memory_used_bytes(2, tmp_path) == 550
    (group.parent / "memory.max").write_text("max\n")
    assert host.memory_used_bytes(2, tmp_path) > MEBIBYTE
