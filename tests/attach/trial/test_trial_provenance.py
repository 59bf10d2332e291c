"""Files that a tuned script saves say what was on, and hold what they would hold otherwise."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from frameworm.attach.patches import Patches
from frameworm.attach.trial.provenance import ENTRY, sign_saved_files

ABOUT = {"switches": {"compile": True}}


@pytest.fixture
def signing() -> Iterator[None]:
    patches = Patches()
    sign_saved_files(ABOUT, patches)
    yield
    patches.remove()


@pytest.mark.usefixtures("signing")
def test_a_saved_model_says_what_was_on_and_loads_as_ever(tmp_path: Path) -> None:
    path, model = tmp_path / "model.pt", nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 3}, path)
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert found["epoch"] == 3
        assert list(found["model"]) == ["weight", "bias"]
        assert torch.equal(found["model"]["weight"], model.weight)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        entry = next(name for name in archive.namelist() if name.endswith(ENTRY))
        assert json.loads(archive.read(entry)) == ABOUT


@pytest.mark.usefixtures("signing")
def test_safetensors_keep_their_own_words(tmp_path: Path) -> None:
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, path, {"format": "pt"})
    assert torch.equal(load_file(path)["weight"], torch.ones(2))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "frameworm": json.dumps(ABOUT)}


@pytest.mark.usefixtures("signing")
def test_what_is_no_archive_is_left_alone(tmp_path: Path) -> None:
    path, kept = tmp_path / "old.pt", io.BytesIO()
    torch.save(torch.ones(2), path, _use_new_zipfile_serialization=False)
    torch.save(torch.ones(2), kept)
    kept.seek(0)
    for place in (path, kept):
        assert torch.equal(torch.load(place, weights_only=True), torch.ones(2))


def test_afterwards_files_are_as_ever(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert not any(name.endswith(ENTRY) for name in archive.namelist())
