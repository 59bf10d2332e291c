"""The usual targets: met, missed, or unknown."""

from __future__ import annotations

import pytest
from planted_facts import GIB, around, gpu_system, make_record, make_steps

from frameworm.diagnose.targets import grade_targets
from frameworm.records.schema import Batch, CheckpointStatistics, Memory, RunRecord
from frameworm.report.kit.tables import target_rows


def test_an_empty_record_is_unknown_throughout() -> None:
    record = RunRecord("x", "failed", {}, Batch(None, 1, 1, None))
    assert [target.grade for target in grade_targets(record)] == ["unknown"] * 5
    assert target_rows(record) == []


@pytest.mark.parametrize(("good", "grade"), [(True, "met"), (False, "missed")])
def test_all_are_graded(good: bool, grade: str) -> None:
    record = make_record(
        make_steps(),
        "NVIDIA H200",
        memory=Memory(70 * GIB if good else 7 * GIB, None, 80 * GIB),
        checkpoint=CheckpointStatistics(4, 2.0 if good else 8.0),
        system=gpu_system(
            0.9 if good else 0.8, cpu_busy=around(0.3 if good else 0.9), io_wait=around(0.01 * (1 if good else 20))
        ),
    )
    targets = grade_targets(record)
    assert [(target.name, target.goal) for target in targets] == [
        ("GPU busy", "> 85%"),
        ("GPU memory", "> 70%"),
        ("CPU", "< 80%"),
        ("I/O wait", "< 10%"),
        ("checkpoint", "< 1 s"),
    ]
    assert {target.grade for target in targets} == {grade}
    assert [row.value for row in target_rows(record)][-1] == ("500 ms" if good else "2.00 s")


def test_a_cpu_has_no_gpu_targets() -> None:
    record = make_record(make_steps(), checkpoint=CheckpointStatistics(1, 0.5))
    assert [(row.name, row.grade) for row in target_rows(record)] == [
        ("CPU", "unknown"),
        ("I/O wait", "unknown"),
        ("checkpoint", "met"),
    ]


def test_memory_comes_from_the_driver_where_torch_does_not_say() -> None:
    system = gpu_system(gpu_memory_bytes=around(60.0 * GIB), gpu_memory_total_bytes=80 * GIB)
    record = make_record(make_steps(), "NVIDIA H200", memory=Memory(), system=system)
    assert grade_targets(record)[1].value == pytest.approx(0.75)
