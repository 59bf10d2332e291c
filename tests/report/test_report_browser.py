"""Real pages in a real browser: what is drawn, whether it fits, and that the console stays silent."""

from __future__ import annotations

import contextlib
import html
import importlib.resources
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from frameworm.records.observations import Bucket, RankSummary, SystemSample, SystemSummary
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
from frameworm.report.run.html import render_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 120
EVIL = "<script>console.error('ran')</script>\"><img src=x onerror=\"console.error('ran')\">"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")

# Reads off the laid-out page what a person would see.
PROBE = """<pre id="probe"></pre><script>
const boxes = (root, what) => [...root.querySelectorAll(what)].map(item => item.getBoundingClientRect());
const out = {width: innerWidth, page: document.documentElement.scrollWidth, charts: {}, sections: [], cut: []};
for (const section of document.querySelectorAll("section")) out.sections.push(section.id);
for (const svg of document.querySelectorAll("svg[role=img]")) {
  const frame = svg.getBoundingClientRect();
  out.charts[svg.getAttribute("aria-label")] = {
    width: frame.width, height: frame.height,
    curves: boxes(svg, "polyline").filter(box => box.width > 20).length,
    bars: boxes(svg, "rect").filter(box => box.width > 0 && box.height > 5).length,
    hatched: boxes(svg, "rect.hatched").filter(box => box.width > 0).length,
    marks: boxes(svg, ".mark").filter(box => box.width > 0).length,
  };
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
        box.bottom > frame.bottom + 1) out.cut.push(text.textContent);
  }
}
out.ink = getComputedStyle(document.body).color;
out.paper = getComputedStyle(document.body).backgroundColor;
document.getElementById("probe").textContent = JSON.stringify(out);
</script></body>"""


class Opened(NamedTuple):
    dom: str
    console: list[str]


def open_page(source: str, folder: Path, width: int = 1200, dark: bool = False) -> Opened:
    """The page after loading, and what the console said."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(source, encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        *(["--force-dark-mode"] if dark else []),
        "--dump-dom",
        path.as_uri(),
    ]
    browser = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
    )
    try:
        dom, log = browser.communicate(timeout=DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    assert browser.returncode == 0, log
    return Opened(dom, [line for line in log.splitlines() if "CONSOLE" in line])


def measure(folder: Path, *frames: tuple[str, int], dark: bool = False) -> list[dict[str, Any]]:
    """What the probe reads off copies of pages that are allowed to run it, each laid out in a frame of some width.

    A window cannot be as narrow as a phone, a frame can.
    """
    inner = "".join(
        f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{html.escape(_probed(page))}"></iframe>'
        for page, width in frames
    )
    script = (
        "addEventListener('load', () => { for (const frame of document.querySelectorAll('iframe')) {"
        "const note = document.body.appendChild(document.createElement('pre')); note.className = 'found';"
        "note.textContent = frame.contentDocument.getElementById('probe').textContent; } });"
    )
    scheme = '<meta name="color-scheme" content="light dark">'
    page = f"<!DOCTYPE html><head>{scheme}<script>{script}</script></head><body>{inner}</body>"
    opened = open_page(page, folder, dark=dark)
    found = re.findall(r'<pre class="found">(.*?)</pre>', opened.dom, re.DOTALL)
    data: list[dict[str, Any]] = [json.loads(html.unescape(text)) for text in found]
    assert [item["width"] for item in data] == [width for _, width in frames], opened.console
    return data


def _probed(page: str) -> str:
    return POLICY.sub("", page).replace("</body>", PROBE)


def spread(mean: float) -> Statistics:
    return Statistics(mean, mean / 10, mean / 2, mean * 2, mean, mean * 1.2, mean * 1.5)


def full_page(word: str = "demo") -> str:
    phases = {
        "data_wait": 0.002,
        "forward": 0.006,
        "backward": 0.011,
        "communication_exposed": 0.004,
        "optimizer": 0.002,
        "other": 0.001,
    }
    step_s = sum(phases.values())
    record = RunRecord(
        word,
        "completed",
        {"torch": "2.13", "device": "cuda", word: word},
        Batch(32, 1, 2, 64),
        wall_s=75.0,
        steps=1500,
        device=word,
        strategy="ddp",
        precision="bf16",
        throughput=Throughput(7543.2, 350_000.0, spread(step_s)),
        phases={name: Phase(mean_s, mean_s / step_s) for name, mean_s in phases.items()},
        communication=Communication(
            0.012,
            0.004,
            60_000_000,
            0.0015,
            1,
            [Bucket(10_000_000 * n, 0.003 * n, 0.003 * n + 0.0005, 0.0035 * n + 0.001) for n in (1, 2, 3, 4)],
        ),
        memory=Memory(3 * 2**30, 4 * 2**30, 141 * 2**30, 2**31),
        quality=Quality(0.31, 0.55, 0.912),
        checkpoint=CheckpointStatistics(3, 0.25),
        ranks=[
            RankSummary(0, step_s, phases, 0.012, 0.0015, word),
            RankSummary(1, step_s, {**phases, "backward": 0.0145, "communication_exposed": 0.0005}, 0.009, 0.0, word),
        ],
        system=SystemSummary(100, 0.5, spread(0.6), cpu_busy=spread(0.3), io_wait=spread(0.02)),
        unseen=["transfer", word],
        verdict="straggler",
        findings=[
            Finding(
                word,
                "critical",
                0.12,
                {"slowest_rank": 1, word: word},
                [Remedy("data.num_workers", 4, word), Remedy(word, word, word)],
                ExpectedSpeedup(1.5, 1.3, 1.6, word),
            )
        ],
        notes=[word],
        epochs=[EpochRecord(n, 2.0, 0.7 / n, 0.8 / n, 0.5, 100.0) for n in (1, 2, 3)],
        slow_steps=[
            StepRecord(1234, 3, 0.0, 0.31, None, None, 32, 32.0, phases={**phases, word: 0.28}),
            StepRecord(700, 2, 0.0, 0.05, None, None, 32, 32.0),
        ],
        run_dir=f"runs/{word}",
    )
    series = [SeriesPoint(n, 1 + n // 501, 2.0 / n, step_s * (1 + n % 7 / 50), 1) for n in range(1, 1501)]
    samples = {
        rank: [
            SystemSample(
                1e9 + n / 2,
                gpu_busy=0.5 + 0.4 * math.sin(n / 9 + rank),
                gpu_memory_bytes=(3 + rank) * 2**30,
                gpu_memory_total_bytes=141 * 2**30,
                gpu_power_w=300.0 + n % 50,
                cpu_cores=[0.2, 0.9],
                io_wait=0.01,
                rss_bytes=2**30 + n * 2**20,
            )
            for n in range(200)
        ]
        for rank in (0, 1)
    }
    return render_html(record, series, f"name: {word}\n" + "x" * 300, samples)


def attached_page() -> str:
    record = RunRecord(
        "plain_loop.py",
        "failed",
        {},
        Batch(None, 1, 1, None),
        steps=40,
        phases={"forward": Phase(0.02, 0.66), "other": Phase(0.01, 0.34)},
        unseen=["transfer", "backward"],
        source="attached",
        notes=["inconclusive: only 40 steps were seen"],
    )
    return render_html(record, [SeriesPoint(n, 1, None, 0.03, 1) for n in range(1, 41)])


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The full page and the attached one, each on a desk and on a phone."""
    full, attached = full_page(), attached_page()
    return measure(tmp_path_factory.mktemp("light"), (full, 1200), (full, 360), (attached, 1200), (attached, 360))


def brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


@in_browser
def test_nothing_is_cut_off_on_a_desk_or_a_phone(light: list[dict[str, Any]]) -> None:
    for data in light:
        assert data["page"] <= data["width"], "the page scrolls sideways"
        assert data["cut"] == []
        sizes = [(chart["width"], chart["height"]) for chart in data["charts"].values()]
        assert all(width > 0.7 * min(data["width"], 480) and height > 20 for width, height in sizes)


@in_browser
def test_a_run_with_everything(light: list[dict[str, Any]]) -> None:
    for data in light[:2]:
        assert data["sections"] == [
            "verdict",
            "targets",
            "notes",
            "phases",
            "steps",
            "ranks",
            "overlap",
            "system",
            "epochs",
            "run",
        ]
        charts = data["charts"]
        assert {name: chart["curves"] for name, chart in charts.items() if chart["curves"]} == {
            "Time of each step": 1,
            "Loss over the steps": 2,
            "GPU busy over the run": 2,
            "CPU over the run": 3,
            "GPU memory over the run": 2,
            "process memory over the run": 2,
            "GPU power over the run": 2,
        }
        assert charts["Time of each step"]["marks"] == 2
        assert charts["Shares of the mean step"]["bars"] == 6
        ranks = charts["Phases of the mean step on each rank"]
        assert (ranks["bars"], ranks["hatched"]) == (13, 1)
        # Backward; waiting and hidden twice; waiting, hidden, exposed; waiting, exposed; exposed is drawn twice.
        overlap = charts["Gradient buckets sent during backward"]
        assert (overlap["bars"], overlap["hatched"]) == (12, 2)


@in_browser
def test_an_attached_run_with_little(light: list[dict[str, Any]]) -> None:
    for data in light[2:]:
        assert data["sections"] == ["verdict", "phases", "steps", "run"]
        assert set(data["charts"]) == {"Shares of the mean step", "Time of each step"}


@in_browser
def test_a_dark_page_where_dark_is_preferred(tmp_path: Path, light: list[dict[str, Any]]) -> None:
    (dark,) = measure(tmp_path, (attached_page(), 360), dark=True)
    assert brightness(dark["ink"]) > 600 > 150 > brightness(dark["paper"])
    assert brightness(light[0]["ink"]) < 150 < 600 < brightness(light[0]["paper"])


@in_browser
@pytest.mark.parametrize("page", [full_page(), attached_page()], ids=["full", "attached"])
def test_the_console_has_nothing_to_say(tmp_path: Path, page: str) -> None:
    opened = open_page(page, tmp_path)
    assert opened.console == []
    assert "</main>" in opened.dom


@in_browser
def test_an_error_would_be_heard(tmp_path: Path) -> None:
    page = full_page().replace("</main>", "<script>console.error('planted')</script></main>")
    console = open_page(page, tmp_path).console
    assert any("Content Security Policy" in line for line in console)
    assert not any("planted" in line for line in console)


@in_browser
def test_words_of_a_run_run_nothing_even_without_the_policy(tmp_path: Path) -> None:
    opened = open_page(POLICY.sub("", full_page(EVIL)), tmp_path)
    assert opened.console == []
    assert html.escape(EVIL, quote=False) in opened.dom
    assert "<script" not in opened.dom
    assert "<img" not in opened.dom


def luminance(colour: str) -> float:
    parts = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_texts_stand_out_from_their_ground() -> None:
    style = (
        importlib.resources.files("frameworm.report.kit").joinpath("templates/report.css").read_text(encoding="utf-8")
    )
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in re.findall(r":root \{(.*?)\}", style, re.S)]
    assert len(schemes) == 2
    for colours in schemes:
        for ground in ("page", "card"):
            for text in ("ink", "soft", "warn", "critical", "good"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for curve in ("curve-a", "curve-b", "curve-c", "curve-d", "mark"):
            assert contrast(colours[curve], colours["card"]) >= 3, curve
    fills = re.findall(r"\.phase-\w+.*fill: (#\w{6})", style)
    assert len(fills) == 9
    assert all(contrast(fill, "#000000") >= 4.5 for fill in fills)
