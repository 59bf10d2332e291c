"""Padded, bucketed and packed runs: the same losses step by step, and exact after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from workbench import StopAfter, classification, make_optimizer, mlp

from frameworm import Trainer
from frameworm.config.load import load_config_from_mapping
from frameworm.engine.run import run
from frameworm.errors import TrainingInterruptedError
from frameworm.hardware.resolve import resolve_here
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import build_workload

STEPS_PER_EPOCH = 7  # 100 samples in steps of 16, the last one of 4


def train(out: Path, cache: Path, *, stop_after: int | None = None, dropout: float = 0.0, **data: Any) -> list[Any]:
    sections = {
        "model": {
            "d_model": 16,
            "n_heads": 2,
            "num_layers": 1,
            "dim_feedforward": 32,
            "max_seq_len": 32,
            "dropout": dropout,
        },
        "data": {"cache_dir": str(cache), "limit": 100, "vocab_size": 512, **data},
        "training": {"epochs": 2, "global_batch": 16, "micro_batch": 8},
        "gpu": {"device": "cpu"},
        "checkpoint": {"every_steps": 3},
    }
    config = load_config_from_mapping(sections, environ={})
    run(config, out=out, resume="auto" if out.exists() else None, callbacks=[StopAfter(stop_after)])
    steps = [json.loads(line) for line in (out / "steps-rank0.jsonl").read_text().splitlines()]
    assert len(steps) == 2 * STEPS_PER_EPOCH
    return steps


@pytest.mark.slow
def test_packed_steps_give_the_losses_of_padded_ones(tmp_path: Path, data_cache_dir: Path) -> None:
    padded = train(tmp_path / "padded", data_cache_dir, balance=True)
    packed = train(tmp_path / "packed", data_cache_dir, batching="packed")
    assert [step["loss"] for step in packed] == pytest.approx([step["loss"] for step in padded], abs=1e-5)
    assert [step["samples"] for step in packed] == ([16] * 6 + [4]) * 2
    assert [step["tokens"] for step in packed] == [step["tokens"] for step in padded]
    full = [step for step in packed if step["samples"] == 16]
    assert len({step["padded_tokens"] for step in full}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("batching", "stop_after"), [("packed", 5), ("packed", 7), ("bucketed", 10)])
def test_a_stopped_run_goes_on_exactly(batching: str, stop_after: int, tmp_path: Path, data_cache_dir: Path) -> None:
    through = train(tmp_path / "through", data_cache_dir, dropout=0.2, batching=batching)
    with pytest.raises(TrainingInterruptedError):
        train(tmp_path / "stopped", data_cache_dir, dropout=0.2, batching=batching, stop_after=stop_after)
    resumed = train(tmp_path / "stopped", data_cache_dir, dropout=0.2, batching=batching)
    fields = ("step", "loss", "samples", "tokens", "padded_tokens")
    assert [[step[name] for name in fields] for step in resumed] == [
        [step[name] for name in fields] for step in through
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_steps_have_fewer_widths(compiled: bool, data_cache_dir: Path) -> None:
    sections = {
        "model": {"max_seq_len": 32},
        "data": {"cache_dir": str(data_cache_dir), "limit": 800, "vocab_size": 512, "batching": "bucketed"},
        "training": {"global_batch": 4},
        "gpu": {"device": "cpu", "compile_model": compiled},
    }
    config = resolve_here(load_config_from_mapping(sections, environ={}), 1)
    workload = build_workload(config)
    loader = build_loader(config, workload, workload.train_data, evaluation=False)
    seen = {batch["input_ids"].shape[1] for batch in loader}
    assert 8 < len(seen) <= 16 if compiled else len(seen) > 16


def _notes_of_both_ways(rank: int, world_size: int, cache: Path) -> tuple[list[str], list[str]]:
    sections = {
        "model": {"d_model": 16, "n_heads": 2, "num_layers": 1, "dim_feedforward": 32, "max_seq_len": 32},
        "data": {"cache_dir": str(cache), "limit": 100, "vocab_size": 512},
        "training": {"max_steps": 2, "batch_size": 8},
        "gpu": {"device": "cpu"},
    }
    by_config = run(load_config_from_mapping(sections, environ={}), out=None)
    model = mlp()
    trainer = Trainer(model, make_optimizer("sgd", model), run_dir=None, device="cpu", max_steps=2)
    by_loader = trainer.train(DataLoader(classification(64), batch_size=4))
    assert (by_config.batch.global_, by_loader.batch.global_) == (16, 8)
    return by_config.notes, by_loader.notes


@pytest.mark.slow
def test_a_batch_per_rank_is_noted(run_ranks: Callable[..., list[Any]], data_cache_dir: Path) -> None:
    by_config, by_loader = run_ranks(_notes_of_both_ways, args=(data_cache_dir,))[0]
    assert sum("the global batch is 16: training.batch_size" in note for note in by_config) == 1
    assert not any("loader's batch_size" in note for note in by_config)
    assert any("the global batch is 8: the loader's batch_size 4" in note for note in by_loader)
