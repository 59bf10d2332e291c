"""Two runs in lock step: what only rounds agrees, what is wrong does not, and neither run notices the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.data.steps import StepBatch
from frameworm.engine.gate import Gate, Passage, Session
from frameworm.engine.job import Ingredients, build_job
from frameworm.engine.lockstep import FollowingGate, LeadingGate, Plan
from frameworm.engine.optim.schedule import AnySchedule, NoSchedule, TorchSchedule
from frameworm.engine.session import run_job
from frameworm.engine.step.step import TrainStep
from frameworm.guard.agreement import ROUNDING_UNITS, Agreement, AgreementVerdict, judge_agreement
from frameworm.hardware.resolve import resolve_here

SAMPLES, BATCH = 160, 16
PLAN = Plan("", (4, 5, 6, 8, 10), early=(1, 2), updates=(2, 4))
UNIT = {"off": ROUNDING_UNITS["fp32"], "bf16": ROUNDING_UNITS["bf16"]}


@dataclass
class Case:
    """A model with its data, loss, optimizer and scheduler."""

    model: nn.Module
    data: TensorDataset
    loss_fn: Callable[..., Any] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda items: torch.optim.AdamW(items, 1e-3)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(limit: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


class Noisy(nn.Module):
    """An autoencoder that hides a part of its input by random numbers of its own, as masked models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        shown = (torch.rand_like(inputs) > 0.3) * inputs + 0.1 * torch.randn(inputs.shape)
        found: Tensor = self.outer(F.silu(self.inner(shown)))
        return found


class Experts(nn.Module):
    """Rows go to one of three layers by what they hold; the last is asked late and seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 12)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1)
        chosen = torch.where(ids[:, 0] == 63, 2, ids[:, 0] % 2)
        for index, expert in enumerate(self.experts):
            here = chosen == index
            if here.any():
                hidden = torch.where(here[:, None], torch.tanh(expert(hidden)), hidden)
        scores: Tensor = self.head(hidden)
        return scores


class Bags(nn.Module):
    """Sums of rows of a large table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(500, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(ids))
        return scores


class Spectral(nn.Module):
    """A norm that is followed by power iteration, and an input that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(10, 16))
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.mul_(0.5)
        scores: Tensor = self.second(F.gelu(self.norm(self.first(inputs))))
        return scores


class Tied(nn.Module):
    """A recurrent language model that reads and writes with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.GRU(16, 16, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight
        self.drops = 0.1

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(F.dropout(self.layers(self.table(ids))[0], self.drops, self.training))
        return scores


def per_token(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over tokens that are no padding, and how many those are."""
    real = targets != -100
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()), real.sum()


class Temperature(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores * self.scale, labels)


def tokens() -> TensorDataset:
    ids = numbers(40, SAMPLES, 9)
    targets = ids.roll(-1, 1)
    targets[torch.arange(9) >= numbers(9, SAMPLES, 1, seed=2) + 1] = -100
    return TensorDataset(ids, targets)


def few_of_the_last() -> TensorDataset:
    ids = numbers(63, SAMPLES, 5)
    ids[[70, 75, 100, 150], 0] = 63  # of steps 5, 7 and 10
    return TensorDataset(ids, ids[:, 1] % 4)


def with_groups(items: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": items[:2], "lr": 2e-3, "weight_decay": 0.1}, {"params": items[2:]}]
    return torch.optim.Adam(groups, lr=1e-3, foreach=True)


def sgd(items: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(items, 0.1)


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, [0.02, 0.01], 20)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 3))


def rows() -> TensorDataset:
    return TensorDataset(drawn(SAMPLES, 10), numbers(3, SAMPLES))


CASES: dict[str, Callable[[], Case]] = {
    "random numbers of its own": lambda: Case(Noisy(), TensorDataset(*[drawn(SAMPLES, 12)] * 2), F.mse_loss),
    "experts": lambda: Case(Experts(), few_of_the_last(), training={"clip_norm": 0.5}),
    "sparse": lambda: Case(
        Bags(), TensorDataset(numbers(500, SAMPLES, 6), numbers(3, SAMPLES)), None, sgd, training={"clip_norm": None}
    ),
    "spectral norm": lambda: Case(Spectral(), rows()),
    "tied weights": lambda: Case(Tied(), tokens(), per_token, training={"clip_norm": 1.0}),
    "a scheduler of torch": lambda: Case(perceptron(), rows(), None, with_groups, one_cycle),
    "a loss that learns": lambda: Case(perceptron(), rows(), Temperature()),
}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {},
    "micro-batches": {"training": {"accumulation": 4}},
    "bf16": {"gpu": {"mixed_precision": "bf16"}},
}


def build(name: str) -> Case:
    torch.manual_seed(7)
    return CASES[name]()


def config_of(case: Case, changes: Mapping[str, Mapping[str, Any]], world_size: int = 1) -> Config:
    values: dict[str, dict[str, Any]] = {
        "training": {"global_batch": BATCH, "epochs": 3, "max_steps": 20, **case.training},
        "gpu": {"device": "cpu", "mixed_precision": "off"},
        "parallel": {"strategy": "auto"},
        "observe": {"progress": False, "sinks": []},
        "data": {"num_workers": 0},
        "checkpoint": {"every_steps": None},
    }
    for section, settings in changes.items():
        values[section].update(settings)
    return resolve_here(load_config_from_mapping({"workload": "a.b:c", **values}, environ={}), world_size)


def train(case: Case, config: Config, gate: Gate | None) -> dict[str, Tensor]:
    """A whole run; the weights at its end."""
    learned = list(case.model.parameters())
    if isinstance(case.loss_fn, nn.Module):
        learned += case.loss_fn.parameters()
    optimizer = case.optimizer(learned)

    def schedule(total: int | None) -> AnySchedule:
        return NoSchedule() if case.scheduler is None else TorchSchedule(case.scheduler(optimizer))

    loader = DataLoader(case.data, config.training.micro_batch)
    given = Ingredients(case.model, optimizer, case.loss_fn, schedule, loader, gate=gate, seed=5)
    run_job(build_job(config, given))
    return {name: value.detach().clone() for name, value in case.model.state_dict().items()}


Fault = Callable[[Case], object]


class Pairs:
    """Both sides of a change in lock step, one after the other, as a proof compares them.

    A leading run that has left its states can be followed by many.
    """

    def __init__(self, folder: Path, world_size: int = 1) -> None:
        self._folder = folder
        self._world_size = world_size
        self._led: dict[Plan, bool | None] = {}

    def verdict(
        self,
        name: str,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        fault: Fault = lambda case: None,
        gate: type[FollowingGate] = FollowingGate,
        draws: bool = False,
    ) -> AgreementVerdict:
        """What a comparison says about a change, with or without a fault."""
        config = config_of(build(name), changes or {}, self._world_size)
        plan = replace(PLAN, folder=str(self._folder / name / config.gpu.mixed_precision))
        plan = replace(plan, precision=config.gpu.mixed_precision)
        agreement, is_random = self._follow(name, config, plan, fault, gate)
        if is_random and draws:
            plan = replace(plan, folder=f"{plan.folder}-draws", steps=plan.steps[:1], early=(), updates=(), draws=16)
            drawn, _ = self._follow(name, config, plan, fault, gate)
            agreement = replace(agreement, draws=drawn.draws)
        return judge_agreement(agreement)

    def _follow(
        self, name: str, config: Config, plan: Plan, fault: Fault, gate: type[FollowingGate]
    ) -> tuple[Agreement, bool]:
        if plan not in self._led:
            Path(plan.folder).mkdir(parents=True, exist_ok=True)
            leading = LeadingGate(plan)
            train(build(name), config_of(build(name), {}, self._world_size), leading)
            self._led[plan] = leading.random
        case = build(name)
        fault(case)
        following = gate(replace(plan, unit=UNIT[config.gpu.mixed_precision], wait_s=30.0))
        train(case, config, following)
        return following.agreement(), bool(self._led[plan])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("lockstep"))


# Micro-batches change a model whose layers count their passes or draw numbers themselves, and not every CPU has
# recurrent layers in bf16.
NOT_ROUNDING = {
    ("spectral norm", "micro-batches"),
    ("random numbers of its own", "micro-batches"),
    ("tied weights", "bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name in CASES for change in CHANGES if (name, change) not in NOT_ROUNDING]
)
def test_what_only_rounds_agrees(name: str, change: str, pairs: Pairs) -> None:
    verdict = pairs.verdict(name, CHANGES[change])
    assert verdict.passed is True, verdict.detail


def scaled(factor: float) -> Fault:
    """A wrong factor of the gradient of the last layer's weights."""

    def plant(case: Case) -> None:
        last = [item for item in case.model.parameters() if item.ndim > 1][-1]
        last.register_hook(lambda gradient: gradient * factor)

    return plant


def frozen(case: Case) -> None:
    next(case.model.parameters()).requires_grad_(False)


def other_samples(case: Case) -> None:
    case.data = TensorDataset(*(tensor.roll(1, 0) for tensor in case.data.tensors))


def other_rates(case: Case) -> None:
    usual = case.optimizer

    def build_optimizer(items: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = usual(items)
        optimizer.param_groups[-1]["lr"] *= 1.01
        return optimizer

    case.optimizer = build_optimizer


def lost_update(case: Case) -> None:
    """The optimizer leaves out one parameter, though its groups say otherwise."""
    usual = case.optimizer

    def build_optimizer(items: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = usual(items)
        step = optimizer.step

        def without_the_first(self: torch.optim.Optimizer, *given: Any, **named: Any) -> None:
            kept = items[0].detach().clone()
            step(*given, **named)
            with torch.no_grad():
                items[0].copy_(kept)

        optimizer.step = MethodType(without_the_first, optimizer)  # type: ignore[method-assign]
        return optimizer

    case.optimizer = build_optimizer


FAULTS: dict[str, Fault] = {
    "1.02 times a gradient": scaled(1.02),
    "no gradient": scaled(0.0),
    "frozen": frozen,
    "other samples": other_samples,
    "other rates": other_rates,
    "lost update": lost_update,
}


@pytest.mark.parametrize(
    ("name", "fault"),
    # A scheduler sets the rates itself, so wrong ones cannot be planted there. Every model and every fault is in the
    # fast tests, but not every pair of them.
    [
        pytest.param(name, fault, marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, name in enumerate(CASES)
        for j, fault in enumerate(FAULTS)
        if (name, fault) != ("a scheduler of torch", "other rates")
    ],
)
@pytest.mark.slow
def test_what_is_wrong_is_found(name: str, fault: str, pairs: Pairs) -> None:
    verdict = pairs.verdict(name, fault=FAULTS[fault])
    # Where every output is off, a model that draws random numbers may have drawn others: not accepted, but not refused.
    assert verdict.passed is False or "draw different ones" in verdict.detail, verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_neither_run_notices_that_it_is_compared(name: str, tmp_path: Path) -> None:
    def weights(gate: Gate) -> dict[str, Tensor]:
        case = build(name)
        case.model.apply(_without_dropout)  # a comparison switches it off, but for that of random draws
        return train(case, config_of(case, {}), gate)

    plan = replace(PLAN, folder=str(tmp_path))
    alone = weights(Ending(plan.steps[-1]))
    for gate in (LeadingGate(plan), FollowingGate(plan)):
        found = weights(gate)
        assert all(torch.equal(found[key], value) for key, value in alone.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied weights", "random numbers of its own"])
def test_neither_run_notices_that_its_random_draws_are_compared(name: str, tmp_path: Path) -> None:
    def weights(gate: Gate) -> dict[str, Tensor]:
        case = build(name)
        return train(case, config_of(case, {}), gate)

    plan = Plan(str(tmp_path), (4,), draws=6)
    alone = weights(Ending(4))
    for gate in (LeadingGate(plan), FollowingGate(plan)):
        found = weights(gate)
        assert all(torch.equal(found[key], value) for key, value in alone.items())


def _without_dropout(layer: nn.Module) -> None:
    if isinstance(layer, Tied):
        layer.drops = 0.0
    elif isinstance(layer, nn.RNNBase):
        layer.dropout = 0.0


class Ending(Gate):
    """Ends a run where a comparison would."""

    def __init__(self, last: int) -> None:
        self._last = last

    def enter(self, step: int) -> Passage:
        """Until the last step has been made."""
        return "end" if step > self._last else "go"


def no_dropout(case: Case) -> None:
    case.model.apply(_without_dropout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"), [(lambda case: None, ""), (no_dropout, "random draws"), (scaled(0.5), "gradient of")]
)
def test_dropout_is_compared_by_its_draws(fault: Fault, told: str, pairs: Pairs) -> None:
    verdict = pairs.verdict("tied weights", fault=fault, draws=True)
    assert verdict.passed is not bool(told), verdict.detail
    assert told in verdict.detail


def test_a_state_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    case = build("sparse")
    with pytest.raises(TimeoutError, match="no state to compare came"):
        train(case, config_of(case, {}), FollowingGate(replace(PLAN, folder=str(tmp_path), wait_s=0.1)))


def test_a_run_that_failed_leaves_dropout_as_it_was(tmp_path: Path) -> None:
    case = build("sparse")
    function = F.dropout

    def broken(module: nn.Module, inputs: Any) -> None:
        assert F.dropout is not function, "it is switched off"
        raise RuntimeError("planted")

    case.model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="planted"):
        train(case, config_of(case, {}), LeadingGate(replace(PLAN, folder=str(tmp_path))))
    assert F.dropout is function


class Normalised(nn.Module):
    """Has statistics that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores


CASES_OF_RANKS: dict[str, Callable[[], Case]] = {
    "batch norm": lambda: Case(Normalised(), rows()),
    "counted tokens": lambda: Case(Tied(), tokens(), per_token),
    "plain": lambda: Case(perceptron(), rows()),
}


class Alone(FollowingGate):
    """The gradients of rank 1 are its own, not the mean over the ranks."""

    def begin(self, session: Session) -> None:
        super().begin(session)
        step = session.step
        assert isinstance(step, TrainStep)
        gradients = step.gradients

        def own(batch: StepBatch, *more: Any) -> Any:
            with step.strategy.no_sync():
                gradients(batch, *more)
            kept = [item.grad for item in step.model.parameters()]
            step.update.clear()
            result = gradients(batch, *more)
            if step.strategy.rank == 1:
                for item, gradient in zip(step.model.parameters(), kept):
                    item.grad = gradient
            return result

        step.gradients = own  # type: ignore[method-assign]


def on_ranks(rank: int, world_size: int, name: str, folder: str, gate: str, strategy: str) -> tuple[bool | None, str]:
    """One rank of both sides; its verdict."""
    CASES.update(CASES_OF_RANKS)
    changes = {"parallel": {"strategy": strategy}}
    gates = {"honest": FollowingGate, "alone": Alone}
    verdict = Pairs(Path(folder), world_size).verdict(name, changes, gate=gates[gate])
    return verdict.passed, verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("name", CASES_OF_RANKS)
def test_ranks_that_average_their_gradients_agree(
    name: str, strategy: str, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    verdicts = run_ranks(on_ranks, 2, (name, str(tmp_path), "honest", strategy), timeout_s=120)
    assert [passed for passed, _ in verdicts] == [True, True], verdicts


@pytest.mark.slow
def test_a_rank_whose_gradients_are_its_own_is_found(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    verdicts = run_ranks(on_ranks, 2, ("plain", str(tmp_path), "alone", "ddp"), timeout_s=120)
    assert [passed for passed, _ in verdicts] == [True, False], verdicts
    assert "gradient of" in verdicts[1][1]
