"""`frameworm network` from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, command_line

from frameworm.launch.plan import LaunchPlan
from frameworm.scaling.network import COLLECTIVES, NetworkModel

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


@pytest.mark.slow
def test_two_ranks_write_a_file_and_print_a_table(cli: Cli, tmp_path: Path) -> None:
    ended = cli("network", "--nproc-per-node", "2", "--budget", "1", cwd=tmp_path, timeout_s=200)
    assert ended.returncode == 0, ended.stderr
    model = NetworkModel.load(tmp_path / "network.json")
    assert (model.world_size, model.hosts) == (2, 1)
    assert set(model.points) == set(COLLECTIVES)
    assert all(len(points) >= 2 for points in model.points.values())
    assert ended.stdout.count("2 ranks on 1 host") == 1, "one rank speaks"
    for word in (*COLLECTIVES, "latency", "per link", "256 B", "written to network.json"):
        assert word in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    assert sorted(item.name for item in tmp_path.iterdir()) == ["network.json"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_of_another_launcher_joins_and_prints_json(network_lab: Callable[..., Any], tmp_path: Path) -> None:
    lab = network_lab(hosts=2, rate="300mbit")
    command = [sys.executable, "-m", "frameworm", "network", "--distributed", "--budget", "1", "--json"]
    (tmp_path / "results").mkdir()
    first, second = lab.run([*command, "--out", "results/lab.json"], timeout_s=180, cwd=tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == ""
    data = json.loads(first.stdout)
    assert data == json.loads((tmp_path / "results" / "lab.json").read_text())
    assert (data["world_size"], data["hosts"], data["backend"]) == (2, 2, "gloo")
    assert set(data["summary"]["all_reduce"]) == {"latency_us", "bandwidth_gbps", "bus_bandwidth_gbps"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --nproc-per-node 2 or more"),
        (["--nproc-per-node", "1"], "two ranks or more"),
        (["--nproc-per-node", "some"], "a number or auto"),
        (["--nproc-per-node", "2", "--out", "missing/network.json"], "there is no folder missing"),
        (["--nproc-per-node", "2", "--out", "."], "is a folder"),
        (["--nproc-per-node", "2", "--backend", "mpi"], "not one of auto, nccl, gloo"),
        (["--nnodes", "2"], "needs a place to meet"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_start(
    here: CommandLine, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    ended = here("network", *arguments)
    assert ended.code == 2
    assert words in ended.stderr
    assert list(here.folder.iterdir()) == []


def test_one_process_on_each_of_two_machines_is_a_network(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LaunchPlan] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(
        "frameworm.launch.torchrun.launch_workers", lambda plan, command, usable_cpus: started.append(plan) or 0
    )
    ended = here("network", "--nnodes", "2", "--node-rank", "0", "--master-addr", "node0")
    assert ended.code == 0, ended.stderr
    assert [(plan.nproc_per_node, plan.max_nodes) for plan in started] == [(1, 2)]
