"""What is saved, when, and what a run folder says about the run that left it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from number_cases import (
    Cli,
    FirstStep,
    Steps,
    built_once,
    completed,
    is_refusal,
    linear,
    logged,
    outcome,
    pairs,
    trainer,
)
from torch import nn

from frameworm import Config

# State that cannot be saved


class WithoutState:
    """A scheduler that somebody wrote, with the one method that training needs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """The rate stays."""


class Factor:
    """A callable object for LambdaLR, whose attributes are part of the scheduler's state."""

    def __init__(self) -> None:
        self.lock = object()

    def __call__(self, step: int) -> float:
        return 1.0


def by_object(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, Factor())


class Extra(nn.Linear):
    """A layer with state beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": list(model.parameters()), **options}], lr=0.1)


@pytest.mark.parametrize(
    ("model", "options", "scheduler"),
    [
        pytest.param(linear, {}, WithoutState, id="scheduler without state_dict"),
        pytest.param(linear, {}, by_object, id="LambdaLR with a callable object"),
        pytest.param(lambda: Extra(object()), {}, None, id="extra state of a module"),
        pytest.param(linear, {"decay": lambda step: step}, None, id="function in a parameter group"),
    ],
)
def test_state_that_can_never_be_saved_is_found_before_the_first_step(
    model: Callable[[], nn.Module], options: dict[str, Any], scheduler: Any, tmp_path: Path
) -> None:
    built = model()
    optimizer = sgd(built, **options)
    made = None if scheduler is None else scheduler(optimizer)
    with logged() as log:
        first = FirstStep(log)
        result = outcome(
            lambda: trainer(
                built, optimizer=optimizer, scheduler=made, callbacks=[first], run_dir=tmp_path / "run"
            ).train(pairs())
        )
    refused = is_refusal(result) and first.steps == 0
    named = first.steps > 0 and any(record.levelname == "WARNING" for record in log.before_first_step)
    assert refused or named


class KeepsObjects(torch.optim.SGD):
    """Makes state that cannot be saved, in its first step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = object()
        return result


def test_state_that_the_optimizer_makes_is_checked_after_its_first_step(tmp_path: Path) -> None:
    model = linear()
    steps = Steps()
    optimizer = KeepsObjects(model.parameters(), lr=0.1)
    result = outcome(
        lambda: trainer(model, optimizer=optimizer, callbacks=[steps], run_dir=tmp_path / "run").train(pairs())
    )
    assert is_refusal(result)
    assert len(steps.records) == 1


def test_numpy_arrays_in_a_modules_state_are_saved_and_restored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record = trainer(Extra(np.arange(6.0).reshape(2, 3)), run_dir=folder).train(pairs())
    assert record.checkpoint.count == 1
    resumed = Extra(np.zeros(1))
    trainer(resumed, run_dir=folder).train(pairs(), epochs=2, resume=folder)
    assert np.array_equal(np.asarray(resumed.extra), np.arange(6.0).reshape(2, 3))


def test_numpy_arrays_in_a_parameter_group_are_saved(tmp_path: Path) -> None:
    model = linear()
    optimizer = sgd(model, milestones=np.array([10, 20]))
    record = trainer(model, optimizer=optimizer, run_dir=tmp_path / "run").train(pairs())
    assert record.checkpoint.count == 1


# Storage that is slower than the interval between two checkpoints

STEPS = 4
SYNC_S = 1.0
PATIENCE_S = 60.0
# Stands in for the interpreter of the process that writes checkpoints: the same Python, on a disk that takes its time,
# until training is in its last step. A training that waits for the disk meanwhile does not get there.
SLOW_DISK = """\
    #!{python} -IS
    import os, runpy, sys, time

    plain = os.fsync

    def slow(descriptor):
        name = os.readlink(f"/proc/self/fd/{{descriptor if isinstance(descriptor, int) else descriptor.fileno()}}")
        if ".safetensors" in name:
            time.sleep({seconds})
            ends = time.monotonic() + {patience_s}
            while not os.path.exists({last_step!r}):
                if time.monotonic() > ends:
                    open({in_vain!r}, "w").close()
                    break
                time.sleep(0.01)
        return plain(descriptor)

    os.fsync = slow
    if "-c" in sys.argv:
        program = sys.argv[sys.argv.index("-c") + 1]
        exec(compile(program, "<string>", "exec"), {{"__name__": "__main__"}})
    else:
        place = sys.argv.index("-m") + 1
        sys.argv = sys.argv[place:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class SlowRun(NamedTuple):
    folder: Path
    summary: dict[str, Any]
    waited: bool  # whether the last step came after a checkpoint was on disk


def train_on_a_slow_disk(folder: Path) -> None:
    """Save after every step, to storage that takes a second for each checkpoint."""
    python, last_step, in_vain = folder / "python", folder / "last-step", folder / "in-vain"
    given = {"seconds": SYNC_S, "patience_s": PATIENCE_S, "last_step": str(last_step), "in_vain": str(in_vain)}
    python.write_text(textwrap.dedent(SLOW_DISK).format(python=sys.executable, **given))
    python.chmod(0o755)
    model, passes = linear(), []

    def passed(*_: Any) -> None:
        passes.append(1)
        if len(passes) == STEPS:
            last_step.touch()

    model.register_forward_hook(passed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        trainer(model, run_dir=folder / "run", every_steps=1).train(pairs(4 * STEPS))
    assert len(passes) == STEPS


@pytest.fixture
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> SlowRun:
    """A run that saved after every step, on storage that takes a second for each checkpoint."""
    folder = built_once(tmp_path_factory, "slow-disk", train_on_a_slow_disk)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return SlowRun(folder / "run", summary, (folder / "in-vain").exists())


@pytest.mark.slow
def test_the_last_state_is_saved_however_slow_storage_is(slow_run: SlowRun, tmp_path: Path) -> None:
    assert slow_run.summary["checkpoint"]["count"] >= 1
    assert slow_run.summary["wall_s"] > SYNC_S, "the disk of this test is slow"
    folder = tmp_path / "run"
    shutil.copytree(slow_run.folder, folder, symlinks=True)
    steps = Steps()
    trainer(linear(), run_dir=folder, callbacks=[steps]).train(pairs(4 * STEPS), epochs=2, resume=folder)
    assert [step.step for step in steps.records] == list(range(STEPS + 1, 2 * STEPS + 1))


def test_training_does_not_wait_for_slow_storage(slow_run: SlowRun) -> None:
    assert not slow_run.waited


def test_the_largest_gap_between_checkpoints_is_reported(slow_run: SlowRun) -> None:
    summary = slow_run.summary
    assert "gap" in " ".join([*summary["checkpoint"], *summary["notes"]])


@pytest.mark.parametrize("choice", ["skip", "wait"])
def test_what_a_save_does_while_storage_is_busy_can_be_set(choice: str) -> None:
    made = outcome(lambda: trainer(linear(), when_busy=choice))
    assert not isinstance(made, Exception), made
    assert made.config.checkpoint.when_busy == choice


def test_a_save_is_skipped_while_storage_is_busy_unless_set_otherwise() -> None:
    assert getattr(Config().checkpoint, "when_busy", None) == "skip"


# What a run of the Python API says about itself

SCRIPT = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    from frameworm import Trainer


    class Narrow(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)


    class Deep(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


    if __name__ == "__main__":
        torch.manual_seed(0)
        inputs = torch.randn(48, 4)
        labels = (inputs.sum(-1) > 0).long()
        batches = list(zip(inputs.split(4), labels.split(4)))
        for model in (Narrow(), Deep()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            out = Path(sys.argv[1]) / type(model).__name__.lower()
            Trainer(model, optimizer, run_dir=out, device="cpu").train(batches, batches, epochs=2)
"""


def run_own_script(folder: Path) -> None:
    script = folder / "own_training.py"
    script.write_text(textwrap.dedent(SCRIPT))
    subprocess.run(
        [sys.executable, str(script), str(folder / "runs")],
        check=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def python_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `narrow` and `deep`, which the script `own_training.py` left."""
    return built_once(tmp_path_factory, "python-runs", run_own_script) / "runs"


@pytest.mark.slow
@pytest.mark.long
def test_the_config_of_a_python_run_says_that_it_is_one(python_runs: Path) -> None:
    assert yaml.safe_load((python_runs / "narrow" / "config.yaml").read_text())["workload"] == "python"


@pytest.mark.parametrize("fact", ["own_training.py", "Narrow"])
@pytest.mark.slow
def test_the_config_of_a_python_run_names_its_script_and_model(fact: str, python_runs: Path) -> None:
    assert fact in (python_runs / "narrow" / "config.yaml").read_text()


def test_training_by_the_config_of_a_python_run_is_explained(cli: Cli, python_runs: Path, tmp_path: Path) -> None:
    small = ("training.max_steps=1", "data.limit=32")
    done = completed(
        cli,
        "train",
        *("--config", python_runs / "narrow" / "config.yaml", "--out", tmp_path / "run"),
        *(part for setting in small for part in ("--set", setting)),
    )
    assert done.returncode == 2, f"exit code {done.returncode}"
    assert "own_training.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_evaluating_a_python_run_is_explained(cli: Cli, python_runs: Path) -> None:
    done = completed(cli, "evaluate", python_runs / "narrow")
    assert done.returncode == 2
    assert "own_training.py" in done.stderr
    assert "embedding" not in done.stderr


@pytest.mark.slow
def test_a_report_keeps_python_runs_of_different_models_apart(cli: Cli, python_runs: Path, tmp_path: Path) -> None:
    done = completed(cli, "report", "--root", python_runs, "--out", tmp_path / "plots", "--json")
    report = json.loads(done.stdout)
    groups = [row["runs"] for found in report["datasets"] for curve in found["configurations"] for row in curve["rows"]]
    names = [found["dataset"] for found in report["datasets"]]
    assert ("generated" in names, sorted(groups)) == (False, [["deep"], ["narrow"]])


def test_the_list_of_runs_names_script_and_model(cli: Cli, python_runs: Path) -> None:
    rows = json.loads(completed(cli, "runs", python_runs, "--json").stdout)
    assert {row["workload"] for row in rows} == {"python own_training.py Narrow", "python own_training.py Deep"}
