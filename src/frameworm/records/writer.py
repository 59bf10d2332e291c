"""Steps on disk: a writer that cannot disturb training, and readers that survive what a crash leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from frameworm.errors import RunFolderError
from frameworm.records.atomic import open_to_append
from frameworm.records.events import Listener
from frameworm.records.reading import parse_line, read_lines, sample_lines
from frameworm.records.schema import StepRecord, json_ready

WAKE_INTERVAL_S = 0.3
# Serialising holds the GIL; a pause after each group lets the training loop in within a fraction of a millisecond
# instead of the interpreter's 5 ms.
GROUP_RECORDS = 16
GROUP_PAUSE_S = 0.00005
_NEAR_BYTES = 2**13  # closer than this to the wanted step, search line by line
_TAILS_BYTES = (2**12, 2**22)  # a line is seldom longer than the first, and never than the second
_MOST_LINE_BYTES = 2**20
_NUMBER = re.compile(rb'\s*\{\s*"step":\s*(\d{1,18})\b')

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def step_line(record: StepRecord) -> str:
    """Encode a step as one line of JSON with the fields of `StepRecord`; times of phases to the nanosecond.

    The writer thread holds the GIL while it encodes, and training waits. So the usual record fills a template, at half
    the encoder's cost.
    """
    try:
        return _filled_template(record)
    except (TypeError, ValueError, OverflowError):
        pass  # a number that JSON lacks, or a value of another type
    data = {name: getattr(record, name) for name in _FIELDS}
    try:
        return _encoder.encode(data)
    except (TypeError, ValueError):
        return _encoder.encode(json_ready(data))


_FIELDS = tuple(item.name for item in dataclasses.fields(StepRecord))
_NUMBERS = (
    '"step":%d,"epoch":%d,"time":%.6f,"step_s":%.9f,"loss":%s,"lr":%s,"samples":%d,"count":%s,"tokens":%s,'
    '"padded_tokens":%s,"grad_norm":%s,"skipped":%s'
)


@functools.lru_cache(64)
def _template(phases: tuple[str, ...]) -> str:
    times = ",".join(_encoder.encode(str(name)).replace("%", "%%") + ":%.9f" for name in phases)
    return f'{{{_NUMBERS},"phases":{{{times}}},"communication_s":%s,"rank_wait_s":%s,"metrics":{{%s}}}}'


def _filled_template(record: StepRecord) -> str:
    """Encode a record with finite times by the template.

    Raises:
        TypeError, ValueError, OverflowError: The record needs the full encoder.
    """
    phases, metrics = record.phases, record.metrics
    times = [*phases.values()]
    if not math.isfinite(record.time + record.step_s + sum(times)):
        raise ValueError(times)
    return _template(tuple(phases)) % (
        record.step,
        record.epoch,
        record.time,
        record.step_s,
        _text(record.loss),
        _text(record.lr),
        record.samples,
        _text(record.count),
        "null" if record.tokens is None else _text(record.tokens),
        "null" if record.padded_tokens is None else _text(record.padded_tokens),
        "null" if record.grad_norm is None else _text(record.grad_norm),
        "null" if record.skipped is None else _text(record.skipped),
        *times,
        "null" if record.communication_s is None else _text(record.communication_s),
        "null" if record.rank_wait_s is None else _text(record.rank_wait_s),
        _encoder.encode(metrics)[1:-1] if metrics else "",
    )


def _text(value: object) -> str:
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):  # type: ignore[arg-type]
        return repr(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    raise TypeError(value)


class JsonLinesWriter(Listener):
    """Writes records to a file from a background thread: steps, or anything that `encode` turns into a line.

    `write` only appends to a bounded queue: it never waits and never raises. Records that are lost because the queue is
    full or the disk fails are counted in `lost`.

    Args:
        path: File to append to; it is created when the first record is written.
        max_pending: Most records that may wait to be written; further ones are lost.
        encode: Turns a record into one line of JSON.

    Attributes:
        problem: The first error from the disk, or None.
    """

    must_not_break_training: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_pending: int = 10_000,
        encode: Callable[[Any], str] = step_line,
    ) -> None:
        assert max_pending > 0, "a queue that holds nothing loses everything"
        self.path = Path(path)
        self.problem: str | None = None
        self._encode = encode
        self._max_pending = max_pending
        self._wake_at = max(1, max_pending // 4)
        self._pending: deque[Any] = deque()
        # Two counters, because each thread increments its own without a lock.
        self._lost_when_full = 0
        self._lost_on_disk = 0
        self._descriptor: int | None = None
        self._torn = False
        self._closing = False
        self._wake = threading.Event()
        self._flushed = threading.Condition()
        self._flushes_wanted = 0
        self._flushes_done = 0
        self._thread = threading.Thread(target=self._run, name="frameworm-steps", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Records that did not reach the file."""
        return self._lost_when_full + self._lost_on_disk

    def write(self, record: Any) -> None:
        """Queue one record, which must not be modified afterwards."""
        pending = len(self._pending)
        if pending >= self._max_pending or self._closing:
            self._lost_when_full += 1
            return
        self._pending.append(record)
        # Waking the thread on every step would cost the loop more than the record itself.
        if pending == self._wake_at:
            self._wake.set()

    def on_step(self, step: StepRecord) -> None:
        """Write the step, so that the writer can be a listener of `Events`."""
        self.write(step)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all records queued so far are handed to the system; return False on timeout."""
        if not self._thread.is_alive():
            return not self._pending
        with self._flushed:
            self._flushes_wanted += 1
            ticket = self._flushes_wanted
            self._wake.set()
            return self._flushed.wait_for(lambda: self._flushes_done >= ticket, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what is queued and stop; return False if the disk took longer than `timeout_s`, and give up waiting."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait(WAKE_INTERVAL_S)
            self._wake.clear()
            closing = self._closing
            wanted = self._flushes_wanted
            while self._pending:
                self._write_group()
                if self._flushes_wanted == self._flushes_done:  # a caller of `flush` is waiting, so do not pause
                    time.sleep(GROUP_PAUSE_S)
            with self._flushed:
                self._flushes_done = wanted
                self._flushed.notify_all()
            if closing:
                break
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _write_group(self) -> None:
        records = [self._pending.popleft() for _ in range(min(len(self._pending), GROUP_RECORDS))]
        lines = []
        for record in records:
            try:
                lines.append(self._encode(record))
            except Exception as error:  # a record that cannot be encoded must not end the thread
                step = getattr(record, "step", None)
                what = type(record).__name__ if step is None else f"step {step}"
                self._lose(1, f"{what} cannot be written as JSON: {error}")
        if not lines:
            return
        try:
            self._append("\n".join(lines).encode() + b"\n")
        except OSError as error:
            self._lose(len(lines), f"{self.path}: {error.strerror or error}")

    def _append(self, data: bytes) -> None:
        """Append all of `data` or, as far as the disk allows, none of it."""
        descriptor = self._open()
        size = os.fstat(descriptor).st_size
        view = memoryview(b"\n" + data if self._torn else data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
            self._torn = False
        except OSError:
            try:
                os.ftruncate(descriptor, size)
            except OSError:
                self._torn = True
            raise

    def _open(self) -> int:
        # Writes to a deleted file succeed, but go nowhere.
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            os.close(self._descriptor)
            self._descriptor = None
            raise FileNotFoundError(2, "the file was deleted during the run")
        if self._descriptor is None:
            self._descriptor = open_to_append(self.path, os.O_RDWR)
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        return self._descriptor

    def _lose(self, count: int, problem: str) -> None:
        self._lost_on_disk += count
        self.problem = self.problem or problem


class StepReader:
    """Iterates over the steps of a file one at a time, so that a long run needs no memory.

    Args:
        path: The file.
        most_bytes: Read at most this much; from a larger file, read evenly spread blocks of neighbouring steps. None:
            read everything.

    Attributes:
        broken: Number of unreadable lines so far, not counting a torn last one.
        torn: True if the last line was cut off, as a killed process leaves it.
    """

    def __init__(self, path: str | os.PathLike[str], most_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.broken = 0
        self.torn = False
        self._most_bytes = most_bytes

    @property
    def share(self) -> float:
        """Fraction of the file that is read, 0 to 1."""
        if self._most_bytes is None:
            return 1.0
        try:
            return min(1.0, self._most_bytes / max(self.path.stat().st_size, 1))
        except OSError:
            return 1.0

    def __iter__(self) -> Iterator[StepRecord]:
        self.broken, self.torn = 0, False
        is_sample = self._most_bytes is not None and self.share < 1
        try:
            for line in sample_lines(self.path, self._most_bytes or 0) if is_sample else read_lines(self.path):
                step = parse_step(line)
                if step is not None:
                    yield step
                elif not line.endswith(b"\n"):
                    self.torn = True
                elif line.strip():
                    self.broken += 1
        except OSError as error:
            raise RunFolderError(f"cannot read the steps in {self.path}: {error.strerror or error}") from error


def read_steps(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Read all readable steps of a file; `StepReader` also counts the unreadable lines."""
    return list(StepReader(path))


def parse_step(line: bytes) -> StepRecord | None:
    """Parse one line; None if it is not a step."""
    try:
        step = StepRecord.from_dict(parse_line(line))
    except (ValueError, TypeError, AttributeError):
        return None
    return step if isinstance(step.step, int) and isinstance(step.step_s, (int, float)) else None


class StepSeeker:
    """Finds steps in an open file by binary search; the steps must be in order, as a writer leaves them.

    Args:
        file: The open file; it is not closed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size

    def first(self) -> StepRecord | None:
        """Return the first step of the file."""
        return self.at(0)

    def last(self) -> StepRecord | None:
        """Return the last complete step of the file."""
        for tail_bytes in _TAILS_BYTES:
            self._begin(max(0, self._size - tail_bytes))
            found = max(self._steps(), key=lambda step: step.step, default=None)
            if found is not None:
                return found
        return None

    def at(self, number: int) -> StepRecord | None:
        """Return the first step with this number or a higher one; None if there is none."""
        return next(self.onwards(number), None)

    def onwards(self, number: int) -> Iterator[StepRecord]:
        """Yield all steps from that number on."""
        low, high = 0, self._size
        while high - low > _NEAR_BYTES:
            middle = (low + high) // 2
            self._begin(middle)
            found = next((known for line in self._lines() if (known := _number(line)) is not None), None)
            if found is None or found >= number:
                high = middle
            else:
                low = middle
        self._begin(low)
        for line in self._lines():
            known = _number(line)
            if known is not None and known >= number:
                step = parse_step(line)
                if step is not None:
                    yield step

    def _begin(self, offset: int) -> None:
        """Seek to the first line that begins at or after `offset`."""
        self._file.seek(max(0, offset - 1))
        if offset:
            self._file.readline(_MOST_LINE_BYTES)

    def _steps(self) -> Iterator[StepRecord]:
        """Yield the steps from the current position on."""
        for line in self._lines():
            step = parse_step(line)
            if step is not None:
                yield step

    def _lines(self) -> Iterator[bytes]:
        return iter(functools.partial(self._file.readline, _MOST_LINE_BYTES), b"")


def _number(line: bytes) -> int | None:
    """Step number of a line, at a fraction of the cost of parsing the line."""
    match = _NUMBER.match(line)
    return None if match is None else int(match[1])
