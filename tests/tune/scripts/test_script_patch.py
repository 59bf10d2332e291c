"""Changes are written into a script where it makes what they change, or it is said why they cannot be."""

from __future__ import annotations

import ast
import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworm.attach.padding import trimmed
from frameworm.attach.trial.padding_layout import layout_of
from frameworm.tune.scripts.by_hand import lines_by_hand
from frameworm.tune.scripts.patch import write_changes
from frameworm.tune.scripts.source import NoPatchError, as_diff

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


def patched(source: str, changes: dict[str, Any], facts: dict[str, Any]) -> str:
    """The script with all of the changes in it."""
    written = write_changes(source, changes, facts)
    if written.left:
        raise NoPatchError("; ".join(written.left.values()))
    assert written.changes == changes
    return written.text


def added(changes: dict[str, Any], source: str = SCRIPT, places: list[tuple[str, int, str]] = PLACES) -> list[str]:
    """The lines that a patch adds; what comes out is Python."""
    written = patched(source, changes, {"places": places})
    ast.parse(written)
    lines = as_diff(source, written, "train.py").splitlines()
    assert lines[:2] == ["--- a/train.py", "+++ b/train.py"]
    return [line[1:].strip() for line in lines[2:] if line[1:].strip() and line.startswith("+")]


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
        ({"none_gradients": True}, "optimizer.zero_grad()"),
    ],
)
def test_calls_in_the_loop_are_changed_where_they_are_made(changes: dict[str, Any], line: str) -> None:
    assert added(changes, LOOP, [("copy", 2, ""), ("zeroing", 3, "")]) == [line]


def test_an_argument_without_a_name_is_dropped_too() -> None:
    facts = {"places": [("zeroing", 1, "")]}
    assert patched("model.zero_grad(False)\n", {"none_gradients": True}, facts) == "model.zero_grad()\n"


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
        ({"autocast": "bf16"}, SCRIPT, PLACES, "do not lie in one block"),
        ({"fused_optimizer": True}, SCRIPT, PLACES[1:], "made by a library"),
        ({"compile": True}, SCRIPT, PLACES[:2], "no model that is trained has a name"),
        ({"compile": True}, SCRIPT, [*PLACES, ("model", 1, "other")], "other, which line 1 calls, gets no name"),
        ({"compile_blocks": True}, SCRIPT, PLACES, "do not lie in one list"),
        (
            {"fused_optimizer": True},
            SCRIPT.replace("lr=1e-3, betas=(0.9, 0.99)", "**settings") + 'settings = {"fused": None}\n',
            PLACES,
            "its arguments by **",
        ),
        ({"late_losses": True}, SCRIPT, PLACES, "is for the script to say"),
        ({"trim_padding": True}, SCRIPT, PLACES, "not a flat mapping or sequence"),
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
        (
            TRAINER.replace('output_dir="out"', "**settings"),
            {"options_given": ["bf16"]},
            "line 3 gives its arguments by **, and bf16",
        ),
        (TRAINER.replace("= TrainingArguments(", "= make("), {}, "line 3 makes TrainingArguments in a way"),
        (TRAINER, {"places": [], "options_made_by": "transformers"}, "TrainingArguments is made by transformers, from"),
        (TRAINER, {"places": []}, "TrainingArguments is made in another file"),
    ],
)
def test_options_without_a_line_say_why(source: str, facts: dict[str, Any], told: str) -> None:
    with pytest.raises(NoPatchError, match=told.replace("*", r"\*")):
        patched(source, {"autocast": "bf16"}, {**FACTS, **facts})


BATCHES = "BatchSampler(RandomSampler(data), {}, {})"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            "DataLoader(data, batch_size=8, shuffle=True)",
            f"DataLoader(data, batch_size=None, sampler={BATCHES.format(8, False)})",
        ),
        (
            "DataLoader(data, args.size, True, num_workers=2)",
            f"DataLoader(data, None, False, num_workers=2, sampler={BATCHES.format('args.size', False)})",
        ),
        (
            "DataLoader(data, batch_size=8, drop_last=last, shuffle=True)",
            f"DataLoader(data, batch_size=None, drop_last=False, sampler={BATCHES.format(8, 'last')})",
        ),
        (
            "DataLoader(dataset=data, batch_size=8, shuffle=True)",
            f"DataLoader(dataset=data, batch_size=None, sampler={BATCHES.format(8, False)})",
        ),
        (
            "DataLoader(data, batch_size=8, shuffle=True, generator=drawn)",
            "DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data, generator=drawn), 8, False), "
            "generator=drawn)",
        ),
        (
            "DataLoader(data, 8, sampler=Ranks(data))",
            "DataLoader(data, None, sampler=BatchSampler(Ranks(data), 8, False))",
        ),
        ("DataLoader(data, batch_size=8, shuffle=args.shuffle)", None),
        ("DataLoader(**options)", None),
    ],
)
def test_whole_batches_are_written_where_a_loader_shuffles(call: str, written: str | None) -> None:
    source = f"from torch.utils.data import DataLoader\n\nloader = {call}\n"
    places = [("loader", 3, "DataLoader")]
    if written is None:
        with pytest.raises(NoPatchError, match="line 3 makes a loader whose order it does not show"):
            patched(source, {"whole_batches": True}, {"places": places})
    else:
        imports = "from torch.utils.data import BatchSampler, DataLoader, RandomSampler"
        wanted = [
            imports.replace(", RandomSampler", "" if "Ranks" in call else ", RandomSampler"),
            f"loader = {written}",
        ]
        assert added({"whole_batches": True}, source, places) == wanted


def test_a_data_set_that_is_made_in_the_loaders_call_gets_a_name() -> None:
    source = "import torch.utils.data as tud\nimport torch\n\nloader = tud.DataLoader(\n    make(1, 2), 8, True,\n)\n"
    written = patched(source, {"whole_batches": True, "workers": 2}, {"places": [("loader", 4, "DataLoader")]})
    assert written.endswith(
        "\n\ndataset = make(1, 2)\nloader = tud.DataLoader(\n    dataset, None, False, "
        "sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(dataset), 8, False), num_workers=2,\n)\n"
    )


def test_optimizers_chosen_at_run_time_get_their_argument() -> None:
    source = 'optimizer = kinds[settings.pop("name")](model.parameters(), **settings)\n'
    written = patched(source, {"fused_optimizer": True}, {"places": [("optimizer", 1, "AdamW")]})
    assert written == 'optimizer = kinds[settings.pop("name")](model.parameters(), **settings, fused=True)\n'


def test_the_class_of_the_optimizer_tells_its_call_from_others() -> None:
    source = "optimizer = Wrapped(adamw(p for p in parameters), Adamw(x))\n"
    written = patched(source, {"fused_optimizer": True}, {"places": [("optimizer", 1, "adamw")]})
    assert written == "optimizer = Wrapped(adamw((p for p in parameters), fused=True), Adamw(x))\n"


MODELS = """\
import torch as th


class Training:
    def __init__(self, data, ddp):
        if data:
            self.model, self.data = Net(), data
        else:
            self.model = Other()

    def step(self, batch):
        self.model(batch)


def evaluate(model):
    model = load()
    return model


def main():
    model = Net()
    if ddp:
        model = Ranks(model)
    with mesh:
        generator = Net()
        generator.to("cpu")
    run(model)
"""


@pytest.mark.parametrize(
    ("name", "line", "behind"),
    [
        ("self.model", "self.model(batch)", "            self.model = Other()\n        self.model.compile()\n"),
        ("model", "run(model)", "        model = Ranks(model)\n    model.compile()\n"),
        ("generator", "run(model)", "        generator = Net()\n        generator.compile()\n"),
    ],
)
def test_a_model_is_compiled_behind_the_last_statement_that_names_it(name: str, line: str, behind: str) -> None:
    facts = {"places": [("model", line_of(line, MODELS), name)]}
    assert behind in patched(MODELS, {"compile": True}, facts)


def test_all_models_are_compiled() -> None:
    at = line_of("run(model)", MODELS)
    written = patched(MODELS, {"compile": True}, {"places": [("model", at, "model"), ("model", at, "generator")]})
    assert written.count(".compile()") == 2


def test_torch_has_the_scripts_own_name_for_it_or_is_imported() -> None:
    assert added({"threads": 2}, MODELS, []) == ["th.set_num_threads(2)"]
    source = "import os\nfrom torch import nn\n\nmodel = nn.Linear(1, 1)\n"
    assert added({"threads": 2}, source, []) == ["import torch", "torch.set_num_threads(2)"]


def test_blocks_outside_of_a_list_are_known_by_their_class() -> None:
    facts = {"places": PLACES, "block_list": None, "block_classes": [["__main__", "Block"], ["package.of", "Other"]]}
    written = patched(SCRIPT, {"compile_blocks": True}, facts)
    indent = " " * 4
    assert "from torch.utils.data import DataLoader\nfrom package.of import Other\n" in written
    assert (
        f"{indent}for block in model.modules():\n{indent}    if isinstance(block, (Block, Other)):\n"
        f"{indent}        block.compile()\n" in written
    )


ACCUMULATING = """\
import torch

for place, (batch, labels) in enumerate(loader):
    # forward
    output = model(batch)
    loss = loss_of(output, labels) / 4

    loss.backward()
    if (place + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def accumulating(source: str = ACCUMULATING) -> dict[str, Any]:
    kinds = {"model": "model(batch)", "backward": ".backward()", "update": "optimizer.step()"}
    places = [(kind, line_of(text, source), "model" if kind == "model" else "") for kind, text in kinds.items()]
    return {"places": places, "device": "cuda", "data_parallel": {"looks_for_unused": False}}


def test_the_forward_pass_and_the_loss_are_computed_in_half_precision() -> None:
    written = patched(ACCUMULATING, {"autocast": "bf16"}, accumulating())
    assert (
        "    # forward\n"
        '    with torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "        output = model(batch)\n"
        "        loss = loss_of(output, labels) / 4\n\n"
        "    loss.backward()\n" in written
    )


def test_each_backward_pass_has_a_forward_pass_of_its_own() -> None:
    source = "import torch\na = d(x)\na.backward()\nb = g(x)\nc = d(b)\nc.backward()\n"
    places = [("model", 2, "d"), ("model", 4, "g"), ("model", 5, "d"), ("backward", 3, ""), ("backward", 6, "")]
    written = patched(source, {"autocast": "bf16"}, {"places": places, "device": "cuda"})
    under = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n'
    assert written == (
        f"import torch\n{under}    a = d(x)\na.backward()\n{under}    b = g(x)\n    c = d(b)\nc.backward()\n"
    )


def test_what_is_computed_in_one_statement_is_left_to_the_user() -> None:
    source = "import torch\nmodel(batch).sum().backward()\n"
    with pytest.raises(NoPatchError, match="line 2 computes the loss and its gradients in one statement"):
        patched(
            source, {"autocast": "bf16"}, {"places": [("model", 2, "model"), ("backward", 2, "")], "device": "cuda"}
        )


INNER = """\
model = DDP(Net())
while True:
    for micro in range(config.passes):
        loss = model(batch)
        loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("model = DDP(Net())\n" + ACCUMULATING, "model.require_backward_grad_sync = (place + 1) % 4 == 0"),
        (INNER, "model.require_backward_grad_sync = micro == config.passes - 1"),
    ],
)
def test_gradients_are_gathered_in_the_pass_before_the_update(source: str, line: str) -> None:
    source = source.replace("model(batch)", "model(batch)  # forward")
    facts = accumulating(source)
    written = patched(source, {"gather_once": True}, facts).splitlines()
    assert written[facts["places"][0][1] - 1].strip() == line
    assert written[facts["places"][0][1]].strip().endswith("# forward")
    both = patched("import torch\n" + source, {"autocast": "bf16", "gather_once": True}, accumulating("\n" + source))
    assert f"{line}\n" in both


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("if (place + 1) % 4 == 0", "if loss > 1"), r"\(loss > 1\) is known only after the pass"),
        (("    if (place + 1) % 4 == 0:\n        optimizer.step()", "    optimizer.step()\n    if place:"), "not show"),
        (("if (place + 1) % 4 == 0", "if ready()"), "is known only after the pass"),
    ],
)
def test_a_loop_that_decides_later_gathers_as_it_did(change: tuple[str, str], told: str) -> None:
    source = "model = DDP(Net())\n" + ACCUMULATING.replace(*change)
    with pytest.raises(NoPatchError, match=told):
        patched(source, {"gather_once": True}, accumulating(source))
    facts = {**accumulating("\n" + ACCUMULATING), "data_parallel": {"looks_for_unused": True}}
    with pytest.raises(NoPatchError, match="would miss those that only the first passes use"):
        patched("model = DDP(Net())\n" + ACCUMULATING, {"gather_once": True}, facts)


SHARDED = """\
from torch.distributed.fsdp import fully_shard as shard

if mesh:
    for layer in model.layers:
        shard(layer, mesh=mesh)
shard(model.head, reshard_after_forward=True)
shard(model, mesh=mesh)
"""


def test_parameters_are_kept_in_all_calls() -> None:
    assert added({"keep_gathered": True}, SHARDED, []) == [
        "shard(layer, mesh=mesh, reshard_after_forward=False)",
        "shard(model.head, reshard_after_forward=False)",
        "shard(model, mesh=mesh, reshard_after_forward=False)",
    ]


def test_only_the_call_around_the_whole_model_stays() -> None:
    written = patched(SHARDED, {"shard_calls": 4, "keep_gathered": True}, {"places": []})
    assert written.splitlines()[1:] == ["", "shard(model, mesh=mesh, reshard_after_forward=False)"]
    with pytest.raises(NoPatchError, match="called by a library"):
        patched("import torch\n", {"shard_calls": 4}, {"places": []})
    with pytest.raises(NoPatchError, match="line 2 uses what fully_shard returns"):
        patched(
            "from torch.distributed.fsdp import fully_shard\na = fully_shard(b)\nfully_shard(c)\n",
            {"shard_calls": 2},
            {"places": []},
        )


def test_what_can_be_written_is_and_what_cannot_says_why() -> None:
    written = write_changes(SCRIPT, {"fused_optimizer": True, "late_losses": True, "threads": 2}, {"places": PLACES})
    assert written.changes == {"fused_optimizer": True, "threads": 2}
    assert written.left == {"late_losses": "what is logged, and when, is for the script to say"}
    assert "fused=True" in written.text
    assert "set_num_threads" in written.text


def test_a_diff_can_be_applied_to_files_of_any_kind(tmp_path: Path) -> None:
    for text in (SCRIPT.replace("\n", "\r\n"), SCRIPT.rstrip("\n"), SCRIPT.replace('"in', '"\f\u2028in')):
        (tmp_path / "train.py").write_bytes(text.encode())
        written = patched(text, {"compile": True, "workers": 2, "threads": 2}, {"places": PLACES})
        (tmp_path / "tuned.patch").write_bytes(as_diff(text, written, "train.py").encode())
        done = subprocess.run(
            ["git", "apply", "tuned.patch"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "train.py").read_bytes() == written.encode()


PADDED = """\
import os

import torch


def collate(samples):
    return MADE


loader = torch.utils.data.DataLoader(
    data,
    8,
    shuffle=True,
    collate_fn=collate,
)
"""
WORDS = torch.tensor([[5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
LABELS = torch.where(WORDS == 0, -100, WORDS)
TABLE = torch.ones(2, 12, 3)
BATCHES_PADDED: dict[str, Any] = {
    "mapping": {"input_ids": WORDS, "attention_mask": (WORDS != 0).long(), "labels": torch.arange(2)},
    "tuple": (WORDS, torch.arange(2), LABELS),
    "list": [WORDS, WORDS == 0],
    "left": {"ids": WORDS.flip(1), "mask": (WORDS != 0).flip(1), "vectors": TABLE},
}


@pytest.mark.parametrize("form", BATCHES_PADDED)
def test_batches_are_trimmed_as_the_switch_does_it(form: str) -> None:
    batch = copy.copy(BATCHES_PADDED[form])
    layout = layout_of(batch)
    places = [("loader", line_of("DataLoader(", PADDED), "DataLoader")]
    written = patched(PADDED, {"trim_padding": True}, {"places": places, "padding": layout})
    assert written.startswith("import functools\nimport os\n\nimport torch\n")
    assert "    collate_fn=functools.partial(collate_trimmed, collate),\n" in written
    names: dict[str, Any] = {"MADE": batch, "data": [0]}
    exec(written, names)
    before, after = trimmed(BATCHES_PADDED[form]), names["loader"].collate_fn([])
    assert type(after) is type(before)
    pairs = [(after[key], before[key]) for key in (before if isinstance(before, dict) else range(len(before)))]
    assert all(torch.equal(*pair) for pair in pairs)
    assert pairs[0][0].shape == (2, 8)


def test_a_line_that_also_makes_loaders_for_evaluation_is_not_trimmed() -> None:
    """Their batches may be put together, and then all of them have to be as wide."""
    line = line_of("DataLoader(", PADDED)
    facts: dict[str, Any] = {
        "padding": layout_of(BATCHES_PADDED["mapping"]),
        "places": [("loader", line, "DataLoader")],
    }
    patched(PADDED, {"trim_padding": True}, {**facts, "places": [*facts["places"], ("other_loader", 99, "DataLoader")]})
    facts["places"].append(("other_loader", line, "DataLoader"))
    with pytest.raises(NoPatchError, match="also makes loaders that do not shuffle"):
        patched(PADDED, {"trim_padding": True}, facts)


@pytest.mark.parametrize("read", ["loader.batch_size", "loader.sampler.set_epoch(1)", "args.batch_size"])
def test_whole_batches_are_not_written_where_the_script_asks_its_loader(read: str) -> None:
    """An epoch may end long after the steps that are compared, and `loader.batch_size` would be None."""
    source = (
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(data, 8, shuffle=True)\n"
        "for epoch in range(args.epochs):\n"
        "    for number, batch in enumerate(loader):\n"
        "        step(batch)\n"
        f"    {read}\n"
    )
    facts = {"places": [("loader", 2, "DataLoader")]}
    if read.startswith("args"):
        patched(source, {"whole_batches": True}, facts)
    else:
        with pytest.raises(NoPatchError, match="line 6 reads loader"):
            patched(source, {"whole_batches": True}, facts)


def test_tags_that_end_where_the_words_end_are_no_mask() -> None:
    tags = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    layout = layout_of((WORDS, tags, (WORDS != 0).long()))
    assert layout is not None
    assert layout["real"] == [[2, "!= 0"]]


def test_an_attribute_of_another_class_is_not_mistaken_for_the_model() -> None:
    source = (
        "import torch\n"
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.model = torch.nn.Linear(1, 1)\n"
        "    def fit(self, batch):\n"
        "        return self.model(batch)\n"
        "class Average:\n"
        "    def __init__(self, model):\n"
        "        self.model = model\n"
    )
    written = patched(source, {"compile": True}, {"places": [("model", 6, "self.model")]})
    assert "torch.nn.Linear(1, 1)\n        self.model.compile()\n" in written
    assert written.count("compile") == 1


def test_a_loader_without_a_function_of_its_own_collates_as_before() -> None:
    source = "import functools as ft\nimport torch\nloader = torch.utils.data.DataLoader(data)\n"
    facts = {"places": [("loader", 3, "DataLoader")], "padding": layout_of(BATCHES_PADDED["tuple"])}
    written = patched(source, {"trim_padding": True}, facts)
    assert "collate_fn=ft.partial(collate_trimmed, torch.utils.data.default_collate))" in written


@pytest.mark.parametrize(
    "batch",
    [
        WORDS,
        {"input_ids": WORDS},
        [WORDS.clamp(min=1), WORDS.clamp(max=1)[:, :1]],
        {"inputs": {"input_ids": WORDS, "attention_mask": (WORDS != 0).long()}},
    ],
)
def test_a_batch_that_is_not_as_simple_has_no_layout(batch: Any) -> None:
    assert layout_of(batch) is None


def test_by_hand_means_lines_that_run() -> None:
    facts = {"device": "cpu", "places": [], "padding": layout_of(BATCHES_PADDED["mapping"])}
    facts |= {"block_list": None, "block_classes": [["torch.nn", "Linear"]]}
    lines = lines_by_hand({"trim_padding": True, "compile_blocks": True, "attention": "math"}, facts)
    code = "\n".join(line for line in lines if "..." not in line and not line.startswith("pad to"))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    names: dict[str, Any] = {"torch": torch, "model": model}
    allowed = torch.backends.cuda.flash_sdp_enabled()
    try:
        exec(code, names)
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        for allow in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{allow}_sdp")(allowed)
    assert model[0]._compiled_call_impl is not None
    assert model[1]._compiled_call_impl is None
    after = names["collate_trimmed"](dict, BATCHES_PADDED["mapping"])
    assert after["input_ids"].shape == (2, 8)
