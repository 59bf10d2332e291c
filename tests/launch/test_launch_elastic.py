"""Workers that are killed start again and go on from the last checkpoint, with every step recorded once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from conftest import kill_tree
from frameworm.config.schema import Config
from frameworm.engine.run_output import open_output
from frameworm.records.launches import read_launch, write_launch

CONFIG = Path(__file__).parents[2] / "configs/quickstart.yaml"
# Small, and enough steps that a kill comes before the end.
SETTINGS = (
    "model.d_model=16",
    "model.n_heads=2",
    "model.num_layers=1",
    "model.dim_feedforward=32",
    "model.max_seq_len=16",
    "training.global_batch=16",
    "training.max_steps=300",
    "checkpoint.every_steps=10",
    "observe.progress=off",
)
STEPS = 300
KILLS = 2  # the second is of workers that had been restarted; benchmarks/elastic_campaign.py has more


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def has_come_to(goal: int, path: Path, since: float) -> bool:
    """Whether a step that ended after a point in time is that one or a later one."""
    if not path.exists():
        return False
    whole = path.read_text().rpartition("\n")[0]
    last = json.loads(whole.splitlines()[-1]) if whole else {"step": 0, "time": 0.0}
    return bool(last["step"] >= goal and last["time"] > since)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_kills_are_survived(tmp_path: Path, data_cache_dir: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "frameworm", "train", "--config", str(CONFIG), "--out", str(run)]
    command += ["--distributed", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    environ = {**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        generator = random.Random(0)
        for number in range(1, KILLS + 1):
            goal = 25 * number - 10
            victim = wait_for_step(job, run, goal, generator)
            victim.send_signal(signal.SIGKILL)
            psutil.wait_procs([victim], timeout=60)
        _, stderr = job.communicate(timeout=150)
    finally:
        kill_tree(job.pid)
        job.communicate()
    assert job.returncode == 0, stderr
    assert stderr.count("restarting the workers from the last checkpoint") == KILLS
    assert stderr.count("resumed") == KILLS, "each round says from which step it goes on"
    for rank in (0, 1):
        assert steps_of(run / f"steps-rank{rank}.jsonl") == list(range(1, STEPS + 1))
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def wait_for_step(job: subprocess.Popen[str], run: Path, goal: int, generator: random.Random) -> psutil.Process:
    """A worker of the round that has come to a step; found once that round has written it."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and job.poll() is None:
        workers = psutil.Process(job.pid).children()
        files = [run / f"steps-rank{rank}.jsonl" for rank in (0, 1)]
        if len(workers) == 2:
            with suppress(psutil.NoSuchProcess):
                since = max(worker.create_time() for worker in workers)  # the round before left lines too
                if all(has_come_to(goal, file, since) for file in files):
                    return generator.choice(workers)
        time.sleep(0.05)
    raise AssertionError(f"step {goal} never came (exit code {job.poll()})")


def test_restarted_workers_find_the_folder_they_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")

    def begin(launch: str) -> tuple[str, bool]:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        settings = {"run_dir": "auto", "resume": None, "show_progress": False, "rank": 0, "world_size": 1}
        output = open_output(Config(name="demo"), **settings)  # type: ignore[arg-type]
        assert output.folder is not None
        return output.folder.path.name, output.resumed

    first = begin("frameworm-a")
    assert not first[1]
    assert begin("frameworm-a") == (first[0], True)
    other, resumed = begin("frameworm-b")
    assert (other != first[0], resumed) == (True, False)


def test_a_launch_is_remembered_by_its_folder(tmp_path: Path) -> None:
    assert read_launch(tmp_path) is None
    write_launch(tmp_path, "frameworm-x")
    assert read_launch(tmp_path) == "frameworm-x"
