"""Ways to train that no plain loop shows: in a thread, by replayed graphs, sharded over ranks that a script starts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conftest import kill_tree
from frameworm.attach import timeline
from frameworm.attach.hooks import install
from frameworm.attach.record import Surroundings, record_of
from frameworm.attach.training_thread import MOVES_AFTER
from frameworm.attach.watch import Watch
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import JsonLinesWriter, read_steps

DELAY_S = 0.02
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def observe() -> Iterator[Callable[[], tuple[Watch, list[StepRecord]]]]:
    ends: list[Callable[[], None]] = []

    def make() -> tuple[Watch, list[StepRecord]]:
        steps: list[StepRecord] = []
        watch = Watch(steps.append)
        patches = install(watch)
        ends.extend((watch.stop, patches.remove))
        return watch, steps

    yield make
    for end in ends:
        end()


class Clock:
    """The clock of the marks, which only the delays of a test move: others that take the cores change nothing."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timeline, "perf_counter", lambda: made.now_s)
    return made


def train(batches: int, delay_s: float = 0.0, loader: Any = None) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in loader or DataLoader(TensorDataset(torch.ones(batches * 3, 4)), 3):
        time.sleep(delay_s)
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_thread(target: Callable[..., None], *args: Any) -> None:
    thread = threading.Thread(target=target, args=args)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_trains_is_seen_whole(observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    in_thread(train, 6, DELAY_S)
    watch.finish()
    assert len(steps) == 6
    assert [step.samples for step in steps] == [3] * 6
    assert {"data_wait", "forward", "backward", "optimizer", "other"} <= steps[2].phases.keys()
    assert median(step.phases["other"] for step in steps) > DELAY_S * 0.9
    assert not watch.notes


def test_a_model_that_was_called_before_does_not_hide_the_thread(observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4))
    in_thread(train, 6)
    watch.finish()
    assert len(steps) == 6
    assert all("forward" in step.phases and step.samples == 3 for step in steps[1:])


def test_a_thread_that_loads_ahead_is_not_taken_for_training(observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    loader = DataLoader(TensorDataset(torch.ones(30, 4)), 3)
    ready: list[Any] = []
    in_thread(lambda: ready.extend(loader))
    train(10, loader=ready)
    watch.finish()
    assert len(steps) == 10
    assert all({"forward", "backward", "optimizer"} <= step.phases.keys() for step in steps[1:])


def test_training_that_moves_to_a_thread_is_followed(observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    train(4)
    in_thread(train, 8)
    watch.finish()
    assert len(steps) == 4 + 8 - (MOVES_AFTER - 1)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert any("moved to another thread" in note for note in watch.notes)


def test_a_thread_that_trains_beside_is_left_out_and_told(observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        model(torch.ones(5, 4)).sum().backward()
        if number:
            in_thread(train, 1)
        optimizer.step()
    watch.finish()
    assert len(steps) == 8
    assert {step.samples for step in steps} == {5}
    assert any("another thread too" in note for note in watch.notes)


THREAD = """
    import threading, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def train():
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (inputs,) in DataLoader(TensorDataset(torch.randn(120, 8)), 4, shuffle=True):
            time.sleep(0.02)
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(model.weight.flatten().tolist())

    threading.Thread(target=train).start()
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_thread_that_outlives_the_main_one(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(THREAD))
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    done = cli("profile", "--out", tmp_path / "run", script)
    assert done.returncode == 0
    assert done.stdout == plain.stdout != ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 30
    assert summary["batch"]["micro"] == 4
    assert summary["wall_s"] > 30 * 0.02
    places = summary["other_time"]["places"]  # the sleep, found by samples of that thread
    assert ("train", "waiting") in {(place["function"], place["work"]) for place in places}


class FakeGraph:
    """Stands in for a graph: its replay calls nothing of torch."""

    def capture_begin(self, pool: Any = None) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""

    def replay(self) -> None:
        time.sleep(DELAY_S)


def capture(work: Callable[[], Any]) -> FakeGraph:
    graph = FakeGraph()
    graph.capture_begin()
    work()
    graph.capture_end()
    return graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)


class Loop:
    """A model with its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def compute(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4)).sum().backward()

    def step(self) -> None:
        self.compute()
        self.optimizer.step()


@pytest.mark.parametrize("loads", [True, False])
def test_replays_of_a_whole_step_are_steps(graphs: None, loads: bool, observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    loop = Loop()
    graph = capture(loop.step)
    for _ in DataLoader(TensorDataset(torch.ones(15, 4)), 3) if loads else range(5):
        graph.replay()
    watch.finish()
    assert len(steps) == 5
    assert all(step.phases["graph_replay"] >= DELAY_S * 0.9 for step in steps)
    assert all("backward" not in step.phases for step in steps)
    assert [step.samples for step in steps] == [3 * loads] * 5
    assert {step.lr for step in steps} == {0.1}
    assert watch.facts["captured_steps"] == 5
    assert watch.facts["parameters"] == 10
    assert not watch.notes


def test_warm_up_before_the_capture_counts(graphs: None, observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    loop = Loop()
    for _ in range(3):
        loop.step()
    graph = capture(loop.step)
    for _ in range(4):
        graph.replay()
    watch.finish()
    assert ["graph_replay" in step.phases for step in steps] == [False] * 3 + [True] * 4


def test_two_graphs_of_one_optimizer_are_two_steps(graphs: None, observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    loop = Loop()
    long, short = capture(loop.step), capture(loop.step)
    for graph in (long, short, short, long):
        graph.replay()
    watch.finish()
    assert len(steps) == 4


def test_an_optimizer_after_the_replay_ends_the_step(graphs: None, observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    loop = Loop()
    graph = capture(loop.compute)
    for _ in range(4):
        graph.replay()
        loop.optimizer.step()
    watch.finish()
    assert len(steps) == 4
    assert all({"graph_replay", "optimizer"} <= step.phases.keys() for step in steps)
    assert "captured_steps" not in watch.facts


def test_a_graph_that_only_infers_is_no_step(graphs: None, observe: Callable[..., Any]) -> None:
    watch, steps = observe()
    model = nn.Linear(4, 2).eval()
    graph = capture(lambda: model(torch.ones(1, 4)))
    for _ in range(3):
        graph.replay()
    watch.finish()
    assert not steps


def test_replayed_steps_have_nothing_unseen(graphs: None, observe: Callable[..., Any], tmp_path: Path) -> None:
    watch, steps = observe()
    loop = Loop()
    graph = capture(loop.step)
    for _ in DataLoader(TensorDataset(torch.ones(36, 4)), 3):
        graph.replay()
    watch.finish()
    folder = RunFolder(tmp_path)
    writer = JsonLinesWriter(folder.steps(0))
    for step in steps:
        writer.write(step)
    writer.close()
    record, _ = record_of(folder, Surroundings("run", "completed", facts=watch.facts))
    assert record.captured_steps == 12
    assert record.unseen == []


def test_blocking_communication_is_not_said_to_be_hidden(tmp_path: Path) -> None:
    """The first steps, in which ranks find each other, are in neither figure."""
    folder = RunFolder(tmp_path)
    for rank in range(2):
        writer = JsonLinesWriter(folder.steps(rank))
        for number in range(1, 21):
            wait_s = 0.5 if number < 4 else 0.01
            phases = {"forward": 0.02, "communication_exposed": wait_s}
            writer.write(
                StepRecord(
                    step=number,
                    epoch=1,
                    time=float(number),
                    step_s=0.02 + wait_s,
                    loss=None,
                    lr=None,
                    samples=1,
                    count=1.0,
                    phases=phases,
                    communication_s=wait_s,
                )
            )
        writer.close()
    record, _ = record_of(folder, Surroundings("run", "completed", world_size=2))
    assert record.communication.total_s == pytest.approx(0.01)
    assert record.communication.exposed_s == pytest.approx(0.01)


class FakeStream:
    """A stream, by its number."""


class FakeEvent:
    """An event whose wait takes `DELAY_S` by a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self, stream: Any = None) -> None:
        """Record."""

    def wait(self, stream: Any = None) -> None:
        self.clock.sleep(DELAY_S)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_a_wait_of_the_steps_stream_for_a_collective_in_another(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, observe: Callable[..., Any]
) -> None:
    own, sending, copying = FakeStream(), FakeStream(), FakeStream()
    current = [own]
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda: clock.sleep(DELAY_S))
    watch, steps = observe()
    monkeypatch.setattr(Watch, "stream", own)
    loop = Loop()
    for _ in range(6):
        current.append(sending)
        dist.all_gather_into_tensor()  # the host's time in it says nothing about the device
        gathered = FakeEvent(clock)
        gathered.record()
        current.pop()
        copied = FakeEvent(clock)
        copied.record(copying)
        loop.compute()
        gathered.wait(copying)  # another stream waits, the step goes on
        copied.wait(own)  # no collective
        gathered.wait(own)
        loop.optimizer.step()
    watch.finish()
    waits = [step.phases["communication_exposed"] for step in steps]
    assert len(steps) == 6
    assert waits[1:] == pytest.approx([DELAY_S] * 5)
    assert all(step.communication_s is None for step in steps)  # how long it took in all is not known
    assert not watch.notes


def test_what_autograd_runs_in_a_thread_of_its_own_belongs_to_backward(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, observe: Callable[..., Any]
) -> None:
    """As on a GPU, where hooks of the backward pass run in the device's thread."""
    watch, steps = observe()
    loop = Loop()

    def in_engine() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
            if watch.enter("communication_exposed"):
                clock.sleep(DELAY_S)
                watch.leave()

    loop.model.weight.register_hook(lambda _: in_thread(in_engine))
    for _ in range(5):
        loop.step()
    watch.finish()
    assert len(steps) == 5
    assert [step.phases["communication_exposed"] for step in steps] == pytest.approx([DELAY_S] * 5)
    assert [step.phases["backward"] for step in steps[1:]] == pytest.approx([0.0] * 4)


# FSDP2 in ranks that the script starts. Rank 1 is late in each step, which rank 0 waits for in the first all-gather:
# later than all collectives of a step together, which take long where others have the cores.
SHARDED = """
    import sys, time
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def work(rank, folder):
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + folder + "/meeting")
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        for number in range(24):
            time.sleep(0.2 * rank)
            model(torch.randn(8, 16)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        whole = [item.full_tensor().tolist() for item in model.parameters()]
        if rank == 0:
            print(whole)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.mark.slow
def test_sharded_ranks_that_the_script_starts(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SHARDED))
    for name in ("plain", "profiled"):
        (tmp_path / name).mkdir()
    plain = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "plain")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        done = cli("profile", "--out", tmp_path / "run", script, tmp_path / "profiled", timeout_s=140)
        output, _ = plain.communicate(timeout=140)
    finally:
        kill_tree(plain.pid)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == output != ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["strategy"] == "fsdp2"
    assert summary["steps"] == 24
    assert summary["batch"]["world_size"] == 2
    assert "communication_exposed" not in summary["unseen"]
    first, second = (read_steps(tmp_path / "run" / f"steps-rank{rank}.jsonl") for rank in range(2))
    waits = [median(step.phases["communication_exposed"] for step in steps) for steps in (first, second)]
    assert waits[0] > max(0.1, waits[1])
    assert summary["communication"]["slowest_rank"] == 1
    # What others take of a busy machine may cost more than the planted wait, or hide it among steps that vary.
    expected = {"straggler", "communication_bound"}
    assert (expected | {"cpu_oversubscribed"}) & {finding["code"] for finding in summary["findings"]}
