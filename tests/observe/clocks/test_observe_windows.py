"""Profiler windows and named ranges in a run: what they leave behind, and that training does not notice."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Callback, RunRecord, Trainer
from frameworm.config.schema import ObserveConfig
from frameworm.observe.clocks import windows
from frameworm.observe.clocks.device_clock import make_clock
from frameworm.observe.clocks.nvtx import LiveRanges, PhaseRanges, nsys_command, nvtx_functions
from frameworm.observe.clocks.windows import Schedule, Windows, choose_schedule
from frameworm.observe.trace.read import read_trace
from frameworm.records.schema import StepRecord
from frameworm.records.trace import TraceSummary

CPU = torch.device("cpu")


class Watch(Callback):
    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[StepRecord] = []
        self._fail_at = fail_at

    def on_step(self, step: StepRecord) -> None:
        self.steps.append(step)
        if step.step == self._fail_at:
            raise RuntimeError("on purpose")


def train(
    run_dir: Path | None, *, steps: int = 24, accumulation: int = 1, watch: Watch | None = None, **settings: Any
) -> tuple[RunRecord, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))
    inputs = torch.randn(4 * steps * accumulation, 6)
    data = TensorDataset(inputs, torch.randint(0, 3, (len(inputs),)))
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        run_dir=run_dir,
        device="cpu",
        seed=3,
        accumulation=accumulation,
        callbacks=[] if watch is None else [watch],
        **settings,
    )
    record = trainer.train(DataLoader(data, 4), epochs=1)
    return record, torch.cat([item.detach().flatten() for item in model.parameters()])


def summary_of(folder: Path) -> TraceSummary:
    return TraceSummary.from_dict(json.loads((folder / "trace-rank0-summary.json").read_text()))


@pytest.mark.slow
def test_a_window_leaves_a_trace_and_the_same_model(tmp_path: Path) -> None:
    _, plain = train(tmp_path / "plain")
    watch = Watch()
    record, traced = train(tmp_path / "traced", trace="window", watch=watch)
    assert torch.equal(plain, traced)
    assert not list((tmp_path / "plain").glob("trace*"))
    stored = summary_of(tmp_path / "traced")
    again = read_trace(tmp_path / "traced" / "trace-rank0.pt.trace.json.gz")
    assert stored.to_dict() | {"source": "", "rank": 0} == again.to_dict() | {"source": "", "rank": 0}
    assert len(stored.steps) == 5
    assert {item.name: item.count for item in stored.ranges}["frameworm:forward"] == 5
    assert any("steps 11 to 17" in note for note in record.notes)
    assert "trace-rank*.pt.trace.json.gz" in (tmp_path / "traced" / "summary.txt").read_text()
    assert [step.step for step in watch.steps] == list(range(1, 25))
    assert not list((tmp_path / "traced").glob(".trace*"))


@pytest.mark.slow
def test_the_ranges_in_a_trace_are_the_phases(tmp_path: Path) -> None:
    train(tmp_path / "run", accumulation=3, trace="window")
    ranges = {item.name: item.count for item in summary_of(tmp_path / "run").ranges}
    # Only the first recorded step cannot know that two more micro-batches follow.
    assert ranges["frameworm:forward"] >= 3 * 4 + 1
    assert ranges["frameworm:backward"] >= 3 * 4 + 1
    assert 5 <= ranges["frameworm:optimizer"] <= 7
    assert ranges["frameworm:data_wait"] == 5


@pytest.mark.slow
def test_the_time_of_writing_a_trace_belongs_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real, slept_s = windows.read_trace, []

    def slow(path: Path, most: int) -> TraceSummary:
        before = time.perf_counter()
        time.sleep(4)
        slept_s.append(time.perf_counter() - before)
        return real(path, most)

    monkeypatch.setattr(windows, "read_trace", slow)
    watch = Watch()
    before = time.perf_counter()
    train(tmp_path / "run", trace="window", watch=watch)
    took_s = time.perf_counter() - before
    assert len(slept_s) == 1
    # However busy the machine: what a step takes is part of the rest.
    assert sum(step.step_s for step in watch.steps) < took_s - slept_s[0]


@pytest.mark.parametrize("steps", [2, 3, 9])
def test_a_short_run_has_a_short_window(tmp_path: Path, steps: int) -> None:
    train(tmp_path / "run", steps=steps, trace="window")
    assert len(summary_of(tmp_path / "run").steps) == {2: 1, 3: 1, 9: 5}[steps]


def test_schedules_fit_the_run() -> None:
    assert choose_schedule(None) == choose_schedule(17) == (10, 2, 5, 1)
    assert choose_schedule(16) == (9, 2, 5, 1)
    assert choose_schedule(4) == (0, 2, 2, 1)
    assert choose_schedule(2) == (0, 1, 1, 1)
    assert choose_schedule(1) is None
    wanted = Schedule(3, 0, 2, 4)
    assert choose_schedule(None, wanted) == choose_schedule(20, wanted) == wanted
    assert choose_schedule(19, wanted) == (3, 0, 2, 3)
    assert choose_schedule(4, wanted) == (2, 0, 2, 1)


# How TensorBoard's plugin tells a trace, and of which worker and window it is (torch_tb_profiler/consts.py).
PLUGIN = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "warmup"), [(3, 1), (0, 0)])
def test_windows_by_a_schedule_of_the_user(tmp_path: Path, wait: int, warmup: int) -> None:
    _, plain = train(tmp_path / "plain")
    asked = {"trace_wait": wait, "trace_warmup": warmup, "trace_active": 2, "trace_repeat": 3, "trace_operators": 4}
    watch = Watch()
    record, traced = train(tmp_path / "run", trace="window", watch=watch, **asked)
    assert torch.equal(plain, traced)
    assert [step.step for step in watch.steps] == list(range(1, 25))
    files = sorted(path.name for path in (tmp_path / "run").glob("trace*.gz"))
    assert [PLUGIN.match(name).groups() for name in files] == [  # type: ignore[union-attr]
        ("trace-rank0", ".2"), ("trace-rank0", ".3"), ("trace-rank0", None),
    ]  # fmt: skip
    length = wait + warmup + 2
    ran = " and ".join(f"{length * index + wait + 1} to {length * (index + 1)}" for index in range(3))
    assert any(f"torch.profiler ran in steps {ran}," in note for note in record.notes), record.notes
    for name in ("trace-rank0", "trace-rank0.2", "trace-rank0.3"):
        summary = TraceSummary.from_dict(json.loads((tmp_path / "run" / f"{name}-summary.json").read_text()))
        assert len(summary.steps) == 2
        assert len(summary.operators_by_cpu) == 4


def test_a_run_that_ends_within_its_second_window(tmp_path: Path) -> None:
    """Nobody knows how long a loader without a length goes on."""
    window = windows.TraceWindow(CPU, 0, None, Schedule(1, 1, 2, 5))
    window.folder = tmp_path
    window.begin()
    for _ in range(7):
        torch.ones(3).sum()
        window.after_step()
    window.close()
    assert not window.running
    assert "steps 2 to 4 and 6 to 7," in str(window.note)
    assert len(list(tmp_path.glob("trace*.gz"))) == 2


@pytest.mark.slow
def test_no_window_without_steps_or_a_folder(tmp_path: Path) -> None:
    record, _ = train(tmp_path / "run", steps=1, trace="window")
    assert "no trace: a window needs at least two steps" in record.notes
    record, _ = train(None, trace="window")
    assert "no trace: the run has no folder to put it into" in record.notes


@pytest.mark.slow
def test_a_run_that_fails_in_the_window_leaves_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path / "run", trace="window", watch=Watch(fail_at=15))
    assert len(summary_of(tmp_path / "run").steps) >= 2
    train(tmp_path / "next", trace="window")  # the profiler was let go
    assert len(summary_of(tmp_path / "next").steps) == 5


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_costs_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(windows, "replacing", full)
    _, plain = train(tmp_path / "plain")
    record, traced = train(tmp_path / "run", trace="window")
    assert torch.equal(plain, traced)
    assert record.status == "completed"
    assert any("trace of rank 0 was lost" in note and "No space left" in note for note in record.notes)
    assert not list((tmp_path / "run").glob("*trace*"))


def test_somebody_elses_profiler_goes_first(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        record, _ = train(tmp_path / "run", trace="window")
    assert record.status == "completed"
    assert "no trace: another torch.profiler is running" in record.notes
    assert any(item.key == "aten::linear" for item in profiler.key_averages())


def test_nothing_asked_for_is_nothing_done() -> None:
    clock = make_clock(CPU)
    quiet = Windows(ObserveConfig(), CPU, 0, 100)
    assert quiet.around(clock) is clock
    assert quiet.close() == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nvtx_without_a_device_says_so(tmp_path: Path) -> None:
    assert nvtx_functions() is None
    record, _ = train(tmp_path / "run", nvtx=True)
    assert "no NVTX ranges: there is no CUDA device" in record.notes


class Log:
    """Stands for NVTX; ranges inside of others are told apart by a slash."""

    def __init__(self, deepest: int = 1) -> None:
        self.names: list[str] = []
        self._deepest = deepest
        self._open: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, name: str) -> None:
        self._open.append(name)
        assert self.depth <= self._deepest
        self.names.append("/".join(self._open))

    def pop(self) -> None:
        self._open.pop()


def test_ranges_foresee_the_phases() -> None:
    log = Log()
    ranges = PhaseRanges(log.push, log.pop)
    usual = ["other", "data_wait", "forward", "backward", "forward", "backward", "optimizer"]
    for _ in range(3):
        log.names.clear()
        ranges.begin()
        for name in usual:
            ranges.mark(name)
        ranges.end_step()
    assert log.names == [*usual, "other"]
    log.names.clear()
    ranges.begin()
    for name in ["checkpoint", *usual]:
        ranges.mark(name)
    ranges.end_step()
    assert log.names[1:4] == ["other", "data_wait", "forward"]  # a checkpoint cannot be foreseen, what follows can
    assert log.depth == 0


def test_marks_outside_a_step_open_nothing() -> None:
    log = Log()
    ranges = PhaseRanges(log.push, log.pop)
    ranges.mark("forward")
    ranges.end_step()
    ranges.end()
    assert log.names == []


def test_nvtx_ranges_surround_the_phases_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(deepest=3)
    monkeypatch.setattr(windows, "nvtx_functions", lambda: (log.push, log.pop))
    _, plain = train(tmp_path / "plain", steps=4)
    _, ranged = train(tmp_path / "ranged", steps=4, nvtx=True)
    assert torch.equal(plain, ranged)
    step = ["step/data_wait", "step/forward", "step/backward", "step/optimizer"]
    # At last the loop looks for one more batch; that none comes could not be foreseen.
    assert log.names[:2] == ["epoch", "epoch/step"]
    inside = [name.removeprefix("epoch/") for name in log.names]
    found = [name for name in inside if name not in ("epoch", "step", "step/other")]
    assert found == [*step * 4, "step/validation", "step/data_wait", "step/forward"]
    assert inside.count("step") == 5
    assert inside.count("epoch") == 1
    assert log.depth == 0


def test_ranges_of_a_loop_that_does_not_say_where_its_steps_end() -> None:
    log = Log(deepest=3)
    ready = False
    ranges = LiveRanges(log.push, log.pop, lambda: ready)

    def phase(name: str, inner: str | None = None) -> None:
        ranges.enter(name)
        if inner is not None:
            phase(inner)
        ranges.leave()

    ranges.enter("data_wait")
    ready = True  # the device comes to life within a phase, which then has no range to close
    ranges.leave()
    assert log.names == []
    micro_batch = ["data_wait", "forward", "backward"]
    for _ in range(2):
        for name in micro_batch * 2:
            phase(name)
        phase("optimizer", "forward")  # with a closure
        ranges.stepped()
        phase("checkpoint")
    step = ["step", *(f"step/{name}" for name in micro_batch * 2)]
    step += ["step/optimizer", "step/optimizer/forward", "step/checkpoint"]
    assert log.names == step * 2
    ranges.enter("forward")
    ranges.close()
    assert log.names[-2:] == ["step", "step/forward"]
    assert log.depth == 0


def test_the_line_for_nsight() -> None:
    line = nsys_command(["frameworm", "train", "--config", "my config.yaml"], "out")
    words = shlex.split(line)
    assert words[:2] == ["nsys", "profile"]
    assert words[-4:] == ["frameworm", "train", "--config", "my config.yaml"]
    assert "--output=out" in words
    assert any(word.startswith("--trace=") and "nvtx" in word and "cuda" in word for word in words)
    assert "--cuda-memory-usage=true" in words
