"""The checklist of what is in hand: items follow the model, the loader and the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm.distributed import OptimizedDataLoader, print_optimization_checklist

CONFIGS = Path(__file__).parents[3] / "configs"
DATA = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))


def items(*args: Any, **named: Any) -> dict[str, dict[str, Any]]:
    found = print_optimization_checklist(*args, show=False, **named)
    return {item["name"]: item for item in found["items"]}


def test_every_item_is_checked_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = print_optimization_checklist(nn.Linear(8, 3), DataLoader(DATA, 16))
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    assert "checklist · Linear · 1 process" in printed
    assert len(found["items"]) > 20
    for item in found["items"]:
        assert item["state"] in ("done", "not done", "does not apply")
        assert item["reason"]
        assert item["name"] in " ".join(printed.split())


@pytest.mark.slow
def test_items_follow_what_is_in_hand() -> None:
    model = nn.Linear(8, 3)
    plain = items(model, DataLoader(DATA, 16))
    assert plain["compiled model"]["state"] == "not done"
    assert plain["checkpoints beside training"]["state"] == "done"
    assert plain["deterministic mode off"]["state"] == "done"
    assert plain["fused optimizer"]["state"] == "done"
    unfused = torch.optim.AdamW(model.parameters(), fused=False)
    changed = items(
        torch.compile(model), DataLoader(DATA, 16, num_workers=0), optimizer=unfused, mode="sync", deterministic=True
    )
    assert changed["compiled model"]["state"] == "done"
    assert changed["checkpoints beside training"]["state"] == "not done"
    assert changed["deterministic mode off"]["state"] == "not done"
    assert changed["fused optimizer"]["state"] == "not done"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_with_far_too_many_workers_is_seen() -> None:
    for loader in (
        DataLoader(DATA, 16, num_workers=500),
        OptimizedDataLoader.create(DATA, 16, num_workers=500),
    ):
        item = items(nn.Linear(8, 3), loader)["loader processes"]
        assert item["state"] == "not done"
        assert "500 for each rank" in item["reason"]


def test_settings_are_named_as_python_takes_them() -> None:
    text = str(print_optimization_checklist(nn.Linear(8, 3), show=False))
    assert "Trainer(..., compile_model=True)" in text
    assert "--set" not in text


def test_a_config_file_gives_the_list_of_doctor() -> None:
    found = print_optimization_checklist(config=CONFIGS / "quickstart.yaml", show=False)
    assert "--set" in str(found)
    assert "quickstart" in found["subject"]
    assert len(found["items"]) > 20


def _in_ddp(rank: int, world_size: int) -> Any:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2_000, 2_000), find_unused_parameters=True, bucket_cap_mb=25)
    return print_optimization_checklist(model, DataLoader(DATA, 16), show=False)


@pytest.mark.slow
def test_a_model_in_ddp_is_checked_as_it_is(run_ranks: Any) -> None:
    found, _ = run_ranks(_in_ddp)
    assert "Linear · 2 processes · cpu" in found["subject"]
    state = {item["name"]: item["state"] for item in found["items"]}
    assert state["no search for unused parameters"] == "not done"
    assert state["buckets that overlap with backward"] == "not done"
    assert state["compressed gradients"] == "not done"
