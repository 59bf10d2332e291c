"""What a trainer is given is checked before anything is built."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Callback, Trainer
from frameworm.distributed import DistributedTrainer
from frameworm.engine.given import check_callbacks, check_given, check_loader
from frameworm.errors import ConfigError, DataError

MODEL = nn.Linear(2, 2)
LOADER = DataLoader(TensorDataset(torch.zeros(4, 2)), 2)


class OwnStep(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The loss, as Lightning asks for it."""
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


def _lbfgs_with_scheduler() -> torch.optim.Optimizer:
    optimizer = torch.optim.LBFGS(MODEL.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((lambda inputs: inputs, _sgd(), None, None), "model must be a torch module"),
        ((MODEL, [_sgd(), _sgd()], None, None), "one optimizer, not a list of 2"),
        ((MODEL, {"all": _sgd()}, None, None), "one optimizer, not a dict.*frameworm profile SCRIPT"),
        ((MODEL, ([_sgd(), _sgd()], []), None, None), "one optimizer, not a tuple.*frameworm tune SCRIPT"),
        ((OwnStep(), _sgd(), None, None), "OwnStep has a method training_step.*frameworm profile SCRIPT"),
        ((MODEL, _sgd(), lambda target, output: output.sum(), None), "target came first"),
        ((MODEL, torch.optim.AdamW, None, None), "build it"),
        ((MODEL, functools.partial(torch.optim.AdamW, lr=0.1), None, None), "not a partial"),
        ((MODEL, MODEL.parameters(), None, None), "not a generator"),
        ((MODEL, nn.CrossEntropyLoss(), _sgd(), None), r"not a CrossEntropyLoss: Trainer\(model, optimizer"),
        ((MODEL, torch.optim.LBFGS(MODEL.parameters()), None, None), "LBFGS"),
        ((MODEL, _lbfgs_with_scheduler(), None, None), "LBFGS"),
        ((MODEL, _sgd(), torch.optim.lr_scheduler.StepLR(_sgd(), 1), None), "scheduler="),
        ((MODEL, _sgd(), "mse", None), "not a str"),
        ((MODEL, _sgd(), None, [torch.optim.lr_scheduler.StepLR(_sgd(), 1)]), "one scheduler"),
        ((MODEL, _sgd(), None, 0.1), "method step"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_given(*arguments)
    with pytest.raises(ConfigError, match=says):
        Trainer(*arguments)


@pytest.mark.parametrize(
    "keyword",
    [
        {"training_step": lambda model, batch: model(batch)},
        {"optimizers": [_sgd(), _sgd()]},
        {"optimizers": (_sgd(), None)},
        {"discriminator": {"optimizer": _sgd()}},
        {"configure_optimizers": _sgd},
        {"critic_optimizer": _sgd()},
    ],
)
def test_a_loop_of_the_users_own_is_sent_to_the_script_verbs(keyword: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting .*frameworm profile SCRIPT.*frameworm tune SCRIPT"):
        Trainer(MODEL, _sgd(), **keyword)


@pytest.mark.parametrize("method", ["training_step", "compute_loss", "configure_optimizers"])
def test_a_subclass_with_a_step_that_is_never_called_is_refused(method: str) -> None:
    own = type("Own", (DistributedTrainer,), {method: lambda self, *arguments: None})
    with pytest.raises(ConfigError, match=f"Own.{method} would never be called.*frameworm profile SCRIPT"):
        own(MODEL, _sgd())
    type("Plain", (DistributedTrainer,), {"greet": lambda self: None})(MODEL, _sgd())


def test_a_training_step_is_no_hindrance_where_the_loss_is_given() -> None:
    check_given(OwnStep(), _sgd(), nn.MSELoss(), None)


def test_usual_arguments_are_taken() -> None:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own into the optimizer
    check_given(MODEL, optimizer, nn.CrossEntropyLoss(), scheduler)
    check_given(MODEL, optimizer, None, lambda total_steps: scheduler)
    check_given(MODEL, optimizer, lambda y, t: (y - t).square().mean(), None)
    check_loader(LOADER, "train_loader")
    check_loader(list(LOADER), "val_loader")
    check_loader(None, "val_loader")


class OtherLibrary:
    def on_train_batch_end(self, trainer: Any, outputs: Any) -> None:
        """A method that nobody calls here."""


class OtherArguments:
    def on_step(self, trainer: Any, batch: Any) -> None:
        """Called with one argument here."""


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([OtherLibrary()], "OtherLibrary is not a callback"),
        ([OtherArguments()], "OtherArguments: on_step"),
        ([Callback], "is a class"),
        (Callback(), "must be a list"),
    ],
)
def test_callbacks_that_could_not_be_called_are_refused(callbacks: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_callbacks(callbacks)


def test_methods_of_a_callback_that_are_never_called_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Habit(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            """As other libraries call it."""

    check_callbacks([Callback(), Habit()])
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "callback Habit: on_epoch_end is never called"
    ]


def test_no_callbacks_may_be_written_as_none() -> None:
    assert check_callbacks(None) == []


@pytest.mark.parametrize("loaders", [[LOADER, LOADER], (LOADER,), {"a": LOADER}, {}])
def test_several_loaders_are_refused(loaders: Any) -> None:
    with pytest.raises(DataError, match="val_loader must be"):
        check_loader(loaders, "val_loader")


def test_several_validation_loaders_are_to_have_names() -> None:
    with pytest.raises(DataError, match="give each a name"):
        check_loader([LOADER, LOADER], "val_loader", several=True)
    check_loader({"dev": LOADER, "test": LOADER}, "val_loader", several=True)


def test_parameters_in_fp16_are_refused_unless_they_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.weight is in fp16.*enable_mixed_precision"):
        Trainer(model, optimizer)
    model[0].requires_grad_(False)
    Trainer(model, optimizer)


def test_a_loss_that_is_a_sum_is_named() -> None:
    for reduction, is_named in (("sum", True), ("mean", False)):
        trainer = Trainer(MODEL, _sgd(), nn.MSELoss(reduction=reduction), run_dir=None)
        record = trainer.train([(torch.zeros(2, 2), torch.zeros(2, 2))])
        assert any("reduction='sum'" in note for note in record.notes) == is_named
