"""The end-of-run text: one screen, no codes, nothing unknown shown as zero."""

from __future__ import annotations

import re

import pytest

from frameworm.records.observations import Ceiling, Framework, Roofline
from frameworm.records.schema import (
    Batch,
    CheckpointStatistics,
    Communication,
    Compilation,
    ExpectedSpeedup,
    Finding,
    Memory,
    Phase,
    Quality,
    Remedy,
    RunRecord,
    Statistics,
    Throughput,
)
from frameworm.report.run.html import render_html
from frameworm.report.run.text import bar, render_text


def make_record() -> RunRecord:
    return RunRecord(
        name="ag_news",
        status="completed",
        environment={},
        batch=Batch(32, 1, 2, 64),
        wall_s=75.0,
        steps=1200,
        device="2x Some GPU",
        strategy="ddp",
        precision="bf16",
        throughput=Throughput(7543.2, 471444.0, Statistics(0.017, 0.001, 0.01, 0.03, 0.0169, 0.0188, 0.02)),
        phases={"forward": Phase(0.005, 0.25), "backward": Phase(0.010, 0.5), "other": Phase(0.005, 0.25)},
        communication=Communication(0.004, 0.0011, 1024),
        memory=Memory(3 * 2**30),
        quality=Quality(0.31, 0.55, 0.912),
        checkpoint=CheckpointStatistics(3, 0.25),
        notes=["a note that is long enough to need more than one line of eighty characters, so that it wraps"],
        run_dir="runs/ag_news-20300101-000000",
    )


def test_all_parts_are_there() -> None:
    text = render_text(make_record())
    for part in (
        "ag_news · completed · 2x Some GPU · ddp · bf16",
        "train loss 0.31",
        "validation loss 0.55",
        "validation accuracy 91.2%",
        "samples/s 7,543",
        "tokens/s 471,444",
        "step p50 16.9 ms",
        "step p95 18.8 ms",
        "global batch 64 = micro-batch 32 x accumulation 1 x world size 2",
        "peak 3.00 GiB",
        "3 written, stall 250 ms",
        "folder      runs/ag_news-20300101-000000",
    ):
        assert part in text
    backward = next(line for line in text.splitlines() if "backward" in line)
    forward = next(line for line in text.splitlines() if "forward" in line)
    assert "10.00 ms" in backward
    assert "50.0%" in backward
    assert backward.count("█") == pytest.approx(2 * forward.count("█"), abs=1)
    assert len(text.splitlines()) <= 24
    assert "verdict" not in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_lines_keep_to_the_width(width: int) -> None:
    for line in render_text(make_record(), width).splitlines():
        assert len(line) <= max(width, 40)
        assert line == line.rstrip()


def test_an_empty_record_shows_unknown_and_no_zero() -> None:
    text = render_text(RunRecord("x", "failed", {}, Batch(None, 1, 1, None)))
    assert text.startswith("x · failed\n")
    assert "samples/s unknown" in text
    assert "mean step" not in text
    assert " 0.0" not in text
    assert "0%" not in text


def test_a_script_that_tells_no_quality_has_no_line_of_it() -> None:
    record = RunRecord("x", "completed", {}, Batch(None, 1, 1, None), source="attached")
    assert "train loss" not in render_text(record)
    record.source = "engine"
    assert "train loss unknown" in render_text(record)


def test_compiling_is_told_where_there_was_any() -> None:
    record = make_record()
    assert "compile time" not in render_text(record)
    record.compilation = Compilation(time_s=12.34, graphs=3, recompilations=0)
    assert "compile time 12.3 s" in render_text(record)
    assert "recompilations" not in render_text(record)
    record.compilation.recompilations = 2
    assert "compile time 12.3 s  recompilations 2" in " ".join(render_text(record).split("\n           "))


def test_no_terminal_codes_get_through() -> None:
    record = make_record()
    record.name = "a\x1b[31mred"
    record.notes = ["bell\x07 and\nline"]
    record.run_dir = "runs/\x1b]0;title"
    text = render_text(record)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "note        bell  and line" in text


def test_findings_are_told_with_remedy_and_gain() -> None:
    record = make_record()
    record.verdict = "input_bound"
    record.findings = [
        Finding(
            "input_bound",
            "warning",
            0.4,
            {"wait_s": 0.02},
            [Remedy("data.num_workers", 4, "more loader processes")],
            ExpectedSpeedup(1.5, 1.3, 1.6, "modelled"),
        )
    ]
    text = render_text(record)
    assert "verdict     input bound" in text
    assert "input_bound (warning, costs 40.0%) wait 20.0 ms" in text
    assert "try: more loader processes (data.num_workers: 4)" in text
    assert "expected speedup 1.50x (1.30 to 1.60, modelled)" in text


def test_a_bar_is_drawn_to_an_eighth() -> None:
    assert bar(0.0, 8) == ""
    assert bar(1.0, 8) == "█" * 8
    assert bar(2.0, 8) == "█" * 8
    assert bar(0.5, 8) == "█" * 4
    assert bar(1 / 64, 8) == "▏"


def test_three_remedies_at_most_and_infos_on_one_line() -> None:
    record = make_record()
    record.verdict = "input_bound"
    remedies = [Remedy("data.num_workers", 4, "first"), Remedy("", None, "second")]
    record.findings = [
        Finding("input_bound", "critical", 0.4, {"io_wait": 0.25, "share_low": 0.35, "share_high": 0.45}, remedies),
        Finding("padding_waste", "warning", 0.2, {"padding_share": 0.3}, [*remedies, Remedy("", None, "third")]),
        Finding("memory_growth", "warning", None, {"growth_bytes_per_s": 2.0**20, "full_in_s": 7200.0}),
        Finding("memory_pressure", "warning", None, {"peak_bytes": 2**30}),
        Finding("compute_bound", "info", 0.4, {"forward_share": 0.4}),
    ]
    text = render_text(record)
    assert "input_bound (critical, costs 40.0%, 35.0% to 45.0%) io wait 25.0%\n" in text
    assert text.count("try: ") == 3
    assert "            try: second\n            expected speedup too uncertain for a figure" in text
    assert "padding 30.0%" in text
    assert "growth 1.00 MiB/s, full in 2 h 00 min" in text
    assert "also        memory_pressure (warning); compute_bound (info, takes 40.0%)" in text


def test_a_gain_that_is_too_uncertain_is_said_in_words() -> None:
    record = make_record()
    record.verdict = "host_bound"
    record.findings = [Finding("host_bound", "critical", 0.93, {"share_low": 0.8, "share_high": 0.99})]
    text = " ".join(render_text(record).split())
    limit = "the step is limited by how fast the host launches work, not by what the GPU computes"
    assert f"expected speedup too uncertain for a figure: {limit}" in text
    assert not re.search(r"speedup \d", text)
    assert limit in render_html(record)


def test_a_script_is_told_its_own_words_and_none_of_ours() -> None:
    record = make_record()
    record.verdict = "host_bound"
    line = 'model = torch.compile(model, mode="reduce-overhead")'
    record.findings = [Finding("host_bound", "critical", 0.6, {}, [Remedy("gpu.capture", "auto", line)])]
    record.roofline = Roofline({"launch_gaps": 0.6}, None, [Ceiling("launch_gaps", 0.6, 2.5, ["gpu.capture"])])
    for shown in (render_text(record), render_html(record)):
        assert "gpu.capture" in shown
    record.source = "attached"
    record.framework = Framework("transformers", "9.9", "Trainer", "TrainingArguments")
    text, page = render_text(record), render_html(record)
    assert "gpu.capture" not in text + page
    assert line in text
    assert "reduce-overhead" in page
    for shown in (text, page):
        assert "Trainer of transformers 9.9" in shown
        assert "at most 2.50x" in shown
    told = record.to_dict()
    assert told["framework"]["arguments"] == "TrainingArguments"
    assert told["findings"][0]["remedies"] == [{"knob": "gpu.capture", "value": "auto", "text": line}]
    assert RunRecord.from_dict(told).framework == record.framework


def test_targets_are_graded_where_known() -> None:
    record = make_record()
    record.throughput.samples_per_s = 2345.0
    text = " ".join(render_text(record).split())
    assert "targets GPU busy > 85% unknown, GPU memory > 70% unknown, samples/s > 1,000 met (2,345)" in text
    assert "checkpoint stall < 1 s met (83.3 ms)" in text
    record.throughput.samples_per_s = None
    record.checkpoint = CheckpointStatistics()
    assert "targets" not in render_text(record)
