"""Scripts that start their own ranks with multiprocessing: followed, timed, compared, and run with what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from frameworm.attach.isolation import why_not
from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.attach.trial.job import ScriptJob
from frameworm.guard.agreement import judge_agreement
from frameworm.tune.processes.process_tree import free_port
from frameworm.tune.scripts.comparing import CANDIDATE, LEADER, evidence_of
from frameworm.tune.scripts.process import ScriptEndedError, ScriptError, ScriptProcess, TrainsElsewhereError

pytestmark = pytest.mark.slow
REFUSED = why_not()
DEADLINE_S = 280
STEPS = [2, 3, 4, 6]
METHODS = ["spawn", "fork", "forkserver"]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, updates, port, wrong):
    if port:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(inner) if port else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for update in range(updates):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        if wrong and rank == 1 and update == 20:
            raise ValueError("no room on this rank")
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print("done", optimizer.param_groups[0]["fused"], flush=True)
    if port:
        dist.destroy_process_group()


if __name__ == "__main__":
    updates, method, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    mp.start_processes(train, (updates, port, "wrong" in sys.argv), nprocs=2, start_method=method)
"""


def started(folder: Path, *arguments: str, port: int | None = None, **more: Any) -> ScriptProcess:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    given = [*arguments[:2], str(free_port() if port is None else port), *arguments[2:]]
    job = ScriptJob(str(script), given, folder=str(folder), isolated=False, steps=STEPS, **more)
    for rank in range(len(job.ranks)):
        job.folder_of(rank).mkdir(exist_ok=True)
    return ScriptProcess(job, folder / "processes", time.monotonic() + DEADLINE_S)


RANKS: dict[str, Any] = {"ranks": [{}, {}], "spawned": True}


@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_the_scripts_own_stand_and_go_and_end(tmp_path: Path, method: str) -> None:
    with started(tmp_path, "60", method) as process, pytest.raises(TrainsElsewhereError, match="in 2 processes"):
        process.stand()
    with started(tmp_path, "60", method, **RANKS, switches={"fused_optimizer": True}) as process:
        stand = process.stand()
        assert stand.facts["world_size"] == 2
        assert not stand.facts["can_fuse"], "the switch is on in these processes"
        assert process.go(5).done == stand.done + 5
        with pytest.raises(ScriptEndedError) as ended:
            process.go(100)
        assert ended.value.steps == 60


def test_one_that_fails_ends_the_trial(tmp_path: Path) -> None:
    with started(tmp_path, "60", "spawn", "wrong", **RANKS) as process:
        process.stand()
        with pytest.raises(ScriptError, match="no room on this rank"):
            process.go(100)


def test_processes_that_train_each_for_itself_are_told(tmp_path: Path) -> None:
    told = pytest.raises(TrainsElsewhereError, match="without a process group: call the function that trains")
    with started(tmp_path, "60", "spawn", port=0) as process, told:
        process.stand()


@pytest.mark.parametrize("method", METHODS[:2])
def test_they_are_compared_step_by_step(tmp_path: Path, method: str) -> None:
    with ExitStack() as together:
        for process in [
            together.enter_context(started(tmp_path, "9", method, role="lead", name=LEADER, **RANKS)),
            together.enter_context(started(tmp_path, "9", method, role="follow", name="noise", perturbed=1, **RANKS)),
            together.enter_context(
                started(
                    tmp_path, "9", method, role="follow", name=CANDIDATE, switches={"fused_optimizer": True}, **RANKS
                )
            ),
        ]:
            process.hear("compared")
    agreement = evidence_of([tmp_path / "rank0", tmp_path / "rank1"], STEPS, ["noise"], CANDIDATE, 2.0**-24).agreement
    assert agreement is not None
    assert len(agreement.states) == 2 * len(STEPS)
    judged = judge_agreement(agreement)
    assert judged.passed is True, judged.detail


def frameworm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameworm", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.skipif(REFUSED is not None, reason=f"trials cannot be kept apart here: {REFUSED}")
def test_a_script_that_spawns_is_tuned_and_run_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["20000", "spawn", str(free_port())]
    tuned = frameworm(tmp_path, "tune", "--budget", "150s", "train.py", *arguments)
    assert tuned.returncode == 0, tuned.stderr
    assert "it trains in 2 processes that it starts itself" in tuned.stderr
    facts = json.loads((tmp_path / "tune" / "train" / "tune.json").read_text())["facts"]
    assert facts["spawned"] == 2

    arguments[0] = "30"
    path = tmp_path / "tuned.yaml"  # whatever the search found in its time
    bound_to = {**fingerprint_of(tmp_path / "train.py", arguments), "device": "CPU"}
    settings = {"version": 1, "fingerprint": bound_to, "switches": {"fused_optimizer": True}, "facts": facts}
    path.write_text(yaml.safe_dump(settings))
    run = frameworm(tmp_path, "run", "--with", str(path), "train.py", *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done True\n"
    assert run.stderr.count("fused optimizer switched on") == 1
