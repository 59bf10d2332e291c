"""The tensors of a step are copied, put back where they were, and handed over in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from frameworm.numerics.state import StepTensors, read, whole, write


class Small(nn.Module):
    """Weights, a norm with buffers, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        scores: Tensor = self.layers(inputs)
        return scores


@pytest.fixture
def training() -> tuple[Small, torch.optim.Optimizer, StepTensors]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, StepTensors(model.named_parameters(), model.named_buffers(), optimizer)


def make_steps(model: Small, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        model(torch.randn(8, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


Training = tuple[Small, torch.optim.Optimizer, StepTensors]


def test_restored_tensors_keep_their_places_in_memory(training: Training) -> None:
    model, optimizer, tensors = training
    make_steps(model, optimizer, 2)
    saved = tensors.copy()
    places = {name: item.data_ptr() for name, item in tensors.live().items()}
    make_steps(model, optimizer, 3, seed=1)
    assert not torch.equal(model.layers[0].weight, saved["parameter layers.0.weight"])
    tensors.restore(saved)
    live = tensors.live()
    assert {name: item.data_ptr() for name, item in live.items()} == places
    assert all(torch.equal(live[name], value) for name, value in saved.items())
    assert set(saved) == set(live)


def test_all_that_a_step_changes_is_named(training: Training) -> None:
    model, optimizer, tensors = training
    assert "optimizer layers.0.weight exp_avg" not in tensors.live(), "there is none before the first step"
    make_steps(model, optimizer, 1)
    live = tensors.live()
    parameters = [name for name, _ in model.named_parameters()]
    assert {f"parameter {name}" for name in parameters} <= set(live)
    assert {f"optimizer {name} {key}" for name in parameters for key in ("exp_avg", "exp_avg_sq", "step")} <= set(live)
    assert {"buffer seen", "buffer layers.1.running_var", "buffer layers.1.num_batches_tracked"} <= set(live)


def test_a_run_that_is_restored_goes_on_as_it_did(training: Training) -> None:
    model, optimizer, tensors = training
    make_steps(model, optimizer, 2)
    saved = tensors.copy()
    make_steps(model, optimizer, 3, seed=1)
    first = tensors.copy()
    tensors.restore(saved)
    make_steps(model, optimizer, 3, seed=1)
    again = tensors.live()
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_plain_numbers_that_an_optimizer_counts_with_are_restored() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    tensors = StepTensors(table.named_parameters(), [], optimizer)

    def make_step() -> None:
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()

    make_step()
    assert isinstance(optimizer.state[table.weight]["step"], int), "the reason for this test"
    saved = tensors.copy()
    make_step()
    tensors.restore(saved)
    assert optimizer.state[table.weight]["step"] == 1
    assert isinstance(optimizer.state[table.weight]["step"], int)


def test_state_that_came_after_saving_is_forgotten(training: Training) -> None:
    model, optimizer, tensors = training
    saved = tensors.copy()
    make_steps(model, optimizer, 1)
    tensors.restore(saved)
    tensors.forget_new(saved)
    assert not any(optimizer.state.values())
    make_steps(model, optimizer, 1)
    saved = tensors.copy()
    tensors.forget_new(saved)
    assert all(optimizer.state[item] for item in model.parameters())


def test_what_is_not_saved_stays(training: Training) -> None:
    model, optimizer, tensors = training
    make_steps(model, optimizer, 1)
    moment = tensors.live()["optimizer layers.0.weight exp_avg"].clone()
    tensors.restore({"parameter layers.0.weight": torch.zeros(6, 4), "parameter of another model": torch.ones(3)})
    assert not model.layers[0].weight.any()
    assert torch.equal(tensors.live()["optimizer layers.0.weight exp_avg"], moment)


def test_further_tensors_may_come_later(training: Training) -> None:
    model, optimizer, _ = training
    others: dict[str, Tensor] = {}
    tensors = StepTensors(model.named_parameters(), model.named_buffers(), optimizer, lambda: others)
    assert "other scale" not in tensors.copy()
    others["scale"] = torch.tensor(8.0)
    saved = tensors.copy()
    others["scale"].fill_(4.0)
    tensors.restore(saved)
    assert others["scale"].item() == 8.0


def test_what_depends_on_the_values_is_told_that_they_were_restored(training: Training) -> None:
    model, optimizer, _ = training
    cast: list[Tensor] = []
    tensors = StepTensors(
        model.named_parameters(), [], optimizer, restored=lambda: cast.append(model.layers[0].bias.bfloat16())
    )
    tensors.restore({"parameter layers.0.bias": torch.full((6,), 3.0)})
    assert len(cast) == 1
    assert torch.equal(cast[0], torch.full((6,), 3.0, dtype=torch.bfloat16))


def test_copies_do_not_follow(training: Training) -> None:
    model, optimizer, tensors = training
    saved = tensors.copy()
    before = saved["parameter layers.0.bias"].clone()
    make_steps(model, optimizer, 1)
    assert torch.equal(saved["parameter layers.0.bias"], before)
    assert not any(value.requires_grad for value in saved.values())


def test_a_state_is_the_same_after_a_file(training: Training, tmp_path: Path) -> None:
    model, optimizer, tensors = training
    make_steps(model, optimizer, 1)
    saved = tensors.copy()
    content = {"tensors": whole(saved), "at": 3, "settings": {"betas": (0.9, 0.99), "name": None}}
    write(tmp_path / "state-0.pt", content)
    found = read(tmp_path / "state-0.pt")
    assert (found["at"], found["settings"]) == (3, content["settings"])
    assert all(torch.equal(found["tensors"][name], value) for name, value in saved.items())
    assert [path.name for path in tmp_path.iterdir()] == ["state-0.pt"]
