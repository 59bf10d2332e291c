"""Modules are found and run as `python -m` does it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from frameworm.attach.script import find_module
from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.attach.trial.tuned_run import TunedRun


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the working folder whose module trains as soon as it is imported."""
    folder = tmp_path / "trained_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "settings.py").write_text("steps = 3\n")
    (folder / "train.py").write_text(
        "from pathlib import Path\nfrom .settings import steps\nPath('trained').write_text(f'{__name__} {steps}')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item not in ("", str(tmp_path))])
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "trained_here"]:
        del sys.modules[name]


def test_a_module_is_found_in_the_working_folder_and_not_imported(package: Path) -> None:
    path = sys.path[:]
    assert find_module("trained_here.train") == package / "train.py"
    assert not Path("trained").exists()
    assert sys.path == path
    (package / "__main__.py").write_text("raise AssertionError")
    assert find_module("trained_here") == package / "__main__.py"


def test_what_was_tuned_as_a_module_runs_as_one(package: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.yaml"
    script = package / "train.py"
    found = {"version": 1, "fingerprint": fingerprint_of(script, []), "facts": {"module": "trained_here.train"}}
    tuned.write_text(yaml.safe_dump(found))
    run = f"import pathlib\nfrom {TunedRun.__module__} import TunedRun\n"
    run += f"print(TunedRun(pathlib.Path({str(script)!r}), [], pathlib.Path({str(tuned)!r})).run().status)"
    # In a process of its own: what is switched on stays on.
    ended = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "completed", ended.stderr
    assert Path("trained").read_text() == "__main__ 3"
