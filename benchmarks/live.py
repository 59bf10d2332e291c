"""Contenders that live on: each trains in a process of its own and waits, between blocks, for its turn.

Start-up, compilation and capture are paid once, and a block is a few hundred steps of a training that goes on. The
contender stands still where its loop asks for the next batch: there the gate waits for the device, reads the clock and
waits for a word from the parent. A loop that reads k batches ahead does so at both ends of a block, so exactly `steps`
steps lie between them. Only one contender runs at a time. One that raises or is too slow is recorded as failed; it
takes nobody down with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, perf_counter, thread_time
from typing import Any

import psutil
import torch
from harness import ContenderError, Sample

TAIL = 8  # steps after the last block, so that a loop that reads ahead still comes to its end
LOG_LINES = 12


@dataclass(frozen=True)
class Plan:
    """The steps of every contender's training.

    Attributes:
        warmup: Steps before the first block: compilation, capture, caches.
        lead_in: Steps at the beginning of each block that are not timed: clocks come up, queues empty themselves.
        steps: Timed steps of a block.
        blocks: Number of blocks.
    """

    warmup: int
    lead_in: int
    steps: int
    blocks: int

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.warmup + self.blocks * (self.lead_in + self.steps) + TAIL


class Over(BaseException):
    """The parent needs no more of this contender."""


class Gate:
    """In the contender's process: lets its loop through block by block."""

    def __init__(self, link: Connection, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.facts: dict[str, Any] = {}  # told when it is warm
        self._link = link
        self._asked = 0
        self._begun = perf_counter()
        self._first: float | None = None
        self._started: tuple[float, float] | None = None
        self._next_stop = plan.warmup
        self._next_start = -1
        self._closed = False
        self.on_early_end: Callable[[], None] = lambda: None

    @property
    def open(self) -> bool:
        """Whether there are batches left to hand out."""
        return not self._closed and self._asked < self.plan.total

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, one epoch of it, or less if the training ends before."""
        iterator = iter(source)
        while self.open:
            self._stand()
            if self._closed:
                return
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._asked += 1
            yield batch

    def loader(self, source: Any) -> GatedLoader:
        """The same as an object that can be read once per epoch."""
        return GatedLoader(self, source)

    def _stand(self) -> None:
        """Before a batch is asked for: begin or end a block if one begins or ends here."""
        if self._first is None:
            self._first = perf_counter()
        if self._asked == self._next_stop:
            now = self._now()
            if self._started is None:
                begun_s, warmup_s = self._first - self._begun, now[0] - self._first
                self._send("ready", {"startup_s": begun_s, "warmup_s": warmup_s, **self.facts})
            else:
                wall_s, thread_s = now[0] - self._started[0], now[1] - self._started[1]
                steps = self.plan.steps
                self._send("block", {"step_s": wall_s / steps, "thread_s": thread_s / steps})
            self._next_stop = self._next_start = -1
            # After the last block too: others have theirs still before them.
            word = self._receive()
            if word == "finish":
                self._closed = True
                self.on_early_end()
                return
            if word not in ("go", "last"):
                raise Over
            if word == "go" and self._asked < self.plan.total - TAIL:
                self._next_start = self._asked + self.plan.lead_in
                self._next_stop = self._next_start + self.plan.steps
        if self._asked == self._next_start:
            self._next_start = -1
            self._started = self._now()

    def _now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter(), thread_time()

    def _send(self, kind: str, facts: dict[str, Any]) -> None:
        try:
            self._link.send((kind, facts))
        except OSError:
            raise Over from None

    def _receive(self) -> str:
        try:
            return str(self._link.recv())
        except EOFError:
            raise Over from None  # the parent is gone


class GatedLoader:
    """A loader behind the gate."""

    def __init__(self, gate: Gate, source: Any) -> None:
        self._gate = gate
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._gate.batches(self._source)

    def __len__(self) -> int:
        return len(self._source)


Train = Callable[..., dict[str, Any]]


def _live(link: Connection, plan: Plan, log: str, device: str, train: Train, arguments: tuple[Any, ...]) -> None:
    """A contender's process."""
    # As in a script that is started by hand: its loader processes are forked.
    multiprocessing.set_start_method("fork", force=True)
    with Path(log).open("w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1 if device == "cpu" else 4)
    try:
        facts = train(Gate(link, plan, torch.device(device)), *arguments)
        link.send(("done", facts))
    except Over:
        pass
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            link.send(("failed", f"{type(error).__name__}: {_short(str(error))}"))
    sys.stdout.flush()
    sys.stderr.flush()


class Live:
    """In the parent: one contender.

    Args:
        name: For messages and the log file.
        train: `train(gate, *arguments)` trains through the gate and returns facts about the end; picklable.
        arguments: Picklable too.
        plan: The steps.
        device: cuda or cpu.
        folder: Where its output goes.
        limit_s: Longest to wait for anything it does.
    """

    def __init__(
        self,
        name: str,
        train: Train,
        arguments: tuple[Any, ...],
        plan: Plan,
        device: str,
        folder: Path,
        limit_s: float,
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._limit_s = limit_s
        self._log = folder / f"{name.replace('/', '-')}.log"
        # Not forked: CUDA does not survive that. Not a daemon: it has loader processes of its own.
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._process = context.Process(target=_live, args=(other, plan, str(self._log), device, train, arguments))
        self._process.start()
        other.close()

    def wait_ready(self) -> dict[str, Any]:
        """Until it is warm; what it says about itself."""
        self.ready = self._expect("ready")
        return self.ready

    def block(self) -> Sample:
        """Let it train one block."""
        try:
            self._link.send("go")
        except OSError:
            raise ContenderError(self._died()) from None
        facts = self._expect("block")
        return Sample(facts["step_s"], facts["thread_s"])

    def finish(self, *, early: bool = False) -> dict[str, Any]:
        """After its last block: let it end by itself; what it says about the end.

        Args:
            early: The plan has more blocks, which are not wanted.
        """
        with contextlib.suppress(OSError):  # it says below why it is gone
            self._link.send("finish" if early else "last")
        facts = self._expect("done")
        self.end()
        return facts

    def end(self, patience_s: float = 20.0) -> None:
        """Stop it, gently if it listens within the time, and whatever it started."""
        self._link.close()
        self._process.join(patience_s)
        if self._process.is_alive():
            family = _family(self._process.pid)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=5)
            self._process.join(5)

    def _expect(self, kind: str) -> dict[str, Any]:
        deadline = monotonic() + self._limit_s
        try:
            if not self._link.poll(max(0.0, deadline - monotonic())):
                self._process.kill()
                raise ContenderError(f"gave no answer within {self._limit_s:.0f} s while {_DOING[kind]}")
            told, facts = self._link.recv()
        except (EOFError, OSError):
            raise ContenderError(self._died()) from None
        if told == "failed":
            raise ContenderError(str(facts))
        if told != kind:
            raise ContenderError(f"expected it to be {_DOING[kind]}, but it is at {told}: its loop counts otherwise")
        assert isinstance(facts, dict)
        return facts

    def _died(self) -> str:
        self._process.join(5)
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        return f"its process ended with code {self._process.exitcode}: {_short(' | '.join(lines[-LOG_LINES:]))}"


_DOING = {"ready": "warming up", "block": "training a block", "done": "ending"}


def _family(pid: int | None) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _short(text: str, longest: int = 600) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
