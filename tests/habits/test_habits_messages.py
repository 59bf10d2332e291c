"""Habits of other libraries and damaged files end in one clear line, not in a traceback or in silence.

The tests marked as expected failures pin known defects: each asserts the correct behaviour.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from message_cases import (
    CommandLine,
    arguments_of,
    batches,
    change_summary,
    make_run,
    refusal,
    samples,
    sgd,
    small_model,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from frameworm.errors import FramewormError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    return CommandLine(monkeypatch, capfd, tmp_path)


# What is given to the trainer


def test_a_list_of_optimizers_is_refused_in_words() -> None:
    model = small_model()
    optimizers = [sgd(model[0]), sgd(model[2])]
    message = refusal(lambda: trainer(model, optimizers).train(batches()))
    assert "optimizer" in message


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    model = small_model()
    message = refusal(lambda: trainer(model, torch.optim.LBFGS(model.parameters())).train(batches()))
    assert "LBFGS" in message


def test_a_loss_in_the_place_of_the_optimizer_is_refused_in_words() -> None:
    model = small_model()
    message = refusal(lambda: trainer(model, nn.CrossEntropyLoss(), sgd(model)).train(batches()))
    assert "optimizer" in message


class OnlySteps:
    """A callback as other libraries take them: no base class, and only the method that it needs."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, step: object) -> None:
        self.steps += 1


def test_a_callback_with_some_of_the_methods_is_called_or_refused_by_name() -> None:
    callback = OnlySteps()
    training = trainer(small_model(), callbacks=[callback])
    message = ""
    try:
        training.train(batches(16))
    except FramewormError as error:
        message = str(error)
    except AttributeError as error:
        raise AssertionError(f"not refused in words: {error}") from error
    assert callback.steps == 4 or "OnlySteps" in message


def test_an_object_that_is_no_callback_is_refused_in_words() -> None:
    message = refusal(lambda: trainer(small_model(), callbacks=[lambda step: None]).train(batches()))
    assert "callback" in message


def test_a_list_of_validation_loaders_is_refused_in_words() -> None:
    message = refusal(lambda: trainer(small_model()).train(batches(), [batches(8), batches(8)]))
    assert "loader" in message


# What a training leaves behind in the process


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_training_goes_on_eagerly_when_the_compiler_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_compiler: None
) -> None:
    expected = small_model()
    trainer(expected).train(batches())

    def broken(*_: object) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend=broken))
    model = small_model()
    with caplog.at_level(logging.INFO, logger="frameworm"):
        try:
            record = trainer(model).enable_compile().train(batches())
        except Exception as error:
            raise AssertionError(f"the training ended with {type(error).__name__}") from error
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters()))
    assert "compile" in " ".join([*record.notes, caplog.text])


@pytest.fixture
def torch_switches() -> Iterator[None]:
    """Torch's switches as they were, whatever the test does to them."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, benchmark
    torch.set_float32_matmul_precision(precision)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deterministic_mode_ends_with_its_training(torch_switches: None) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    trainer(small_model(), deterministic=True).train(batches())
    assert not torch.are_deterministic_algorithms_enabled()


# Ctrl-C


class Interrupting:
    """Sends Ctrl-C to this process in the midst of a training, from code that catches every Exception."""

    def __init__(self, at_call: int, times: int) -> None:
        self.caught: list[str] = []
        self._calls = 0
        self._at_call = at_call
        self._times = times

    def __call__(self) -> None:
        self._calls += 1
        try:
            if self._calls == self._at_call:
                for _ in range(self._times):
                    os.kill(os.getpid(), signal.SIGINT)
        except Exception as error:
            self.caught.append(type(error).__name__)


class InterruptedSamples(Dataset[Any]):
    def __init__(self, interrupt: Interrupting) -> None:
        self._interrupt = interrupt
        self._samples = samples(40)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        self._interrupt()
        return self._samples[index]


def _interrupted_loss(interrupt: Interrupting) -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        interrupt()
        return F.cross_entropy(output, target)

    return loss


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_passes_through_a_loss_that_catches_exceptions(times: int) -> None:
    interrupt = Interrupting(at_call=2, times=times)
    with pytest.raises(KeyboardInterrupt):
        trainer(small_model(), None, _interrupted_loss(interrupt)).train(batches(40))
    assert interrupt.caught == []


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_passes_through_a_data_set_that_catches_exceptions(times: int) -> None:
    interrupt = Interrupting(at_call=6, times=times)
    with pytest.raises(KeyboardInterrupt):
        trainer(small_model()).train(DataLoader(InterruptedSamples(interrupt), 4))
    assert interrupt.caught == []


def test_ctrl_c_passes_through_except_exception_around_a_training() -> None:
    """As in a script that tries several settings and goes on with the next when one fails."""

    def try_settings() -> int:
        failed = 0
        for _ in range(2):
            loss = _interrupted_loss(Interrupting(at_call=2, times=1))
            try:
                trainer(small_model(), None, loss).train(batches(40))
            except Exception:
                failed += 1
        return failed

    try:
        failed = try_settings()
    except KeyboardInterrupt:
        failed = 0
    assert failed == 0, "Ctrl-C counted as one more setting that failed"


# frameworm memory

WORKLOADS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from frameworm import Workload


class SparseWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


class ByNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(inputs) * float(inputs.detach().numpy().std())


def sparse(config):
    return Workload(SparseWords(), TensorDataset(torch.randint(0, 50, (32, 5)), torch.randint(0, 3, (32,))))


def by_numpy(config):
    return Workload(ByNumpy(), TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,))))
"""


@pytest.mark.parametrize("name", ["sparse", "by_numpy"])
def test_memory_plans_a_model_or_says_why_it_cannot(
    command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "hard_to_plan.py").write_text(WORKLOADS)
    (tmp_path / "own.yaml").write_text(
        f"workload: hard_to_plan:{name}\ngpu: {{device: cpu}}\ntraining: {{global_batch: 8, optimizer: sgd}}\n"
    )
    monkeypatch.delitem(sys.modules, "hard_to_plan", raising=False)
    try:
        _answers(command, "memory", "--config", "own.yaml")
    finally:
        sys.modules.pop("hard_to_plan", None)


def test_memory_refuses_a_number_of_parameters_that_no_model_has(command: CommandLine) -> None:
    assert "params" in command.refuses("memory", "--params", "1e20")


# Stored summaries with values of the wrong kind


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    make_run(root / "before")
    make_run(root / "after")
    return root


@pytest.fixture
def runs(stored_runs: Path, tmp_path: Path) -> Path:
    """Two good runs of one kind, `before` and `after`, to be spoiled."""
    shutil.copytree(stored_runs, tmp_path / "runs")
    return tmp_path / "runs"


def _answers(command: CommandLine, *args: str | Path) -> str:
    """What a command says: an answer, or one line about what it cannot read."""
    ended = command(*args)
    if ended.code == 2:
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert ended.stderr.startswith("frameworm: ")
    assert ended.stdout or ended.stderr
    return ended.stdout + ended.stderr


WRONG_KINDS: list[tuple[str, str, Any]] = [
    ("diagnose", "environment", [1]),
    ("diagnose", "steps", "many"),
    ("diagnose", "phases.forward.mean_s", "long"),
    ("diagnose", "throughput.step_s.p50", [1]),
    ("diagnose", "notes", -1),
    ("guard", "environment", "here"),
    ("guard", "batch.world_size", "two"),
    ("guard", "steps", [1]),
    ("guard", "memory.host_peak_bytes", "much"),
    ("compare", "environment", None),
    ("compare", "batch.world_size", {"a": 1}),
    ("compare", "steps", "many"),
    ("compare", "environment.memory_bytes", "much"),
    ("runs", "steps", "many"),
    ("runs", "quality.train_loss", "small"),
    ("runs", "throughput.samples_per_s", [1]),
    ("report", "batch.world_size", 10**30),
]


@pytest.mark.parametrize(("verb", "place", "value"), WRONG_KINDS, ids=lambda item: str(item)[:24])
def test_a_summary_with_values_of_the_wrong_kind_is_answered_in_words(
    command: CommandLine, runs: Path, verb: str, place: str, value: Any
) -> None:
    change_summary(runs / "after", place, value)
    said = _answers(command, *arguments_of(verb, runs))
    if verb == "runs":
        assert "before" in said
        assert "after" in said


def test_a_step_with_a_loss_of_the_wrong_kind_is_answered_in_words(command: CommandLine, runs: Path) -> None:
    steps = runs / "after" / "steps-rank0.jsonl"
    lines = steps.read_text().splitlines()
    head, _, tail = lines[0].partition('"loss":')
    steps.write_text("\n".join([f'{head}"loss":"small",{tail.partition(",")[2]}', *lines[1:]]) + "\n")
    _answers(command, *arguments_of("compare", runs))


@pytest.mark.parametrize(
    ("place", "value"),
    [("environment", [1]), ("batch.world_size", "two"), ("steps", "many"), ("phases.forward", None)],
)
def test_report_lists_a_run_whose_summary_it_cannot_read(
    command: CommandLine, runs: Path, monkeypatch: pytest.MonkeyPatch, place: str, value: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the tables are written without the figures
    shutil.rmtree(runs / "before")
    change_summary(runs / "after", place, value)
    _answers(command, *arguments_of("report", runs))


def test_good_runs_are_answered_by_every_verb(command: CommandLine, runs: Path) -> None:
    """What the tests above spoil is good before."""
    for verb in ("diagnose", "guard", "compare", "runs"):
        ended = command(*arguments_of(verb, runs))
        assert ended.code != 2, ended.stderr
