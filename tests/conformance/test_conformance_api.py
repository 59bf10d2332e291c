"""The verbs from Python, each used once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contract_entries import covers

from frameworm import api
from frameworm.config.load import load_config
from frameworm.errors import TrainingFailedError

STORED = Path(__file__).parents[1] / "golden" / "stored" / "runs"
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = ["data.limit=256", "training.epochs=2", "training.cpu_threads=1", "checkpoint.every_steps=off"]
SCRIPT = """
import sys
import torch

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
for inputs, targets in torch.utils.data.DataLoader(data, int(sys.argv[1])):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""


@covers("api.diagnose", "api.compare", "api.predict")
def test_stored_runs_are_judged_compared_and_predicted() -> None:
    judged = api.diagnose(STORED / "single")
    assert judged.verdict
    assert isinstance(judged.findings, list)
    assert api.compare(STORED / "ddp", STORED / "zero1").before is not None
    predicted = api.predict(STORED / "single", [1, 2, 8], bandwidth_gbps=10, latency_us=50)
    json.dumps(predicted.to_dict())


@pytest.mark.slow
@covers("api.plan_memory")
@pytest.mark.parametrize("as_file", [True, False])
def test_memory_is_planned(as_file: bool) -> None:
    config: Any = QUICKSTART if as_file else load_config(QUICKSTART)
    assert api.plan_memory(config, memory_bytes=10**9).fits
    assert api.plan_memory(config, memory_bytes=10**6, settings=["training.global_batch=128"]).fits is False


@covers("api.profile")
@pytest.mark.slow
def test_a_script_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    assert api.profile("script.py", ["16"], out="run").steps == 10
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(TrainingFailedError, match="exit code 1"):
        api.profile("script.py", ["none"])


@covers("api.tune")
@pytest.mark.slow
def test_a_config_is_tuned(tmp_path: Path, data_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(data_cache_dir))
    found = api.tune(QUICKSTART, budget="200s", trials=1, out=tmp_path / "search", settings=SMALL)
    assert found.baseline.failure is None
    assert (tmp_path / "search" / "best.yaml").exists()
