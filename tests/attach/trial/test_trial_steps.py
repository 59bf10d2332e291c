"""Steps of other people's loops are counted where they begin, and told apart from what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm.attach.trial.steps import Listener, StepCounter


class Notes(Listener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def model_found(self, module: nn.Module) -> None:
        self.seen.append("model")

    def step_begins(self, number: int) -> None:
        self.seen.append(f"step {number}")

    def before_update(self) -> None:
        self.seen.append("complete")

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append("updated")


@pytest.fixture
def counted() -> Iterator[tuple[StepCounter, Notes]]:
    notes = Notes()
    counter = StepCounter(notes)
    before = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__
    counter.install()
    yield counter, notes
    counter.remove()
    assert (nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__) == before


def data(samples: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1)), 4)


def plain() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch, target in data():
        optimizer.zero_grad()
        (model(batch) - target).square().mean().backward()
        optimizer.step()


def accumulated() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (batch, target) in enumerate(data(24), 1):
        (model(batch) - target).square().mean().backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def without_loader() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(4, 4)).mean().backward()
        optimizer.step()


def by_closure() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch, target in data():

        def closure(batch: Any = batch, target: Any = target) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(batch) - target).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]


def validated() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch, target in data():
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        model.train()
        (model(batch) - target).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [plain, accumulated, without_loader, by_closure, validated])
def test_each_update_is_one_step(loop: Callable[[], None], counted: tuple[StepCounter, Notes]) -> None:
    counter, notes = counted
    loop()
    assert counter.updates == 3
    assert notes.seen.count("model") == 1
    assert [item for item in notes.seen if item != "model"][:9] == [
        part for number in (1, 2, 3) for part in (f"step {number}", "complete", "updated")
    ]


def test_two_optimizers_share_a_step(counted: tuple[StepCounter, Notes]) -> None:
    """What the first computes may still be needed by the second: nothing may be changed between them."""
    counter, notes = counted
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for batch, _ in data():
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    assert counter.updates == 6
    assert counter.step == 4, "the fetch that finds the loader at its end begins one more"
    assert notes.seen.count("complete") == 6
    assert counter.optimizers == optimizers
    assert counter.models == list(models)


def test_a_loader_that_is_read_once_does_not_hide_the_steps(counted: tuple[StepCounter, Notes]) -> None:
    counter, _ = counted
    (batch, _), *_ = data(4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(batch).mean().backward()
        optimizer.step()
    assert counter.updates == 40
    assert counter.step > 20


def test_what_looks_away_still_counts(counted: tuple[StepCounter, Notes]) -> None:
    counter, _ = counted
    counter.look_away()
    plain()
    assert (counter.step, counter.updates) == (4, 3)


def test_loaders_that_do_not_shuffle_are_told_apart() -> None:
    counter = StepCounter(Notes(), __file__)
    counter.install()
    samples = TensorDataset(torch.zeros(4))
    try:
        for shuffles in (True, False):
            DataLoader(samples, 2, shuffle=shuffles)
    finally:
        counter.remove()
    (first, line, name), (second, other, _) = counter.places
    assert (first, second, name) == ("loader", "other_loader", "DataLoader")
    assert line == other
