"""What a verb imports before it can answer: the reading verbs start at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from frameworm.records.schema import Batch, RunRecord, StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line

_LOADED = """
import atexit, sys
def tell():
    print("LOADED", *(name for name in ("torch", "numpy", "frameworm.config.schema") if name in sys.modules))
atexit.register(tell)
from frameworm.cli.main import main
sys.argv = ["frameworm", *sys.argv[1:]]
main()
"""


def _write_run(path: Path) -> None:
    path.mkdir()
    folder = RunFolder(path)
    folder.write_summary(RunRecord(path.name, "completed", {}, Batch(8, 1, 1, 8), steps=20))
    lines = [
        step_line(StepRecord(number, 1, float(number), 0.1, 1.0, 0.1, 8, 8.0, phases={"forward": 0.1}))
        for number in range(1, 21)
    ]
    folder.steps(0).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("verb", "allowed"),
    [
        (("--version",), set()),
        (("init", "model", "new"), set()),
        (("runs", "."), set()),
        (("diagnose", "a"), {"frameworm.config.schema"}),  # remedies leave out what the config has set already
        (("compare", "a", "b"), set()),
        (("guard", "a", "--baseline", "b"), set()),
    ],
)
def test_a_verb_that_reads_imports_nothing_heavy(tmp_path: Path, verb: tuple[str, ...], allowed: set[str]) -> None:
    for name in ("a", "b"):
        _write_run(tmp_path / name)
    ended = subprocess.run(
        [sys.executable, "-c", _LOADED, *verb], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode in (0, 3), ended.stderr
    said, *loaded = ended.stdout.splitlines()[-1].split()
    assert said == "LOADED"
    assert set(loaded) <= allowed
