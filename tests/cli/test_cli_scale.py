"""`frameworm scale` with real runs, also after a kill, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_line import CommandLine, command_line

from conftest import kill_tree

_CONFIG = """
name: small
model: {d_model: 16, n_heads: 2, num_layers: 1, dim_feedforward: 16, max_seq_len: 16, dropout: 0.0}
data: {dataset: generated, vocab_size: 256, num_workers: 0, limit: 256}
training: {epochs: 2, global_batch: 32, cpu_threads: 1}
gpu: {device: cpu}
checkpoint: {every_steps: off}
"""
FIGURES = ("epoch_time_detailed", "speedup_efficiency", "throughput", "accuracy")
TABLES = ("comprehensive_summary.csv", "summary_table.tex", "performance_report.txt", "report.html", "scaling.json")


@pytest.fixture
def frameworm(
    tmp_path: Path, data_cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capsys) as line:
        (line.folder / "small.yaml").write_text(_CONFIG, encoding="utf-8")
        yield line


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert process.poll() is None, f"the sweep ended early with {process.returncode}"
        assert time.monotonic() < deadline, "the sweep did not come that far in time"
        time.sleep(0.05)


def _of_sweep(out: Path) -> list[psutil.Process]:
    """Processes that train into the sweep's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(out) in argument for argument in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_that_was_killed_goes_on_and_leaves_every_file(frameworm: CommandLine) -> None:
    out = frameworm.folder / "sweep"
    command = ["scale", "--config", "small.yaml", "--world-sizes", "1,2", "--repeats", "1", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "frameworm", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    first, second = out / "runs/ws0001-run01/summary.json", out / "runs/ws0002-run01.log"
    try:
        _until(second.exists, process, 200)
        assert first.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 120
        while _of_sweep(out) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _of_sweep(out), "what the sweep had started outlived it"
    finally:
        kill_tree(process.pid)
        for left in _of_sweep(out):
            kill_tree(left.pid)
    made = first.stat().st_mtime_ns
    again = frameworm(*command, "--resume")
    assert again.code == 0, again.stderr
    assert first.stat().st_mtime_ns == made, "a completed run was made again"
    assert "done before" in again.stderr
    for name in (*TABLES, *(f"generated_{figure}.png" for figure in FIGURES)):
        assert (out / name).stat().st_size > 0, name
    for word in ("world size", "speedup", "efficiency", "lost to", "communication", "smaller batch"):
        assert word in again.stdout
    data = json.loads((out / "scaling.json").read_text(encoding="utf-8"))
    (curve,) = data["curves"]
    assert [row["world_size"] for row in curve["rows"]] == [1, 2]
    assert [row["point"]["micro_batch"] for row in curve["rows"]] == [32, 16]
    row = curve["rows"][1]
    losses = row["losses"]
    parts = ("communication", "stragglers", "input", "smaller_batch", "other")
    assert sum(losses[part] for part in parts) == pytest.approx(1 - row["efficiency"]["value"], abs=1e-9)
    epochs = [json.loads((out / f"runs/ws000{size}-run01/summary.json").read_text())["epochs"] for size in (1, 2)]
    assert row["speedup"]["value"] == pytest.approx(epochs[0][1]["epoch_time_s"] / epochs[1][1]["epoch_time_s"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-sizes", "1,two"], "--world-sizes 1,two"),
        (["--world-sizes", "1,3"], "32 does not divide among 3 processes"),
        (["--world-sizes", "1,2", "--set", "training.epoch=2"], "training.epochs"),
        (["--world-sizes", "1,2", "--set", "parallel.strategy=single"], "parallel.strategy"),
        (["--world-sizes", "1,2", "--out", "small.yaml"], "is a file"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(frameworm: CommandLine, arguments: list[str], said: str) -> None:
    before = sorted(frameworm.folder.rglob("*"))
    end = frameworm("scale", "--config", "small.yaml", *arguments)
    assert end.code == 2
    assert said in end.stderr
    assert sorted(frameworm.folder.rglob("*")) == before


def test_workers_of_a_launcher_start_no_sweep(frameworm: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    end = frameworm("scale", "--config", "small.yaml", "--world-sizes", "1")
    assert end.code == 2
    assert "without torchrun or srun" in end.stderr


@pytest.mark.slow
def test_a_run_that_fails_makes_the_exit_code_1(frameworm: CommandLine) -> None:
    broken = frameworm.folder / "broken.yaml"
    broken.write_text("workload: nowhere_at_all:build\ngpu: {device: cpu}\n", encoding="utf-8")
    end = frameworm("scale", "--config", broken, "--world-sizes", "1", "--repeats", "2", "--out", "out")
    assert end.code == 1, end.stderr
    assert "nowhere_at_all" in end.stderr
    data = json.loads((frameworm.folder / "out/scaling.json").read_text())
    assert [run["status"] for run in data["runs"]] == ["failed", "skipped"]


def test_help_has_an_example(frameworm: CommandLine) -> None:
    end = frameworm("scale", "--help")
    assert end.code == 0
    assert "Example" in end.stdout
