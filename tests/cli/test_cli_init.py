"""`frameworm init` as a newcomer meets it: what it says, and that what it says to run runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, command_line

from frameworm.records.store import RunFolder

STEPS = ["--set", "training.max_steps=3", "--set", "training.epochs=1"]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


def told(stdout: str) -> list[str]:
    """The commands that are to be run next."""
    return [line[11:] for line in stdout[stdout.index("\nnext ") + 1 :].splitlines()]


def test_without_a_choice_the_help_shows_them(here: CommandLine) -> None:
    for ended in (here("init"), here("init", "--help")):
        for name in ("quickstart", "model", "script"):
            assert re.search(rf"│ {name} +Write ", ended.stdout), ended.stdout
        assert "frameworm init quickstart" in ended.stdout
    assert list(here.folder.iterdir()) == []


def test_what_it_says(here: CommandLine) -> None:
    assert here("init", "quickstart").stdout.splitlines() == [
        "wrote      quickstart.yaml  what is trained, and how",
        "wrote      quickstart.md    what to do with it",
        "next       frameworm train --config quickstart.yaml",
        "           frameworm tune --config quickstart.yaml --budget 3m",
    ]
    (here.folder / "quickstart.yaml").unlink()
    assert [line[:26] for line in here("init", "quickstart").stdout.splitlines()][:2] == [
        "wrote      quickstart.yaml",
        "was there  quickstart.md  ",
    ]
    (here.folder / "fit.py").write_text("print('hello')\n")
    said = here("init", "script", "fit.py", "--epochs", "3").stdout.splitlines()
    assert said[1].startswith("note       fit.py does not import torch")
    assert said[2:] == [
        "next       frameworm profile fit.py --epochs 3",
        "           frameworm tune --budget 5m fit.py --epochs 3",
    ]


def test_as_json(here: CommandLine) -> None:
    ended = here("init", "model", "--json", "waves")
    facts = json.loads(ended.stdout)
    assert (facts["folder"], facts["unchanged"], facts["notes"]) == ("waves", [], [])
    assert set(facts["files"]) == {path.name for path in (here.folder / "waves").iterdir()}
    assert facts["next"][0] == "cd waves"
    script = here("init", "script", "--json")
    assert list(json.loads(script.stdout)["files"]) == ["train.py", "frameworm-train.md"]


def test_a_refusal_goes_to_stderr(here: CommandLine) -> None:
    (here.folder / "quickstart.yaml").write_text("name: mine\n")
    ended = here("init", "quickstart")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "quickstart.yaml" in ended.stderr
    assert here("init", "other").code == 2


@pytest.mark.slow
def test_the_commands_of_the_quickstart(here: CommandLine) -> None:
    """All that are in its page, one after the other, but for two that tests/test_wheel.py runs."""
    assert here("init", "quickstart").code == 0
    (here.folder / "tune" / "quickstart").mkdir(parents=True)
    shutil.copy(here.folder / "quickstart.yaml", here.folder / "tune" / "quickstart" / "best.yaml")
    page = (here.folder / "quickstart.md").read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    verbs = []
    for program, verb, *arguments in (words for line in blocks.splitlines() if (words := shlex.split(line, True))):
        verbs.append(verb)
        if program == "pip" or verb in ("tune", "watch"):
            continue
        assert program == "frameworm"
        if verb == "train":
            arguments += ["--set", f"training.max_steps={6 if '--resume' in arguments else 3}"]
        ended = here(verb, *arguments)
        assert ended.code in (0, 3), ended.stderr
    assert set(verbs) == {"train", "diagnose", "tune", "compare", "evaluate", "export", "install", "watch"}
    assert RunFolder.open(here.folder / "runs" / "first").read_summary().steps == 6
    assert (here.folder / "quickstart.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_the_model_trains_and_its_test_passes(here: CommandLine, data_cache_dir: Path) -> None:
    train, check = told(here("init", "model").stdout)
    ended = here(*train.split()[1:], "--out", "run", *STEPS)
    assert ended.code == 0, ended.stderr
    assert RunFolder.open(here.folder / "run").read_summary().steps == 3
    program, *arguments = check.split()
    assert program == "python"
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, *arguments, "-q", "-p", "no:cacheprovider"],
        cwd=here.folder,
        env={**os.environ, "PYTHONPATH": source, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_the_script_is_profiled(here: CommandLine, cli: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    profile, tune = told(here("init", "script").stdout)
    verb, script = profile.split()[1:]
    done = cli(verb, "--out", "run", script, "--epochs", "1", cwd=here.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0: ")
    assert "verdict " in done.stderr
    summary = RunFolder.open(here.folder / "run").read_summary()
    assert (summary.source, summary.steps) == ("attached", 40)
    verb, *arguments = tune.split()[1:]
    planned: Any = here(verb, "--dry-run", *arguments)
    assert planned.code == 0, planned.stderr
    assert "tune/train" in planned.stdout
