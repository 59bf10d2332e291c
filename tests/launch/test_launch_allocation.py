"""Hosts of a SLURM allocation, and processes on them."""

from __future__ import annotations

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.allocation import Allocation, find_allocation

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-3]", "SLURM_JOB_CPUS_PER_NODE": "8(x3),4"}


def test_outside_of_slurm_there_is_none() -> None:
    assert find_allocation({}) is None


def test_a_batch_script_sees_its_hosts() -> None:
    assert find_allocation(BATCH) == Allocation("7", ("n0", "n1", "n2", "n3"), 4)


def test_a_task_of_srun_trains_on_its_own_host() -> None:
    one = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert find_allocation({**BATCH, **one}) is None


@pytest.mark.parametrize(
    "inside",
    [
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
        {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"},
    ],
)
def test_one_of_several_workers_is_refused(inside: dict[str, str]) -> None:
    with pytest.raises(EnvironmentSetupError, match="without torchrun or srun"):
        find_allocation({**BATCH, **inside})


def test_processes_fill_one_host_before_the_next() -> None:
    allocation = Allocation("7", ("n0", "n1"))
    assert allocation.place(1, 4) == (1, 1)
    assert allocation.place(4, 4) == (1, 4)
    assert allocation.place(8, 4) == (2, 4)
    assert allocation.place(2, 1) == (2, 1)
    with pytest.raises(EnvironmentSetupError, match="does not fill hosts of 4"):
        allocation.place(6, 4)
    with pytest.raises(EnvironmentSetupError, match="needs 4 hosts of 4 processes, and job 7 has 2"):
        allocation.place(16, 4)


def test_one_launcher_on_each_host() -> None:
    command = Allocation("7", ("n0", "n1"), 4).command(2, ["frameworm", "train"])
    assert command[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4"} <= set(command)
    assert command[-2:] == ["frameworm", "train"]
