"""Snapshots of what lies on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import make_store
from torch import nn

from frameworm.engine.checkpoint import staging as staging_module
from frameworm.engine.checkpoint.load import list_checkpoints
from frameworm.engine.checkpoint.snapshot import Snapshot, take_snapshot
from frameworm.parallel.shards import HeldState, loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("room", [True, False])
def test_weights_changed_right_after_a_save_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr(staging_module, "_BOUNCE_BYTES", 2**16)  # several pieces
    if not room:
        monkeypatch.setattr(staging_module, "_DEVICE_SHARE", 0.0)
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(700, 300), nn.BatchNorm1d(300), nn.Linear(300, 5, dtype=torch.bfloat16)).to(device)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # not in the order of memory
    store = make_store(tmp_path, asynchronous=True, device=device)
    for step in (1, 2, 3):
        before = {name: item.detach().cpu().clone() for name, item in model.state_dict().items()}

        def capture(staging: staging_module.Staging | None, settle: object) -> Snapshot:
            assert staging is not None
            held = HeldState({"model": model.state_dict(), "optimizer": {}})
            rest = {"schedule": {}, "precision": {}, "progress": {}}
            return take_snapshot(held, {}, staging, 0, 1, lambda: (rest, {"own": torch.tensor(1)}))

        store.save(step, capture)
        with torch.no_grad():
            for item in model.state_dict().values():
                item.fill_(step)
        store.wait()
        assert store.problem is None
        found = loaded(list_checkpoints(tmp_path)[-1].read().shared["model"])
        assert all(torch.equal(found[name], item) for name, item in before.items())
    store.close()
    assert any("no room on the device" in note for note in store.all_notes()) is not room
