"""Records survive the way through JSON."""

from __future__ import annotations

import json
import math

from frameworm.records.observations import OtherTime, Place
from frameworm.records.printable import speedup_in_words
from frameworm.records.schema import (
    Batch,
    CheckpointStatistics,
    Communication,
    EpochRecord,
    ExpectedSpeedup,
    Finding,
    Memory,
    Phase,
    Quality,
    Remedy,
    RunRecord,
    Statistics,
    StepRecord,
    Throughput,
    json_ready,
)


def full_record() -> RunRecord:
    return RunRecord(
        name="full",
        status="completed",
        environment={"torch": "2.13", "devices": ["a", "b"], "driver": None},
        batch=Batch(micro=32, accumulation=2, world_size=4, global_=256),
        started="2030-01-01T00:00:00+00:00",
        wall_s=12.5,
        steps=100,
        device="cpu",
        strategy="ddp",
        precision="bf16",
        parameters=1234,
        throughput=Throughput(10.0, 20.0, Statistics(1.0, 0.1, 0.8, 1.5, 1.0, 1.2, 1.4)),
        phases={"forward": Phase(0.4, 0.4), "other": Phase(0.6, 0.6)},
        communication=Communication(0.1, 0.05, 1000),
        memory=Memory(1, 2, 3, 4),
        mfu=0.4,
        padding_waste=0.1,
        quality=Quality(0.5, 0.6, 0.9),
        checkpoint=CheckpointStatistics(3, 0.2),
        skipped_steps=1,
        verdict="input_bound",
        findings=[
            Finding(
                "input_bound",
                "warning",
                0.3,
                {"wait_s": 0.1},
                [Remedy("data.num_workers", 4, "use more workers")],
                ExpectedSpeedup(1.3, 1.2, 1.4, "modelled"),
            )
        ],
        other_time=OtherTime(9, {"writing": 9}, [Place("train.py", 7, "log", "writing", 9, 0.6)]),
        notes=["a note"],
        epochs=[EpochRecord(1, 5.0, 0.5, 0.6, 0.9, 10.0), EpochRecord(2, 5.0, None, None, None, None)],
        run_dir="runs/full",
    )


def through_json(record: RunRecord) -> RunRecord:
    return RunRecord.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


def test_a_full_record_comes_back_equal() -> None:
    record = full_record()
    assert through_json(record) == record


def test_a_record_of_nulls_comes_back_equal_and_holds_nulls() -> None:
    record = RunRecord("empty", "failed", {}, Batch(None, 1, 1, None))
    data = record.to_dict()
    assert data["batch"] == {"micro": None, "accumulation": 1, "world_size": 1, "global": None}
    assert data["throughput"] == {"samples_per_s": None, "tokens_per_s": None, "step_s": None}
    assert data["quality"] == {"train_loss": None, "val_loss": None, "val_accuracy": None}
    assert data["mfu"] is None
    assert through_json(record) == record


def test_non_finite_numbers_come_back_but_names_stay_names() -> None:
    record = full_record()
    record.name = "nan"
    record.quality.train_loss = math.inf
    record.epochs[1].train_loss = -math.inf
    record.mfu = math.nan
    back = through_json(record)
    assert back.name == "nan"
    assert back.quality.train_loss == math.inf
    assert back.epochs[1].train_loss == -math.inf
    assert back.mfu is not None
    assert math.isnan(back.mfu)


def test_keys_of_later_versions_are_ignored() -> None:
    data = full_record().to_dict()
    data["invented"] = 1
    data["quality"]["invented"] = 2
    data["findings"][0]["remedies"][0]["invented"] = 3
    assert RunRecord.from_dict(data) == full_record()


def test_json_ready_takes_numpy_numbers_and_odd_objects() -> None:
    import numpy

    ready = json_ready({"a": numpy.int64(3), "b": numpy.float32(0.5), "c": (1, math.nan), 4: {"x"}, "p": object})
    assert ready["a"] == 3
    assert type(ready["a"]) is int
    assert ready["b"] == 0.5
    assert ready["c"] == [1, "nan"]
    assert ready["4"] == ["x"]
    json.dumps(ready, allow_nan=False)


def test_a_step_needs_its_keys_and_ignores_others() -> None:
    data = {"step": 1, "epoch": 1, "time": 0.0, "step_s": 0.1, "loss": "nan", "lr": None, "samples": 2, "count": 2.0}
    step = StepRecord.from_dict({**data, "invented": 5, "phases": {"forward": "inf"}})
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert step.phases == {"forward": math.inf}
    assert step.tokens is None


def test_a_record_with_unknown_numbers_can_be_shown() -> None:
    record = RunRecord("empty", "failed", {}, Batch(None, 1, 1, None))
    record.steps = None  # type: ignore[assignment]
    assert "unknown steps" in repr(record)
    assert speedup_in_words(None, 1.0, None) == "unknown as fast (1.00 to unknown)"
