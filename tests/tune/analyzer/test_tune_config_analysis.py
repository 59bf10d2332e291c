"""A config's short run, with experiments after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameworm import Config
from frameworm.tune.analyzer.config_analysis import analyze_config

WORKLOAD = """
import time
import torch
from torch import nn

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(8), index % 3

def build(config):
    return nn.Linear(8, 3), Slow(), None
"""


@pytest.mark.slow
def test_findings_of_a_config_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_planted_workload.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config.model_validate(
        {
            "workload": "slow_planted_workload:build",
            "data": {"num_workers": 0},
            "training": {"global_batch": 8},
            "gpu": {"device": "cpu"},
            "observe": {"progress": False},
        }
    )
    before = config.model_dump()
    record = analyze_config(config, steps=25, budget_s=4.0, out=tmp_path / "run")
    assert config.model_dump() == before
    assert record.steps == 25
    assert record.verdict == "input_bound"
    finding = record.findings[0]
    assert finding.expected_speedup is not None
    assert finding.expected_speedup.basis == "measured"
    assert "measured_speedup" in finding.evidence
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["findings"][0]["expected_speedup"]["basis"] == "measured"
