"""The analyzer: it finds what was planted, measures it, and leaves no trace."""

from __future__ import annotations

import copy
import json
import pickle
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm.distributed import (
    BottleneckAnalyzer,
    CompressedDDP,
    OptimizedDataLoader,
    benchmark_training_step,
    measure_optimization_effectiveness,
    profile_memory_usage,
)
from frameworm.errors import ConfigError, DataError, DeviceError
from frameworm.parallel import replicated


class Counting(nn.Module):
    """Dropout, batch norm and a counter: everything a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.calls = 0
        self.frozen = nn.Linear(2, 2)
        self.frozen.eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.lately = inputs.shape
        return self.body(inputs)


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Draws from every generator there is, and from one of its own."""

    def __init__(self, delay_s: float = 0.0, samples: int = 96) -> None:
        self.delay_s = delay_s
        self.samples = samples
        self.own = random.Random(5)
        self.reads = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        time.sleep(self.delay_s)
        shift = random.random() + np.random.rand() + self.own.random()
        return torch.randn(8) + shift, index % 3


def state_of(model: Counting, optimizer: torch.optim.Optimizer, data: Noisy) -> Any:
    state = {
        "model": model.state_dict(),
        "grads": [item.grad for item in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "plain": (model.calls, hasattr(model, "lately")),
        "optimizer": optimizer.state_dict(),
        "data": (data.reads, data.own.getstate()),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
    }
    return copy.deepcopy(state)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_nothing_is_changed(used: bool, ours: bool) -> None:
    torch.manual_seed(1)
    model, data = Counting(), Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(7)
    loader: Any = (
        OptimizedDataLoader.create(data, 12, num_workers=0, seed=3)
        if ours
        else DataLoader(data, 12, shuffle=True, generator=generator)
    )
    running = iter(loader)
    if used:  # in the middle of an epoch, gradients at hand
        for _ in range(2):
            inputs, targets = next(running)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    else:
        next(running)
    parameters = list(model.parameters())
    pointers = [item.data_ptr() for item in parameters]
    before, drawn = state_of(model, optimizer, data), generator.get_state()

    BottleneckAnalyzer(model, loader, "cpu", optimizer=optimizer, budget_s=1.0).analyze()

    assert_same(before, state_of(model, optimizer, data))
    assert torch.equal(generator.get_state(), drawn)
    assert [item.data_ptr() for item in parameters] == pointers
    # The epoch that was under way goes on as it would have.
    rest = [batch[0] for batch in running]
    assert len(rest) == 8 - (2 if used else 1)


def test_training_afterwards_is_bitwise_the_same() -> None:
    def train(analyzed: bool) -> tuple[Any, list[float]]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model, data = Counting(), Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, 12, shuffle=True)
        if analyzed:
            BottleneckAnalyzer(model, loader, optimizer=optimizer, budget_s=1.0).analyze()
        losses = []
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model.state_dict(), losses

    assert_same(train(False), train(True))


@pytest.mark.slow
def test_a_slow_data_set_is_found_and_its_gain_measured() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Noisy(delay_s=0.005), 8)  # 40 ms per batch
    found = BottleneckAnalyzer(nn.Sequential(nn.Linear(8, 3)), loader, "cpu", budget_s=6.0).analyze()
    assert found["verdict"] == "input_bound"
    finding = found["findings"][0]
    assert set(finding) == {"code", "severity", "share", "evidence", "remedies", "expected_speedup"}
    assert finding["expected_speedup"]["basis"] == "measured"
    assert finding["expected_speedup"]["value"] > 1
    assert found["data_loading"]["wait_ms"] > 39
    assert found["data_loading"]["tried_workers"] is not None
    assert found["experiments"]["step_ms"]["as_is"]["value"] > found["compute"]["time_ms"]
    assert {"time_ms", "throughput"} == set(found["compute"])
    assert {"time_ms", "bandwidth_gbps", "param_size_mb"} == set(found["communication"])
    assert {"allocated_gb", "reserved_gb", "peak_gb", "total_gb", "usage_pct"} == set(found["memory"])
    assert found["communication"]["time_ms"] == 0.0
    assert found["communication"]["bandwidth_gbps"] is None
    assert 0 < found["data_loading"]["throughput"] < 200  # 8 samples in 40 ms, or more on a busy machine
    assert found["per_epoch"] == {"steps": 12, "communications": 0, "sent_gb": 0.0}
    for section in ("compute", "communication", "data_loading", "memory", "per_epoch"):
        assert set(found[section]) <= set(found["units"])


@pytest.mark.slow
def test_parts_of_an_analysis_are_to_be_had_alone_and_all_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(Noisy(), 8)
    analyzer = BottleneckAnalyzer(nn.Linear(8, 3), loader, "cpu", budget_s=1.0)
    compute = analyzer.analyze_compute()
    assert compute["time_ms"] > 0
    assert compute["throughput"] > 0
    assert analyzer.analyze_communication() == {"time_ms": 0.0, "bandwidth_gbps": None, "param_size_mb": 108 / 2**20}
    assert analyzer.analyze_data_loading()["throughput"] > 0
    assert analyzer.analyze_memory()["allocated_gb"] > 0
    assert str(compute).startswith("time ")
    assert str(compute).endswith(" samples/s")
    analyzer.print_summary()
    first = capsys.readouterr().out
    for words in ("ms per step", "samples/s", "GiB", "global batch 8", "verdict", "tried", "steps 12 per epoch"):
        assert words in first
    found = analyzer.analyze()
    assert json.loads(json.dumps(found)) == found
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    found.print_summary()
    print(found)
    second = capsys.readouterr().out
    assert second == 2 * f"{found}\n"
    analyzer.print_summary()
    assert capsys.readouterr().out == f"{found}\n"


def test_batches_that_cannot_be_cut_are_said_to_be_skipped() -> None:
    class Own:
        def __init__(self) -> None:
            self.inputs, self.targets = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)

    def loss_fn(model: nn.Module, batch: Own) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    found = BottleneckAnalyzer(nn.Linear(8, 3), [Own()] * 20, "cpu", loss_fn=loss_fn, budget_s=10.0).analyze()
    # A stall at the first look may cost another variant its place.
    assert set(found["experiments"]["skipped"]) - {"autocast"} == {"half_batch", "double_batch"}
    for name in ("half_batch", "double_batch"):
        assert "cannot be cut or doubled" in found["experiments"]["skipped"][name]
    assert found["data_loading"]["num_workers"] is None


def test_what_cannot_be_analyzed_is_refused() -> None:
    data = TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    with pytest.raises(DataError, match="iterator"):
        BottleneckAnalyzer(nn.Linear(8, 3), iter(DataLoader(data, 4)), "cpu").analyze()
    with pytest.raises(DeviceError, match="move it there first"):
        BottleneckAnalyzer(nn.Linear(8, 3), DataLoader(data, 4), "cuda:0")
    with pytest.raises(DataError, match="no batch"):
        BottleneckAnalyzer(nn.Linear(8, 3), [], "cpu").analyze()


def _two_ranks(rank: int, world_size: int, wrapped: bool) -> Any:
    torch.manual_seed(rank)  # ranks may differ: nothing is to be broadcast for good
    model: nn.Module = nn.Sequential(nn.Linear(8, 20_000), nn.Linear(20_000, 3))
    if wrapped:
        model = nn.parallel.DistributedDataParallel(model)
    before = copy.deepcopy(model.state_dict())
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    found = BottleneckAnalyzer(model, DataLoader(data, 4), "cpu", budget_s=4.0).analyze()
    assert_same(before, model.state_dict())
    assert all(item.grad is None for item in model.parameters())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_two_ranks_measure_their_bandwidth(run_ranks: Any, wrapped: bool) -> None:
    found, other = run_ranks(_two_ranks, args=(wrapped,), timeout_s=100)
    assert "no_sync" in found["experiments"]["step_ms"]
    assert found["communication"]["time_ms"] is not None
    assert found["communication"]["bandwidth_gbps"] > 0
    assert found["experiments"]["rounds"] == other["experiments"]["rounds"]


def _slow_wire(rank: int, world_size: int, wrapped: bool, late_s: float) -> Any:
    """Sending gradients takes 50 ms, or rank 1 is late."""

    class Late(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(late_s if rank == 1 else 0.0)
            return super().forward(inputs)

    def slow(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        time.sleep(0.0 if late_s else 0.05)
        work = torch.distributed.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    slow.__annotations__ = {}
    model: Any = Late(8, 3)
    if wrapped:
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, slow)
    else:
        replicated.mean_of_gradients = slow  # type: ignore[assignment]
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    return BottleneckAnalyzer(model, DataLoader(data, 4), "cpu", budget_s=6.0).analyze()


@pytest.mark.timing
@pytest.mark.parametrize("wrapped", [False, True])
def test_costly_communication_is_found_by_no_sync(run_ranks: Any, wrapped: bool) -> None:
    for found in run_ranks(_slow_wire, args=(wrapped, 0.0), timeout_s=100):
        assert found["communication"]["time_ms"] > 25
        assert found["verdict"] == "communication_bound"
        finding = found["findings"][0]
        assert finding["severity"] == "critical"
        assert finding["expected_speedup"]["basis"] == "measured"
        assert finding["expected_speedup"]["low"] > 1.5
        texts = [remedy["text"] for remedy in finding["remedies"]]
        assert any("accumulate" in text if wrapped else "compressed" in text for text in texts), texts
        assert any("communication hook" in note for note in found["notes"]) == wrapped


def _analyzed_then_trained(rank: int, world_size: int, kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 3)
    if kind == "compressed":
        model = CompressedDDP(model, method="fp16")
    else:
        model = nn.parallel.DistributedDataParallel(model, **({} if kind == "plain" else {kind: True}))
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    analyzer = BottleneckAnalyzer(model, DataLoader(data, 4), "cpu", budget_s=1.0)
    first, second = analyzer.analyze(), analyzer.analyze_communication()
    model.eval()
    assert benchmark_training_step(model, (data.tensors[0], data.tensors[1]), steps=2)["steps"] == 2
    assert not model.training
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, targets in DataLoader(data, 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs + rank), targets).backward()
        optimizer.step()
    if kind == "compressed":
        model.compression.close()
    return first["communication"], second, [item.tolist() for item in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "static_graph", "find_unused_parameters", "compressed"])
def test_a_wrapped_model_is_analyzed_twice_and_then_trains(run_ranks: Any, kind: str) -> None:
    (first, second, weights), (_, _, others) = run_ranks(_analyzed_then_trained, args=(kind,), timeout_s=100)
    assert weights == others
    for found in (first, second):
        assert found["time_ms"] is not None
        assert (found["bandwidth_gbps"] is None) == (kind == "compressed")  # a hook's bytes are not known


@pytest.mark.timing
@pytest.mark.parametrize("wrapped", [False, True])
def test_waiting_for_a_slow_rank_is_not_called_communication(run_ranks: Any, wrapped: bool) -> None:
    for found in run_ranks(_slow_wire, args=(wrapped, 0.05), timeout_s=100):
        assert found["verdict"] == "straggler"
        assert found["findings"][0]["evidence"]["slowest_rank"] == 1


def test_small_helpers_leave_no_trace_either() -> None:
    torch.manual_seed(2)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(16, 8), torch.zeros(16, dtype=torch.long))
    data = Noisy()
    before = state_of(model, optimizer, data)
    timed = benchmark_training_step(model, batch, optimizer=optimizer, steps=5)
    memory = profile_memory_usage(model, batch, optimizer=optimizer)
    compared = measure_optimization_effectiveness(model, batch, {}, {"clip_norm": 1.0}, budget_s=1.0)
    assert_same(before, state_of(model, optimizer, data))
    assert timed["steps"] == 5
    assert timed["step_ms"]["min"] <= timed["step_ms"]["p50"]
    assert sum(timed["phases_ms"].values()) == pytest.approx(timed["step_ms"]["mean"], rel=0.02)
    count = sum(item.numel() for item in model.parameters())
    assert memory["parameters"] == 4 * count
    assert memory["optimizer"] >= 8 * sum(item.numel() for item in model.body.parameters())
    assert memory["activations"] is not None
    assert memory["activations"] > 16 * 16 * 4
    assert compared["speedup"]["low"] <= compared["speedup"]["value"] <= compared["speedup"]["high"]


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU()) for _ in range(4)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@pytest.mark.slow
def test_activation_checkpointing_is_measured_in_percent_and_then_undone() -> None:
    model, batch = Repeated(), (torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    classes = [type(module) for module in model.modules()]
    found = profile_memory_usage(model, batch, activation_checkpointing="full")
    assert 50 < found["checkpointing_saved_pct"] < 100
    assert found["step"] == sum(
        found[name] for name in ("parameters", "gradients", "optimizer", "buffers", "activations")
    )
    assert 0 < found["efficiency"] <= 1
    assert found["usage"] == pytest.approx(found["peak"] / found["total"])
    assert "activation checkpointing saves" in str(found)
    assert profile_memory_usage(model, batch)["checkpointing_saved_pct"] is None
    compared = measure_optimization_effectiveness(model, batch, {}, {"activation_checkpointing": "full"}, budget_s=1.0)
    assert 10 < compared["memory"]["saved_pct"] < 100
    assert compared["memory"]["before_bytes"] > compared["memory"]["after_bytes"]
    assert "% saved" in str(compared)
    assert [type(module) for module in model.modules()] == classes


def test_a_number_of_samples_in_place_of_a_batch() -> None:
    timed = benchmark_training_step(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), 32, steps=3)
    assert timed["samples_per_s"] == pytest.approx(32 / timed["step_ms"]["mean"] * 1e3)
    assert "samples/s over 3 steps" in str(timed)
    assert profile_memory_usage(nn.Linear(8, 4), 32)["parameters"] == 4 * 36
    with pytest.raises(ConfigError, match=r"batch: 32 .* next\(iter\(train_loader\)\)"):
        benchmark_training_step(nn.Embedding(8, 4), 32)
