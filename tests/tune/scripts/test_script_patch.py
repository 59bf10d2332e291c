"""Changes are written into a script where it makes what they change, or it is said why they cannot be."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from frameworm.tune.scripts.patch import NoPatchError, as_diff, patched

SCRIPT = """\
from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader


def main(data, workers):
    loader = DataLoader(
        data,
        batch_size=8,
        shuffle=True,  # "in any order"
        num_workers=workers,
    )
    model = nn.Sequential(
        nn.Linear(4, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    for batch in loader:
        optimizer.zero_grad(); loss = model(batch).mean(); loss.backward(); optimizer.step()
"""


def line_of(text: str, source: str = SCRIPT) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


PLACES: list[tuple[str, int, str]] = [
    ("optimizer", line_of("AdamW"), ""),
    ("loader", line_of("DataLoader("), ""),
    ("model", line_of("model(batch)"), "model"),
]


def added(changes: dict[str, Any], source: str = SCRIPT, places: list[tuple[str, int, str]] = PLACES) -> list[str]:
    """The lines that a patch adds; what comes out is Python."""
    written = patched(source, changes, {"places": places})
    ast.parse(written)
    lines = as_diff(source, written, "train.py").splitlines()
    assert lines[:2] == ["--- a/train.py", "+++ b/train.py"]
    return [line[1:].strip() for line in lines[2:] if line.startswith("+")]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"fused_optimizer": True},
            ["optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), fused=True)"],
        ),
        ({"workers": 3}, ["num_workers=3,", "persistent_workers=True,"]),
        ({"pin_memory": True}, ["pin_memory=True,"]),
        ({"compile": True}, ["model.compile()"]),
        ({"channels_last": True}, ["model.to(memory_format=torch.channels_last)"]),
        ({"tf32": True}, ['torch.set_float32_matmul_precision("high")']),
        (
            {"tf32": True, "compile": True, "workers": 1},
            [
                'torch.set_float32_matmul_precision("high")',
                "num_workers=1,",
                "persistent_workers=True,",
                "model.compile()",
            ],
        ),
    ],
)
def test_a_change_is_one_small_edit(changes: dict[str, Any], lines: list[str]) -> None:
    assert added(changes) == lines


def test_text_beyond_ascii_moves_nothing() -> None:
    source = SCRIPT.replace("lr=1e-3", 'lr=sum(map(ord, "é")) * 1e-6')
    assert added({"fused_optimizer": True}, source)[0].endswith('"é")) * 1e-6, betas=(0.9, 0.99), fused=True)')


@pytest.mark.parametrize(
    ("changes", "source", "places", "told"),
    [
        ({"autocast": "bf16"}, SCRIPT, PLACES, "only you can tell apart"),
        ({"fused_optimizer": True}, SCRIPT, PLACES[1:], "made by a library"),
        ({"compile": True}, SCRIPT, PLACES[:2], "does not call one model"),
        ({"compile": True}, SCRIPT, [*PLACES, ("model", 1, "other")], "does not call one model"),
        ({"tf32": True}, SCRIPT.replace("import torch\n", "import torch as t\n", 1), PLACES, "under its own name"),
        (
            {"fused_optimizer": True},
            SCRIPT.replace("lr=1e-3, betas=(0.9, 0.99)", "**settings"),
            PLACES,
            "its arguments by **",
        ),
        ({"fused_optimizer": True}, SCRIPT.replace("torch.optim.AdamW", "make"), PLACES, "cannot be added to"),
    ],
)
def test_what_has_no_place_says_why(changes: dict[str, Any], source: str, places: Any, told: str) -> None:
    with pytest.raises(NoPatchError, match=told.replace("*", r"\*")):
        patched(source, changes, {"places": places})
