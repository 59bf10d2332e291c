"""Everything that learns is treated alike: parameters of the loss, and parameters unfrozen during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from habit_cases import QUICK, PressCtrlC, classification, on_ranks, require, values
from torch import nn
from torch.utils.data import DataLoader

from frameworm import Callback, Trainer
from frameworm.errors import FramewormError

CLIP = 1e-3


# A loss with parameters of its own


class ArcFace(nn.Module):
    """A margin loss over angles; the class centres and the scale of the cosines are learned."""

    def __init__(self, features: int = 4, classes: int = 3, margin: float = 0.2) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, features))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self._margin = margin

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cosines = F.normalize(output) @ F.normalize(self.centres).T
        margins = F.one_hot(target, len(self.centres)) * self._margin
        return F.cross_entropy((cosines - margins) * self.log_scale.exp(), target)


def _embedding_and_loss(seed: int = 0) -> tuple[nn.Module, ArcFace]:
    torch.manual_seed(seed)
    return nn.Linear(6, 4), ArcFace()


def _train_with_loss(
    model: nn.Module,
    loss: nn.Module,
    batch_size: int,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    lr: float = 0.5,
    **settings: Any,
) -> None:
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=lr, momentum=0.9)
    trainer = Trainer(model, optimizer, loss, run_dir=run_dir, **QUICK, **settings)
    trainer.train(DataLoader(classification(), batch_size), resume="auto" if resume else None)


def test_clipping_covers_the_parameters_of_the_loss() -> None:
    model, loss = _embedding_and_loss()
    before = torch.cat([values(model), values(loss)])
    _train_with_loss(model, loss, 8, lr=1.0, max_steps=1, clip_norm=CLIP)
    moved = torch.cat([values(model), values(loss)]) - before
    require(moved.norm() > CLIP / 2, "nothing was trained")
    assert float(moved.norm()) == pytest.approx(CLIP, rel=1e-2), "one step at a rate of 1 moves by the clipped norm"


def _train_with_loss_rank(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    model, loss = _embedding_and_loss(seed=rank)  # as with the model, the weights of rank 0 count
    _train_with_loss(model, loss, 4)
    return values(model), values(loss)


def test_the_parameters_of_the_loss_are_the_same_on_all_ranks(run_ranks: Callable[..., Any]) -> None:
    model, loss = _embedding_and_loss()
    _train_with_loss(model, loss, 8)
    first, second = on_ranks(run_ranks, _train_with_loss_rank)
    require(torch.equal(first[0], second[0]), "the model itself differs from rank to rank")
    assert torch.equal(first[1], second[1]), "replicas of the loss are equal"
    assert torch.allclose(first[1], values(loss), atol=1e-4), "two ranks train as one process with the global batch"
    assert torch.allclose(first[0], values(model), atol=1e-4)


def test_the_parameters_of_the_loss_are_saved_and_resumed(tmp_path: Path) -> None:
    model, loss = _embedding_and_loss()
    _train_with_loss(model, loss, 4)
    stopped_model, stopped_loss = _embedding_and_loss()
    with pytest.raises(KeyboardInterrupt):
        _train_with_loss(stopped_model, stopped_loss, 4, run_dir=tmp_path / "run", callbacks=[PressCtrlC(3)])
    resumed_model, resumed_loss = _embedding_and_loss()
    _train_with_loss(resumed_model, resumed_loss, 4, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(values(resumed_loss), values(loss))
    assert torch.equal(values(resumed_model), values(model))


def test_an_optimizer_that_holds_none_of_the_models_parameters_is_refused() -> None:
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    with pytest.raises(FramewormError, match="optimizer"):
        Trainer(model, torch.optim.SGD(other.parameters(), lr=0.1), run_dir=None, **QUICK).train(
            DataLoader(classification(), 8)
        )


class Centred(nn.Module):
    """A loss without parameters that remembers: the running mean of outputs, subtracted from them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.modes: list[bool] = []

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.mean, target)


def test_what_a_loss_remembers_is_saved_and_resumed(tmp_path: Path) -> None:
    def train(loss: Centred, **settings: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        settings = {"run_dir": None, **settings}
        resume = settings.pop("resume", None)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, **QUICK, **settings)
        trainer.train(DataLoader(classification(), 4), DataLoader(classification(8, seed=1), 8), resume=resume)

    whole, stopped, resumed = Centred(), Centred(), Centred()
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, run_dir=tmp_path / "run", callbacks=[PressCtrlC(3)])
    train(resumed, run_dir=tmp_path / "run", resume="auto")
    assert torch.equal(resumed.mean, whole.mean)
    assert whole.modes == [*[True] * 8, False], "validation puts the loss into evaluation mode"
    assert whole.training


# Parameters unfrozen during training


def _half_frozen() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


class Unfreeze(Callback):
    """Unfreezes the first layer after a step or an epoch; adds it to the optimizer if it is not there."""

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        *,
        step: int | None = None,
        epoch: int | None = None,
    ) -> None:
        self._layer = model[0]
        self._optimizer = optimizer
        self._step = step
        self._epoch = epoch

    def on_step(self, step: Any) -> None:
        if step.step == self._step:
            self._unfreeze()

    def on_epoch(self, epoch: Any) -> None:
        if epoch.epoch == self._epoch:
            self._unfreeze()

    def _unfreeze(self) -> None:
        self._layer.requires_grad_(True)
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        added = [parameter for parameter in self._layer.parameters() if id(parameter) not in held]
        if added:
            self._optimizer.add_param_group({"params": added})


class Norms(Callback):
    """Keeps the gradient norm of every step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step(self, step: Any) -> None:
        self.norms.append(step.grad_norm)


@pytest.mark.parametrize("held", [True, False], ids=["in the optimizer", "added to it"])
def test_clipping_covers_parameters_unfrozen_during_training(held: bool) -> None:
    model = _half_frozen()
    before = values(model[0])
    optimizer = torch.optim.SGD(model.parameters() if held else model[2].parameters(), lr=1.0)
    callbacks = [Unfreeze(model, optimizer, step=2)]
    trainer = Trainer(model, optimizer, callbacks=callbacks, clip_norm=CLIP, max_steps=3, run_dir=None, **QUICK)
    trainer.train(DataLoader(classification(), 8))
    moved = float((values(model[0]) - before).norm())
    require(moved > 0, "the unfrozen layer was not trained")
    assert moved <= CLIP * 1.01, "one step at a rate of 1 moves by the clipped norm at most"


def _plain_norms(unfreeze_after: int, batches: Iterator[Any]) -> list[float]:
    """The gradient norms of a plain training loop."""
    model = _half_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step, (inputs, target) in enumerate(batches):
        model[0].requires_grad_(step >= unfreeze_after)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
    return norms


def test_the_gradient_norm_covers_parameters_unfrozen_during_training() -> None:
    expected = _plain_norms(2, iter(DataLoader(classification(), 8)))
    model = _half_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = Norms()
    callbacks = [Unfreeze(model, optimizer, step=2), norms]
    trainer = Trainer(model, optimizer, callbacks=callbacks, clip_norm=1e3, run_dir=None, **QUICK)
    trainer.train(DataLoader(classification(), 8))
    require(norms.norms[:2] == pytest.approx(expected[:2]), "the norms differ before anything was unfrozen")
    assert norms.norms == pytest.approx(expected, rel=1e-4)


def _unfreeze_after_an_epoch(batch_size: int, **settings: Any) -> nn.Sequential:
    model = _half_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    callbacks = [Unfreeze(model, optimizer, epoch=1)]
    trainer = Trainer(model, optimizer, callbacks=callbacks, run_dir=None, **QUICK, **settings)
    trainer.train(DataLoader(classification(), batch_size), epochs=2)
    return model


def _unfreeze_rank(rank: int, world_size: int) -> torch.Tensor:
    return values(_unfreeze_after_an_epoch(4, strategy="ddp"))


def test_parameters_unfrozen_during_training_are_equal_on_all_ranks(run_ranks: Callable[..., Any]) -> None:
    expected = _unfreeze_after_an_epoch(8)
    require(not torch.equal(values(expected[0]), values(_half_frozen()[0])), "the unfrozen layer was not trained")
    first, second = on_ranks(run_ranks, _unfreeze_rank)
    assert torch.equal(first, second), "replicas are equal"
    assert torch.allclose(first, values(expected), atol=1e-4), "two ranks train as one process with the global batch"


def test_a_run_that_was_stopped_after_unfreezing_goes_on_with_what_was_unfrozen(tmp_path: Path) -> None:
    def train(held: bool, stop: int | None = None, **settings: Any) -> torch.Tensor:
        model = _half_frozen()
        optimizer = torch.optim.SGD(model.parameters() if held else model[2].parameters(), lr=0.5, momentum=0.9)
        callbacks: list[Any] = [Unfreeze(model, optimizer, step=2), *([] if stop is None else [PressCtrlC(stop)])]
        resume = settings.pop("resume", None)
        settings = {"run_dir": None, "clip_norm": 0.1, **settings}
        Trainer(model, optimizer, callbacks=callbacks, **QUICK, **settings).train(
            DataLoader(classification(), 4), resume=resume
        )
        return values(model)

    for held in (True, False):
        folder = tmp_path / str(held)
        with pytest.raises(KeyboardInterrupt):
            train(held, stop=4, run_dir=folder)
        assert torch.equal(train(held, run_dir=folder, resume="auto"), train(held))


def _train_everything(batch_size: int, change: str, **settings: Any) -> torch.Tensor:
    """A loss with parameters, and a layer that is frozen, unfrozen or given to the optimizer in mid-epoch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    loss = ArcFace()
    loss.log_scale = nn.Parameter(torch.ones(1))
    model[0].requires_grad_(change == "freeze")
    held = [*model[2].parameters(), *loss.parameters()]
    optimizer = torch.optim.AdamW(held if change == "add" else [*model[0].parameters(), *held], lr=0.05)

    class Change(Callback):
        def on_step(self, step: Any) -> None:
            if step.step == 3:
                model[0].requires_grad_(change != "freeze")
                if change == "add":
                    optimizer.add_param_group({"params": list(model[0].parameters())})

    settings = {"callbacks": [Change()], "clip_norm": 0.5, "run_dir": None, **settings}
    Trainer(model, optimizer, lambda output, target: loss(output, target), **QUICK, **settings).train(
        DataLoader(classification(), batch_size), DataLoader(classification(8, seed=1), 4)
    )
    tensors = [*model.parameters(), *loss.parameters()]
    whole = [item.full_tensor() if hasattr(item, "full_tensor") else item for item in tensors]
    return torch.cat([item.detach().flatten() for item in whole])


CHANGES = ("unfreeze", "add", "freeze")


def _train_everything_rank(rank: int, world_size: int, strategy: str) -> list[torch.Tensor]:
    return [_train_everything(2, change, strategy=strategy, accumulation=2) for change in CHANGES]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.slow
def test_what_trains_may_change_in_mid_epoch_under_every_strategy(run_ranks: Callable[..., Any], strategy: str) -> None:
    first, second = on_ranks(run_ranks, _train_everything_rank, strategy)
    for change, found, other in zip(CHANGES, first, second):
        assert torch.equal(found, other), f"{change}: replicas are equal"
        assert torch.allclose(found, _train_everything(8, change), atol=1e-4), f"{change}: as one process"


class UnfreezesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _half_frozen()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            self.inner[0].requires_grad_(True)
        result: torch.Tensor = self.inner(inputs)
        return result


def _unfreeze_inside_rank(rank: int, world_size: int) -> str:
    model = UnfreezesItself()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, **QUICK)
    try:
        trainer.train(DataLoader(classification(), 4))
    except FramewormError as error:
        return str(error)
    return ""


def test_unfreezing_inside_a_step_is_refused_where_ranks_would_differ(run_ranks: Callable[..., Any]) -> None:
    assert all("between two steps" in message for message in on_ranks(run_ranks, _unfreeze_inside_rank))


# Layers that the user has put into evaluation mode


def _with_frozen_statistics() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3))
    model.train()
    model[1].eval()
    return model


@pytest.mark.parametrize("validates", [False, True], ids=["no validation", "validation"])
def test_batch_norm_in_evaluation_mode_stays_in_it(validates: bool) -> None:
    expected = _with_frozen_statistics()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, target in DataLoader(classification(), 8):
            optimizer.zero_grad()
            F.cross_entropy(expected(inputs), target).backward()
            optimizer.step()
    model = _with_frozen_statistics()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, **QUICK)
    validation = DataLoader(classification(8, seed=1), 8) if validates else None
    trainer.train(DataLoader(classification(), 8), validation, epochs=2)
    assert torch.equal(model[1].running_mean, expected[1].running_mean), "running statistics stay as they were"
    assert torch.allclose(values(model), values(expected), atol=1e-6), "trained as in a plain loop"
    assert not model[1].training
    assert model[2].training, "layers in training mode stay in it"
