"""Where a GPU's step goes, and what can be gained by it at most."""

from __future__ import annotations

import pytest

from frameworm.diagnose.roofline import KNOBS, ceilings, roofline
from frameworm.diagnose.rules.judge import apply_judgement, judge
from frameworm.records.observations import Flops, Roofline
from frameworm.records.schema import Batch, RunRecord
from frameworm.records.trace import DeviceTime, HostTime, TraceStep, TraceSummary
from frameworm.report.run.html import render_html
from frameworm.report.run.text import render_text


def trace(**waits: float) -> TraceSummary:
    """One second: 0.4 of products, 0.1 of attention, 0.1 of other kernels, the rest as given."""
    kernels = {"matrix_products": 0.4, "attention": 0.1, "other_kernels": 0.1}
    idle = sum(waits.values())
    device = DeviceTime(0, 0.6 + idle, 0.6, idle, 0.6, 0.0, 0.0, waits, 1, "NVIDIA H200", kernels)
    steps = [TraceStep(1, 0.6 + idle, 0.0, 10, device_wall_s=0.6 + idle)]
    return TraceSummary("trace.json", 0.6 + idle, 100, HostTime(0.0, 0.0, 0.0), devices=[device], steps=steps)


def test_all_of_the_time_is_told() -> None:
    found = roofline(trace(host=0.2, queued=0.05, data_loading=0.1, communication=0.03, transfer=0.02))
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["launch_gaps"] == pytest.approx(0.25)
    assert found.shares["data_wait"] == pytest.approx(0.1)
    assert set(found.shares) == set(KNOBS)


def test_no_setting_gains_more_than_its_part_of_the_step() -> None:
    found = roofline(trace(host=0.25, data_loading=0.15))
    assert found is not None
    first, second, *_ = found.ceilings
    assert (first.part, second.part) == ("launch_gaps", "data_wait")
    assert first.speedup == pytest.approx(1 / 0.75)
    assert "gpu.capture" in first.knobs
    assert all(item.part != "matrix_products" for item in found.ceilings), "how fast they could be is not known"


def test_products_can_come_as_near_to_the_peak_as_was_reached() -> None:
    flops = Flops(per_step=2e14, attention_share=0.2, peak_per_s=8e14)  # 0.2 of the 0.4 seconds at the peak
    found = roofline(trace(host=0.4), flops)
    assert found is not None
    assert found.products_of_peak == pytest.approx(0.5)
    (products,) = [item for item in found.ceilings if item.part == "matrix_products"]
    assert products.speedup == pytest.approx(1 / 0.8)
    flops.achievable_per_s = 4e14
    best = roofline(trace(host=0.4), flops)
    assert best is not None
    assert best.products_of_peak == pytest.approx(1)
    assert all(item.part != "matrix_products" for item in best.ceilings)


def test_a_step_that_is_all_gap_has_a_finite_ceiling() -> None:
    (only,) = ceilings(Roofline({"launch_gaps": 1.0}))
    assert only.speedup == pytest.approx(1000)


def test_without_a_gpu_there_is_none() -> None:
    assert roofline(None) is None
    assert roofline(TraceSummary("trace.json", 1.0, 10, HostTime(1.0, 0.0, 0.0))) is None


def test_the_reports_show_it() -> None:
    record = RunRecord("run", "completed", {}, Batch(4, 1, 1, 4), device="NVIDIA H200")
    apply_judgement(record, judge(record, trace=trace(host=0.25, data_loading=0.15)))
    stored = RunRecord.from_dict(record.to_dict())
    assert stored.roofline == record.roofline
    text = render_text(stored)
    assert "launch gaps" in text
    assert "25.0%: at most 1.33x (gpu.capture" in text
    assert "launch gaps 25.0%" in render_html(stored, [], "")
