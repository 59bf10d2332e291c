"""The probe between ranks: the same result everywhere, within its budget, and true on a link of known rate.

Run as a script, this file is one rank of a probe between hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frameworm.errors import EnvironmentSetupError, NetworkModelError
from frameworm.parallel.network import probe as network
from frameworm.parallel.network.probe import QUICK_COLLECTIVES, probe_network, quick_probe
from frameworm.scaling.network import COLLECTIVES, NetworkModel

Ranks = Callable[..., list[Any]]


def _everything(rank: int, world_size: int) -> Any:
    told: list[float] = []
    model = probe_network(sizes=(1, 5000, 2**16), budget_s=20.0, repetitions=4, tell=told.append)
    quick = quick_probe()
    return model, quick, told


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_same_points(run_ranks: Ranks, world_size: int) -> None:
    (model, quick, told), *others = run_ranks(_everything, world_size)
    part = 4 * world_size
    for found, sizes in ((model, {part, -(-5000 // part) * part, -(-(2**16) // part) * part}), (quick, None)):
        assert (found.world_size, found.hosts, found.backend, found.device) == (world_size, 1, "gloo", "cpu")
        assert found.environment["torch"] == torch.__version__
        for points in found.points.values():
            assert sizes is None or {point.size_bytes for point in points} == sizes
            assert all(
                point.size_bytes % part == 0 and 0 < point.q1_s <= point.median_s <= point.q3_s for point in points
            )
    assert all(point.repetitions == 4 for points in model.points.values() for point in points)
    assert tuple(model.points) == COLLECTIVES
    assert tuple(quick.points) == QUICK_COLLECTIVES
    assert len(quick.points["all_reduce"]) >= 2
    assert told == sorted(told)
    assert 0 < told[-1] <= 1
    for other, other_quick, _ in others:
        assert other.points == model.points
        assert other_quick.points == quick.points
    assert NetworkModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def _slow(rank: int, world_size: int, rate: float, budget_s: float) -> Any:
    """Collectives as on a link of so many bytes per second; rank 1's fast clock says that time is up sooner."""
    real = network._Ranks._call

    def call(self: Any, collective: str, source: Any, target: Any) -> Callable[[], Any]:
        send = real(self, collective, source, target)

        def late() -> None:
            time.sleep(source.numel() / rate)
            send()

        return late

    network._Ranks._call = call  # type: ignore[method-assign]
    if rank == 1:
        network.perf_counter = lambda: 1.5 * time.perf_counter()  # type: ignore[attr-defined]
    begin = time.monotonic()
    sizes = tuple(2**power for power in range(10, 30, 2))
    model = probe_network(sizes=sizes, collectives=("all_gather", "broadcast"), budget_s=budget_s)
    taken_s = time.monotonic() - begin
    return [point.size_bytes for point in model.points["broadcast"]], taken_s


@pytest.mark.slow
@pytest.mark.timing
def test_what_does_not_fit_the_budget_is_left_out_by_all(run_ranks: Ranks) -> None:
    (sizes, taken_s), (other_sizes, _) = run_ranks(_slow, args=(2e6, 2.0))
    assert sizes == other_sizes, "rank 0's clock decides"
    assert sizes == [2**power for power in range(10, 10 + 2 * len(sizes), 2)], "the smaller ones stay"
    assert 2**16 <= sizes[-1] <= 2**20, "a pass of 2 MiB would take two seconds"
    assert taken_s < 4.0


def _two_at_least(rank: int, world_size: int) -> Any:
    return probe_network(sizes=(64, 2**18, 2**24), budget_s=1e-6, repetitions=9).points


def test_two_sizes_are_measured_whatever_they_take(run_ranks: Ranks) -> None:
    for points in run_ranks(_two_at_least):
        assert all([point.size_bytes for point in of_one] == [64, 2**18] for of_one in points.values())
        assert all(point.repetitions == 1 for of_one in points.values() for point in of_one)


def _within_a_group(rank: int, world_size: int) -> Any:
    pair = dist.new_group([1, 2])
    alone = dist.new_group([0])
    if rank == 0:
        with pytest.raises(EnvironmentSetupError, match="two ranks or more"):
            probe_network(alone)
        return None
    with pytest.raises(NetworkModelError, match="at least"):
        probe_network(pair, sizes=())
    return probe_network(pair, sizes=(64, 1024), repetitions=2).points


def test_a_group_that_is_not_all_ranks(run_ranks: Ranks) -> None:
    outside, first, second = run_ranks(_within_a_group, 3)
    assert outside is None
    assert set(first) == set(COLLECTIVES)
    assert first == second


def test_one_process_has_no_network() -> None:
    with pytest.raises(EnvironmentSetupError, match="--nproc-per-node 2"):
        probe_network()


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(240)
def test_the_rate_of_a_link_is_found(network_lab: Callable[..., Any], tmp_path: Path) -> None:
    lab = network_lab(hosts=2, rate="100mbit")
    finished = lab.run([sys.executable, __file__, tmp_path], timeout_s=180)
    assert [item.returncode for item in finished] == [0, 0], finished
    model = NetworkModel.load(tmp_path / "network.json")
    assert (model.world_size, model.hosts) == (2, 2)
    for collective in ("all_reduce", "broadcast"):
        rate = model.bus_bytes_per_s(collective)
        assert rate is not None
        assert rate * 8 / 1e6 == pytest.approx(95, rel=0.15), model.summary()
        assert model.seconds(collective, 10**7) == pytest.approx(10**7 / rate, rel=0.15)
    # gloo's own all_gather and all_to_all keep the two directions of a link only partly busy at once.
    for collective in ("all_gather", "all_to_all"):
        rate = model.bus_bytes_per_s(collective)
        assert rate is not None
        assert 40 < rate * 8 / 1e6 < 109, model.summary()
    quick = NetworkModel.load(tmp_path / "quick.json")
    rate = quick.bus_bytes_per_s("all_reduce")
    assert rate is not None
    assert 95 / 3 < rate * 8 / 1e6 < 95 * 3, "a quick look is a rough one"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_over_gloo(run_ranks: Ranks) -> None:
    for model in run_ranks(_on_cuda):
        assert model.device == "cuda"
        assert set(model.points) == {"all_reduce", "broadcast"}


def _on_cuda(rank: int, world_size: int) -> Any:
    device = torch.device("cuda", 0)
    return probe_network(sizes=(64, 2**16), collectives=("all_reduce", "broadcast"), repetitions=3, device=device)


def _between_hosts(folder: Path) -> None:
    from frameworm.launch.process_group import process_group

    torch.set_num_threads(1)
    with process_group(backend="gloo") as process:
        model, quick = probe_network(budget_s=10.0), quick_probe()
        if process.rank == 0:
            model.save(folder / "network.json")
            quick.save(folder / "quick.json")


if __name__ == "__main__":
    _between_hosts(Path(sys.argv[1]))
