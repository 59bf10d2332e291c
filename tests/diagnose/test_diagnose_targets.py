"""The usual targets: met, missed, or unknown."""

from __future__ import annotations

from typing import Any

import pytest
from planted_facts import GIB, around, gpu_system, make_record, make_steps

from frameworm.config.observe_section import TargetsConfig
from frameworm.diagnose.targets import grade_targets
from frameworm.records.schema import Batch, CheckpointStatistics, EpochRecord, Memory, RunRecord, Throughput
from frameworm.report.kit.tables import target_rows


def test_an_empty_record_is_unknown_throughout() -> None:
    record = RunRecord("x", "failed", {}, Batch(None, 1, 1, None))
    assert [target.grade for target in grade_targets(record)] == ["unknown"] * 8
    assert target_rows(record) == []


@pytest.mark.parametrize(("good", "grade"), [(True, "met"), (False, "missed")])
def test_all_are_graded(good: bool, grade: str) -> None:
    record = make_record(
        make_steps(),
        "NVIDIA H200",
        memory=Memory(70 * GIB if good else 7 * GIB, None, 80 * GIB),
        checkpoint=CheckpointStatistics(4, 2.0 if good else 8.0, 3.0 if good else 12.0),
        throughput=Throughput(samples_per_s=1500.0 if good else 999.0),
        system=gpu_system(
            0.9 if good else 0.8,
            cpu_busy=around(0.3 if good else 0.9),
            io_wait=around(0.01 * (1 if good else 20)),
            host_memory=around(0.5 if good else 0.85),
        ),
    )
    targets = grade_targets(record)
    assert [(target.label, target.goal) for target in targets] == [
        ("GPU busy", "> 85%"),
        ("GPU memory", "> 70%"),
        ("samples/s", "> 1,000"),
        ("CPU", "< 80%"),
        ("I/O wait", "< 10%"),
        ("system memory", "< 80%"),
        ("checkpoint save", "< 1 s"),
        ("checkpoint stall", "< 1 s"),
    ]
    assert {target.grade for target in targets} == {grade}
    assert [row.value for row in target_rows(record)][-2:] == (["750 ms", "500 ms"] if good else ["3.00 s", "2.00 s"])


def test_a_cpu_has_no_gpu_targets() -> None:
    record = make_record(make_steps(), checkpoint=CheckpointStatistics(1, 0.5))
    grades = {row.name: row.grade for row in target_rows(record)}
    assert grades == {
        "samples/s": "met",
        "CPU": "unknown",
        "I/O wait": "unknown",
        "system memory": "unknown",
        "checkpoint save": "unknown",
        "checkpoint stall": "met",
    }


def test_limits_are_the_users_and_off_leaves_a_target_out() -> None:
    record = make_record(make_steps(), throughput=Throughput(samples_per_s=50.0))
    limits = TargetsConfig(
        samples_per_s=40, cpu=None, io_wait=None, host_memory=None, checkpoint_save_s=None, checkpoint_stall_s=None
    )
    (target,) = grade_targets(record, limits)
    assert (target.name, target.goal, target.limit, target.value, target.grade) == (
        "samples_per_s", "> 40", 40, 50.0, "met",
    )  # fmt: skip


@pytest.mark.parametrize(("mfu", "grade"), [(0.5, "met"), (0.3, "missed"), (None, "unknown")])
def test_mfu_is_a_target_where_it_is_asked_for(mfu: float | None, grade: str) -> None:
    record = make_record(make_steps(), environment={"device": "NVIDIA H200"}, mfu=mfu)
    assert {item.name: item.grade for item in grade_targets(record, TargetsConfig(mfu=0.4))}["mfu"] == grade
    assert "mfu" not in {item.name for item in grade_targets(record)}


@pytest.mark.parametrize(
    ("settings", "value", "grade"),
    [
        ({"quality": 0.8}, 20.0, "met"),
        ({"quality": 0.8, "time_to_quality_s": 19.0}, 20.0, "missed"),
        ({"quality": 0.8, "time_to_quality_s": 21.0}, 20.0, "met"),
        ({"quality": 0.99}, None, "missed"),
        ({"quality": 0.5, "quality_metric": "val_loss"}, 30.0, "met"),
        ({"quality": 0.1, "quality_metric": "train_loss"}, None, "unknown"),
    ],
)
def test_time_to_quality(settings: dict[str, Any], value: float | None, grade: str) -> None:
    curve = [(0.7, 0.9), (0.85, 0.6), (0.9, 0.5)]
    epochs = [EpochRecord(index + 1, 10.0, None, loss, accuracy, None) for index, (accuracy, loss) in enumerate(curve)]
    record = make_record(make_steps(), epochs=epochs)
    found = {item.name: item for item in grade_targets(record, TargetsConfig(**settings))}["time_to_quality_s"]
    assert (found.value, found.grade) == (value, grade)


def test_stored_grades_are_shown_as_they_were_given() -> None:
    record = make_record(make_steps(), throughput=Throughput(samples_per_s=50.0))
    record.targets = grade_targets(record, TargetsConfig(samples_per_s=40))
    again = RunRecord.from_dict(record.to_dict())
    assert again.targets == record.targets
    assert [(row.goal, row.grade) for row in target_rows(again) if row.name == "samples/s"] == [("> 40", "met")]


def test_memory_comes_from_the_driver_where_torch_does_not_say() -> None:
    system = gpu_system(gpu_memory_bytes=around(60.0 * GIB), gpu_memory_total_bytes=80 * GIB)
    record = make_record(make_steps(), "NVIDIA H200", memory=Memory(), system=system)
    assert grade_targets(record)[1].value == pytest.approx(0.75)
