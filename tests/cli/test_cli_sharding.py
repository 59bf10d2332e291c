"""`train` with two processes that share one model, stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import command_line

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SETTINGS = (
    "data.limit=960",  # some seconds of steps, so that a signal comes before the end
    "model.d_model=16",
    "model.n_heads=2",
    "model.num_layers=1",
    "model.dim_feedforward=32",
    "model.max_seq_len=16",
    "training.epochs=2",
    "training.global_batch=16",
    "checkpoint.every_steps=5",
    "parallel.strategy=zero3",
)
DISTRIBUTED = ("--distributed", "--nproc-per-node", "2")


def _arguments() -> list[str]:
    chosen = [part for setting in SETTINGS for part in ("--set", setting)]
    return ["train", "--config", str(QUICKSTART), *chosen, *DISTRIBUTED]


def _interrupt(run: Path, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Start, send SIGINT as Ctrl-C does once the first steps are written, and wait for the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "frameworm", *_arguments(), "--out", str(run)],
        cwd=folder,
        env={**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(cache), "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family = []
    try:
        steps = run / "steps-rank0.jsonl"
        deadline = time.monotonic() + 120
        while not (steps.exists() and steps.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        for member in family:
            if member.is_running():
                member.kill()
        if process.poll() is None:
            process.kill()
            process.wait()
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_zero3_trains_stops_and_resumes(
    cli: Callable[..., Any],
    tmp_path: Path,
    data_cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped = _interrupt(tmp_path / "run", tmp_path, data_cache_dir)
    assert stopped.returncode == 130, stopped.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    resumed = cli(*_arguments(), "--resume", tmp_path / "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["strategy"], summary["batch"]["world_size"]) == ("completed", "zero3", 2)
    assert summary["steps"] == 120
    assert summary["communication"]["exposed_s"] is None  # nobody watched
    assert summary["communication"]["bytes_per_step"] > 0
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capsys) as here:
        scored = here("evaluate", tmp_path / "run", "--json")
    assert scored.code == 0, scored.stderr
    assert json.loads(scored.stdout)["loss"] == pytest.approx(summary["quality"]["val_loss"], abs=1e-5)
