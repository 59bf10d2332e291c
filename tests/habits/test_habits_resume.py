"""A run that stopped goes on as if it had not: every sample once per epoch, in the order of an uninterrupted run."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from habit_cases import (
    QUICK,
    SAMPLES,
    Augmented,
    Numbered,
    PressCtrlC,
    Recorder,
    built,
    classification,
    flatten,
    on_ranks,
    require,
    train_recorded,
    values,
)
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from frameworm import Callback, Config, Trainer, run
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import FramewormError

BATCH = 8
EPOCH = SAMPLES // BATCH  # steps per epoch
IN_SECOND_EPOCH = EPOCH + 3  # a step in the middle of the second epoch


# Loaders that draw their order from a generator of their own


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _loader_with_generator() -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, shuffle=True, generator=_generator())


def _random_sampler() -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, sampler=RandomSampler(Numbered(), generator=_generator()))


def _subset_sampler() -> DataLoader[Any]:
    return DataLoader(Numbered(80), BATCH, sampler=SubsetRandomSampler(range(16, 80), generator=_generator()))


def _random_split() -> DataLoader[Any]:
    generator = _generator()
    train, _ = random_split(Numbered(80), [SAMPLES, 16], generator=generator)
    return DataLoader(train, BATCH, shuffle=True, generator=generator)


class _Drawn:
    """A sampler of the user's own, whose order a function draws."""

    def __init__(self, draw: Callable[[_Drawn], list[int]]) -> None:
        self.rng = np.random.default_rng(5)
        self.epoch = 0
        self.items = list(range(SAMPLES))
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self._draw(self))

    def __len__(self) -> int:
        return SAMPLES


def _numpy_sampler() -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, sampler=_Drawn(lambda it: it.rng.permutation(SAMPLES).tolist()))


def _counting_sampler() -> DataLoader[Any]:
    def draw(sampler: _Drawn) -> list[int]:
        return random.Random(sampler.epoch).sample(range(SAMPLES), SAMPLES)

    return DataLoader(Numbered(), BATCH, sampler=_Drawn(draw))


class _Batches:
    """A batch sampler of the user's own."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.rng.sample(range(SAMPLES), SAMPLES)
        return (order[start : start + BATCH] for start in range(0, SAMPLES, BATCH))

    def __len__(self) -> int:
        return EPOCH


def _batch_sampler() -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_sampler=_Batches())


class _OwnNoise(Numbered):
    """Augmentation from a generator that the data set holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(5)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + float(self.rng.random()) / 2, target


def _own_noise() -> DataLoader[Any]:
    return DataLoader(_OwnNoise(), BATCH, shuffle=True)


def _own_noise_ours() -> Any:
    return OptimizedDataLoader.create(_OwnNoise(), BATCH, num_workers=0)


def _own_noise_workers() -> Any:
    return OptimizedDataLoader.create(_OwnNoise(), BATCH, num_workers=2)


def _function() -> Any:
    def batches() -> Iterator[Any]:
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            part = order[start : start + BATCH]
            yield part[:, None].float(), part % 3

    return batches


def _check_second_epoch(whole: list[list[float]], first: list[list[float]], rest: list[list[float]]) -> None:
    require(len(first) == IN_SECOND_EPOCH, "the run did not stop in the middle of the second epoch")
    expected, found = whole[EPOCH:], [*first[EPOCH:], *rest]
    require(len(set(flatten(expected))) == SAMPLES, "the uninterrupted run does not train every sample once")
    # The whole part of an input is the sample's number.
    assert sorted(map(int, flatten(found))) == sorted(map(int, flatten(expected))), "every sample once in the epoch"
    assert found == expected, "the order and the values of an uninterrupted run"


@pytest.mark.parametrize(
    "make_loader",
    [
        _loader_with_generator,
        _random_sampler,
        _subset_sampler,
        _random_split,
        _numpy_sampler,
        _counting_sampler,
        _batch_sampler,
        _own_noise,
        _own_noise_ours,
        _own_noise_workers,
        _function,
    ],
)
def test_an_interrupted_epoch_trains_every_sample_once(
    tmp_path: Path, make_loader: Callable[[], DataLoader[Any]]
) -> None:
    whole = train_recorded(make_loader(), tmp_path / "whole", epochs=2)
    first = train_recorded(make_loader(), tmp_path / "parts", epochs=2, interrupt_in=IN_SECOND_EPOCH)
    rest = train_recorded(make_loader(), tmp_path / "parts", epochs=2, resume=True)
    _check_second_epoch(whole, first, rest)


def test_the_same_loader_object_can_go_on_after_ctrl_c(tmp_path: Path) -> None:
    """As in a notebook: the loader that was interrupted is passed to the resumed run."""
    whole = train_recorded(_loader_with_generator(), tmp_path / "whole", epochs=2)
    loader = _loader_with_generator()
    first = train_recorded(loader, tmp_path / "parts", epochs=2, interrupt_in=IN_SECOND_EPOCH)
    rest = train_recorded(loader, tmp_path / "parts", epochs=2, resume=True)
    _check_second_epoch(whole, first, rest)


def test_persistent_workers_draw_the_augmentation_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def train(folder: Path, **more: Any) -> list[list[float]]:
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        steps = train_recorded(loader, folder, epochs=2, **more)
        workers = getattr(loader, "_iterator", None)
        if workers is not None:  # left to the garbage collector, they would take seconds to end
            workers._shutdown_workers()
        return steps

    whole = train(tmp_path / "whole")
    first = train(tmp_path / "parts", interrupt_in=IN_SECOND_EPOCH)
    rest = train(tmp_path / "parts", resume=True)
    _check_second_epoch(whole, first, rest)


# Loaders that cannot be replayed


def _system_sampler() -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, sampler=_Drawn(lambda it: random.SystemRandom().sample(it.items, SAMPLES)))


def _in_place() -> DataLoader[Any]:
    def draw(sampler: _Drawn) -> list[int]:
        random.shuffle(sampler.items)
        return list(sampler.items)

    return DataLoader(Numbered(), BATCH, sampler=_Drawn(draw))


def _unseeded_function() -> Any:
    def unseeded() -> Iterator[Any]:
        order = torch.from_numpy(np.random.default_rng().permutation(SAMPLES))
        for start in range(0, SAMPLES, BATCH):
            part = order[start : start + BATCH]
            yield part[:, None].float(), part % 3

    return unseeded


@pytest.mark.parametrize(
    ("make_loader", "name"), [(_system_sampler, "_Drawn"), (_in_place, "_Drawn"), (_unseeded_function, "unseeded")]
)
def test_a_loader_that_cannot_be_replayed_is_named_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make_loader: Callable[[], Any], name: str
) -> None:
    def named() -> list[str]:
        return [record.getMessage() for record in caplog.records if name in record.getMessage()]

    class BeforeFirstStep(Callback):
        def on_step(self, step: Any) -> None:
            if step.step == 1:
                assert len(named()) == 1

    model = Recorder()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        run_dir=tmp_path / "run",
        callbacks=[BeforeFirstStep(), PressCtrlC(3)],
        **QUICK,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train(make_loader(), epochs=2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert any(name in note for note in summary["notes"])
    caplog.clear()
    train_recorded(make_loader(), tmp_path / "run", epochs=2, resume=True)
    assert any("trained twice" in text for text in named())


# Another global batch, another number of processes

TRAINED = 16  # samples before the interruption


def _loader(kind: str, batch_size: int) -> Any:
    if kind == "ours":
        return OptimizedDataLoader.create(Numbered(), batch_size, num_workers=0, seed=2)
    return DataLoader(Numbered(), batch_size, shuffle=kind == "shuffled")


def _check_each_sample_once(first: list[list[float]], rest: list[list[float]]) -> None:
    require(len(set(flatten(first))) == len(flatten(first)) < SAMPLES, "the run did not stop in its first epoch")
    seen = flatten([*first, *rest])
    untrained, repeated = sorted(set(range(SAMPLES)) - set(seen)), len(seen) - len(set(seen))
    assert not untrained, "samples of the epoch were never trained"
    assert not repeated, "samples were trained twice in the epoch"


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("ours", 4, 8), ("ours", 8, 4), ("ours", 4, 12), ("shuffled", 4, 8), ("shuffled", 8, 4)],
)
def test_resume_with_another_batch_size_trains_every_sample_once(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    first = train_recorded(_loader(kind, before), tmp_path / "run", interrupt_in=TRAINED // before)
    rest = train_recorded(_loader(kind, after), tmp_path / "run", resume=True)
    _check_each_sample_once(first, rest)


def _train_rank(
    rank: int, world_size: int, folder: str, kind: str, interrupt_in: int | None, resume: bool
) -> list[list[float]]:
    return train_recorded(_loader(kind, 4), Path(folder), interrupt_in=interrupt_in, resume=resume)


@pytest.mark.parametrize(("kind", "before", "after"), [("in order", 1, 2), ("ours", 2, 1)])
def test_resume_with_another_number_of_processes_trains_every_sample_once(
    run_ranks: Callable[..., Any], tmp_path: Path, kind: str, before: int, after: int
) -> None:
    """The batch per process stays, so the global batch changes with the number of processes."""

    def train(count: int, interrupt_in: int | None, resume: bool) -> list[list[float]]:
        if count == 1:
            return train_recorded(_loader(kind, 4), tmp_path / "run", interrupt_in=interrupt_in, resume=resume)
        by_rank = on_ranks(run_ranks, _train_rank, str(tmp_path / "run"), kind, interrupt_in, resume)
        return [step for steps in by_rank for step in steps]

    first = train(before, 3, False)
    _check_each_sample_once(first, train(after, None, True))


def _train_rank_or_refuse(rank: int, world_size: int, folder: str) -> list[list[float]] | None:
    try:
        return train_recorded(_loader("shuffled", 4), Path(folder), resume=True)
    except FramewormError:
        return None


def test_a_shuffled_loader_on_more_processes_trains_every_sample_once_or_is_refused(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    first = train_recorded(_loader("shuffled", 4), tmp_path / "run", interrupt_in=TRAINED // 4)
    by_rank = on_ranks(run_ranks, _train_rank_or_refuse, str(tmp_path / "run"))
    if None not in by_rank:
        _check_each_sample_once(first, [step for steps in by_rank for step in steps])


def _run_config(folder: Path, batch_size: int, interrupt_in: int | None, resume: bool) -> list[list[float]]:
    config = Config(
        workload="habit_cases:numbered_workload",
        model={"interrupt_in": interrupt_in},
        data={"num_workers": 0},
        training={"batch_size": batch_size, "epochs": 1, "optimizer": "sgd", "schedule": "constant"},
        gpu={"device": "cpu"},
        memory={"enable_automatic_gc": False},
    )
    stopped = False
    try:
        run(config, out=folder, resume="auto" if resume else None)
    except KeyboardInterrupt:
        stopped = True
    require(stopped == (interrupt_in is not None), "the run did not stop where the test wanted it to")
    return built[-1].steps


def _run_config_rank(rank: int, world_size: int, folder: str) -> list[list[float]]:
    return _run_config(Path(folder), 4, None, True)


@pytest.mark.parametrize("after", [8, 2])
def test_a_config_with_another_batch_size_trains_every_sample_once(tmp_path: Path, after: int) -> None:
    first = _run_config(tmp_path / "run", 4, TRAINED // 4, False)
    _check_each_sample_once(first, _run_config(tmp_path / "run", after, None, True))


def test_a_config_with_a_batch_size_per_device_goes_on_with_two_processes(
    run_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    first = _run_config(tmp_path / "run", 4, TRAINED // 4, False)
    by_rank = on_ranks(run_ranks, _run_config_rank, str(tmp_path / "run"))
    _check_each_sample_once(first, [step for steps in by_rank for step in steps])


# Runs that came to their end and are extended


@pytest.mark.parametrize(("kind", "epochs"), [("ours", 1), ("shuffled", 2)])
def test_a_run_that_ended_at_max_steps_can_finish_its_epoch(tmp_path: Path, kind: str, epochs: int) -> None:
    whole = train_recorded(_loader(kind, BATCH), tmp_path / "whole", epochs=epochs)
    first = train_recorded(_loader(kind, BATCH), tmp_path / "parts", epochs=epochs, max_steps=5)
    require(first == whole[:5], "the run did not stop after its fifth step")
    rest = train_recorded(_loader(kind, BATCH), tmp_path / "parts", epochs=epochs, resume=True)
    assert [*first, *rest] == whole


class _Stream(IterableDataset[Any]):
    """Samples of unknown number, so that nobody knows which step is an epoch's last."""

    def __iter__(self) -> Iterator[Any]:
        return iter(classification())


@pytest.mark.parametrize("data", [classification(), _Stream()], ids=["map", "stream"])
def test_a_cut_epoch_is_finished_as_if_it_had_not_been_validated(tmp_path: Path, data: Any) -> None:
    """Validation draws random numbers too (here its order), and plateau schedulers act on its figure."""

    def train(folder: str, max_steps: int | None, resume: bool = False) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        trainer = Trainer(
            model, optimizer, scheduler=scheduler, run_dir=tmp_path / folder, seed=0, max_steps=max_steps, **QUICK
        )
        validation = DataLoader(classification(16, seed=5), 4, shuffle=True)
        record = trainer.train(
            DataLoader(data, 4, shuffle=isinstance(data, TensorDataset)),
            validation,
            epochs=3,
            resume="auto" if resume else None,
        )
        require(len(record.epochs) == (2 if max_steps else 3), "the wrong number of epochs")
        return values(model)

    expected = train("whole", None)
    train("parts", 11)  # epochs have 8 steps
    assert torch.equal(train("parts", None, resume=True), expected)


PATIENT = {"metric": "train_loss", "patience": 100}


@pytest.mark.parametrize(
    ("limits", "more"),
    [
        ({"epochs": 1}, {"epochs": 3}),
        ({"epochs": 3, "max_steps": EPOCH}, {"epochs": 3, "max_steps": 2 * EPOCH}),
    ],
    ids=["epochs", "steps"],
)
def test_a_finished_run_with_early_stop_can_be_extended(
    tmp_path: Path, limits: dict[str, int], more: dict[str, int]
) -> None:
    whole = train_recorded(_loader("ours", BATCH), tmp_path / "whole", early_stop=PATIENT, **more)
    first = train_recorded(_loader("ours", BATCH), tmp_path / "parts", early_stop=PATIENT, **limits)
    require(first == whole[:EPOCH], "the first part is not one epoch")
    rest = train_recorded(_loader("ours", BATCH), tmp_path / "parts", early_stop=PATIENT, resume=True, **more)
    assert [*first, *rest] == whole


def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path: Path) -> None:
    # No epoch is better by so much than the one before: each counts as one without improvement.
    rule = {"metric": "train_loss", "min_delta": 1e6}
    first = train_recorded(_loader("ours", BATCH), tmp_path / "run", epochs=4, early_stop={**rule, "patience": 1})
    require(len(first) == 2 * EPOCH, "the run did not stop early, after its second epoch")
    rest = train_recorded(
        _loader("ours", BATCH), tmp_path / "run", epochs=4, early_stop={**rule, "patience": 3}, resume=True
    )
    assert len(rest) == 2 * EPOCH


# A second call of train()


def _train_twice(strategy: str, kind: str) -> list[torch.Tensor]:
    """The weights after each of two calls of train()."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    after = []
    for again in range(2):
        # "new trainer": the optimizer alone carries its state from one training to the next.
        if not again or kind == "new trainer":
            trainer = Trainer(model, optimizer, strategy=strategy, run_dir=None, **QUICK)
        trainer.train(DataLoader(classification(), 4))
        after.append(values(model))
    return after


def _train_twice_rank(rank: int, world_size: int, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return _train_twice("ddp", kind), _train_twice("zero1", kind)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "new trainer"])
def test_a_second_train_under_zero1_keeps_the_state_of_the_optimizer(run_ranks: Callable[..., Any], kind: str) -> None:
    expected, found = on_ranks(run_ranks, _train_twice_rank, kind)[0]
    require(torch.allclose(found[0], expected[0], atol=1e-5), "zero1 differs from ddp in the first train() already")
    assert torch.allclose(found[1], expected[1], atol=1e-5), "zero1 trains as ddp does"


def _train_divided_otherwise(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    large = nn.Linear(64, 64)
    optimizer = torch.optim.SGD([{"params": model.parameters()}], lr=0.1, momentum=0.9)
    Trainer(model, optimizer, strategy="zero1", run_dir=None, **QUICK).train(DataLoader(classification(), 4))
    optimizer.param_groups[0]["params"].insert(0, large.weight)
    model.add_module("large", large)
    try:
        loss = lambda model, batch: model[1](model[0](batch[0])).sum() + model.large.weight.sum()  # noqa: E731
        Trainer(model, optimizer, loss, strategy="zero1", run_dir=None, **QUICK).train(DataLoader(classification(), 4))
    except FramewormError as error:
        return str(error)
    return ""


def test_state_that_lies_on_another_rank_is_not_dropped_in_silence(run_ranks: Callable[..., Any]) -> None:
    for message in on_ranks(run_ranks, _train_divided_otherwise):
        assert "divided otherwise" in message


def _train_twice_divided(rank: int, world_size: int) -> list[str]:
    messages = []
    for strategy in ("zero2", "zero3"):
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(model, optimizer, strategy=strategy, run_dir=None, **QUICK)
        trainer.train(DataLoader(classification(), 4))
        try:
            trainer.train(DataLoader(classification(), 4))
        except FramewormError as error:
            messages.append(str(error))
    return messages


def test_a_second_train_of_divided_parameters_is_refused(run_ranks: Callable[..., Any]) -> None:
    for messages in on_ranks(run_ranks, _train_twice_divided):
        assert len(messages) == 2
        assert all("resume" in message for message in messages)


# resume="auto" without a name


def _tanh() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _relu() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _auto(model: nn.Module, data: Any, *, interrupt_after: int | None = None, run_dir: Any = "auto") -> nn.Module:
    """Train two epochs with the default name and `resume="auto"`."""
    callbacks = [] if interrupt_after is None else [PressCtrlC(interrupt_after)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, callbacks=callbacks, seed=0, run_dir=run_dir, **QUICK)
    stopped = False
    try:
        trainer.train(DataLoader(data, 4), epochs=2, resume=None if run_dir is None else "auto")
    except KeyboardInterrupt:
        stopped = True
    require(stopped == (interrupt_after is not None), "the run did not stop where the test wanted it to")
    return model


def _runs() -> int:
    return len(list(Path("runs").iterdir()))


def test_resume_auto_goes_on_with_the_unfinished_run_of_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = values(_auto(_tanh(), classification(), run_dir=None))
    _auto(_tanh(), classification(), interrupt_after=5)
    found = values(_auto(_tanh(), classification()))
    assert _runs() == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("other", ["model", "data"])
def test_resume_auto_does_not_adopt_the_run_of_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model = _relu if other == "model" else _tanh
    data = classification(40, seed=9) if other == "data" else classification()
    expected = values(_auto(make_model(), data, run_dir=None))
    _auto(_tanh(), classification(), interrupt_after=5)
    found = values(_auto(make_model(), data))
    assert torch.equal(found, expected), "the weights of a run that started afresh"
    assert _runs() == 2


SCRIPT = """
import torch
from frameworm import Trainer
from habit_cases import QUICK, PressCtrlC, classification

torch.manual_seed(3)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
callbacks = [] if interrupt_after is None else [PressCtrlC(interrupt_after)]
trainer = Trainer(model, optimizer, callbacks=callbacks, seed=0, **QUICK)
steps = 0
try:
    steps = trainer.train(torch.utils.data.DataLoader(classification(), 4), epochs=2, resume="auto").steps
except KeyboardInterrupt:
    pass
"""


def _run_script(path: Path, interrupt_after: int | None = None) -> None:
    result = runpy.run_path(str(path), {"interrupt_after": interrupt_after}, run_name="__main__")
    require((result["steps"] == 0) == (interrupt_after is not None), "the script did not stop where it should")


def test_resume_auto_goes_on_with_the_unfinished_run_of_the_same_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "first.py"
    script.write_text(SCRIPT.format(lr=0.1))
    _run_script(script, interrupt_after=5)
    _run_script(script)
    assert _runs() == 1


def test_resume_auto_does_not_adopt_the_run_of_another_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lr in (("first.py", 0.1), ("second.py", 0.2)):
        (tmp_path / name).write_text(SCRIPT.format(lr=lr))
    _run_script(tmp_path / "first.py", interrupt_after=5)
    _run_script(tmp_path / "second.py")
    assert _runs() == 2, "the second script starts a run of its own"
