"""`frameworm watch --tui`: the table and a run in a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import append_steps, write_run
from rich.console import Console
from typer.testing import CliRunner

from frameworm.cli.main import app
from frameworm.watch import terminal


def _shown(*arguments: str) -> str:
    told = CliRunner().invoke(app, ["watch", *arguments, "--tui"], env={"COLUMNS": "120"})
    assert told.exit_code == 0, told.output
    return told.output


def test_the_table_and_a_run(tmp_path: Path) -> None:
    assert "no runs yet" in _shown(str(tmp_path))
    folder = write_run(tmp_path, "one", steps=1_234)
    write_run(tmp_path, "two", finished=False)
    table = _shown(str(tmp_path)).splitlines()
    assert table[0].split() == ["run", "status", "steps", "loss", "samples/s", "verdict", "model"]
    assert {line.split()[0] for line in table[1:]} == {"one", "two"}
    assert any("1,234" in line and "completed" in line for line in table)
    alone = _shown(str(folder))
    assert alone.startswith("demo · completed")
    assert "try: " in alone


def test_hostile_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, "one\x1b[2J", word="\x1b]0;x\x07[bold]")
    assert "\x1b" not in _shown(str(tmp_path))
    assert "\x1b" not in _shown(str(tmp_path / "one\x1b[2J"))


def test_it_goes_on_until_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "one", steps=50, finished=False)
    ticks: list[float] = []

    def tick(seconds: float) -> None:
        ticks.append(seconds)
        append_steps(folder, 51, 60)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.time, "sleep", tick)
    output = io.StringIO()
    terminal.show(tmp_path, Console(file=output, force_terminal=True, width=120))
    assert len(ticks) == 3
    assert "one" in output.getvalue()


def test_one_of_tui_and_json(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["watch", str(tmp_path), "--tui", "--json"]).exit_code == 2
