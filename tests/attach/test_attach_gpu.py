"""The same hooks on a CUDA device: times by events, copies and waits, and no wait of our own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm.attach.hooks import install
from frameworm.attach.patches import Patches
from frameworm.attach.watch import Watch
from frameworm.records.schema import PHASES, StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DELAY_S = 0.03


@pytest.fixture
def observed() -> Iterator[tuple[Watch, list[StepRecord], Patches]]:
    steps: list[StepRecord] = []
    watch = Watch(steps.append)
    patches = install(watch)
    yield watch, steps, patches
    watch.stop()
    patches.remove()


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(DELAY_S)
        return torch.ones(64)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()


def test_phases_by_events(observed: Any) -> None:
    watch, steps, _ = observed
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Slow(), 1):
        batch = batch.to("cuda")
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        torch.cuda._sleep(40_000_000)  # the device works on while the host fetches
        loss.item()
    watch.finish()
    assert len(steps) == 12
    for step in steps[1:]:
        assert set(step.phases) <= set(PHASES)
        assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=0.02, abs=1e-4)
        assert step.metrics["syncs"] >= 1
    assert median(step.metrics["sync_s"] for step in steps[2:]) > 0.01
    assert median(step.phases["data_wait"] for step in steps[2:]) == pytest.approx(DELAY_S, abs=0.004)
    assert {"transfer", "forward", "backward", "optimizer"} <= set(steps[-1].phases)
    assert watch.facts["device"].startswith("cuda")


def test_wait_for_data_that_the_device_does_not_feel(observed: Any) -> None:
    """With nothing that makes the host wait, the device is still busy while the next batch is fetched."""
    watch, steps, _ = observed
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Slow(), 1):
        optimizer.zero_grad()
        model(batch.cuda(non_blocking=True)).sum().backward()
        torch.cuda._sleep(150_000_000)  # longer than the fetch
        optimizer.step()
    watch.finish()
    assert median(step.phases["data_wait"] for step in steps[3:-1]) < DELAY_S / 3


def test_observing_adds_no_wait(observed: Any) -> None:
    watch, _, _ = observed
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(8, 64, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    watch.finish()
    assert watch.steps == 12
    assert not watch.notes


def test_results_are_bitwise_the_same() -> None:
    def train() -> torch.Tensor:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for (batch,) in DataLoader(TensorDataset(torch.randn(64, 64)), 8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.dropout(model(batch.cuda())).sum().backward()
            optimizer.step()
        return torch.cat([item.detach().flatten() for item in model.parameters()])

    plain = train()
    watch = Watch(lambda _: None)
    patches = install(watch)
    try:
        watched = train()
    finally:
        watch.finish()
        patches.remove()
    assert watch.steps == 8
    assert torch.equal(plain, watched)


def test_capture_of_a_graph_is_not_disturbed(observed: Any) -> None:
    watch, _, _ = observed
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(8, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    graph.replay()
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]
    watch.finish()
    assert not watch.notes
