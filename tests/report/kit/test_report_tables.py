"""Numbers as people read them; what is unknown says so."""

from __future__ import annotations

import math

import pytest

from frameworm.records.schema import Batch, CheckpointStatistics, EpochRecord, Finding, Memory, Phase, RunRecord
from frameworm.report.kit import tables
from frameworm.report.run.network_text import communication_text


def empty_record() -> RunRecord:
    return RunRecord("empty", "failed", {}, Batch(None, 1, 1, None))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (0.0, "0 s"),
        (0.0000123, "12.3 us"),
        (0.00234, "2.34 ms"),
        (0.0999, "99.9 ms"),
        (0.9999, "1.00 s"),
        (59.99, "1 min 00 s"),
        (61.0, "1 min 01 s"),
        (3723.0, "1 h 02 min"),
        (math.nan, "nan"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert tables.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (0, "0 B"), (1000, "1000 B"), (1536, "1.50 KiB"), (2**30 - 1, "1.00 GiB"), (2**53, "8192 TiB")],
)
def test_data_size(value: int | None, text: str) -> None:
    assert tables.data_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (0.0, "0"), (0.123456, "0.1235"), (1234.5, "1,234"), (7.0, "7"), (math.inf, "inf")],
)
def test_number(value: float | None, text: str) -> None:
    assert tables.number(value) == text


def test_share_and_plain() -> None:
    assert tables.share(0.1234) == "12.3%"
    assert tables.share(None) == "unknown"
    assert tables.plain("a\x1b[31mb\nc") == "a [31mb c"


def test_the_batch_is_shown_as_a_product() -> None:
    assert tables.batch_text(Batch(32, 1, 2, 64)) == (
        "global batch 64 = micro-batch 32 x accumulation 1 x world size 2"
    )
    assert tables.batch_text(Batch(None, 1, 2, None)).startswith("global batch unknown = micro-batch unknown x")


def test_unknown_is_never_zero() -> None:
    record = empty_record()
    assert [figure.value for figure in tables.quality_figures(record)] == ["unknown"] * 3
    assert [figure.value for figure in tables.speed_figures(record)] == ["unknown"] * 3
    assert tables.memory_text(record) == "peak unknown"
    assert communication_text(record) is None
    assert tables.checkpoint_text(record) == "none written"
    record.checkpoint = CheckpointStatistics(2, None)
    assert tables.checkpoint_text(record) == "2 written, stall unknown"


def test_memory_says_what_it_is_part_of() -> None:
    record = empty_record()
    record.memory = Memory(2**29, None, 2**30, 2**20)
    assert tables.memory_text(record) == "peak 512 MiB of 1.00 GiB (50.0%), host peak 1.00 MiB"


def test_phases_are_in_step_order_and_keep_their_numbers() -> None:
    record = empty_record()
    record.phases = {"other": Phase(0.1, 0.1), "mine": Phase(0.2, 0.2), "communication_exposed": Phase(0.7, 0.7)}
    rows = tables.phase_rows(record)
    assert [row.label for row in rows] == ["exposed communication", "other", "mine"]
    assert [row.share for row in rows] == [0.7, 0.1, 0.2]


def test_a_verdict_nobody_reached_is_left_out() -> None:
    record = empty_record()
    assert tables.verdict_text(record) is None
    record.verdict = "healthy"
    assert tables.verdict_text(record) == "healthy"
    record.verdict = "inconclusive"
    record.findings = [Finding("input_bound", "info", None, {"wait_s": 0.25, "ranks": [0, 1]})]
    assert tables.verdict_text(record) == "inconclusive"
    assert tables.finding_rows(record)[0].evidence == "wait 250 ms, ranks 0, 1"


def test_epoch_cells_without_a_value_are_empty() -> None:
    assert tables.epoch_rows([EpochRecord(1, 2.0, None, None, 0.5, None)]) == [("1", "2.00 s", "", "", "50.0%", "")]


def test_the_environment_is_flattened() -> None:
    rows = tables.environment_rows({"gpu": {"name": ["a", "b"], "driver": None}, "cpus": 4, "cuda": False, "none": {}})
    assert rows == [("gpu.name", "a, b"), ("gpu.driver", "unknown"), ("cpus", "4"), ("cuda", "no"), ("none", "none")]
