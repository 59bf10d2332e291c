"""Gradients of DistributedDataParallel gathered once per update are those that every pass gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.attach.patches import Patches
from frameworm.attach.trial.data_parallel import facts_of_data_parallel
from frameworm.attach.trial.interception import intercept
from frameworm.attach.trial.switches import Switches

Ranks = Callable[..., list[Any]]


class Net(nn.Module):
    """One of its layers is used by rank 0 alone where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.seldom = nn.Linear(6, 16)

    def forward(self, batch: torch.Tensor, *, all_of_it: bool) -> Any:
        hidden = self.first(batch)
        if all_of_it:
            hidden = hidden + self.seldom(batch)
        return self.last(torch.relu(self.norm(hidden)))


def train(rank: int, world_size: int, switches: dict[str, Any], passes: Sequence[int], clip: bool) -> Any:
    """Updates after so many passes each; gives what was learned, and how gradients are gathered."""
    patches = Patches()
    intercept(Switches.from_dict(switches), patches)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for count in passes:
        for place in range(count):
            batch = torch.randn(8, 6)
            loss = model(batch, all_of_it=rank == 0 and place == 0).square().mean() / count
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    patches.remove()
    state = {name: item.detach().clone() for name, item in model.state_dict().items()}
    return state, model.bucket_bytes_cap, bool(model.gradient_as_bucket_view), bool(model.static_graph)


PASSES = {"alike": [3] * 6, "shorter last": [3, 3, 3, 2, 3, 3], "single": [1] * 4, "longer": [2, 2, 2, 4, 2, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("clip", [False, True])
def test_what_is_learned_stays_whatever_the_number_of_passes(run_ranks: Ranks, passes: list[int], clip: bool) -> None:
    plain = run_ranks(train, args=({}, passes, clip))
    once = run_ranks(train, args=({"gather_once": True}, passes, clip))
    for rank in (0, 1):
        for name, value in plain[rank][0].items():
            torch.testing.assert_close(once[rank][0][name], value, msg=f"{name} on rank {rank}")


@pytest.mark.slow
def test_buckets_are_set_where_the_script_says_nothing(run_ranks: Ranks) -> None:
    found = run_ranks(train, args=({"bucket_mib": 7, "bucket_views": True}, [1], False))
    assert found[0][1:] == (7 * 2**20, True, False)


@pytest.mark.slow
def test_a_static_graph_is_set_and_learns_the_same(run_ranks: Ranks) -> None:
    plain = run_ranks(train, args=({}, [1] * 4, True))
    found = run_ranks(train, args=({"static_graph": True}, [1] * 4, True))
    assert found[0][3]
    for name, value in plain[0][0].items():
        torch.testing.assert_close(found[0][0][name], value, msg=name)


def count_gathers(rank: int, world_size: int, switches: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    patches = Patches()
    intercept(Switches.from_dict(switches), patches)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathers = 0

    def count(state: object, bucket: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / 2)

    count.__annotations__.clear()  # torch compares them with classes, not with their names
    facts = facts_of_data_parallel([model], 4.0)
    model.register_comm_hook(None, count)
    assert (facts_of_data_parallel([model], 4.0) or {})["hooked"]
    for update in range(6):
        for place in range(4):
            own = model.no_sync() if update == 5 and place < 3 else contextlib.nullcontext()
            with own:
                model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    patches.remove()
    return gathers, facts


@pytest.mark.slow
def test_only_the_last_pass_gathers_once_two_updates_were_alike(run_ranks: Ranks) -> None:
    plain, once = run_ranks(count_gathers, args=({},)), run_ranks(count_gathers, args=({"gather_once": True},))
    assert plain[0][0] == 5 * 4 + 1, "the last update says itself when to gather"
    assert once[0][0] == 2 * 4 + 3 + 1
    assert plain[0][1] == {
        "gradient_mib": 20 / 2**20,
        "bucket_mib": 25.0,
        "bucket_views": False,
        "looks_for_unused": False,
        "passes_per_update": 4.0,
        "hooked": False,
    }
