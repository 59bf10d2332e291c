"""Records become the values that trackers get."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from frameworm.observe.loggers.points import StepPoints, epoch_values, summary_values
from frameworm.records.schema import Batch, EpochRecord, Quality, RunRecord, StepRecord


def step(number: int, time: float, **values: Any) -> StepRecord:
    fields = {"step_s": 0.5, "loss": 1.0, "lr": 0.1, "samples": 4, "count": 4.0, **values}
    return StepRecord(number, 1, time, **fields)


def test_a_point_sums_up_the_steps_since_the_last() -> None:
    points = StepPoints(1.0, world_size=2)
    first = points.add(step(1, 10.0))
    assert first is not None
    assert first.step == 1
    assert points.add(step(2, 10.4, loss=2.0, count=1.0, grad_norm=1.0)) is None
    second = points.add(step(3, 11.0, loss=4.0, count=3.0, grad_norm=3.0, lr=0.2, step_s=1.5))
    assert second is not None
    assert second.step == 3
    assert second.values == {
        "train/loss": pytest.approx(3.5),  # weighted by count
        "train/grad_norm": 2.0,
        "train/lr": 0.2,
        "time/step_s": 1.0,
        "time/samples_per_s": 8.0,
    }
    assert points.rest() is None


def test_every_step_is_a_point_with_no_interval_and_the_rest_is_not_lost() -> None:
    points = StepPoints(0.0)
    assert [point.step for number in range(1, 4) if (point := points.add(step(number, 5.0)))] == [1, 2, 3]
    points = StepPoints(100.0)
    made = [points.add(step(number, float(number))) for number in range(200)]
    assert [point.step for point in made if point] == [0, 100]
    rest = points.rest()
    assert rest is not None
    assert rest.step == 199


def test_mfu_tokens_and_memory_are_told_where_they_are_known() -> None:
    asked: list[tuple[Any, ...]] = []

    def mfu(*sums: Any) -> float:
        asked.append(sums)
        return 0.25

    point = StepPoints(0.0, 1, mfu, lambda: 1000).add(step(1, 0.0, tokens=8))
    assert point is not None
    assert asked == [(4, 8, 16.0, 0.5)]
    names = ("time/mfu", "memory/peak_bytes", "time/tokens_per_s")
    assert [point.values[name] for name in names] == [0.25, 1000.0, 16.0]
    unknown = StepPoints(0.0, 1, lambda *_: None).add(step(1, 0.0))
    assert unknown is not None
    assert not set(names) & set(unknown.values)


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    points = StepPoints(0.0)
    point = points.add(step(1, 0.0, loss=math.nan, grad_norm=math.inf))
    assert point is not None
    assert "train/loss" not in point.values
    assert "train/grad_norm" not in point.values


def test_an_epoch_tells_all_of_its_numbers_whatever_their_names() -> None:
    @dataclasses.dataclass
    class Richer(EpochRecord):
        metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    epoch = Richer(3, 2.0, 1.5, None, 0.75, 100.0, metrics={"f1": 0.5, "bad": math.nan})
    assert epoch_values(epoch) == {
        "epoch": 3.0,
        "epoch/time_s": 2.0,
        "epoch/train_loss": 1.5,
        "epoch/val_accuracy": 0.75,
        "epoch/samples_per_s": 100.0,
        "epoch/f1": 0.5,
    }


def test_the_summary_is_flat_and_has_no_unknowns() -> None:
    class Version(str):
        """As torch.__version__."""

    record = RunRecord("a", "completed", {"torch": Version("2.13")}, Batch(4, 1, 1, 4), steps=7)
    record.quality = Quality(train_loss=0.5)
    summary = summary_values(record)
    assert summary["status"] == "completed"
    assert (summary["steps"], summary["batch.global"], summary["quality.train_loss"]) == (7, 4, 0.5)
    assert "quality.val_loss" not in summary
    assert type(summary["environment.torch"]) is str
