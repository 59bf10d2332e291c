"""What the tests of messages and of hostile files share: tiny trainings, the command line, and stored runs to spoil."""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import frameworm
from frameworm import Trainer
from frameworm.errors import FramewormError

_MAIN = str(Path(frameworm.__file__).with_name("__main__.py"))


class EndedByTracebackError(Exception):
    """A command ended with an exception that a user would see as a traceback."""


class OverdueError(Exception):
    """Something was still waiting at its deadline."""


def samples(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(-1))


def batches(count: int = 16) -> DataLoader[Any]:
    return DataLoader(samples(count), 4)


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trainer(model: nn.Module, optimizer: Any = None, *args: Any, **settings: Any) -> Trainer:
    """A trainer on the CPU that leaves nothing behind unless told to."""
    optimizer = sgd(model) if optimizer is None else optimizer
    return Trainer(model, optimizer, *args, **{"run_dir": None, "device": "cpu", **settings})


def refusal(action: Callable[[], object]) -> str:
    """The one line with which frameworm refuses; any other end is a failure of the test."""
    try:
        action()
    except FramewormError as error:
        message = str(error)
        assert "\n" not in message, f"more than one line: {message}"
        return message
    except Exception as error:
        raise AssertionError(f"not refused in words, but by {type(error).__name__}: {error}") from error
    raise AssertionError("not refused")


class Ended(NamedTuple):
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str


class _Alarm(BaseException):
    """Time is up; no `except Exception` catches it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fail instead of waiting: what blocks in the main thread is woken by a signal."""

    def overdue(number: int, frame: FrameType | None) -> NoReturn:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Alarm:
        raise OverdueError(f"still waiting after {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_main() -> int:
    """`python -m frameworm` with the arguments in `sys.argv`; the exit code."""
    umask = os.umask(0o022)
    os.umask(umask)
    try:
        runpy.run_path(_MAIN, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception as error:
        raise EndedByTracebackError(f"{type(error).__name__}: {error}") from error
    finally:
        os.umask(umask)
    return 0


class CommandLine:
    """`python -m frameworm ARGS...` inside this process, which saves the seconds of a start."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        # Workloads of one's own are found in the working folder.
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "dont_write_bytecode", True)
        self._patch = patch
        self._capture = capture

    def __call__(self, *args: str | Path, limit_s: float = 120.0) -> Ended:
        """Run to the end; what a user would see as a traceback fails the test."""
        self._capture.readouterr()
        self._patch.setattr(sys, "argv", ["frameworm", *(str(argument) for argument in args)])
        with deadline(limit_s):
            code = run_main()
        stdout, stderr = self._capture.readouterr()
        return Ended(code, stdout, stderr)

    def refuses(self, *args: str | Path, limit_s: float = 120.0) -> str:
        """The one line with which a command ends with exit code 2."""
        ended = self(*args, limit_s=limit_s)
        assert ended.code == 2, f"exit code {ended.code}\n{ended.stdout}{ended.stderr}"
        lines = ended.stderr.splitlines()
        assert len(lines) == 1, ended.stderr
        assert lines[0].startswith("frameworm: ")
        return lines[0]


def make_run(folder: Path, **settings: Any) -> Path:
    """A real run of a few steps, with everything that a run leaves behind."""
    model = small_model()
    settings = {"run_dir": folder, "seed": 0, "mode": "sync", **settings}
    trainer(model, **settings).train(batches(96), batches(8), epochs=2)
    return folder


@contextmanager
def nobody_reads(pipe: Path) -> Iterator[None]:
    """Fail if somebody reads from a pipe that nobody writes to, instead of waiting for ever.

    To open it without waiting, only to see that it is no plain file, is allowed.
    """
    os.mkfifo(pipe)
    over, read = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            try:
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue  # nobody has it open
            watched = select.poll()
            watched.register(descriptor, 0)
            if not watched.poll(5000):  # an error would say that it was opened and closed again
                with suppress(BrokenPipeError):
                    os.write(descriptor, b" ")
                    read.set()
            os.close(descriptor)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert not read.is_set(), f"{pipe.name} is a pipe, and was waited for"


def change_summary(run: Path, place: str, value: Any) -> None:
    """Put a value into a stored summary; the place is a path such as batch.world_size."""
    file = run / "summary.json"
    data = json.loads(file.read_text())
    *outer, last = place.split(".")
    inner = data
    for name in outer:
        inner = inner[name]
    inner[last] = value
    file.write_text(json.dumps(data))


def arguments_of(verb: str, runs: Path) -> list[str | Path]:
    """A command about the stored run `after`, beside which there is `before`."""
    before, after = runs / "before", runs / "after"
    return {
        "diagnose": ["diagnose", after],
        "guard": ["guard", after, "--baseline", before],
        "baseline": ["guard", before, "--baseline", after],
        "compare": ["compare", before, after],
        "runs": ["runs", runs],
        "report": ["report", "--root", runs, "--out", runs.parent / "plots"],
    }[verb]
