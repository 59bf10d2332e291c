"""Communication under DDP: delays are found where they were put, waits name who is waited for, nothing is changed.

Run as a script, this file is one rank of a training whose link is slow.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import Link, Slow, close, median
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workbench import Sequences, Steps, classification, make_optimizer, mlp, parameters

from frameworm import RunRecord, Trainer
from frameworm.observe.clocks import phases, ranks
from frameworm.parallel import replicated
from frameworm.parallel.replicated import DDPStrategy
from frameworm.records.schema import StepRecord
from frameworm.report.kit.tables import data_size
from frameworm.report.run.network_text import communication_text

pytestmark = pytest.mark.timing

WARM_UP = 5
STEPS = 25
WAIT_S = 0.05

Ranks = Callable[..., list[Any]]


def _train(model: nn.Module, data: Any = None, **settings: Any) -> tuple[RunRecord, list[StepRecord]]:
    steps = Steps()
    settings = {"run_dir": None, "device": "cpu", "max_steps": STEPS, **settings}
    batch_size = settings.pop("batch_size", 4)
    trainer = Trainer(model, make_optimizer("sgd", model), callbacks=[steps], **settings)
    loader: DataLoader[Any] = DataLoader(classification(1000) if data is None else data, batch_size=batch_size)
    record = trainer.train(loader)
    assert [item.step for item in steps.records] == list(range(1, len(steps.records) + 1)), "each step once, in order"
    for item in steps.records:
        assert sum(item.phases.values()) == pytest.approx(item.step_s, rel=1e-6)
    return record, steps.records[WARM_UP:]


def _exposed(steps: list[StepRecord]) -> list[float]:
    return [step.phases["communication_exposed"] for step in steps]


def _slow_link(rank: int, world_size: int) -> Any:
    found = []
    link = replicated.mean_of_gradients = Link(WAIT_S)  # type: ignore[assignment]
    for accumulation in (1, 3):
        link.sent.clear()
        record, steps = _train(mlp(), accumulation=accumulation)
        found.append((len(link.sent), record, _exposed(steps), steps))
    return found


def test_a_delay_in_the_all_reduce_is_exposed_communication(run_ranks: Ranks) -> None:
    for sent, record, exposed, steps in [case for rank in run_ranks(_slow_link) for case in rank]:
        assert sent == STEPS, "one bucket, sent by the last micro-batch only"
        with_delay, without = exposed[::2], exposed[1::2]
        assert close(median(with_delay) - median(without), WAIT_S)
        assert median(step.phases["backward"] for step in steps[::2]) < WAIT_S / 2
        assert all(step.communication_s is not None for step in steps)
        assert median(step.communication_s for step in steps[::2]) >= WAIT_S
        communication = record.communication
        assert communication.exposed_s == pytest.approx(record.phases["communication_exposed"].mean_s)
        assert communication.exposed_s is not None
        assert communication.total_s is not None
        assert WAIT_S / 3 < communication.exposed_s <= communication.total_s * 1.01
        (bucket,) = communication.buckets
        assert bucket.bytes == communication.bytes_per_step == (6 * 16 + 16 + 16 * 3 + 3) * 4
        # 500 samples per rank in micro-batches of 4; an epoch has more steps than this run took.
        assert communication.times_per_epoch == math.ceil(125 / record.batch.accumulation)
        assert communication.bytes_per_epoch == communication.times_per_epoch * bucket.bytes
        sent_text = data_size(communication.bytes_per_epoch)
        assert f"{communication.times_per_epoch} times and {sent_text} per epoch" in (communication_text(record) or "")
        assert 0 < bucket.ready_s <= bucket.start_s <= bucket.end_s
        assert bucket.end_s - bucket.ready_s > WAIT_S / 3


def _hidden(rank: int, world_size: int) -> Any:
    replicated.mean_of_gradients = Link(WAIT_S)  # type: ignore[assignment]
    torch.manual_seed(0)
    wide = nn.Linear(600, 600)  # more than a megabyte, so that it fills a bucket alone
    model = nn.Sequential(nn.Linear(6, 600), Slow(backward_s=2.5 * WAIT_S), wide, nn.Linear(600, 3))
    record, steps = _train(model, bucket_cap_mb=1)
    return record.communication.buckets, _exposed(steps), steps


@pytest.mark.slow
def test_hidden_communication_is_not_called_exposed(run_ranks: Ranks) -> None:
    for buckets, exposed, steps in run_ranks(_hidden):
        assert len(buckets) >= 2
        assert median(step.communication_s for step in steps[::2]) >= WAIT_S
        assert median(exposed[::2]) - median(exposed[1::2]) < 0.1 * WAIT_S
        assert median(exposed) < WAIT_S / 2
        assert median(step.phases["backward"] for step in steps) >= 2.4 * WAIT_S
        assert buckets[0].end_s < buckets[-1].ready_s


def _late_ranks(rank: int, world_size: int) -> Any:
    return [_late_rank(rank, skew_s, counted) for skew_s, counted in LATE_CASES]


def _late_rank(rank: int, skew_s: float, counted: bool) -> Any:
    clock = time.perf_counter
    if rank == 1:
        phases.perf_counter = ranks.perf_counter = lambda: clock() + skew_s  # type: ignore[attr-defined]
    slow = Slow(forward_s=WAIT_S if rank == 1 else 0.0)
    torch.manual_seed(0)
    if counted:
        model = nn.Sequential(nn.Embedding(11, 8), slow, nn.Linear(8, 4))
        return _train(model, Sequences(1000), loss_fn=_counted_loss)
    return _train(nn.Sequential(nn.Linear(6, 16), slow, nn.Linear(16, 3)))


def _counted_loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
    return loss, (target != -100).sum()


LATE_CASES = [(0.0, False), (1000.0, False), (0.0, True)]


@pytest.mark.slow
def test_waiting_for_a_slow_rank_is_told_apart_and_names_it(run_ranks: Ranks) -> None:
    for (_, counted), first, second in zip(LATE_CASES, *run_ranks(_late_ranks)):
        _check_late(counted, *first, *second)


def _check_late(
    counted: bool, first: RunRecord, first_steps: list[Any], second: RunRecord, second_steps: list[Any]
) -> None:
    waits = [step.rank_wait_s for step in first_steps]
    assert None not in waits
    assert close(median(waits), WAIT_S)
    assert median(step.rank_wait_s for step in second_steps) < WAIT_S / 5
    for step in [*first_steps, *second_steps]:
        assert step.rank_wait_s <= step.phases["communication_exposed"] <= step.communication_s * 1.01
    assert first.communication.slowest_rank == second.communication.slowest_rank == 1
    assert first.communication.rank_wait_s is not None
    assert first.communication.rank_wait_s > 0.9 * WAIT_S
    assert [item.rank for item in first.ranks] == [0, 1]
    waited, slow = first.ranks
    assert waited.phases["communication_exposed"] > WAIT_S / 2 > slow.phases["communication_exposed"]
    assert slow.phases["forward"] > WAIT_S * 0.95 > waited.phases["forward"]
    assert waited.rank_wait_s == pytest.approx(first.communication.rank_wait_s)
    assert waited.host == slow.host is not None
    for bucket in first.communication.buckets:
        if not counted:
            assert bucket.start_s - bucket.ready_s > WAIT_S / 2, "not on its way before the other rank had come"


def _on_and_off(rank: int, world_size: int, kinds: list[str]) -> Any:
    observed = [_trained(kind) for kind in kinds]
    DDPStrategy.wrap_hook = lambda self, wrap: False  # type: ignore[method-assign, assignment]
    return list(zip(kinds, observed, [_trained(kind) for kind in kinds]))


def _trained(kind: str) -> Any:
    settings: dict[str, Any] = {"max_steps": 9, "seed": 1}
    data: Any = classification(100)
    model = mlp()
    if kind == "accumulated":
        settings["accumulation"] = 3
    elif kind == "bf16":
        settings["mixed_precision"] = "bf16"
    elif kind == "several buckets":
        model = nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 3))
        settings["bucket_cap_mb"] = 1
    elif kind == "unused":
        settings["find_unused_parameters"] = True
        model.add_module("unused", Unused())
    elif kind == "static":
        settings["static_graph"] = True
    elif kind == "sparse":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 4))
        data, settings["loss_fn"] = Sequences(100), _counted_loss
    record, steps = _train(model, data, **settings)
    return parameters(model), [step.loss for step in steps], record


class Unused(nn.Module):
    """Has a parameter and makes no use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (3, ["plain", "accumulated"]),  # not a power of two: multiplying and dividing round differently
        (2, ["several buckets", "bf16", "unused", "static", "sparse"]),
    ],
)
@pytest.mark.slow
def test_observation_does_not_change_a_bit(run_ranks: Ranks, kinds: list[str], world_size: int) -> None:
    for rank in run_ranks(_on_and_off, world_size, args=(kinds,)):
        for kind, (weights, losses, seen), (expected, expected_losses, unseen) in rank:
            assert torch.equal(weights, expected), kind
            assert losses == expected_losses
            assert seen.communication.total_s is not None
            assert seen.communication.buckets
            assert seen.unseen == []
            alone = unseen.communication
            assert (alone.total_s, alone.exposed_s, alone.buckets) == (None, None, [])
            assert unseen.unseen == ["communication_exposed"]


def _fails_later(rank: int, world_size: int) -> Any:
    class Broken(nn.Module):
        calls = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 9:
                raise ValueError("planted")
            return values

    steps = Steps()
    model = nn.Sequential(nn.Linear(6, 3), Broken())
    trainer = Trainer(model, make_optimizer("sgd", model), callbacks=[steps], run_dir=None, device="cpu")
    with pytest.raises(ValueError, match="planted"):
        trainer.train(DataLoader(classification(100), batch_size=4))
    return [step.step for step in steps.records]


def test_steps_held_back_are_handed_out_when_the_run_fails(run_ranks: Ranks) -> None:
    assert run_ranks(_fails_later) == [list(range(1, 9))] * 2


def test_one_process_has_no_communication() -> None:
    record, steps = _train(mlp())
    assert record.communication.total_s == record.communication.exposed_s == 0.0
    assert record.communication.times_per_epoch == record.communication.bytes_per_epoch == 0
    assert record.communication.slowest_rank is None
    assert [item.rank for item in record.ranks] == [0]
    assert all(step.communication_s is None and "communication_exposed" not in step.phases for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_exposed_time_on_a_slow_link_is_what_synchronising_costs(
    network_lab: Callable[..., Any], tmp_path: Path
) -> None:
    lab = network_lab(hosts=2, rate="100mbit")
    finished = lab.run([sys.executable, __file__, tmp_path], env={"OMP_NUM_THREADS": "1"}, timeout_s=120)
    assert [item.returncode for item in finished] == [0, 0], finished
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        costs_s = found["step_s"] - found["no_sync_step_s"]
        assert found["exposed_s"] == pytest.approx(costs_s, rel=0.1), found
        assert found["exposed_s"] > 0.1
        assert found["rank_wait_s"] < 0.2 * found["exposed_s"], "this is the link, not the other rank"


def _on_a_slow_link(folder: Path) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(500, 700, generator=generator), torch.zeros(500, dtype=torch.long))

    def train() -> tuple[RunRecord, list[StepRecord]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(700, 700), Slow(0.01, 0.02), nn.Linear(700, 700), Slow(0.01, 0.02))
        return _train(model, data, max_steps=16, backend="gloo")

    _, steps = train()
    place = DDPStrategy.place

    def silent(self: DDPStrategy, model: nn.Module) -> nn.Module:
        wrapped = place(self, model)
        wrapped.require_backward_grad_sync = False  # type: ignore[assignment]
        return wrapped

    DDPStrategy.place = silent  # type: ignore[method-assign]
    _, without = train()
    found = {
        "exposed_s": median(_exposed(steps)),
        "step_s": median(step.step_s for step in steps),
        "no_sync_step_s": median(step.step_s for step in without),
        "rank_wait_s": median(step.rank_wait_s for step in steps),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _on_a_slow_link(Path(sys.argv[1]))
