"""Do killed workers come back? Trains the quickstart on two processes, kills one at a random step, many times over.

    python benchmarks/elastic_campaign.py --kills 20

A kill counts as recovered when the run ends completed, with every step recorded exactly once on both ranks, and with
the loss of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import measured_now

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/elastic_campaign.json"
STEPS = 80
LIMIT_S = 300.0


def start(run: Path, more: list[str]) -> subprocess.Popen[str]:
    """Launch a training of two workers."""
    settings = [f"training.max_steps={STEPS}", "checkpoint.every_steps=10", "observe.progress=off"]
    command = [sys.executable, "-m", "frameworm", "train", "--config", str(ROOT / "configs/quickstart.yaml")]
    command += ["--out", str(run), "--distributed", "--nproc-per-node", "2", *more]
    command += [word for setting in settings for word in ("--set", setting)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )


def losses(run: Path, rank: int) -> list[tuple[int, float]]:
    """Step numbers and losses that a rank recorded."""
    lines = (run / f"steps-rank{rank}.jsonl").read_text().splitlines()
    return [(item["step"], item["loss"]) for item in map(json.loads, lines)]


def kill_once(run: Path, goal: int, whom: int, expected: list[list[tuple[int, float]]]) -> dict[str, Any]:
    """One training with one kill; what came of it."""
    began = time.monotonic()
    job = start(run, ["--max-restarts", "1"])
    killed_at = None
    try:
        while killed_at is None and job.poll() is None and time.monotonic() - began < LIMIT_S:
            files = [run / f"steps-rank{rank}.jsonl" for rank in (0, 1)]
            workers = psutil.Process(job.pid).children()
            if len(workers) == 2 and all(file.exists() and file.read_bytes().count(b"\n") >= goal for file in files):
                workers[whom].send_signal(signal.SIGKILL)
                killed_at = time.monotonic()
            time.sleep(0.02)
        _, stderr = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        stderr = "timed out"
    finally:
        family = [*psutil.Process(job.pid).children(recursive=True)] if job.poll() is None else []
        for process in family:
            process.kill()
        job.kill()
        job.wait()
    found = [losses(run, rank) if (run / f"steps-rank{rank}.jsonl").exists() else [] for rank in (0, 1)]
    return {
        "step": goal,
        "rank": whom,
        "recovered": job.returncode == 0 and killed_at is not None and found == expected,
        "exit_code": job.returncode,
        "steps_recorded_once": [[step for step, _ in part] == list(range(1, STEPS + 1)) for part in found],
        "same_losses": found == expected,
        "seconds_after_kill": None if killed_at is None else time.monotonic() - killed_at,
        "said": stderr.splitlines()[-3:],
    }


def main() -> int:
    """Run the campaign and write its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        job = start(reference, [])
        _, stderr = job.communicate(timeout=LIMIT_S)
        if job.returncode:
            print(stderr, file=sys.stderr)
            return 2
        expected = [losses(reference, rank) for rank in (0, 1)]
        for number in range(options.kills):
            goal, whom = generator.randrange(1, STEPS - 10), generator.randrange(2)
            row = kill_once(Path(folder) / f"run-{number}", goal, whom, expected)
            rows.append(row)
            verdict = "recovered" if row["recovered"] else f"NOT recovered: {row}"
            print(f"{number + 1:3d}  rank {whom} killed after step {goal:3d}: {verdict}", flush=True)
    recovered = sum(row["recovered"] for row in rows)
    print(f"{recovered} of {len(rows)} kills recovered")
    result = {
        "command": f"python benchmarks/elastic_campaign.py --kills {options.kills} --seed {options.seed}",
        **measured_now(torch.device("cpu")),
        "recovered": recovered,
        "kills": len(rows),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if recovered == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
