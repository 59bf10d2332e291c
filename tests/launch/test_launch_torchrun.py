from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from conftest import kill_tree
from frameworm.launch.plan import LaunchPlan
from frameworm.launch.torchrun import launch_workers

WORKER = str(Path(__file__).parent / "agent_worker.py")
LAUNCHER = """
import sys
from frameworm.launch.plan import plan_launch
from frameworm.launch.torchrun import launch_workers
plan = plan_launch(True, nproc_per_node=2)
sys.exit(launch_workers(plan, [sys.executable, *sys.argv[1:]], usable_cpus=2, failure_grace_s=2))
"""


def read(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def said_in(stderr: str) -> list[str]:
    """What was said, but for the word that nodes which start slowly are still waited for.

    A store that an earlier test has left may still log, in torch's own form, that nobody answers.
    """
    ours = re.compile(r"(?!still waiting for |\[[EWI]\d{4} |Exception raised from |frame #|<omitting |$)")
    return [line for line in stderr.splitlines() if ours.match(line)]


def wait_until(condition: Callable[[], bool], deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start launchers of two workers each, in processes of their own."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, WORKER, *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ, "TMPDIR": str(tmp_path_factory.mktemp("launcher"))},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill_tree(process.pid)
        process.communicate()


def test_workers_know_who_they_are_and_arguments_arrive_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "cost$$ $HOME"
    folder.mkdir()
    plan = LaunchPlan("launch", nproc_per_node=2)
    assert launch_workers(plan, [sys.executable, WORKER, "write", str(folder)], usable_cpus=6) == 0
    first, second = read(folder / "rank-0"), read(folder / "rank-1")
    assert [first["LOCAL_RANK"], second["LOCAL_RANK"]] == ["0", "1"]
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")


def test_a_failed_worker_ends_the_others_and_its_code_is_returned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = LaunchPlan("launch", nproc_per_node=2)
    before = signal.getsignal(signal.SIGTERM)
    code = launch_workers(plan, [sys.executable, WORKER, "fail", "3", str(tmp_path)], failure_grace_s=0.5)
    assert code == 3
    assert said_in(capfd.readouterr().err) == ["rank 1: ended with exit code 3"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not [child for child in psutil.Process().children() if WORKER in " ".join(child.cmdline())]


def test_ranks_that_agreed_to_stop_are_left_to_end_by_themselves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = LaunchPlan("launch", nproc_per_node=2)
    assert launch_workers(plan, [sys.executable, WORKER, "stop", str(tmp_path)]) == 75
    assert (tmp_path / "rank-0").exists()
    assert said_in(capfd.readouterr().err) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "cause"),
    [
        ("data", 2, "rank 1: the data set is gone; bring it back"),
        ("value", 1, "rank 1: ValueError: a batch of the wrong shape"),
        ("kill", 1, "rank 1: killed by SIGKILL; the usual reason is that the machine ran out of memory"),
    ],
)
def test_the_first_cause_is_the_last_thing_said(
    kind: str, code: int, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = LaunchPlan("launch", nproc_per_node=2)
    assert launch_workers(plan, [sys.executable, WORKER, "group", kind]) == code
    said = said_in(capfd.readouterr().err)
    assert said[-1] == cause
    # Nothing of the agent's log and table, nor of the rank that only lost its peer.
    assert len(said) == 1 or kind == "value"
    assert not any("rank0" in line for line in said)


@pytest.mark.slow
def test_two_jobs_side_by_side_do_not_meet(tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]) -> None:
    jobs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        jobs.append(launcher("wait", str(tmp_path / name)))
    wait_until(lambda: len(list(tmp_path.glob("*/rank-*"))) == 4)
    ports = [read(tmp_path / name / "rank-0")["MASTER_PORT"] for name in ("a", "b")]
    assert ports[0] != ports[1]
    jobs[0].send_signal(signal.SIGINT)
    assert jobs[0].wait(100) == 130
    assert jobs[1].poll() is None
    assert not list((tmp_path / "b").glob("saved-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "seen", "code"), [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 75), ("SIGHUP", "SIGTERM", 75)]
)
def test_signals_reach_the_workers_which_may_save(
    sent: str, seen: str, code: int, tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    job = launcher("wait", str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
    workers = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.Signals[sent])
    assert job.wait(100) == code
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [seen, seen]
    assert job.stderr is not None
    assert job.stderr.read() == ""
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
def test_two_nodes_by_first_rank_share_the_cause_of_a_failure(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = [launcher("fail", "2", str(tmp_path), RANK=first, **world) for first in ("2", "0")]
    for node in nodes:
        assert node.wait(100) == 2
        assert node.stderr is not None
        assert said_in(node.stderr.read()) == ["rank 3: ended with exit code 2"]
    assert [read(tmp_path / f"rank-{rank}")["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert {read(tmp_path / f"rank-{rank}")["MASTER_PORT"] for rank in range(4)} == {str(port)}
