"""The page: complete, self-contained, and nothing a run says can become markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from frameworm.records.observations import Bucket, OtherTime, Place, RankSummary, SystemSample
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
)
from frameworm.records.series import SeriesPoint
from frameworm.report.run.charts import step_timeline, timeline_chart, validation_points
from frameworm.report.run.html import render_html, set_option

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects them with their attributes and texts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def make_record(word: str = "demo") -> RunRecord:
    return RunRecord(
        name=word,
        status="completed",
        environment={"torch": "2.13", word: [word, 1]},
        batch=Batch(32, 1, 2, 64),
        started="2030-01-01T00:00:00+00:00",
        wall_s=75.0,
        steps=30,
        device=word,
        strategy="ddp",
        precision="bf16",
        parameters=1_000_000,
        throughput=Throughput(7543.2, None, Statistics(0.017, 0.001, 0.01, 0.03, 0.0169, 0.0188, 0.02)),
        phases={"forward": Phase(0.015, 0.75), word: Phase(0.001, 0.05), "other": Phase(0.004, 0.2)},
        memory=Memory(3 * 2**30),
        quality=Quality(0.31, 0.55, 0.912),
        checkpoint=CheckpointStatistics(3, 0.25),
        notes=[f"note {word}"],
        epochs=[EpochRecord(1, 2.0, 0.7, 0.8, 0.5, 100.0), EpochRecord(2, 2.0, 0.3, None, None, None)],
        run_dir=f"runs/{word}",
    )


def make_series(count: int = 30) -> list[SeriesPoint]:
    return [SeriesPoint(step, 1 + (step - 1) // 10, 1.0 / step, 0.02, 1) for step in range(1, count + 1)]


def test_the_page_holds_every_part() -> None:
    page = Page(render_html(make_record(), make_series(), "name: demo\nseed: 0\n"))
    text = "\n".join(page.texts)
    for part in ("demo", "0.31", "91.2%", "7,543", "16.9 ms", "forward", "75.0%", "2.13", "name: demo\nseed: 0"):
        assert part in text
    assert "global batch 64 = micro-batch 32 x accumulation 1 x world size 2" in text
    assert len([attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]) == 3
    assert "Verdict" not in text
    assert any(tag == "details" for tag, _ in page.tags)
    assert any(attrs.get("name") == "viewport" for tag, attrs in page.tags if tag == "meta")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    source = render_html(make_record(), make_series(), "a: 1")
    tags = {tag for tag, _ in Page(source).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=|\bhref=", source)
    assert "prefers-color-scheme: dark" in source


def test_words_of_a_run_stay_words() -> None:
    record = make_record(EVIL)
    record.verdict = EVIL
    record.findings = [
        Finding(
            EVIL,
            EVIL,
            0.1,
            {EVIL: EVIL},
            [Remedy(EVIL, EVIL, EVIL)],
            ExpectedSpeedup(1.5, 1.3, 1.6, EVIL),
        )
    ]
    page = Page(render_html(record, make_series(), f"name: {EVIL}\n</pre></details>"))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert EVIL in page.texts
    assert f"name: {EVIL}\n</pre></details>" in page.texts
    assert f"note {EVIL}" in page.texts
    assert any("1.50x (1.30 to 1.60" in text for text in page.texts)


def test_a_run_that_recorded_nothing_still_has_a_page() -> None:
    page = Page(render_html(RunRecord("x", "failed", {}, Batch(None, 1, 1, None))))
    assert "No steps were recorded." in page.texts
    assert "No phases were measured." in page.texts
    assert "unknown" in page.texts
    assert not any(attrs.get("role") == "img" for _, attrs in page.tags)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_no_number_breaks_the_page(value: float) -> None:
    record = make_record()
    record.phases = {name: Phase(value, value) for name in ("forward", "backward", "other")}
    record.throughput.step_s = Statistics(*[value] * 7)
    record.ranks = [RankSummary(rank, value, {"forward": value, "backward": 0.1}, value, value) for rank in (0, 1)]
    record.communication = Communication(value, value, 0, value, 0, [Bucket(0, value, value, value)])
    record.quality = Quality(value, value, value)
    record.slow_steps = [StepRecord(3, 1, value, value, value, value, 0, value, phases={"forward": value})]
    record.findings = [
        Finding("x", "info", value, {"a_s": value}, [], ExpectedSpeedup(value, value, value, "modelled"))
    ]
    series = [SeriesPoint(step, 1, value, value, 1) for step in range(1, 30)]
    samples = {0: [SystemSample(float(n), value, 0, 0, cpu_cores=[value], io_wait=value) for n in range(9)]}
    source = render_html(record, series, "", samples)
    Page(source)
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', re.sub(r"<title>.*?</title>", "", source))


def test_validation_is_drawn_where_its_epoch_ended() -> None:
    record = make_record()
    record.epochs = [EpochRecord(number, 1.0, None, 0.5 / number, None, None) for number in (1, 2, 3)]
    assert [x for x, _ in validation_points(record, make_series())] == [10, 20, 30]
    assert [x for x, _ in validation_points(record, make_series(15))] == [10, 15, 15]
    assert [x for x, _ in validation_points(record, [])] == [10, 20, 30]
    record.epochs[1].val_loss = None
    assert [x for x, _ in validation_points(record, make_series())] == [10, 30]


@pytest.mark.parametrize(("step_s", "unit"), [(2.0, "s"), (0.02, "ms"), (0.0002, "us"), (1e-9, "us")])
def test_step_times_are_drawn_in_a_fitting_unit(step_s: float, unit: str) -> None:
    timeline = step_timeline(make_record(), [SeriesPoint(step, 1, None, step_s, 1) for step in (1, 2, 3)])
    assert timeline is not None
    assert timeline.unit == unit
    assert timeline.note == ""
    assert f"step time in {unit}<" in timeline_chart(timeline)


def test_a_slow_first_step_does_not_flatten_the_rest() -> None:
    timeline = step_timeline(make_record(), [SeriesPoint(1, 1, None, 9.0, 1), *make_series(40)[1:]])
    assert timeline is not None
    assert "beyond" in timeline_chart(timeline)
    assert timeline.note == "1 of 40 points lie above the axis. The highest step shown took 9.00 s."


def test_remedies_can_be_copied_unless_the_script_is_not_ours() -> None:
    record = make_record()
    record.verdict = "input_bound"
    record.findings = [Finding("input_bound", "warning", 0.1, {}, [Remedy("data.num_workers", 4, "more workers")])]
    assert "--set data.num_workers=4" in Page(render_html(record)).texts
    record.source = "attached"
    texts = Page(render_html(record)).texts
    assert "more workers" in texts
    assert not any("--set" in text for text in texts)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "a.b=true"), (None, "a.b=null"), (0.5, "a.b=0.5"), ("x y", "'a.b=x y'"), ([1, 2], "'a.b=[1, 2]'")],
)
def test_options_survive_a_shell(value: object, text: str) -> None:
    assert set_option("a.b", value) == f"--set {text}"


def test_unseen_phases_are_named() -> None:
    record = make_record()
    record.unseen = ["communication_exposed"]
    assert any("Unseen in this run: exposed communication." in text for text in Page(render_html(record)).texts)


def test_places_of_time_in_no_phase_are_shown_where_it_matters() -> None:
    record = make_record()
    record.phases["other"] = Phase(0.01, 0.3)
    record.other_time = OtherTime(9, {"writing": 9}, [Place("<b>.py", 7, "log", "writing", 9, 0.3)])
    texts = Page(render_html(record)).texts
    assert {"<b>.py:7 in log", "writing", "30.0%"} <= set(texts)
    record.phases["other"] = Phase(0.0001, 0.01)
    assert "<b>.py:7 in log" not in Page(render_html(record)).texts


def test_doubts_stand_beside_the_verdict() -> None:
    record = make_record()
    record.notes = ["inconclusive: too few steps", "another"]
    texts = Page(render_html(record)).texts
    assert texts.index("Verdict: inconclusive") + 1 == texts.index("too few steps")
    assert texts.index("Notes") + 1 == texts.index("another")


def test_thinned_curves_say_so() -> None:
    series = [SeriesPoint(step * 4, 1, 1.0, 0.02, 4) for step in range(1, 20)]
    assert "Each point is the mean of 4 steps." in Page(render_html(make_record(), series)).texts
    assert "Each point is the mean" not in render_html(make_record(), make_series())
