"""SLURM's variables: what a real SLURM sets is accepted, what contradicts itself is refused with its names."""

from __future__ import annotations

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import detect
from frameworm.launch.plan import plan_launch
from frameworm.launch.slurm_environment import Contradiction, contradictions

# Taken from SLURM 22.05: `sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-node=2`, ...
BATCH = {
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOBID": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[0-1]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# ... its step over all of it, as the last task sees it, ...
STEP = {
    **BATCH,
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_DISTRIBUTION": "cyclic",
}
# ... and a step of one task inside of it, in which the job's numbers stay around.
SMALL_STEP = {
    **BATCH,
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "9"}, BATCH, STEP, SMALL_STEP])
def test_what_slurm_sets_does_not_contradict_itself(variables: dict[str, str]) -> None:
    assert contradictions(variables) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": "4"}, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}),
        ({"SLURM_NODEID": "2"}, {"SLURM_NODEID", "SLURM_STEP_NUM_NODES"}),
        ({"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"}),
        ({"SLURM_STEP_NODELIST": "n0"}, {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"}),
        ({"SLURM_JOB_NUM_NODES": "3"}, {"SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"}),
        ({"SLURM_STEP_NODELIST": "n[0,7]"}, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}),
        ({"SLURM_STEP_NODELIST": "n[0-"}, {"SLURM_STEP_NODELIST"}),
        ({"SLURM_JOB_NODELIST": "n[0-"}, {"SLURM_JOB_NODELIST"}),
        ({"SLURM_JOBID": "17"}, {"SLURM_JOB_ID", "SLURM_JOBID"}),
        ({"SLURM_NPROCS": "2"}, {"SLURM_NTASKS", "SLURM_NPROCS"}),
        ({"SLURM_NNODES": "4"}, {"SLURM_NNODES", "SLURM_STEP_NUM_NODES"}),
        ({"RANK": "0", "WORLD_SIZE": "4"}, {"RANK", "SLURM_PROCID"}),
        ({"MASTER_ADDR": "n1"}, {"MASTER_ADDR", "SLURM_STEP_NODELIST"}),
        ({"SLURM_MEM_PER_CPU": "1G", "SLURM_MEM_PER_NODE": "9G"}, {"SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"}),
        ({"SLURM_PROCID": "three"}, {"SLURM_PROCID"}),
        ({"SLURM_STEP_NUM_NODES": "0"}, {"SLURM_STEP_NUM_NODES"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_contradictions_are_found_and_refused_by_name(changes: dict[str, str], named: set[str]) -> None:
    variables = {**STEP, **changes}
    found = contradictions(variables)
    assert named in [set(item.variables) for item in found]
    for item in found:
        assert all(name in item.text for name in item.variables)
    for refuse in (detect, lambda these: plan_launch(True, environ=these)):
        with pytest.raises(EnvironmentSetupError) as error:
            refuse(variables)
        assert all(name in str(error.value) for name in named)


def test_each_contradiction_is_told_once() -> None:
    texts = [item.text for item in contradictions({**STEP, "SLURM_PROCID": "three"})]
    assert len(texts) == len(set(texts)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"MASTER_ADDR": "n0"},
        {"MASTER_ADDR": "10.0.0.7"},  # another network's address of the first node
        {"MASTER_ADDR": "n1", "SLURM_DISTRIBUTION": "arbitrary"},
        {"RANK": "3", "WORLD_SIZE": "4"},
        {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},  # a node's first rank
        {"CUDA_VISIBLE_DEVICES": "1"},  # a task that sees only its own
    ],
)
def test_what_a_user_may_add(changes: dict[str, str]) -> None:
    assert contradictions({**STEP, **changes}) == []


def test_a_worker_of_torchrun_goes_by_torchruns_variables() -> None:
    worker = {"LOCAL_RANK": "0", "RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    assert contradictions({**STEP, **worker}) == []
    assert detect({**STEP, **worker}).rank == 2


def test_outside_of_a_step_the_job_is_checked_too() -> None:
    assert contradictions({**BATCH, "SLURM_JOB_NODELIST": "n[0-3]"}) == [
        Contradiction(
            ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
            "SLURM_JOB_NODELIST=n[0-3] lists 4 nodes, but SLURM_JOB_NUM_NODES=2; unset the one that is not of this job",
        )
    ]
