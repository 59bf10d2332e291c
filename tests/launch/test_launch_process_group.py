from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conftest import kill_tree
from frameworm.errors import DeviceError, EnvironmentSetupError
from frameworm.launch import process_group as module
from frameworm.launch.environment import ProcessInfo
from frameworm.launch.process_group import (
    all_reduce_sums,
    barrier,
    broadcast_object,
    cleanup,
    gather_objects,
    is_distributed,
    process_group,
    setup_ddp,
    shared_store,
)

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "NCCL_TIMEOUT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    cleanup()


def use_helpers(rank: int, world_size: int) -> dict[str, Any]:
    barrier()
    store = shared_store("test")
    assert store is not None
    return {
        "distributed": is_distributed(),
        "sums": all_reduce_sums([1.0, rank + 0.1]),
        "broadcast": broadcast_object({"from": rank}, source=1),
        "gathered": gather_objects((rank, "x" * rank)),
        "counted": store.add("count", 1) in range(1, world_size + 1),
        "again": setup_ddp(rank, world_size) == setup_ddp(),
    }


def test_helpers_over_two_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(use_helpers)
    assert first["gathered"] == [(0, ""), (1, "x")]
    assert second["gathered"] is None
    for result in (first, second):
        assert result["sums"] == pytest.approx([2.0, 1.2], abs=1e-12)
        assert result["broadcast"] == {"from": 1}
        assert result["distributed"]
        assert result["counted"]
        assert result["again"]
    assert not list(Path(tempfile.gettempdir()).glob(f"frameworm-{os.getuid()}/spawn-{os.getpid()}-*"))


def fail_on_one_rank(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    barrier()


def sleep_for_ever(rank: int, world_size: int) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_the_fixture_shows_the_traceback_and_keeps_its_deadline(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(AssertionError, match="ValueError: only here"):
        run_ranks(fail_on_one_rank)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] were still running"):
        run_ranks(sleep_for_ever, timeout_s=3)


@pytest.mark.slow
@pytest.mark.long
def test_spawn_jobs_side_by_side_find_their_own(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "spawn_jobs.py")
    parents = [
        subprocess.Popen([sys.executable, script, method, first, str(tmp_path)])
        for method, first in (("spawn", "10"), ("forkserver", "20"))
    ]
    try:
        assert [parent.wait(200) for parent in parents] == [0, 0]
    finally:
        for parent in parents:
            kill_tree(parent.pid)
            parent.wait()
    for job in (10, 11, 20, 21):
        assert (tmp_path / f"job-{job}").read_text() == f"[{2.0 * job}, 2.0]"
    for parent in parents:
        assert not list(Path(tempfile.gettempdir()).glob(f"frameworm-{os.getuid()}/spawn-{parent.pid}-*"))


def test_one_process_needs_no_port_and_cleanup_can_be_repeated() -> None:
    assert setup_ddp(0, 1, backend="gloo") == ProcessInfo()
    assert dist.is_initialized()
    assert not is_distributed()
    assert setup_ddp().world_size == 1
    assert all_reduce_sums([1.5]) == [1.5]
    assert broadcast_object("x") == "x"
    assert gather_objects(3) == [3]
    barrier()
    cleanup()
    cleanup()
    assert not dist.is_initialized()
    setup_ddp(0, 1, backend="gloo")


def test_context_leaves_the_group_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), process_group(ProcessInfo(), backend="gloo"):
        print(1 / (0 if dist.is_initialized() else 1))
    assert not dist.is_initialized()
    setup_ddp(0, 1, backend="gloo")
    with process_group(ProcessInfo()):
        pass
    assert dist.is_initialized(), "a group that was there before must stay"


@pytest.mark.parametrize("hint", ["torchrun", "torch.multiprocessing.spawn", "MASTER_PORT"])
def test_processes_that_cannot_find_each_other_are_told_three_ways(hint: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=hint):
        setup_ddp(0, 2, backend="gloo")


def test_contradictions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentSetupError, match="both rank and world_size"):
        setup_ddp(0)
    with pytest.raises(EnvironmentSetupError, match="rank 2"):
        setup_ddp(2, 2)
    with pytest.raises(EnvironmentSetupError, match="'mpi'"):
        setup_ddp(0, 1, backend="mpi")
    setup_ddp(0, 1, backend="gloo")
    with pytest.raises(EnvironmentSetupError, match="already rank 0 of 1"):
        setup_ddp(1, 2)
    cleanup()
    for name, value in {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentSetupError, match="contradicts RANK=0"):
        setup_ddp(1, 2)


def test_nccl_asks_for_a_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="nccl needs a CUDA device"):
        setup_ddp(0, 1, backend="nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert module._choose_backend("auto", ProcessInfo(3, 1, 4, 2)) == ("nccl", torch.device("cuda", 1))
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(DeviceError, match="at most 2 processes per node"):
        module._choose_backend("auto", ProcessInfo(2, 2, 4, 4))
    assert module._choose_backend("gloo", ProcessInfo(2, 2, 4, 4)) == ("gloo", None)


def test_timeout_comes_from_nccl_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kw: seen.append(kw["timeout"].total_seconds()))
    setup_ddp(0, 1, backend="gloo")
    setup_ddp(0, 1, backend="gloo", timeout_s=30)
    monkeypatch.setenv("NCCL_TIMEOUT", "77")
    setup_ddp(0, 1, backend="gloo", timeout_s=30)
    assert seen == [600, 30, 77]


def leave_while_a_collective_hangs(rank: int, world_size: int, left: Path) -> None:
    """Rank 0 starts a collective that rank 1 never joins; leaving must not wait for it."""
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        cleanup(wait_s=0.5)
        assert work is not None
        left.touch()
    while not left.exists():  # the other rank goes only after it, so that nothing but leaving ends the wait
        time.sleep(0.02)


def test_leaving_does_not_wait_for_a_hanging_collective(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(leave_while_a_collective_hangs, args=(tmp_path / "left",), timeout_s=60)
