"""Switches go through a framework's own options where it has them and the script leaves them open."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from frameworm.attach.patches import Patches
from frameworm.attach.trial.framework_options import FrameworkOptions
from frameworm.attach.trial.switches import Switches, by_hand, options_of, through_options

SCRIPT = "/home/user/train.py"


@dataclass
class TrainingArguments:
    output_dir: str = "out"
    bf16: bool = False
    torch_compile: bool = False
    dataloader_num_workers: int = 0
    seen: Any = None

    def __post_init__(self) -> None:
        self.seen = self.bf16


@dataclass
class SFTConfig(TrainingArguments):
    packing: bool = False


class Accelerator:
    def __init__(self, device_placement: bool = True, mixed_precision: str | None = None) -> None:
        self.mixed_precision = mixed_precision


class Careful(Accelerator):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Stand-ins of the libraries' modules, and what puts them back as they were."""
    for name, kind in (("transformers.training_args", TrainingArguments), ("accelerate.accelerator", Accelerator)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
    kinds = (TrainingArguments, SFTConfig, Accelerator, Careful)
    before = [vars(kind)["__init__"] for kind in kinds]
    made = Patches()
    yield made
    made.remove()
    assert [vars(kind)["__init__"] for kind in kinds] == before
    assert TrainingArguments("a", bf16=True) == TrainingArguments("a", bf16=True, seen=1)


def watched(patches: Patches, options: dict[str, dict[str, Any]] | None = None) -> FrameworkOptions:
    found = FrameworkOptions(SCRIPT, options)
    for finder in found.watch(patches):
        finder.disarm()
    return found


def run(source: str, file: str = SCRIPT) -> dict[str, Any]:
    """What a file's lines leave."""
    names: dict[str, Any] = {kind.__name__: kind for kind in (TrainingArguments, SFTConfig, Accelerator, Careful)} | {
        "dataclasses": dataclasses
    }
    exec(compile(textwrap.dedent(source), file, "exec"), names)
    return names


def test_what_the_script_leaves_open_is_set(patches: Patches) -> None:
    watched(patches, {"TrainingArguments": {"bf16": True, "dataloader_num_workers": 2}})
    made = run("args = TrainingArguments('here')\nother = TrainingArguments(dataloader_num_workers=0, bf16=False)")
    assert (made["args"].bf16, made["args"].dataloader_num_workers, made["args"].seen) == (True, 2, True)
    assert made["args"].output_dir == "here"
    assert (made["other"].bf16, made["other"].dataloader_num_workers) == (False, 0), "it is given"
    assert dataclasses.replace(made["args"], output_dir="there").bf16 is True
    assert list(inspect.signature(TrainingArguments).parameters) == [
        item.name for item in dataclasses.fields(TrainingArguments)
    ]


def test_subclasses_are_reached_also_those_that_come_later(patches: Patches) -> None:
    watched(patches, {"TrainingArguments": {"bf16": True}})
    made = run(
        """
        @dataclasses.dataclass
        class Mine(TrainingArguments):
            extra: int = 1
        mine, theirs = Mine(extra=2), SFTConfig(packing=True)
        """
    )
    assert (made["mine"].bf16, made["mine"].extra, made["theirs"].bf16, made["theirs"].packing) == (True, 2, True, True)


def test_a_subclass_that_takes_anything_is_not_given_it_twice(patches: Patches) -> None:
    watched(patches, {"Accelerator": {"mixed_precision": "bf16"}})
    made = run("a = Accelerator(); b = Careful(); c = Careful(mixed_precision='no'); d = Accelerator(True, 'fp16')")
    assert [made[name].mixed_precision for name in "abcd"] == ["bf16", "bf16", "no", "fp16"]


def test_options_that_a_class_does_not_take_are_left_out(patches: Patches) -> None:
    watched(patches, {"SFTConfig": {"tf32": True, "bf16": True}})
    made = run("a = TrainingArguments(); b = SFTConfig()")
    assert (made["a"].bf16, made["b"].bf16) == (False, True)


def test_lines_and_what_is_given_are_noted(patches: Patches) -> None:
    found = watched(patches)
    run("\n\nargs = SFTConfig(\n    'here',\n    bf16=False,\n)\nAccelerator()")
    assert found.places("SFTConfig") == [("options", 3, "SFTConfig")]
    assert found.facts("SFTConfig") == {"options_given": ["bf16", "output_dir", "self"], "options_made_by": None}
    assert found.places("Accelerator") == [("options", 7, "Accelerator")]
    assert found.places(None) == []
    run("SFTConfig()", "/home/user/helpers.py")
    assert len(found.places("SFTConfig")) == 1, "a line of another file is none of the script's"


def test_of_a_parser_that_gives_everything_only_other_values_count(patches: Patches) -> None:
    found = watched(patches, {"TrainingArguments": {"bf16": True, "torch_compile": True}})
    parser = run(
        "def parse(**given): return TrainingArguments(output_dir='x', bf16=False, torch_compile=False, **given)",
        "/lib/site-packages/transformers/hf_argparser.py",
    )["parse"]
    names = {"parse": parser}
    exec(compile("args = parse(dataloader_num_workers=3)", SCRIPT, "exec"), names)
    made: Any = names["args"]
    assert (made.bf16, made.torch_compile, made.dataloader_num_workers) == (True, True, 3)
    assert found.places("TrainingArguments") == []
    told = found.facts("TrainingArguments")
    assert told["options_made_by"] == "transformers"
    assert {"output_dir", "dataloader_num_workers"} <= set(told["options_given"])
    assert not {"bf16", "torch_compile"} & set(told["options_given"])


TRAINER = {
    "name": "transformers",
    "arguments": "TrainingArguments",
    "options": {"bf16": False, "optim": "adamw_torch", "torch_compile": False, "dataloader_num_workers": 0},
    "unfused_optimizer": "AdamW",
}


def test_each_switch_goes_one_way() -> None:
    wanted = Switches(autocast="bf16", fused_optimizer=True, workers=2, cudnn_benchmark=True)
    left, options = through_options(wanted, {"framework": TRAINER})
    assert left == Switches(workers=2, cudnn_benchmark=True), "what loader processes draw is seen to in torch"
    assert options == {"TrainingArguments": {"bf16": True, "optim": "adamw_torch_fused"}}
    left, options = through_options(wanted, {"framework": TRAINER, "options_given": ["optim"]})
    assert left == Switches(fused_optimizer=True, workers=2, cudnn_benchmark=True)
    assert options == {"TrainingArguments": {"bf16": True}}
    assert options_of({"workers": 2}, {"framework": TRAINER}) == {"workers": {"dataloader_num_workers": "2"}}
    for facts in ({}, {"framework": None}, {"framework": {"name": "torch"}}, {"framework": {**TRAINER, "options": {}}}):
        assert through_options(wanted, facts) == (wanted, {})


def test_another_optimizer_is_fused_in_torch() -> None:
    framework = {**TRAINER, "unfused_optimizer": "SGD"}
    wanted = Switches(fused_optimizer=True)
    assert through_options(wanted, {"framework": framework}) == (wanted, {})
    assert by_hand(wanted.to_dict(), {"framework": framework}) == ["fused=True in the optimizer's arguments"]


def test_an_optimizer_or_a_loader_of_the_script_is_not_made_by_options() -> None:
    facts = {"framework": TRAINER, "options_given": ["optim"], "places": [["optimizer", 3, ""]]}
    wanted = Switches(autocast="bf16", fused_optimizer=True)
    assert through_options(wanted, facts)[0] == Switches(fused_optimizer=True)
    assert by_hand({"fused_optimizer": True}, facts) == ["fused=True in the optimizer's arguments"]
    assert options_of({"workers": 1}, {**facts, "places": [["loader", 3, ""]]}) == {}


def test_what_is_more_than_a_literal_is_set_in_torch() -> None:
    framework = {"name": "accelerate", "arguments": "Accelerator", "options": {"dataloader_config": None}}
    assert options_of({"pin_memory": True}, {"framework": framework}) == {}


# Each trains a few steps on the CPU, and prints what it was made with.
REAL = {
    "transformers": """
        import torch
        from transformers import Trainer, TrainingArguments
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__(); self.inner = torch.nn.Linear(2, 1)
            def forward(self, x, labels=None):
                loss = (self.inner(x).squeeze(1) - labels).square().mean()
                print("AUTOCAST", torch.is_autocast_enabled("cpu"), self.inner(x).dtype)
                return {"loss": loss}
        samples = [{"x": torch.ones(2), "labels": torch.tensor(1.0)} for _ in range(16)]
        quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True)
        args = TrainingArguments("out", max_steps=5, use_cpu=True, **quiet)
        Trainer(Net(), args, train_dataset=samples).train()
    """,
    "lightning": """
        import lightning, torch
        class Net(lightning.LightningModule):
            def __init__(self):
                super().__init__(); self.inner = torch.nn.Linear(2, 1)
            def training_step(self, batch, _):
                print("AUTOCAST", torch.is_autocast_enabled("cpu"), self.inner(batch[0]).dtype)
                return self.inner(batch[0]).square().mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(10, 2)), 2)
        lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Net(), loader)
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__(); self.inner = torch.nn.Linear(2, 1)
            def forward(self, x):
                print("AUTOCAST", torch.is_autocast_enabled("cpu"), self.inner(x).dtype)
                return self.inner(x)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(5):
            accelerator.backward(model(torch.ones(2, 2)).square().mean()); optimizer.step(); optimizer.zero_grad()
    """,
}
ARGUMENTS = {
    "transformers": ("TrainingArguments", {"bf16": True}),
    "lightning": ("Trainer", {"precision": "bf16-mixed"}),
    "accelerate": ("Accelerator", {"mixed_precision": "bf16"}),
}
TRIAL = """
import json, sys
from pathlib import Path
from frameworm.attach.script import AfterImport, run_script
from frameworm.attach.trial.switches import Switches, through_options
script, framework = Path(sys.argv[1]), json.loads(sys.argv[2])
def attach():
    from frameworm.attach.patches import Patches
    from frameworm.attach.trial.framework_options import FrameworkOptions
    from frameworm.attach.trial.interception import intercept
    from frameworm.attach.trial.timing import TimedRun
    left, given = through_options(Switches(autocast="bf16"), {"framework": framework})
    options = FrameworkOptions(str(script), given)
    options.watch(Patches())
    tell = lambda told: print("TOLD", json.dumps(told))
    TimedRun(intercept(left, Patches()), tell, lambda: {"go": 1000}, str(script), options).counter.install()
AfterImport("torch", attach).arm()
run_script(script, [])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_installed_version_does_what_its_option_says(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script, (arguments, wanted) = tmp_path / "train.py", ARGUMENTS[name]
    script.write_text(textwrap.dedent(REAL[name]))
    given = {"name": name, "arguments": arguments, "options": dict.fromkeys(wanted)}
    ended = subprocess.run(
        [sys.executable, "-c", TRIAL, str(script), json.dumps(given)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    lines = [line[line.index("AUTOCAST") :] for line in ended.stdout.splitlines() if "AUTOCAST" in line]
    assert lines, ended.stdout + ended.stderr
    assert set(lines) == {"AUTOCAST True torch.bfloat16"}
    told = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("TOLD"))[5:])["facts"]
    assert told["framework"]["name"] == name
    assert told["framework"]["arguments"] == arguments
    assert wanted.keys() <= told["framework"]["options"].keys(), "the installed version takes it"
    assert told["half"]
    line = next(number for number, text in enumerate(script.read_text().splitlines(), 1) if f"{arguments}(" in text)
    assert ["options", line, arguments] in told["places"]
    assert not wanted.keys() & set(told["options_given"])
