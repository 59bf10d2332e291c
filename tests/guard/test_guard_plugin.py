"""The fixture `performance_guard`, in a project of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import QUIET, store, times

INNER_LIMIT_S = 250  # of one pytest of several; each imports torch

ABOUT_RUNS = """
def test_run(performance_guard):
    performance_guard("RUN", baseline="perf/run.json")
"""

ABOUT_STEPS = """
import time

def test_step(performance_guard):
    step = lambda: time.sleep(0.004)
    performance_guard(step, baseline="perf/step.json", measured_s=0.5, max_regression="1000%")
"""


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-p", "frameworm.pytest_plugin"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INNER_LIMIT_S,
        env={**os.environ, "COLUMNS": "200"},
    )


def _project(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "test_it.py").write_text(text)
    return folder


def test_the_plugin_does_not_wait_for_torch() -> None:
    code = "import sys, frameworm.pytest_plugin; sys.exit('torch' in sys.modules or 'psutil' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_folders(tmp_path: Path) -> None:
    project = _project(tmp_path / "project", ABOUT_RUNS.replace("RUN", str(tmp_path / "now")))
    store(tmp_path / "now", times(1, QUIET, 100))
    without = _pytest(project)
    assert without.returncode == 0, without.stdout
    assert "no baseline at perf/run.json" in without.stdout
    written = _pytest(project, "--update-performance")
    assert "was written" in written.stdout, written.stdout + written.stderr
    assert "1 passed" in _pytest(project).stdout
    (tmp_path / "now").rename(tmp_path / "old")
    store(tmp_path / "now", [value * 1.2 for value in times(2, QUIET, 100)])
    failed = _pytest(project)
    assert failed.returncode == 1
    assert "verdict     regression" in failed.stdout
    assert "Traceback" not in failed.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_callables(tmp_path: Path) -> None:
    project = _project(tmp_path / "project", ABOUT_STEPS)
    written = _pytest(project, "--update-performance")
    assert "was written" in written.stdout, written.stdout + written.stderr
    file = project / "perf" / "step.json"
    data = json.loads(file.read_text())
    (run,) = data["runs"]
    assert run["measured_steps"] >= 60
    assert run["environment"]["torch"]
    assert 0.004 <= sorted(run["mean_s"])[0] < 0.5
    again = _pytest(project)
    assert again.returncode == 0, again.stdout
    run["environment"]["machine"] = "another"
    file.write_text(json.dumps(data))
    other = _pytest(project)
    assert "different hardware" in other.stdout
    assert other.returncode == 0
    run["environment"]["machine"] = None
    run["mean_s"] = [value / 100 for value in run["mean_s"]]
    run["crowding"] = None
    file.write_text(json.dumps(data))
    assert "1 passed" not in _pytest(project).stdout
