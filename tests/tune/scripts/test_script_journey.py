"""`frameworm tune SCRIPT.py` and `frameworm run --with`, as a user types them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from frameworm.attach.isolation import why_not

DEADLINE_S = 500
# Each sample and each pass of the model takes its time, so a process that loads beside it saves about half.
SLEEPER = """
import sys
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, place):
        time.sleep(0.005)
        return torch.full((4,), place / 512), torch.tensor(float(place % 2))


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, batch):
        time.sleep(0.02)
        return self.inner(batch).squeeze(1)


torch.manual_seed(0)
model, steps = Slow(), int(sys.argv[1])
model.compile(backend="eager")  # says itself how it is compiled
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
done = 0
Path("log.txt").write_text("began")
while done < steps:
    for batch, target in DataLoader(Samples(), 4, shuffle=True):
        loss = (model(batch) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        if done == steps:
            break
torch.save(model.state_dict(), "model.pt")
print(f"weights {model.inner.weight.tolist()}")
"""

REFUSED = why_not()
needs_isolation = pytest.mark.skipif(REFUSED is not None, reason=f"trials cannot be kept apart here: {REFUSED}")


def frameworm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "frameworm", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "tune" not in path.parts
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_isolation
def test_a_script_is_made_faster_proved_and_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPER)
    before = contents(tmp_path)
    tuned = frameworm(tmp_path, "tune", "--budget", "400s", "train.py", "400")
    assert tuned.returncode == 0, tuned.stderr
    assert contents(tmp_path) == before, "what trials write is gone"
    found = json.loads((tmp_path / "tune" / "train" / "tune.json").read_text())
    assert found["changes"]["workers"]["before"] == 0, tuned.stdout + tuned.stderr
    assert found["speedup"]["low"] > 1.3, "two delays of 20 ms are made beside each other"
    proof = next(item["proof"] for item in found["attempts"] if "workers" in item["changes"])
    assert proof["verdict"] == "accepted"
    assert proof["compared"]["states"] == 8
    assert "frameworm run --with tune/train/tuned.yaml train.py 400" in tuned.stdout
    assert "num_workers=" in tuned.stdout
    assert (tmp_path / "tune" / "train" / "report.html").read_text().count("loader processes")
    assert sorted(path.name for path in (tmp_path / "tune" / "train").iterdir()) == [
        "report.html",
        "tune.json",
        "tuned.patch",
        "tuned.yaml",
    ]
    patch = (tmp_path / "tune" / "train" / "tuned.patch").read_text()
    workers = found["changes"]["workers"]["after"]
    assert f"+    for batch, target in DataLoader(Samples(), 4, shuffle=True, num_workers={workers})" in patch

    path = tmp_path / "tune" / "train" / "tuned.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["fingerprint"]["arguments"] = ["20"]
    path.write_text(yaml.safe_dump(settings))
    plain = subprocess.run([sys.executable, "train.py", "20"], cwd=tmp_path, capture_output=True, text=True, check=True)
    run = frameworm(tmp_path, "run", "--with", str(path), "train.py", "20")
    assert run.returncode == 0, run.stderr
    assert run.stdout == plain.stdout, "the same samples in the same order"
    assert f"loader processes: {workers} switched on" in run.stderr
    refused = frameworm(tmp_path, "run", "--with", str(path), "train.py", "21")
    assert refused.returncode != 0
    assert "its arguments were 20" in refused.stderr


PROBLEMS = {
    "no torch": ("print('hello')", "without importing torch"),
    "no training": ("import torch\nprint(torch.ones(2))", "no optimizer of torch has stepped"),
    "stdin": ("import torch\ninput('which model? ')", "EOFError"),
    "crash": ("import torch\nraise SystemExit('no data here')", "no data here"),
    "processes of its own": (
        "import torch\nimport torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=1)",
        "let torchrun start them",
    ),
    "three steps": (SLEEPER, "ended after 3 steps"),
}


@pytest.mark.slow
@needs_isolation
@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_cannot_be_tuned_is_told_in_one_line(kind: str, tmp_path: Path) -> None:
    script, told = PROBLEMS[kind]
    (tmp_path / "train.py").write_text(script)
    ended = frameworm(tmp_path, "tune", "--budget", "120s", "train.py", *(["3"] if kind == "three steps" else []))
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert told in last
    assert last.startswith("frameworm: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_what_would_be_done_is_told_without_doing_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError")
    told = frameworm(tmp_path, "tune", "--dry-run", "train.py", "--lr", "0.1")
    assert told.returncode == 0
    assert "would run train.py --lr 0.1" in told.stdout
    assert not (tmp_path / "tune").exists()


@pytest.mark.slow
def test_options_of_configs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    told = frameworm(tmp_path, "tune", "--set", "training.lr=1", "train.py")
    assert told.returncode != 0
    assert "--set is for a config" in told.stderr
    assert "give a script or a config" in frameworm(tmp_path, "tune").stderr
    assert "there is no such module" in frameworm(tmp_path, "tune", "-m", "no.such.module").stderr


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "x.yaml").write_text("a: 1")
    assert "was not written by" in frameworm(tmp_path, "run", "--with", "x.yaml", "train.py").stderr
    assert "cannot read" in frameworm(tmp_path, "run", "--with", "y.yaml", "train.py").stderr
