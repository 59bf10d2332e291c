"""DDP, FSDP and process groups under private names, in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.torch_private import distributed

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[dist.HashStore]:
    made = dist.HashStore()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield made
    dist.destroy_process_group()


def test_groups(store: dist.HashStore) -> None:
    world = dist.group.WORLD
    assert distributed.backend_name(world, CPU) == "gloo"
    assert distributed.collective_timeout(world, CPU) == timedelta(seconds=30)
    before = distributed.collectives_begun(world)
    dist.all_reduce(torch.ones(1))
    assert distributed.collectives_begun(world) == before + 1
    distributed.default_store().set("key", "value")
    assert distributed.default_store().get("key") == b"value"


def test_abort_group_is_a_function() -> None:
    assert callable(distributed.abort_group())


def test_replicas(store: dist.HashStore) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert not distributed.has_hook(model)
    assert not distributed.has_hook(model.module)
    distributed.set_timing_rate(model, 1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    times = distributed.times_of(model)
    assert times["iteration"] >= 2
    assert times["backward_comm_time"] > 0
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)
    assert distributed.has_hook(model)
    inner = model.module
    distributed.end_replica(model)
    DistributedDataParallel(inner)(torch.ones(1, 2)).sum().backward()


def test_shards(store: dist.HashStore) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert distributed.shard_state(model[0]) is not distributed.shard_state(model)
    (group,) = distributed.shard_groups(model[0])
    assert group.post_forward_mesh_info is not None
    model[0].set_reshard_after_forward(False)
    (group,) = distributed.shard_groups(model[0])
    assert group.post_forward_mesh_info is None
