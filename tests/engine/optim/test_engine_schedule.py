"""Learning rates over a run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from workbench import Steps, classification, mlp

from frameworm import Trainer
from frameworm.config.schema import TrainingConfig
from frameworm.engine.optim.schedule import SHAPES, Schedule, TorchSchedule, WarmUp
from frameworm.errors import ConfigError


def _rates(kind: str, total: int, warmup: float, **more: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Schedule(optimizer, kind, total, warmup, **more)
    rates = []
    for step in range(total):
        schedule.before_step(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_onecycle_is_torchs_without_momentum() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=50, cycle_momentum=False)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert _rates("onecycle", 50, 0.0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_climbs_and_falls_to_nothing(kind: str) -> None:
    rates = _rates(kind, 100, 0.1)
    assert rates[:10] == pytest.approx([0.05 * (index + 1) for index in range(10)])
    assert max(rates) == pytest.approx(0.5)
    assert all(first >= second for first, second in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01


def test_constant_stays() -> None:
    assert set(_rates("constant", 10, 0.0)) == {0.5}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_finite_positive_rates(kind: str, total: int) -> None:
    assert all(0 < rate <= 0.5 for rate in _rates(kind, total, 0.0))


def test_a_length_is_needed_and_said() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        Schedule(optimizer, "cosine", None, 0.0)
    Schedule(optimizer, "constant", None, 0.0).before_step(12345)


def test_wsd_climbs_stays_and_falls() -> None:
    rates = _rates("wsd", 100, 0.1, decay=0.2)
    assert rates[:10] == pytest.approx([0.05 * (index + 1) for index in range(10)])
    assert set(rates[10:81]) == {0.5}
    assert rates[80:] == pytest.approx([0.5 * (1 - index / 20) for index in range(20)])


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_falls_along_any_shape(shape: str) -> None:
    rates = _rates("wsd", 100, 0.0, decay=10.0, decay_shape=shape)
    assert set(rates[:91]) == {0.5}
    assert all(first > second > 0 for first, second in itertools.pairwise(rates[90:]))
    halfway = {"linear": 0.5, "cosine": 0.5, "sqrt": 1 - math.sqrt(0.5)}[shape]
    assert rates[95] == pytest.approx(0.5 * halfway)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_warm_up_may_be_a_number_of_steps(kind: str) -> None:
    assert _rates(kind, 200, 20.0) == pytest.approx(_rates(kind, 200, 0.1), abs=1e-12)


def test_a_longer_run_stays_at_the_peak_where_a_shorter_one_fell() -> None:
    shorter, longer = (_rates("wsd", total, 5.0, decay=10.0) for total in (50, 80))
    assert shorter[:41] == longer[:41]
    assert longer[45] == 0.5


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"warmup": 2.5}, "neither a share"),
        ({"decay": 1.5}, "neither a share"),
        ({"schedule": "wsd", "warmup": 0.5, "decay": 0.6}, "more than the whole run"),
        ({"decay": 0.0}, "decay"),
    ],
)
def test_lengths_that_cannot_be(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TrainingConfig(**values)


def test_a_torch_scheduler_does_not_notice_its_warm_up() -> None:
    rates = []
    for steps in (0, 4):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        inner = TorchSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        schedule = WarmUp(inner, optimizer, steps) if steps else inner
        seen = []
        for step in range(10):
            schedule.before_step(step)
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.after_step()
        rates.append((seen, schedule.state_dict()))
    (plain, state), (warmed, warmed_state) = rates
    assert warmed[:4] == pytest.approx([rate * (step + 1) / 4 for step, rate in enumerate(plain[:4])])
    assert warmed[4:] == plain[4:]  # to the bit: nothing was multiplied and divided again
    assert state == warmed_state


def _trained_rates(**settings: Any) -> list[float]:
    model, steps = mlp(), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = settings.pop("scheduler", None)
    trainer = Trainer(
        model,
        optimizer,
        scheduler=None if scheduler is None else scheduler(optimizer),
        callbacks=[steps],
        run_dir=None,
        device="cpu",
        **settings,
    )
    trainer.train(torch.utils.data.DataLoader(classification(40), 4))
    return [step.lr for step in steps.records]


@pytest.mark.slow
def test_keywords_of_the_trainer_name_a_course() -> None:
    assert _trained_rates() == [0.5] * 10
    assert _trained_rates(warmup=0.5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, *[0.5] * 5])
    assert _trained_rates(schedule="wsd", warmup=2, decay=5) == pytest.approx(
        [0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1]
    )
    step = _trained_rates(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1), warmup=4.0)
    assert step == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, *[0.05] * 5])


def test_a_warm_up_that_nobody_can_count_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Trainer(
        model, optimizer, scheduler=Schedule(optimizer, "cosine", 10, 0.1), warmup=0.1, run_dir=None, device="cpu"
    )
    with pytest.raises(ConfigError, match="a warm-up of its own"):
        trainer.train(torch.utils.data.DataLoader(classification(8), 4))


@pytest.mark.slow
def test_a_second_training_climbs_to_the_optimizers_own_rate(tmp_path: Path) -> None:
    model, steps = mlp(), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(classification(40), 4)
    trainer = Trainer(
        model, optimizer, schedule="linear", callbacks=[steps], run_dir=None, device="cpu", progress=False
    )
    trainer.train(loader)
    once = [step.lr for step in steps.records]
    trainer.train(loader)
    trainer.save(tmp_path / "state")
    trainer.load(tmp_path / "state")
    trainer.train(loader)
    assert [step.lr for step in steps.records] == 3 * once
    optimizer.param_groups[0]["lr"] = 0.25  # chosen by the user, and so another peak
    trainer.train(loader)
    assert [step.lr for step in steps.records[30:]] == pytest.approx([rate / 2 for rate in once])
