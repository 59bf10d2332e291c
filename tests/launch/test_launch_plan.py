from __future__ import annotations

from typing import Any

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.plan import LaunchPlan, plan_launch

SRUN = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
SECOND_NODE = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
WORKER = {**SECOND_NODE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}


def plan(environ: dict[str, str], distributed: bool = True, **flags: Any) -> LaunchPlan:
    return plan_launch(distributed, environ=environ, **flags)


def test_without_the_flag_one_process_trains() -> None:
    assert plan({}, distributed=False).action == "single"
    assert plan(SRUN, distributed=False).action == "single"
    assert plan(SECOND_NODE, distributed=False).action == "single"


@pytest.mark.parametrize("distributed", [True, False])
def test_a_torchrun_worker_joins_in_any_case(distributed: bool) -> None:
    joined = plan(WORKER, distributed, nproc_per_node=4)
    assert (joined.action, joined.process.rank, joined.process.launcher) == ("join", 4, "torchrun")


def test_one_node_starts_one_worker_per_gpu_or_as_many_as_told() -> None:
    assert plan({}, device_count=4) == LaunchPlan("launch", nproc_per_node=4)
    assert plan({}, device_count=4, nproc_per_node="auto").nproc_per_node == 4
    assert plan({}, device_count=4, nproc_per_node=2).nproc_per_node == 2
    assert plan({}).nproc_per_node == 1
    assert plan({"WORLD_SIZE": "1"}, nproc_per_node=2) == LaunchPlan("launch", nproc_per_node=2)


def test_srun_task_joins_unless_workers_per_node_are_given() -> None:
    joined = plan(SRUN)
    assert (joined.action, joined.process.rank, joined.process.launcher) == ("join", 1, "srun")
    started = plan(SRUN, nproc_per_node=4)
    assert (started.action, started.rendezvous, started.run_id) == ("launch", "static", "5")
    assert (started.nproc_per_node, started.max_nodes, started.node_rank) == (4, 2, 1)
    assert started.master_address == "n1"
    assert started.master_port == joined.process.master_port
    assert plan(SRUN, nproc_per_node="auto", device_count=8).nproc_per_node == 8


def test_srun_launchers_must_be_one_per_node() -> None:
    with pytest.raises(EnvironmentSetupError, match="ntasks-per-node=1"):
        plan({**SRUN, "SLURM_NTASKS": "4"}, nproc_per_node=2)


def test_rank_is_the_first_rank_of_this_node() -> None:
    second = plan(SECOND_NODE, nproc_per_node=4)
    assert (second.action, second.rendezvous) == ("launch", "static")
    assert (second.max_nodes, second.node_rank, second.nproc_per_node) == (2, 1, 4)
    assert (second.master_address, second.master_port) == ("10.0.0.1", 29500)
    assert plan(SECOND_NODE, device_count=4) == second
    assert plan({**SECOND_NODE, "LOCAL_WORLD_SIZE": "4"}) == second
    assert plan({**SECOND_NODE, "RANK": "0"}, nproc_per_node=4).node_rank == 0
    assert plan(SECOND_NODE, nproc_per_node=4, nnodes="2") == second


def test_rank_on_nodes_without_gpus_is_one_worker_each() -> None:
    alone = plan({**SECOND_NODE, "RANK": "1", "WORLD_SIZE": "2"})
    assert (alone.nproc_per_node, alone.max_nodes, alone.node_rank) == (1, 2, 1)


def test_rank_with_all_workers_here_needs_no_fixed_port() -> None:
    assert plan({**SECOND_NODE, "RANK": "0"}, nproc_per_node=8) == LaunchPlan("launch", nproc_per_node=8)


def test_rank_form_inside_srun_is_told_apart_by_the_world_size() -> None:
    assert plan({**SRUN, **SECOND_NODE}, device_count=4).node_rank == 1
    same_world = {**SECOND_NODE, "RANK": "1", "WORLD_SIZE": "2"}
    assert plan({**SRUN, **same_world}).action == "join"


@pytest.mark.parametrize(
    ("environ", "flags", "named"),
    [
        (SECOND_NODE, {"nproc_per_node": 3}, "RANK=4 WORLD_SIZE=8"),
        ({**SECOND_NODE, "RANK": "2"}, {"nproc_per_node": 4}, "RANK=2"),
        (SECOND_NODE, {"nproc_per_node": 4, "nnodes": "3"}, "--nnodes 3"),
        ({"RANK": "4", "WORLD_SIZE": "8"}, {"nproc_per_node": 4}, "MASTER_ADDR"),
        ({}, {"nnodes": "2"}, "--node-rank"),
        ({}, {"nnodes": "2", "node_rank": 2, "master_address": "h"}, "node rank 2"),
        ({}, {"nnodes": "two"}, "--nnodes"),
        ({}, {"nnodes": "3:2"}, "--nnodes"),
        ({}, {"nnodes": "1:2"}, "--rdzv-endpoint"),
        ({}, {"nnodes": "2", "rdzv_endpoint": "h:port"}, "--rdzv-endpoint"),
        ({}, {"nproc_per_node": 0}, "--nproc-per-node"),
    ],
)
def test_plans_that_cannot_work_say_why(environ: dict[str, str], flags: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        plan(environ, **flags)
    assert named in str(error.value)


def test_flags_of_a_launch_need_the_flag_for_it() -> None:
    with pytest.raises(EnvironmentSetupError, match="--distributed"):
        plan({}, distributed=False, nproc_per_node=2)


def test_several_nodes_by_flags() -> None:
    static = plan({}, nproc_per_node=2, nnodes="2", node_rank=1, master_address="h0", master_port=4000)
    assert (static.rendezvous, static.node_rank, static.master_address, static.master_port) == ("static", 1, "h0", 4000)
    assert plan({"MASTER_ADDR": "h0", "NODE_RANK": "1"}, nnodes=2).master_port == 29500
    dynamic = plan({}, nnodes="2", rdzv_endpoint="10.0.0.1:4001")
    assert (dynamic.rendezvous, dynamic.node_rank, dynamic.master_port) == ("c10d", None, 4001)
    assert plan({}, nnodes="1:4", rdzv_endpoint="h0").max_nodes == 4
    assert plan({}, nnodes="2", node_rank=0, rdzv_endpoint="[::1]:4002").master_address == "::1"
