"""Weights kept in half precision: training stays what autocast makes of it, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from frameworm.data.steps import StepBatch
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.schedule import Schedule
from frameworm.engine.optim.update import Update
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.step import TrainStep
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.observe.clocks.phases import HostClock
from frameworm.parallel.strategy import Strategy

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 4)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.second(self.norm(self.first(values).relu()))
        return result

    def autocast_parameters(self) -> Iterator[tuple[nn.Module, str]]:
        for module in (self.first, self.second):
            yield module, "weight"
            yield module, "bias"


def make_step(seed: int = 0, clip_norm: float | None = 0.1) -> TrainStep:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    strategy, precision = Strategy(CPU), Precision("bf16", CPU)
    schedule = Schedule(optimizer, "linear", 200, 0.0)
    update = Update(model.parameters(), optimizer, schedule, precision, clip_norm, CPU)
    return TrainStep(model, model, LossFunction(model), update, strategy, precision, HostClock())


def batch(step: int, accumulation: int) -> StepBatch:
    draw = torch.Generator().manual_seed(step)
    micros = [
        (torch.randn(6, 8, generator=draw), torch.randint(0, 4, (6,), generator=draw)) for _ in range(accumulation)
    ]
    return StepBatch(micros, [6] * accumulation, 6 * accumulation)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip_norm", [0.1, None])
def test_training_is_that_of_autocast(accumulation: int, clip_norm: float | None) -> None:
    plain, ours = make_step(clip_norm=clip_norm), make_step(clip_norm=clip_norm)
    ours.update.half_weights = halves = HalfWeights.of(ours.model, torch.bfloat16)
    assert halves is not None
    seen: list[torch.dtype] = []
    first = ours.model.first
    assert isinstance(first, nn.Linear)
    first.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    for step in range(5):
        expected, found = plain.run(step, batch(step, accumulation)), ours.run(step, batch(step, accumulation))
        assert torch.equal(expected.loss, found.loss)
    assert set(seen) == {torch.bfloat16}
    for expected_item, item in zip(plain.model.parameters(), ours.model.parameters()):
        assert item.dtype == torch.float32
        assert item.grad is None
        assert torch.equal(expected_item, item)
    for half in halves.tensors:
        assert half.grad is None
    weight = halves.beside(first.weight)
    assert weight is not None
    assert torch.equal(weight, first.weight.bfloat16())


def test_what_somebody_writes_into_a_parameter_counts() -> None:
    plain, ours = make_step(), make_step()
    ours.update.half_weights = HalfWeights.of(ours.model, torch.bfloat16)
    other = make_step(seed=1).model.state_dict()
    for step in (plain, ours):
        step.run(0, batch(0, 1))
        step.model.load_state_dict(other)
    assert torch.equal(plain.run(1, batch(1, 1)).loss, ours.run(1, batch(1, 1)).loss)


def test_a_restored_state_counts() -> None:
    """As in a comparison: the state may come from a run without such copies."""
    plain, ours, other = make_step(), make_step(), make_step(seed=1)
    ours.update.half_weights = halves = HalfWeights.of(ours.model, torch.bfloat16)
    assert halves is not None
    saved = other.tensors().copy()
    for step in (plain, ours):
        step.run(0, batch(0, 1))
        step.tensors().restore(saved)
    first = other.model.first
    assert isinstance(first, nn.Linear)
    assert torch.equal(halves.tensors[0], first.weight.bfloat16()), "at once, for steps that do not ask"
    assert torch.equal(plain.run(1, batch(1, 1)).loss, ours.run(1, batch(1, 1)).loss)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("from_step", [0, 2])
def test_gradient_hooks_run_as_without_copies(accumulation: int, from_step: int) -> None:
    plain, ours = make_step(), make_step()
    ours.update.half_weights = halves = HalfWeights.of(ours.model, torch.bfloat16)
    assert halves is not None
    seen: list[list[Tensor]] = [[], []]

    def register(step: TrainStep, found: list[Tensor]) -> None:
        first, second = step.model.first, step.model.second
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)

        def halve(gradient: Tensor) -> Tensor:
            found.append(gradient.clone())
            return gradient * 0.5

        def double(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.grad.mul_(2)

        first.weight.register_hook(halve)
        second.bias.register_post_accumulate_grad_hook(double)

    for step in range(4):
        if step == from_step:
            for each, found in zip((plain, ours), seen):
                register(each, found)
        assert torch.equal(
            plain.run(step, batch(step, accumulation)).loss, ours.run(step, batch(step, accumulation)).loss
        )
    expected, found = seen
    assert len(found) == 2 * accumulation * (4 - from_step)
    for one, other in zip(expected, found, strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)
    for expected_item, item in zip(plain.model.parameters(), ours.model.parameters()):
        assert torch.equal(expected_item, item)
    first, second = ours.model.first, ours.model.second
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    assert halves.leaf(first.weight) is first.weight
    assert halves.leaf(second.weight) is halves.beside(second.weight)
    assert torch.equal(halves.tensors[0], first.weight.bfloat16()), "a graph that was recorded before may read it"


def test_the_parameters_are_back_after_an_error() -> None:
    step = make_step()
    step.update.half_weights = HalfWeights.of(step.model, torch.bfloat16)
    wrong = StepBatch([(torch.randn(6, 9), torch.zeros(6, dtype=torch.long))], [6], 6)
    with pytest.raises(RuntimeError):
        step.run(0, wrong)
    assert {item.dtype for item in step.model.parameters()} == {torch.float32}


def test_which_parameters() -> None:
    model = Net()
    model.first.weight.requires_grad_(False)
    parametrize.register_parametrization(model.second, "weight", nn.Identity())
    halves = HalfWeights.of(model, torch.bfloat16)
    assert halves is not None
    assert [tuple(item.shape) for item in halves.tensors] == [(16,), (4,)]
    assert halves.beside(model.first.weight) is None

    shared = Net()
    shared.twin = nn.Linear(8, 16)
    shared.twin.weight = shared.first.weight
    halves = HalfWeights.of(shared, torch.bfloat16)
    assert halves is not None
    assert halves.beside(shared.first.weight) is None
    assert halves.beside(shared.second.weight) is not None

    assert HalfWeights.of(Net(), torch.float16) is None
    assert HalfWeights.of(Net(), None) is None
    assert HalfWeights.of(nn.Linear(2, 2), torch.bfloat16) is None


def test_the_shipped_models_name_what_autocast_casts() -> None:
    texts = TextClassifier(50, 3, 16, 2, 2, 32, 8)
    decoder = GPT(50, 16, 2, 2, 8)
    for model, in_layers, elsewhere in ((texts, 2 * 8, 2), (decoder, 2 * 8, 0)):  # the classifier's head is one more
        halves = HalfWeights.of(model, torch.bfloat16)
        assert halves is not None
        named = {name for name, item in model.named_parameters() if halves.beside(item) is not None}
        assert not any("norm" in name or "embedding" in name for name in named)
        assert sum(name.startswith("layers") for name in named) == in_layers
        assert len(named) == in_layers + elsewhere
