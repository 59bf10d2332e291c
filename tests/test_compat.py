"""Old spellings: each still works, warns with the new one at the user's line, and is known to the list."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from frameworm import Trainer, compat
from frameworm.cli.main import app
from frameworm.config.schema import Config

MODEL = torch.nn.Linear(2, 2)


def _config(**settings: Any) -> Config:
    return Trainer(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1), run_dir=None, device="cpu", **settings).config


@pytest.mark.parametrize(
    ("old", "section", "field", "value"),
    [
        ({"gradient_accumulation_steps": 3}, "training", "accumulation", 3),
        ({"use_amp": True}, "gpu", "mixed_precision", "bf16"),
        ({"enable_mixed_precision": True}, "gpu", "mixed_precision", "bf16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_old_keyword_of_trainer(old: dict[str, Any], section: str, field: str, value: Any) -> None:
    (name,) = old
    spelling = {**compat.RENAMED_KEYWORDS, **compat.MIXED_PRECISION_KEYWORDS}[name]
    with pytest.warns(DeprecationWarning, match=re.escape(f"write {spelling.new}")) as seen:
        config = _config(**old)
    assert getattr(getattr(config, section), field) == value
    (warning,) = seen
    assert spelling.removed_in in str(warning.message)
    assert Path(warning.filename) == Path(__file__)


def test_old_keyword_for_the_device() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match=r"write Trainer\(device="):
        found = Trainer(MODEL, optimizer, run_dir=None, device_type="cpu").config  # type: ignore[call-arg]
    assert found.gpu.device == "cpu"


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_old_option_of_predict(scaling: str) -> None:
    by_hand = ["predict", "--compute-ms", "100", "--gradient-mb", "100", "--fabric", "1gbe", "--world-sizes", "4"]
    old = CliRunner().invoke(app, [*by_hand, "--scaling", scaling])
    new = CliRunner().invoke(app, [*by_hand, f"--{scaling}"])
    assert old.exit_code == new.exit_code == 0
    assert old.stdout == new.stdout
    assert compat.PREDICT_SCALING.new in old.stderr
    assert not new.stderr


def test_the_list_is_complete_and_says_when_each_goes() -> None:
    listed = {id(spelling) for spelling in compat.EVERY}
    for value in vars(compat).values():
        found = value.values() if isinstance(value, dict) else [value]
        assert all(id(item) in listed for item in found if isinstance(item, compat.OldSpelling))
    for spelling in compat.EVERY:
        assert spelling.old != spelling.new
        assert tuple(int(part) for part in spelling.removed_in.split(".")) > (0, 1)


def test_new_spellings_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _config(accumulation=2, mixed_precision="bf16")
