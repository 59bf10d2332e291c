from __future__ import annotations

import os

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import (
    ProcessInfo,
    added_to_environment,
    collective_timeout_s,
    detect,
    reported_by_launcher,
    worker_environment,
)

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
}
EXPLICIT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_nothing_is_a_single_process() -> None:
    assert detect({}) == ProcessInfo()
    assert detect({"MASTER_ADDR": "h0", "MASTER_PORT": "29500", "WORLD_SIZE": "1"}).launcher == "none"


def test_torchrun_worker() -> None:
    assert detect(TORCHRUN) == ProcessInfo(5, 1, 8, 4, 1, 2, "h0", 29501, "torchrun")


def test_torchrun_worker_without_the_optional_variables() -> None:
    info = detect(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (info.node_rank, info.num_nodes) == (1, 2)
    info = detect({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (info.local_world_size, info.num_nodes) == (2, 1)


def test_srun_task() -> None:
    info = detect(SRUN)
    assert info == ProcessInfo(3, 1, 4, 2, 1, 2, "n07", info.master_port, "srun")
    assert info.master_port is not None
    assert 20000 <= info.master_port <= 59999
    assert (
        detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port == info.master_port
    )
    neighbours = [{"SLURM_JOB_ID": "78"}, {"SLURM_JOB_ID": "76"}, {"SLURM_STEP_ID": "3"}, {"SLURM_STEP_ID": "1"}]
    assert len({info.master_port, *(detect({**SRUN, **other}).master_port for other in neighbours)}) == 5


def test_srun_prefers_what_the_user_chose() -> None:
    info = detect({**SRUN, "MASTER_ADDR": "login", "MASTER_PORT": "4000"})
    assert (info.master_address, info.master_port) == ("login", 4000)


def test_srun_uneven_tasks_and_the_step_beside_the_job() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_LOCALID": "2"}
    assert detect(uneven).local_world_size == 3
    smaller_step = {**SRUN, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NODELIST": "n[01-16]"}
    assert detect(smaller_step) == detect(SRUN)


def test_srun_step_of_one_task() -> None:
    one = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    info = detect(one)
    assert (info.world_size, info.launcher) == (1, "srun")


@pytest.mark.parametrize("step_id", [None, "4294967291", "4294967290"])
def test_a_batch_script_or_an_allocation_shell_is_no_srun_task(step_id: str | None) -> None:
    variables = without(SRUN, "SLURM_STEP_ID") | ({} if step_id is None else {"SLURM_STEP_ID": step_id})
    assert detect(variables).launcher == "none"


def test_torchrun_inside_srun_wins() -> None:
    assert detect({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_explicit_rank() -> None:
    assert detect(EXPLICIT) == ProcessInfo(1, 0, 2, 1, 1, 2, "10.0.0.1", 29500, "explicit")
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_explicit_rank_may_repeat_srun_but_not_contradict_it() -> None:
    assert detect({**SRUN, "RANK": "3", "WORLD_SIZE": "4"}).launcher == "srun"
    with pytest.raises(EnvironmentSetupError, match="SLURM_PROCID"):
        detect({**SRUN, "RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK=8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
        ({**TORCHRUN, "RANK": "one"}, "RANK=one"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK=x"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT=http"),
        (without(TORCHRUN, "RANK"), "RANK is not set"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "node list"),
        (without(SRUN, "SLURM_NTASKS"), "SLURM_NTASKS is not set"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST"),
        ({**EXPLICIT, "RANK": "2"}, "RANK=2"),
        (without(EXPLICIT, "RANK"), "RANK is not set"),
        (without(EXPLICIT, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(EXPLICIT, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(EXPLICIT, "MASTER_PORT"), "MASTER_PORT is not set"),
    ],
)
def test_contradictions_name_the_variable(variables: dict[str, str], named: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        detect(variables)
    assert named in str(error.value)


def test_nccl_timeout_is_in_seconds() -> None:
    assert collective_timeout_s(600, {}) == 600
    assert collective_timeout_s(600, {"NCCL_TIMEOUT": "90"}) == 90
    for text in ("soon", "0", "-5", "nan", "inf"):
        with pytest.raises(EnvironmentSetupError, match="NCCL_TIMEOUT"):
            collective_timeout_s(600, {"NCCL_TIMEOUT": text})


def test_device_of_a_task_that_sees_only_its_own_gpu() -> None:
    task = ProcessInfo(rank=3, local_rank=3, world_size=4, local_world_size=4, launcher="srun")
    assert task.device_index(device_count=1) == 0
    assert task.device_index(device_count=4) == 3
    assert ProcessInfo(rank=3, local_rank=3, world_size=4, launcher="torchrun").device_index(1) == 3


def test_worker_environment_shares_out_the_cores_unless_told() -> None:
    assert worker_environment(3, 8, {})["OMP_NUM_THREADS"] == "2"
    assert worker_environment(8, 2, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in worker_environment(2, 8, {"OMP_NUM_THREADS": "5"})
    assert worker_environment(2, 8, {})["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_added_variables_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("SOME_NEW_VARIABLE", raising=False)
    with added_to_environment({"OMP_NUM_THREADS": "1", "SOME_NEW_VARIABLE": "x"}):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["SOME_NEW_VARIABLE"]) == ("1", "x")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "SOME_NEW_VARIABLE" not in os.environ


def test_only_our_launcher_reports_for_its_workers() -> None:
    assert reported_by_launcher({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "frameworm-job"})
    assert not reported_by_launcher({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"})
    assert not reported_by_launcher({"TORCHELASTIC_RUN_ID": "frameworm-job"})


def test_ranks_may_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORM_RANKS_PER_GPU", "2")
    ranks = [ProcessInfo(rank=rank, local_rank=rank, world_size=4, launcher="torchrun") for rank in range(4)]
    assert [item.device_index(2) for item in ranks] == [0, 0, 1, 1]
    monkeypatch.setenv("FRAMEWORM_RANKS_PER_GPU", "none")
    with pytest.raises(EnvironmentSetupError, match="FRAMEWORM_RANKS_PER_GPU"):
        ranks[0].device_index(2)
