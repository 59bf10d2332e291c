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
        ({"workers": 3}, ["num_workers=3,"]),
        ({"pin_memory": True}, ["pin_memory=True,"]),
        ({"compile": True}, ["model.compile()"]),
        ({"channels_last": True}, ["model.to(memory_format=torch.channels_last)"]),
        ({"tf32": True}, ['torch.set_float32_matmul_precision("high")']),
        ({"threads": 3}, ["torch.set_num_threads(3)"]),
        (
            {"attention": "cudnn"},
            ["torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_mem_efficient_sdp(False)"],
        ),
        (
            {"tf32": True, "compile": True, "workers": 1},
            [
                'torch.set_float32_matmul_precision("high")',
                "num_workers=1,",
                "model.compile()",
            ],
        ),
    ],
)
def test_a_change_is_one_small_edit(changes: dict[str, Any], lines: list[str]) -> None:
    assert added(changes) == lines


def test_buckets_are_set_where_the_model_is_divided() -> None:
    source = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(Net(), device_ids=[0])\n"
    changes = {"bucket_mib": 40, "bucket_views": True}
    written = patched(source, changes, {"places": [("data_parallel", 2, "")]})
    assert "model = DDP(Net(), device_ids=[0], bucket_cap_mb=40, gradient_as_bucket_view=True)" in written
    with pytest.raises(NoPatchError, match="the DistributedDataParallel is made by a library"):
        patched(source, changes, {"places": []})


LOOP = """\
for batch, labels in loader:
    batch, labels = batch["x"].to(device), labels.cuda()
    optimizer.zero_grad(set_to_none=False)
"""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"non_blocking": True},
            'batch, labels = batch["x"].to(device, non_blocking=True), labels.cuda(non_blocking=True)',
        ),
        ({"none_gradients": True}, "optimizer.zero_grad(set_to_none=True)"),
    ],
)
def test_calls_in_the_loop_are_changed_where_they_are_made(changes: dict[str, Any], line: str) -> None:
    assert added(changes, LOOP, [("copy", 2, ""), ("zeroing", 3, "")]) == [line]


def test_an_argument_without_a_name_is_left_to_the_user() -> None:
    with pytest.raises(NoPatchError, match=r"line 1 calls zero_grad\(False\)"):
        patched("model.zero_grad(False)\n", {"none_gradients": True}, {"places": [("zeroing", 1, "")]})


def test_blocks_are_compiled_where_the_model_is_made() -> None:
    written = patched(SCRIPT, {"compile_blocks": True}, {"places": PLACES, "block_list": "encoder.layers"})
    indent = " " * 4
    assert f"{indent}for block in model.encoder.layers:\n{indent}    block.compile()\n" in written


def test_text_beyond_ascii_moves_nothing() -> None:
    source = SCRIPT.replace("lr=1e-3", 'lr=sum(map(ord, "é")) * 1e-6')
    assert added({"fused_optimizer": True}, source)[0].endswith('"é")) * 1e-6, betas=(0.9, 0.99), fused=True)')


@pytest.mark.parametrize(
    ("changes", "source", "places", "told"),
    [
        ({"autocast": "bf16"}, SCRIPT, PLACES, "only you can tell apart"),
        ({"fused_optimizer": True}, SCRIPT, PLACES[1:], "made by a library"),
        ({"compile": True}, SCRIPT, PLACES[:2], "no one model"),
        ({"compile": True}, SCRIPT, [*PLACES, ("model", 1, "other")], "no one model"),
        ({"compile_blocks": True}, SCRIPT, PLACES, "do not all lie in one list"),
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


TRAINER = """\
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out",  # here
    optim="adamw_torch"
)
Trainer(model, arguments, train_dataset=data).train()
"""
OPTIONS = {"bf16": False, "optim": "adamw_torch", "torch_compile": False}
FACTS: dict[str, Any] = {
    "places": [("options", 3, "TrainingArguments"), ("options", 3, "TrainingArguments")],
    "options_given": ["optim"],
    "framework": {
        "name": "transformers",
        "arguments": "TrainingArguments",
        "options": OPTIONS,
        "unfused_optimizer": "AdamW",
    },
}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"autocast": "bf16"}, ['optim="adamw_torch",', "bf16=True,"]),
        ({"fused_optimizer": True}, ['optim="adamw_torch_fused"']),
        (
            {"fused_optimizer": True, "compile": True, "autocast": "bf16"},
            ['optim="adamw_torch_fused",', "torch_compile=True,", "bf16=True,"],
        ),
    ],
)
def test_options_are_written_where_they_are_given(changes: dict[str, Any], lines: list[str]) -> None:
    written = patched(TRAINER, changes, FACTS)
    ast.parse(written)
    diff = as_diff(TRAINER, written, "train.py").splitlines()[2:]
    assert [line[1:].strip() for line in diff if line.startswith("+")] == lines


def test_in_one_line_they_stay_in_it() -> None:
    source = "import lightning as L\nL.Trainer(max_epochs=2).fit(model)\n"
    framework = {"name": "lightning", "arguments": "Trainer", "options": {"precision": "32-true"}}
    facts = {"places": [("options", 2, "Trainer")], "framework": framework}
    written = patched(source, {"autocast": "bf16"}, facts)
    assert written.splitlines()[1] == 'L.Trainer(max_epochs=2, precision="bf16-mixed").fit(model)'


@pytest.mark.parametrize(
    ("source", "facts", "told"),
    [
        (TRAINER.replace('output_dir="out"', "**settings"), {}, "line 3 gives TrainingArguments its arguments by **"),
        (TRAINER.replace("= TrainingArguments(", "= make("), {}, "line 3 makes TrainingArguments in a way"),
        (TRAINER, {"places": [], "options_made_by": "transformers"}, "TrainingArguments is made by transformers, from"),
        (TRAINER, {"places": []}, "TrainingArguments is made in another file"),
    ],
)
def test_options_without_a_line_say_why(source: str, facts: dict[str, Any], told: str) -> None:
    with pytest.raises(NoPatchError, match=told.replace("*", r"\*")):
        patched(source, {"autocast": "bf16"}, {**FACTS, **facts})


BATCHES = "torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), {}, {})"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            "DataLoader(data, batch_size=8, shuffle=True)",
            f"DataLoader(data, batch_size=None, shuffle=False, sampler={BATCHES.format(8, False)})",
        ),
        (
            "DataLoader(data, args.size, True, num_workers=2)",
            f"DataLoader(data, None, False, num_workers=2, sampler={BATCHES.format('args.size', False)})",
        ),
        (
            "DataLoader(data, batch_size=8, drop_last=last, shuffle=True)",
            f"DataLoader(data, batch_size=None, drop_last=False, shuffle=False, sampler={BATCHES.format(8, 'last')})",
        ),
        (
            "DataLoader(dataset=data, batch_size=8, shuffle=True)",
            f"DataLoader(dataset=data, batch_size=None, shuffle=False, sampler={BATCHES.format(8, False)})",
        ),
        ("DataLoader(make(), batch_size=8, shuffle=True)", None),
        ("DataLoader(data, batch_size=8, shuffle=args.shuffle)", None),
        ("DataLoader(data, batch_size=8, shuffle=True, generator=drawn)", None),
        ("DataLoader(**options)", None),
    ],
)
def test_whole_batches_are_written_where_a_loader_shuffles(call: str, written: str | None) -> None:
    source = f"import torch\nfrom torch.utils.data import DataLoader\n\nloader = {call}\n"
    places = [("loader", 4, "")]
    if written is None:
        with pytest.raises(NoPatchError, match="whole_batches: the script makes no loader by"):
            patched(source, {"whole_batches": True}, {"places": places})
    else:
        assert added({"whole_batches": True}, source, places) == [f"loader = {written}"]
