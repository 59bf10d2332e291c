"""The watchdog: who did not arrive, from what the ranks say, and in processes that freeze, hang or lose a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore

from conftest import kill_tree
from frameworm.errors import StuckError
from frameworm.launch.watchdog import Beat, Heard, Watchdog, missing_ranks

RANK_SCRIPT = """
import os, sys, time
from frameworm.engine.faults.watchdog import end_process
from frameworm.launch.process_group import all_reduce_sums, setup_ddp, shared_store
from frameworm.launch.watchdog import Watchdog
info = setup_ddp(backend="gloo", timeout_s=120)
step = 0
def end(error, account):
    print(account, flush=True)
    end_process(error)
with Watchdog(shared_store("watch"), info.rank, info.world_size, 8.0, lambda: step, lambda frame: "testing", end):
    while True:
        all_reduce_sums([1.0])
        step += 1
        if step == 10 and info.rank == 0:
            print("running", flush=True)
        if step == 15 and info.rank == 1 and sys.argv[1] == "hang":
            time.sleep(300)
        time.sleep(0.05)
"""


def heard(collectives: int | None, silent_s: float = 0.1, still_s: float = 20.0, meeting: bool = True) -> Heard:
    return Heard(Beat(7, 11, "backward", "model.py:3 forward", collectives, meeting), silent_s, still_s)


def test_who_is_missing() -> None:
    assert missing_ranks({0: heard(5), 1: heard(5, still_s=3.0)}, 10) is None, "one still moves"
    assert missing_ranks({0: heard(5, meeting=False), 1: heard(5, meeting=False)}, 10) is None, "each is busy"
    assert missing_ranks({0: heard(5), 1: heard(5)}, 10) == {}, "all have come, and it does not end"
    late = missing_ranks({0: heard(5), 1: heard(4, meeting=False), 2: heard(5)}, 10)
    assert late == {1: "in step 12, backward, at model.py:3 forward"}
    frozen = missing_ranks({0: heard(5), 1: heard(5, silent_s=12.0), 2: heard(5)}, 10)
    assert frozen == {1: "silent for 12 s, last seen in step 12, backward, at model.py:3 forward"}
    assert missing_ranks({0: heard(5), 1: None}, 10) == {1: "never heard of"}
    assert missing_ranks({0: heard(None), 1: heard(None, silent_s=30.0)}, 10) is not None, "without counts too"


def test_a_rank_that_never_speaks_is_named_in_time() -> None:
    ended: list[tuple[StuckError, str]] = []
    done = threading.Event()

    def end(error: StuckError, account: str) -> None:
        ended.append((error, account))
        done.set()

    def phase_of(frame: FrameType) -> str:
        return "testing"

    began = time.monotonic()
    with Watchdog(HashStore(), 0, 2, 1.0, lambda: 0, phase_of, end):
        assert done.wait(30)
    assert time.monotonic() - began < 20
    error, account = ended[0]
    assert "nothing has moved for 2 s (parallel.watchdog_s). rank 1 did not arrive (never heard of)" in str(error)
    assert "rank 1: never heard of" in account
    assert "test_launch_watchdog.py" in account, "where this rank was"
    assert len(ended) == 1


def test_nobody_is_ended_while_steps_go_on() -> None:
    ended: list[Any] = []
    moved = 0
    store = HashStore()

    def step() -> int:
        nonlocal moved
        moved += 1
        return moved

    with Watchdog(store, 0, 2, 0.5, step, lambda frame: "testing", lambda *told: ended.append(told)):
        time.sleep(2.5)
    assert not ended


def test_a_process_that_stood_still_itself_holds_it_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    now = 100.0
    monkeypatch.setattr("frameworm.launch.watchdog.time.monotonic", lambda: now)
    dog = Watchdog(HashStore(), 0, 2, 20.0, lambda: 1, lambda frame: "testing", lambda *told: ended.append(told))
    interval_s = dog._interval_s
    looks = iter([interval_s, 600.0, *[interval_s] * 12, 12.0, 12.0])  # suspended for ten minutes, then as usual

    def wait(seconds: float) -> bool:
        nonlocal now
        passed_s = next(looks, None)
        now += passed_s or 0.0
        return bool(ended) or passed_s is None

    monkeypatch.setattr(dog._over, "wait", wait)
    dog._heard_at, dog._moved_at = ({0: now, 1: now} for _ in range(2))
    dog._take(1, Beat(1, 1, "backward", "model.py:3 forward", 5, True))
    dog._judge()
    assert not ended
    looks = iter([interval_s] * 60)
    dog._judge()
    assert "rank 1 did not arrive (silent for " in str(ended[0][0])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Start the two ranks of the script, each in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> list[subprocess.Popen[str]]:
        port = 20000 + os.getpid() % 12000
        for rank in (0, 1):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK_SCRIPT, how],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
                )
            )
        return started

    yield start
    for process in started:
        kill_tree(process.pid)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "whom"), [("freeze", 1), ("freeze", 0), ("hang", 1)])
def test_a_rank_that_stops_is_named_by_the_other(ranks: Callable[..., Any], how: str, whom: int) -> None:
    both = ranks(how)
    assert both[0].stdout.readline() == "running\n"
    if how == "freeze":
        psutil.Process(both[whom].pid).send_signal(signal.SIGSTOP)
    waiting = both[1 - whom]
    stdout, stderr = waiting.communicate(timeout=100)
    assert waiting.returncode == 1, stderr
    if how == "hang":  # its own watchdog may be the first to end it, which the other sees as a lost connection
        more = both[whom].communicate(timeout=100)
        stdout, stderr = stdout + more[0], stderr + more[1]
    assert f"rank {whom} did not arrive (" in stderr
    assert f"rank {1 - whom} did not arrive" not in stderr
    assert ("silent for" in stderr) == (how == "freeze")
    if how == "hang":
        assert "<string>:18 <module>" in stdout, "the line where it hangs"


@pytest.mark.slow
def test_a_lost_link_ends_both_hosts_and_each_names_the_other(network_lab: Callable[..., Any]) -> None:
    lab = network_lab(hosts=2)
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29512", "OMP_NUM_THREADS": "1"}
    both = [
        lab.popen(
            host,
            [sys.executable, "-c", RANK_SCRIPT, "link"],
            env={**environ, "RANK": str(host), "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in (0, 1)
    ]
    assert both[0].stdout.readline() == "running\n"
    subprocess.run(["ip", "-n", lab.hosts[1].namespace, "link", "set", "eth0", "down"], check=True, timeout=20)
    for rank, process in enumerate(both):
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 1, stderr
        assert f"rank {1 - rank} did not arrive (silent for" in stderr
        assert "or this rank has lost its network" in stderr
