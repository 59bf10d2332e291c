"""`frameworm tune` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from frameworm.cli.main import app
from frameworm.config.durations import parse_duration
from frameworm.config.load import load_config
from frameworm.errors import ConfigError

_CONFIG = """
name: small
workload: text_classifier
model: {d_model: 16, n_heads: 2, num_layers: 1, dim_feedforward: 16, max_seq_len: 32, dropout: 0.0}
data: {dataset: generated, vocab_size: 256, num_workers: 0}
training: {epochs: 1, global_batch: 16, cpu_threads: 1}
gpu: {device: cpu}
"""


@pytest.mark.parametrize(("text", "expected"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), (" 2H ", 7200.0)])
def test_a_budget_is_a_time(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "0", "soon", "-5s", "5 days"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        parse_duration(text)


@pytest.mark.slow
def test_tune_writes_a_config_that_loads_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config, out = tmp_path / "small.yaml", tmp_path / "search"
    config.write_text(_CONFIG, encoding="utf-8")
    command = ["tune", "--config", str(config), "--out", str(out), "--trials", "2"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    ends = [line for line in (out / "journal.jsonl").read_text().splitlines() if '"event": "end"' in line]
    assert len(ends) == 2
    again = CliRunner().invoke(app, [*command, "--json"])
    assert again.exit_code == 0, again.output
    assert (out / "journal.jsonl").read_text().count('"event": "end"') == 2
    told = json.loads(again.stdout)
    assert told["trials"] == 2
    assert told["baseline"]["seconds_per_sample"]
    best = load_config(out / "best.yaml", [])
    assert best.training.global_batch == 16
