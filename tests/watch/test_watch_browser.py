"""The page in a real browser, while runs go on."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_browser import Browser
from made_runs import append_steps, set_times, write_run
from test_report_browser import CHROMIUM, in_browser

from frameworm.watch.server import WatchServer

pytestmark = [pytest.mark.slow, in_browser]
EVIL = "<img src=x onerror=console.error('ran')>"
CONFIG = """
name: small
model: {d_model: 32, n_heads: 2, num_layers: 1, dim_feedforward: 32, max_seq_len: 32, dropout: 0.0}
data: {dataset: generated, vocab_size: 256, num_workers: 0, limit: 2048}
training: {epochs: 15, global_batch: 16, cpu_threads: 1}
gpu: {device: cpu}
checkpoint: {every_steps: 500, keep: 2}
"""
# Whether there is ink on each chart that is shown, looked for on a copy.
DRAWN = (
    "[...document.querySelectorAll('.chart:not([hidden]) canvas')].map(item => {"
    "const copy = new OffscreenCanvas(item.width, item.height).getContext('2d', {willReadFrequently: true});"
    "copy.drawImage(item, 0, 0);"
    "return copy.getImageData(0, 0, item.width, item.height).data.some(value => value > 0) })"
)
FIGURE = (
    "[...document.querySelectorAll('.figures dt')].find(item => item.textContent === '{}')?.nextSibling.textContent"
)
STEPS = FIGURE.format("steps")


@contextlib.contextmanager
def serving(root: Path) -> Iterator[WatchServer]:
    """A server in this process."""
    watching = WatchServer(root, port=0)
    server = watching.server()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [watching.socket]})
    thread.start()
    try:
        yield watching
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def row_of(name: str) -> str:
    return f"[...document.querySelectorAll('#runs tbody tr')].find(row => row.innerText.includes({name!r}))"


def test_a_training_is_watched_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    root = tmp_path / "runs"
    root.mkdir()
    (tmp_path / "small.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "frameworm", "train", "--config", "small.yaml", "--out", "runs/small"]
    with serving(root) as watching, Browser(CHROMIUM, tmp_path) as browser:
        browser.open(watching.url)
        browser.wait_for("document.body.innerText.includes('There are no runs here yet')")
        assert browser.evaluate("location.search") == "", "the token is in no address that is copied"
        assert browser.evaluate("document.cookie") == "", "and in no script's reach"
        training = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            browser.wait_for(f"{row_of('small')}?.innerText.includes('running')")
            browser.evaluate("document.querySelector('#runs tbody a').click()")
            running = "document.querySelector('.badge').textContent === 'running'"
            seen = browser.wait_for(f"Number(({STEPS}).replaceAll(',', '')) > 20 && {running} && {STEPS}")
            early = int(seen.replace(",", ""))
            browser.wait_for(f"Number(({STEPS}).replaceAll(',', '')) > {early}")
            browser.wait_for(f"{DRAWN}.length >= 5 && {DRAWN}.every(Boolean)")
            assert training.wait(240) == 0
        finally:
            training.kill()
            training.wait()
        browser.wait_for("document.querySelector('.badge').textContent === 'completed'")
        assert browser.evaluate(STEPS) == "1,920"
        assert "Verdict:" in browser.evaluate("document.getElementById('verdict').innerText")
        assert browser.console == []


def test_zooming_ranks_and_comparing(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    root = tmp_path / "runs"
    set_times(write_run(root, "before", steps=400, ranks=2, slow_rank=1), time.time() - 600)
    set_times(write_run(root, "after", steps=300), time.time() - 300)
    with serving(root) as watching, Browser(CHROMIUM, tmp_path) as browser:
        browser.open(watching.url)
        browser.wait_for(f"{row_of('before')} && {row_of('after')}")
        browser.evaluate(
            "(() => { const box = document.querySelector('input[type=search]'); box.value = 'bef COMP';"
            "box.dispatchEvent(new Event('input')) })()"
        )
        assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 1
        browser.evaluate("document.querySelector('#runs tbody a').click()")
        browser.wait_for(f"{DRAWN}.length >= 10 && {DRAWN}.every(Boolean)")
        browser.wait_for("document.querySelector('canvas.heat').height === 2")
        browser.evaluate("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        left, top, width = browser.evaluate(
            "(() => { const box = document.querySelector('.u-over').getBoundingClientRect();"
            "return [box.left, box.top, box.width] })()"
        )
        browser.drag((left + width * 0.25, top + 50), (left + width * 0.5, top + 50))
        browser.wait_for("/Steps 1\\d\\d to 20\\d/.test(document.body.innerText)")
        browser.evaluate(
            "[...document.querySelectorAll('button')].find(item => item.textContent === 'Show all steps').click()"
        )
        browser.wait_for("!/Steps 1\\d\\d to/.test(document.body.innerText)")
        browser.evaluate("location.hash = '#/'")
        browser.wait_for("document.querySelectorAll('#runs tbody tr').length === 1")
        browser.evaluate(
            "(() => { const box = document.querySelector('input[type=search]'); box.value = '';"
            "box.dispatchEvent(new Event('input')) })()"
        )
        browser.evaluate("document.querySelectorAll('#runs tbody input').forEach(item => item.click())")
        browser.evaluate("document.getElementById('compare').click()")
        browser.wait_for(
            f"document.body.innerText.includes('2 runs compared') && {DRAWN}.length >= 3 && {DRAWN}.every(Boolean)"
        )
        assert "1,600" in browser.evaluate("document.querySelector('table').innerText")
        assert browser.console == []


def test_eight_ranks_four_runs_and_two_hundred(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    root = tmp_path / "runs"
    eight = write_run(root, "eight", steps=200, ranks=8, slow_rank=5, finished=False)
    for number in range(200):
        write_run(root, f"sweep/run-{number:03}", steps=20)
    with serving(root) as watching, Browser(CHROMIUM, tmp_path) as browser:
        browser.open(watching.url)
        browser.wait_for("document.querySelectorAll('#runs tbody tr').length === 201")
        search = (
            "(() => {{ const box = document.querySelector('input[type=search]'); box.value = {!r};"
            "box.dispatchEvent(new Event('input')) }})()"
        )
        browser.evaluate(search.format("run-0 completed"))
        browser.wait_for("document.body.innerText.includes('100 of 201 runs')")
        browser.evaluate(
            "[...document.querySelectorAll('#runs tbody input')].slice(0, 4).forEach(item => item.click())"
        )
        browser.evaluate("document.getElementById('compare').click()")
        browser.wait_for(f"document.body.innerText.includes('4 runs compared') && {DRAWN}.length >= 3")
        assert browser.evaluate("document.querySelectorAll('.key').length") >= 8
        browser.evaluate("location.hash = '#/'")
        browser.wait_for("document.querySelectorAll('#runs tbody tr').length === 100")
        browser.evaluate(search.format("eight"))
        browser.evaluate("document.querySelector('#runs tbody a').click()")
        browser.wait_for("document.querySelector('canvas.heat').height === 8")
        browser.evaluate("document.querySelector('canvas.heat').scrollIntoView({block: 'center'})")
        assert browser.evaluate("document.querySelector('.heat-labels').innerText").split("\n")[5] == "rank 5"
        orange = (
            "(() => { const item = document.querySelector('canvas.heat'); const copy = "
            "new OffscreenCanvas(item.width, item.height); const context = copy.getContext('2d', "
            "{willReadFrequently: true}); context.drawImage(item, 0, 0);"
            "return [...Array(8).keys()].map(row => [...context.getImageData(0, row, item.width, 1).data]"
            ".filter((value, place) => place % 4 === 2).reduce((sum, value) => sum + value, 0) / item.width) })()"
        )
        blue = browser.evaluate(orange)
        assert min(range(8), key=lambda rank: blue[rank]) == 5, "the straggler is the row of full orange"
        for rank in range(8):
            append_steps(eight, 201, 240, rank, ranks=8, slow_rank=5)
        browser.wait_for(f"{STEPS} === '240'")
        assert browser.console == []


def test_a_killed_run_and_one_whose_folder_is_deleted_and_made_again(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    root = tmp_path / "runs"
    root.mkdir()
    (tmp_path / "small.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "frameworm", "train", "--config", "small.yaml", "--out", "runs/small"]
    with serving(root) as watching, Browser(CHROMIUM, tmp_path) as browser:
        training = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            browser.open(watching.url)
            browser.wait_for(f"{row_of('small')}?.innerText.includes('running')")
            browser.evaluate("document.querySelector('#runs tbody a').click()")
            browser.wait_for(f"Number(({STEPS}).replaceAll(',', '')) > 50")
            browser.wait_for("document.getElementById('log').textContent.length > 0 || true")
        finally:
            training.kill()
            training.wait()
        set_times(root / "small", time.time() - 3600)  # an hour goes by
        for known in watching.catalogue._known.values():
            known.written = known.changed_at = None
        browser.wait_for("document.querySelector('.badge').textContent === 'unfinished'")
        browser.wait_for("/nothing has been written since \\d{4}-/.test(document.body.innerText)")
        shutil.rmtree(root / "small")
        browser.wait_for("document.body.innerText.includes('The folder of this run is gone')")
        write_run(root, "small", steps=77, finished=False)
        browser.wait_for(f"{STEPS} === '77'")
        assert browser.evaluate("document.querySelector('.badge').textContent") == "running"
        browser.wait_for(f"{DRAWN}.length >= 5 && {DRAWN}.every(Boolean)")
        assert [line for line in browser.console if "404" not in line] == []


def test_hostile_words_are_shown_and_run_nothing(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    root = tmp_path / "runs"
    folder = write_run(root, EVIL, steps=50, word=EVIL)
    (folder / f"{EVIL}.log").write_text(
        f"{EVIL}\n</pre><script>console.error('ran')</script>\x1b[31mred\x1b[0m\n"
        "  0%|    \r 50%|==  \r100%|====\n\u202etxet\n" + "x" * 1_000_000 + "\nthe end\n"
    )
    with (folder / f"{EVIL}.log").open("ab") as file:
        file.write(b"\xff\xfe invalid\n")
    (folder / "small.log").write_text("  0%|    \r 50%|==  \r100%|====\r\n\x1b[31mred\x1b[0m <b>\n")
    set_times(folder, time.time() - 600)
    with serving(root) as watching, Browser(CHROMIUM, tmp_path, size=(390, 800)) as browser:
        browser.open(watching.url)
        browser.wait_for(f"{row_of('onerror')}")
        assert browser.evaluate("document.querySelector('#runs a').textContent") == EVIL
        browser.evaluate("document.querySelector('#runs a').click()")
        browser.wait_for("document.getElementById('log').textContent.includes('the end')")
        choose = (
            "(() => { const choice = document.querySelector('select[aria-label=\"log file\"]');"
            "choice.value = 'small.log'; choice.dispatchEvent(new Event('change')) })()"
        )
        browser.evaluate(choose)
        browser.wait_for("document.getElementById('log').textContent === '100%|====\\nred <b>\\n'")
        browser.wait_for(f"{DRAWN}.length >= 5 && {DRAWN}.every(Boolean)")
        assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390, "a phone scrolls sideways"
        assert browser.console == []
        append_steps(folder, 51, 60)
        browser.wait_for("document.querySelector('.badge').textContent === 'running'")
        browser.open(watching.url.partition("?")[0].replace("127.0.0.1", "localhost"))
        browser.wait_for("document.body.innerText.startsWith('403')")
