"""`frameworm report` and the script that does the same: options, output and exit codes."""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from scaling_runs import store_published, store_run

from frameworm.cli.main import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_comprehensive_analysis.py"


class Ended(NamedTuple):
    code: object
    stdout: str
    stderr: str


class Shell:
    """Runs the verb or the script within the test process."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capture = capture

    def __call__(self, *args: str | Path, script: bool = False) -> Ended:
        self._capture.readouterr()
        words = [str(item) for item in args]
        self._patch.setattr(sys, "argv", [str(SCRIPT), *words] if script else ["frameworm", "report", *words])
        start = functools.partial(runpy.run_path, str(SCRIPT), run_name="__main__") if script else main
        with pytest.raises(SystemExit) as end:
            start()
        return Ended(end.value.code or 0, *self._capture.readouterr())


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.mark.slow
def test_the_verb_and_the_script_write_the_same(tmp_path: Path, shell: Shell) -> None:
    runs = tmp_path / "experiments"
    store_published(runs)
    done = shell("--root", runs, "--out", tmp_path / "a", "--warmup", "1", "--datasets", "IMDB", "AGNews")
    assert done.code == 0, done.stderr
    assert "negative_scaling" in done.stdout
    assert "excellent" in done.stdout
    again = shell("--datasets", "imdb,ag_news", "--root", runs, "--out", tmp_path / "b", script=True)
    assert again.code == 0, again.stderr
    written = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert len(written) == 12
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_json_holds_the_table(tmp_path: Path, shell: Shell) -> None:
    store_published(tmp_path / "runs")
    done = shell("--root", tmp_path / "runs", "--out", tmp_path / "plots", "--datasets", "imdb", "--json")
    data = json.loads(done.stdout)
    (table,) = data["datasets"]
    row = table["configurations"][0]["rows"][1]
    assert (table["dataset"], row["world_size"], row["status"]) == ("imdb", 4, "excellent")
    assert row["speedup"]["mean"] == pytest.approx(3.49)
    assert all(Path(name).exists() for name in data["files"])


def test_exit_codes(tmp_path: Path, shell: Shell) -> None:
    out = ("--out", tmp_path / "plots")
    missing = shell("--root", tmp_path / "nowhere", *out)
    assert missing.code == 2
    assert "does not exist" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = shell("--root", tmp_path / "empty", *out)
    assert empty.code == 2
    assert "holds no runs" in empty.stderr
    store_run(tmp_path / "single" / "one", "imdb", 1, [3.0, 1.0])
    single = shell("--root", tmp_path / "single", *out)
    assert single.code == 3
    assert "only world size 1" in single.stdout
    assert "no two world sizes" in single.stderr
    store_run(tmp_path / "broken" / "one", "imdb", 1, [3.0, 1.0]).summary_json.write_text("{")
    broken = shell("--root", tmp_path / "broken", *out)
    assert broken.code == 3
    assert "one (unreadable)" in broken.stdout
    for wrong in (["--warmup", "-1"], ["--what"], [str(tmp_path / "single")]):
        refused = shell("--root", tmp_path / "single", *out, *wrong)
        assert refused.code == 2, wrong
        assert refused.stderr


def test_help_has_an_example(shell: Shell) -> None:
    done = shell("--help")
    assert done.code == 0
    assert "frameworm report --root experiments --out plots" in " ".join(done.stdout.split())
