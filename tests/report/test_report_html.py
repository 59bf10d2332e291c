"""The page: complete, self-contained, and nothing a run says can become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from frameworm.records.schema import (
    Batch,
    CheckpointStatistics,
    EpochRecord,
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
from frameworm.records.series import SeriesPoint
from frameworm.report.html import render_html, step_time_chart, validation_points

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
    assert [tag for tag, _ in page.tags].count("svg") == 3
    assert "Verdict" not in text
    assert any(tag == "details" for tag, _ in page.tags)
    assert any(attrs.get("name") == "viewport" for tag, attrs in page.tags if tag == "meta")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    source = render_html(make_record(), make_series(), "a: 1")
    tags = {tag for tag, _ in Page(source).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?://|@import|url\(|\bsrc=|\bhref=", source)
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
    assert not any(tag == "svg" for tag, _ in page.tags)


def test_validation_is_drawn_where_its_epoch_ended() -> None:
    record = make_record()
    record.epochs = [EpochRecord(number, 1.0, None, 0.5 / number, None, None) for number in (1, 2, 3)]
    assert [x for x, _ in validation_points(record, make_series())] == [10, 20, 30]
    assert [x for x, _ in validation_points(record, make_series(15))] == [10, 15, 15]
    assert [x for x, _ in validation_points(record, [])] == [10, 20, 30]
    record.epochs[1].val_loss = None
    assert [x for x, _ in validation_points(record, make_series())] == [10, 30]


@pytest.mark.parametrize(("step_s", "unit"), [(2.0, "in s"), (0.02, "in ms"), (0.0002, "in us"), (1e-9, "in us")])
def test_step_times_are_drawn_in_a_fitting_unit(step_s: float, unit: str) -> None:
    chart, note = step_time_chart([SeriesPoint(step, 1, None, step_s, 1) for step in (1, 2, 3)])
    assert f"step time {unit}<" in chart
    assert note == ""


def test_a_slow_first_step_does_not_flatten_the_rest() -> None:
    series = [SeriesPoint(1, 1, None, 9.0, 1), *make_series(40)[1:]]
    chart, note = step_time_chart(series)
    assert "beyond" in chart
    assert note == "1 of 40 points lie above the axis; the highest is 9.00 s."


def test_thinned_curves_say_so() -> None:
    series = [SeriesPoint(step * 4, 1, 1.0, 0.02, 4) for step in range(1, 20)]
    assert "Each point is the mean of 4 steps." in Page(render_html(make_record(), series)).texts
    assert "Each point is the mean" not in render_html(make_record(), make_series())
