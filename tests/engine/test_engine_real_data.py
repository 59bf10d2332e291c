"""Real texts through the whole path: reader, tokenizer, cache, loader, engine. Needs FRAMEWORM_DATA."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("FRAMEWORM_DATA", "no-such-folder"))
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (DATA / "ag_news").is_dir(), reason="FRAMEWORM_DATA does not name a folder that holds ag_news")
def test_a_small_model_learns_ag_news_on_cpu(cli: Callable[..., Any], tmp_path: Path) -> None:
    settings = [
        f"data.root={DATA / 'ag_news'}",
        "data.limit=14000",
        "training.epochs=2",
        "training.global_batch=64",
        "training.lr=3e-3",
        "model.d_model=32",
        "model.num_layers=1",
        "model.dim_feedforward=64",
        "model.max_seq_len=48",
        "gpu.device=cpu",
    ]
    arguments = [item for setting in settings for item in ("--set", setting)]
    config = CONFIGS / "ag_news_single_gpu.yaml"
    done = cli("train", "--config", config, *arguments, "--out", tmp_path / "run", "--json", timeout_s=580)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["quality"]["val_accuracy"] >= 0.85
    assert summary["steps"] == 2 * -(-14000 // 64)
    assert 0 < summary["padding_waste"] < 0.6
