"""The memory benchmarks on the CPU: who may run beside whom, jobs that fail alone, and ranks that are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CHECK = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import children
from children import Job, run_all

def well(value): return value + 1
def badly(value): raise ValueError(f"no {value}")
def gone(value): os._exit(3)
def slowly(value): time.sleep(600)

if __name__ == "__main__":
    children.PRELOADED[:] = ["torch"]
    from memory_plan import may_start
    assert may_start(200, [], 100), "whoever is alone may have all"
    assert may_start(30, [30], 100) and not may_start(31, [30], 100)
    assert not may_start(1, [1, 1], 100, most=2)
    jobs = [Job("a", function, (1,), limit) for function, limit in ((well, 60), (badly, 60), (gone, 60), (slowly, 1))]
    pids = [job._process.pid for job in jobs]
    while any(job.poll() is None for job in jobs):
        time.sleep(0.05)
    good, bad, dead, late = (job.poll() for job in jobs)
    assert good == (True, 2), good
    assert not bad[0] and "ValueError: no 1" in bad[1], bad
    assert not dead[0] and "code 3" in dead[1], dead
    assert not late[0] and "not done after" in late[1], late
    one, other = run_all([Job("b", badly, (1,), 60), Job("c", slowly, (1,), 60)])
    assert not one[0] and "another one had failed" in other[1], other
    assert all(not os.path.exists(f"/proc/{pid}/stat") for pid in pids), "a job was left behind"
    print("fine")
"""


def run(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout_s, env=environ, check=False
    )


@pytest.mark.slow
def test_jobs_fail_alone(tmp_path: Path) -> None:
    script = tmp_path / "check_jobs.py"
    script.write_text(CHECK)
    ended = run(str(script), str(BENCHMARKS), timeout_s=120)
    assert ended.stdout.strip() == "fine", ended.stderr


@pytest.mark.slow
def test_two_ranks_hold_what_the_planner_says(tmp_path: Path) -> None:
    script = str(BENCHMARKS / "memory_ranks.py")
    ended = run(script, "--device", "cpu", "--strategies", "ddp,zero3", "--out", str(tmp_path), timeout_s=240)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "memory_ranks-cpu.json").read_text())["results"]["strategies"]
    assert [row["strategy"] for row in rows] == ["ddp", "zero3"]
    for row in rows:
        assert "failed" not in row, row["failed"]
        for name in ("parameters", "gradients", "optimizer"):
            assert row["measured"][name] == pytest.approx(row["planned"][name], rel=0.01), (row["strategy"], name)
    whole, divided = (row["measured"] for row in rows)
    assert divided["optimizer"] < 0.55 * whole["optimizer"]
