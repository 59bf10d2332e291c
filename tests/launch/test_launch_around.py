from __future__ import annotations

import pytest

from frameworm.launch.around import find_launcher
from frameworm.launch.plan import DEFAULT_PORT

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
}


def test_alone() -> None:
    around = find_launcher({})
    assert (around.processes, around.nodes, around.port, around.port_asked) == (1, 1, DEFAULT_PORT, False)
    assert around.contradictions == ()


def test_worker_of_torchrun() -> None:
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    around = find_launcher({**variables, "MASTER_ADDR": "n0", "MASTER_PORT": "29511"})
    assert (around.processes, around.nodes) == (4, 2)
    assert (around.master_address, around.port, around.port_asked) == ("n0", 29511, True)


def test_task_of_srun() -> None:
    around = find_launcher(STEP)
    assert (around.processes, around.nodes, around.master_address) == (2, 2, "n0")
    assert around.port != DEFAULT_PORT, "derived from the job"


def test_variables_that_contradict_each_other_are_told_and_not_refused() -> None:
    around = find_launcher({**STEP, "SLURM_PROCID": "9"})
    assert len(around.contradictions) >= 1
    assert "SLURM_PROCID=9" in around.contradictions[0]
    assert (around.processes, around.nodes) == (1, 1)
    broken = find_launcher({"MASTER_PORT": "many"})
    assert "MASTER_PORT=many" in broken.contradictions[0]
    assert broken.port == DEFAULT_PORT


def test_slurm_variables_that_contradict_each_other_outside_of_a_step() -> None:
    pytest.importorskip("frameworm.launch.slurm_environment")
    around = find_launcher({"SLURM_JOB_ID": "7", "SLURM_JOBID": "8", "SLURM_NTASKS": "4", "SLURM_NPROCS": "2"})
    assert [("SLURM_JOBID=8" in text, "SLURM_NPROCS=2" in text) for text in around.contradictions] == [
        (True, False),
        (False, True),
    ]
