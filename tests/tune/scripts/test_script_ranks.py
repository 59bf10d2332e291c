"""Scripts of several processes: trials with all of their ranks, timed, compared and run with what was found."""

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
from frameworm.guard.agreement import Agreement, judge_agreement
from frameworm.tune.processes.process_tree import free_port
from frameworm.tune.scripts.comparing import CANDIDATE, LEADER, evidence_of
from frameworm.tune.scripts.process import ScriptError, ScriptProcess

pytestmark = pytest.mark.slow
REFUSED = why_not()
DEADLINE_S = 200
STEPS = [2, 3, 4, 6]
SCRIPT = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

updates, wrapped, wrong = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
if wrapped == "FSDP2":
    fully_shard(inner[0])
    fully_shard(inner[2])
model = DistributedDataParallel(inner) if wrapped == "DDP" else fully_shard(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for update in range(updates):
    for place in range(3):
        batch = torch.randn(4, 8, generator=generator)
        (model(batch).square().mean() / 3).backward()
    if wrong == ["gradient"] and rank == 1:
        inner[0].weight.grad.mul_(1.5)
    if wrong == ["end"] and rank == 1 and update == 3:
        sys.exit("no room on this rank")
    if wrong == ["late"] and rank == 1 and update == 3:
        raise ValueError("no room on this rank")
    if wrong == ["killed"] and rank == 1 and update == 3:
        print("about to be killed", flush=True)
        os._exit(3)
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    Path("model.txt").write_text("saved")
    print("done", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""
RANKS: list[dict[str, str | None]] = [
    {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in (0, 1)
]


def started(folder: Path, arguments: list[str], **more: Any) -> ScriptProcess:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    job = ScriptJob(
        str(script), arguments, folder=str(folder), ranks=RANKS, port=free_port(), isolated=False, steps=STEPS, **more
    )
    for rank in (0, 1):
        job.folder_of(rank).mkdir(exist_ok=True)
    return ScriptProcess(job, folder / "processes", time.monotonic() + DEADLINE_S)


def agreement_of(folder: Path, wrapped: str, switches: dict[str, Any], wrong: list[str]) -> Agreement:
    plain = ["9", wrapped]
    with ExitStack() as together:
        for process in [
            together.enter_context(started(folder, plain, role="lead", name=LEADER)),
            together.enter_context(started(folder, plain, role="follow", name="noise", perturbed=1)),
            together.enter_context(started(folder, [*plain, *wrong], role="follow", name=CANDIDATE, switches=switches)),
        ]:
            process.hear("compared")
    folders = [folder / "rank0", folder / "rank1"]
    agreement = evidence_of(folders, STEPS, ["noise"], CANDIDATE, 2.0**-24).agreement
    assert agreement is not None
    assert len(agreement.states) == 2 * len(STEPS)
    return agreement


CHANGES: dict[str, dict[str, Any]] = {
    "DDP": {"fused_optimizer": True, "gather_once": True, "bucket_views": True},
    "FSDP2": {"fused_optimizer": True, "keep_gathered": True, "shard_calls": 3},
}


@pytest.mark.parametrize("wrapped", CHANGES)
def test_ranks_are_compared_step_by_step(tmp_path: Path, wrapped: str) -> None:
    agreement = agreement_of(tmp_path, wrapped, CHANGES[wrapped], [])
    judged = judge_agreement(agreement)
    assert judged.passed is True, judged.detail
    assert len(agreement.updates) == 4, "updates of all parameters were held against the plain optimizer"


@pytest.mark.parametrize("wrapped", CHANGES)
def test_a_change_on_one_rank_alone_is_seen(tmp_path: Path, wrapped: str) -> None:
    judged = judge_agreement(agreement_of(tmp_path, wrapped, {}, ["gradient"]))
    assert judged.passed is False, judged.detail


def test_a_trial_of_ranks_stands_and_goes(tmp_path: Path) -> None:
    with started(tmp_path, ["40", "DDP"]) as process:
        stand = process.stand()
        assert stand.facts["world_size"] == 2
        assert stand.facts["data_parallel"]["passes_per_update"] == 3.0
        assert process.go(5).done == stand.done + 5


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("end", "script itself fails: no room on this rank"),
        ("late", r"script itself fails: \[rank1\]: ValueError: no room on this rank"),
        ("killed", "process of rank 1 died: about to be killed"),
    ],
)
def test_the_rank_that_fails_first_says_why(tmp_path: Path, wrong: str, told: str) -> None:
    with started(tmp_path, ["40", "DDP", wrong]) as process:
        process.stand()
        with pytest.raises(ScriptError, match=told):
            process.go(5)


@pytest.mark.parametrize(
    ("switches", "twice", "calls"),
    [({}, True, 3), ({"keep_gathered": True}, False, 3), ({"shard_calls": 3}, False, 1)],
)
def test_parameters_are_gathered_as_often_as_is_set(
    tmp_path: Path, switches: dict[str, Any], twice: bool, calls: int
) -> None:
    with started(tmp_path, ["40", "FSDP2"], switches=switches) as process:
        facts = process.stand().facts
        assert (facts["gathers_twice"], facts["shard_calls"]) == (twice, calls)


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, "-m", "frameworm", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.skipif(REFUSED is not None, reason=f"trials cannot be kept apart here: {REFUSED}")
def test_under_torchrun_rank_0_tunes_and_all_run_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    tuned = torchrun(tmp_path, "tune", "--budget", "45s", "train.py", "200", "DDP")
    assert tuned.returncode == 0, tuned.stderr
    assert not (tmp_path / "model.txt").exists(), "what trials write is gone"
    found = json.loads((tmp_path / "tune" / "train" / "tune.json").read_text())
    assert any("gather_once" in item["changes"] for item in found["attempts"])

    path = tmp_path / "tuned.yaml"  # whatever the search found in its time
    bound_to = {**fingerprint_of(tmp_path / "train.py", ["20", "DDP"], 2), "device": "CPU"}
    facts = {"parameters": 321, "half": False, "device": "cpu", "tf32": False}
    settings = {"version": 1, "fingerprint": bound_to, "switches": {"gather_once": True}, "facts": facts}
    path.write_text(yaml.safe_dump(settings))
    run = torchrun(tmp_path, "run", "--with", str(path), "train.py", "20", "DDP")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done 2\n"
    assert run.stderr.count("gradients gathered once per update switched on") == 1
    assert (tmp_path / "model.txt").exists()
    alone = subprocess.run(
        [sys.executable, "-m", "frameworm", "run", "--with", str(path), "train.py", "20", "DDP"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "it ran as 2 processes, not 1" in alone.stderr
