"""Where a script is while it is in no phase: frames that are made up, a clock that is set, and stretches."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import frameworm.attach.hooks as attach_hooks
from frameworm.attach import samples as attach_looks
from frameworm.attach.frames import FrameReader, Spot, called_names, work_at
from frameworm.attach.samples import StackSamples
from frameworm.attach.timeline import Mark, Stretches

SCRIPT = "/project/train.py"
STANDARD = sysconfig.get_path("stdlib")
PACKAGES = "/venv/lib/python3.11/site-packages"
HOOKS = attach_hooks.__file__
DEVICE_HOOKS = str(Path(HOOKS).with_name("device_hooks.py"))


def stack(*calls: tuple[str, str, int]) -> Any:
    """Frames of (file, function, line), the outermost first."""
    frame = None
    for file, function, line in calls:
        code = types.SimpleNamespace(co_filename=file, co_name=function, co_firstlineno=1)
        frame = types.SimpleNamespace(f_code=code, f_lineno=line, f_lasti=-1, f_back=frame)
    return frame


MAIN = (SCRIPT, "<module>", 40)
LOG = ("/project/tools/log.py", "log", 7)


@pytest.mark.parametrize(
    ("calls", "place", "work"),
    [
        ([MAIN], MAIN, None),
        ([MAIN, LOG], LOG, None),
        ([MAIN, (f"{PACKAGES}/torch/functional.py", "norm", 3)], MAIN, None),
        ([MAIN, LOG, (f"{STANDARD}/logging/__init__.py", "emit", 9)], LOG, "writing"),
        ([MAIN, (f"{STANDARD}/json/encoder.py", "encode", 9)], MAIN, "writing"),
        ([MAIN, (f"{STANDARD}/json/decoder.py", "decode", 9)], MAIN, None),
        ([MAIN, (f"{PACKAGES}/torch/utils/tensorboard/writer.py", "add_histogram", 9)], MAIN, "writing"),
        ([MAIN, (f"{PACKAGES}/tqdm/std.py", "refresh", 9), (f"{STANDARD}/threading.py", "wait", 1)], MAIN, "writing"),
        ([MAIN, (f"{STANDARD}/queue.py", "get", 1), (f"{STANDARD}/threading.py", "wait", 1)], MAIN, "waiting"),
        ([MAIN, (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "fit", 1)], MAIN, "library"),
        ([MAIN, (f"{PACKAGES}/torch/optim/lr_scheduler.py", "step", 1)], MAIN, "library"),
        # A callback of the script within a framework is the script's own.
        ([MAIN, (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "fit", 1), LOG], LOG, None),
        # Somebody else starts the script's loop.
        ([(f"{PACKAGES}/wandb/agents/pyagent.py", "run", 1), LOG], LOG, None),
        ([MAIN, (HOOKS, "write_out", 1)], MAIN, "writing"),
        # What print writes to is the script's own: the place is the print.
        ([MAIN, (HOOKS, "write_out", 1), LOG], MAIN, "writing"),
        ([MAIN, (DEVICE_HOOKS, "read", 1), (DEVICE_HOOKS, "_waiting", 1)], MAIN, "device"),
        ([MAIN, ("<string>", "__init__", 1)], MAIN, None),
    ],
)
def test_frames_tell_place_and_work(calls: list[tuple[str, str, int]], place: tuple[str, str, int], work: str) -> None:
    spot = FrameReader(SCRIPT).read(stack(*calls))
    assert spot is not None
    assert ((spot.file, spot.function, spot.line), spot.work) == (place, work)


def test_a_stack_without_the_script_is_nowhere() -> None:
    assert FrameReader(SCRIPT).read(stack((f"{PACKAGES}/torch/x.py", "f", 1), (HOOKS, "install", 2))) is None
    assert FrameReader(SCRIPT).read(None) is None
    inside = f"{PACKAGES}/tool/main.py"  # the script is its own wherever it lies
    assert FrameReader(inside).read(stack((inside, "<module>", 3))) == Spot(inside, 3, "<module>", None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("terminal.flush()", {"flush"}),
        ("write(str(number))", {"write"}),
        ("    file.write(line); total(x)\n", {"write", "total"}),
        ("while clock() < end:", {"clock"}),
        ("a + b", set()),
    ],
)
def test_names_of_calls(text: str, names: set[str]) -> None:
    assert called_names(text) == names


LINES = {
    "out.flush()": "writing",
    "total(out.write('é'), 1)": "computing",  # the writing is over when the total is made
    "time.sleep(hold)": "waiting",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_calls_into_c_tells_by_itself(line: str, tmp_path: Path) -> None:
    """A real frame that is held up within a call, read from another thread."""
    script = tmp_path / "script.py"
    script.write_text(f"def between():\n    'é'; {line}\n")
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        go_on.wait(60)

    names: dict[str, Any] = {"total": lambda *_: hold(), "out": types.SimpleNamespace(flush=hold, write=len)}
    names |= {"time": types.SimpleNamespace(sleep=hold), "hold": 0}
    exec(compile(script.read_text(), str(script), "exec"), names)
    thread = threading.Thread(target=names["between"])
    thread.start()
    try:
        assert begun.wait(60)
        frame = sys._current_frames()[thread.ident or 0]
        while frame.f_code.co_name != "between":
            assert frame.f_back is not None
            frame = frame.f_back
        spot = FrameReader(str(script)).read(frame)
        del frame
    finally:
        go_on.set()
        thread.join()
    assert spot is not None
    assert (spot.file, spot.line, spot.function) == (str(script), 2, "between")
    if sys.version_info >= (3, 11):
        assert work_at(spot) == LINES[line]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_looks(clock: Clock, frame: Callable[[], Any]) -> StackSamples:
    return StackSamples(SCRIPT, lambda: True, lambda: True, lambda: {threading.get_ident(): frame()}, clock)


def step(begin_s: float, *stretches: tuple[str, float]) -> Stretches:
    marks, now_s = [], begin_s
    for label, seconds in stretches:
        now_s += seconds
        marks.append(Mark(label, now_s, None))
    return Stretches(Mark("", begin_s, None), marks, True, None)


def test_looks_count_where_the_stretch_is_other() -> None:
    clock = Clock()
    line = 0
    looks = make_looks(clock, lambda: stack((SCRIPT, "train", line)))
    #        fetch 0-1, own 1-2, forward 2-3, backward 3-4, own 4-6
    whole = step(0.0, ("data_wait", 1), ("other", 1), ("forward", 1), ("backward", 1), ("other", 2))
    for time_s, seen in ((-0.5, 1), (0.5, 10), (1.5, 20), (2.5, 30), (4.5, 50), (5.0, 52), (5.5, 50), (6.5, 70)):
        clock.now_s, line = time_s, seen
        looks.look()
    looks.credit(whole, 6.0, 3.0)
    summary = looks.summary()
    assert summary is not None
    assert (summary.samples, summary.work) == (4, {"preparing": 1, "computing": 3})
    first, second = summary.places
    assert (first.file, first.line, first.function, first.work, first.samples) == (
        "train.py",
        50,
        "train",
        "computing",
        3,
    )
    assert (second.line, second.work, second.samples) == (20, "preparing", 1)
    # The look at 6.5 belongs to the next step, which is no part of the figures.
    looks.credit(step(6.0, ("other", 1)), 1.0, 1.0, counts=False)
    looks.credit(step(6.0, ("other", 1)), 1.0, 1.0)
    again = looks.summary()
    assert again is not None
    assert again.samples == 4


def test_what_clears_gradients_first_prepares_the_batch_too() -> None:
    clock = Clock()
    looks = make_looks(clock, lambda: stack(MAIN))
    clock.now_s = 2.5
    looks.look()
    looks.credit(step(0.0, ("data_wait", 1), ("optimizer", 1), ("other", 1), ("forward", 1)), 4.0, 1.0)
    summary = looks.summary()
    assert summary is not None
    assert summary.work == {"preparing": 1}


def test_waits_for_the_device_are_no_places() -> None:
    clock = Clock()
    looks = make_looks(clock, lambda: stack(MAIN, (DEVICE_HOOKS, "_waiting", 1)))
    clock.now_s = 0.5
    looks.look()
    looks.credit(step(0.0, ("other", 1)), 1.0, 1.0)
    assert looks.summary() is None


def test_only_the_places_seen_most_are_kept() -> None:
    clock = Clock()
    line = 0
    looks = make_looks(clock, lambda: stack((SCRIPT, "train", line)))
    for number in range(1, 101):
        clock.now_s, line = number / 100, number % 10 * 10
        looks.look()
    looks.credit(step(0.0, ("other", 2)), 2.0, 2.0)
    summary = looks.summary()
    assert summary is not None
    assert (summary.samples, len(summary.places)) == (100, attach_looks.MOST_PLACES)


def test_looks_are_taken_while_there_is_something_to_explain() -> None:
    clock = Clock()
    looks = make_looks(clock, lambda: stack(MAIN))
    often, rarely = attach_looks.INTERVAL_S, attach_looks.IDLE_INTERVAL_S
    assert looks.interval_s == rarely
    for _ in range(5):
        looks.credit(step(0.0, ("forward", 1)), 1.0, 0.01)
    assert looks.interval_s == rarely
    looks.credit(step(0.0, ("other", 1)), 1.0, 1.0)
    assert looks.interval_s == often
    for _ in range(10):  # work that comes once in so many steps is waited for
        looks.credit(step(0.0, ("forward", 1)), 1.0, 0.0)
        looks.credit(step(0.0, ("forward", 1)), 1.0, None)  # a step that was not divided says nothing
    assert looks.interval_s == often
    for _ in range(100):
        looks.credit(step(0.0, ("forward", 1)), 1.0, 0.0)
    assert looks.interval_s == rarely
    for _ in range(attach_looks.ENOUGH_LOOKS):
        looks.look()
    looks.credit(step(-1.0, ("other", 2)), 200.0, 200.0)
    assert looks.interval_s == rarely


def test_a_thread_looks_until_nobody_watches_and_keeps_no_frame() -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    looks = StackSamples(__file__, lambda: True, lambda: True)
    looks.credit(step(0.0, ("other", 1)), 1.0, 1.0)
    begin_s = time.perf_counter()
    looks.start()

    def work(kept: Held) -> None:
        enough, deadline_s = len(looks._samples) + 5, time.perf_counter() + 60
        while len(looks._samples) < enough and time.perf_counter() < deadline_s:
            pass

    work(held)
    looks.stop(60)
    del held
    gc.collect()
    assert gone() is None
    looks.credit(step(begin_s, ("other", 300.0)), 300.0, 300.0)
    summary = looks.summary()
    assert summary is not None
    assert summary.samples >= 5
    assert summary.places[0].file == Path(__file__).name
    assert {place.function for place in summary.places} & {"work"}
    assert "frameworm-looks" not in {thread.name for thread in threading.enumerate()}
    stopped = StackSamples(__file__, lambda: False, lambda: True)
    stopped.start()
    stopped.stop(60)
    assert stopped.summary() is None


def test_an_error_of_a_look_ends_the_looks_alone() -> None:
    def fail() -> Any:
        raise RuntimeError("no frames here")

    looks = StackSamples(SCRIPT, lambda: True, lambda: True, fail)
    looks.start()
    deadline_s = time.monotonic() + 60
    while "frameworm-looks" in {thread.name for thread in threading.enumerate()} and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "frameworm-looks" not in {thread.name for thread in threading.enumerate()}
    looks.stop()
    assert looks.summary() is None
