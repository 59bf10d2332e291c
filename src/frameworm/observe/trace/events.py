"""Reads a Chrome trace as written by torch.profiler (Kineto), event by event.

A trace of several hundred megabytes is never held in memory as a whole: text is decoded piece by piece, and only a few
numbers of each event are kept. A file cut short by a killed run is read as far as it goes.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frameworm.errors import DataError
from frameworm.records.reading import open_plain

PIECE_BYTES = 1 << 20
LONGEST_HEADER = 16 << 20
LONGEST_EVENT = 16 << 20

KERNEL, COPY, MEMSET = 0, 1, 2
OPERATOR, RANGE, RUNTIME, MEMORY, ASYNCHRONOUS = 0, 1, 2, 3, 4

_DEVICE_KINDS = {
    **{"kernel": KERNEL, "Kernel": KERNEL},
    **{"gpu_memcpy": COPY, "Memcpy": COPY},
    **{"gpu_memset": MEMSET, "Memset": MEMSET},
}
_HOST_KINDS = {
    **{"cpu_op": OPERATOR, "Operator": OPERATOR},
    "user_annotation": RANGE,
    **{"cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "Runtime": RUNTIME},
}
DEVICE_COLUMNS = ("start", "end", "name", "kind", "device", "stream", "correlation", "external", "bytes")
HOST_COLUMNS = ("start", "end", "name", "kind", "thread", "correlation", "external", "bytes")

_STEP_NAME = re.compile(r"ProfilerStep#(\d+)$")
# A collective's range is opened on one thread and closed on another, so it overlaps others instead of enclosing them.
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc|rccl|xccl):")
_EVENTS_KEY = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT_EVENT = re.compile(r'\{\s*"(?:ph|name|cat)"\s*:')
_SEPARATOR = re.compile(r"[\s,]*")
_CUDA, _CPU = 1, 0  # "Device Type" of a memory event


class Columns:
    """Numbers of many events, one array per field."""

    def __init__(self, names: tuple[str, ...], values: array[float]) -> None:
        table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names)) if len(values) else None
        self.count = 0 if table is None else len(table)
        self._fields = {
            name: np.empty(0) if table is None else np.ascontiguousarray(table[:, index])
            for index, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        return self._fields[name]

    def __len__(self) -> int:
        return self.count


class TraceEvents:
    """The data kept from a trace. Times are in microseconds, as in the file; names are indices into `names`."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.names: list[str] = []
        self.threads: list[str] = []
        self.steps: list[tuple[int, float, float]] = []  # number, start and end on the host
        self.device_steps: dict[int, tuple[float, float]] = {}  # from the first to the last kernel of each
        self.peak_bytes: dict[int, int] = {}
        self.kinds: Counter[str] = Counter()
        self.count = 0
        self.damaged = 0
        self.truncated = False
        self.device = Columns(DEVICE_COLUMNS, array("d"))
        self.host = Columns(HOST_COLUMNS, array("d"))


def read_events(path: Path) -> TraceEvents:
    """Read a trace file, plain or gzipped.

    Raises:
        DataError: It cannot be read, is not a trace, or holds no events.
    """
    collector = _Collector()
    events = collector.events
    scanner = _Scanner(path)
    for event in scanner:
        collector.add(event)
    collector.finish()
    events.header, events.truncated, events.damaged = scanner.header, scanner.truncated, scanner.damaged
    if not events.count:
        ending = "it ends before the first event" if scanner.truncated else "its traceEvents are empty"
        raise DataError(f"{path}: no events in this trace: {ending}; record it again")
    if not len(events.device) and not len(events.host):
        raise DataError(
            f"{path}: {events.count} events, but no operator or kernel as torch.profiler writes them; give a file of "
            "torch.profiler's export_chrome_trace"
        )
    return events


def _text_pieces(path: Path) -> Iterator[str]:
    """The file's text; a gzip stream that was cut short ends early."""
    decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
    try:
        with open_plain(path) as file:
            piece = file.read(PIECE_BYTES)
            unpack = zlib.decompressobj(31) if piece.startswith(b"\x1f\x8b") else None
            while piece:
                if unpack is None:
                    yield decode(piece)
                else:
                    data = piece
                    while data:
                        yield decode(unpack.decompress(data, PIECE_BYTES))
                        data = unpack.unconsumed_tail
                        if unpack.eof:
                            data, unpack = unpack.unused_data, zlib.decompressobj(31)
                piece = file.read(PIECE_BYTES)
    except zlib.error:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class _Scanner:
    """Finds the events in the text, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces = _text_pieces(path)
        self._text = ""
        self._at = 0
        # strict=False, because names in traces may contain control characters that JSON forbids.
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.header: dict[str, Any] = {}
        self.truncated = False
        self.damaged = 0

    def __iter__(self) -> Iterator[Any]:
        self._find_events()
        while True:
            self._at = _end_of(_SEPARATOR, self._text, self._at)
            if self._at == len(self._text):
                if not self._more():
                    self.truncated = True
                    return
                continue
            if self._text[self._at] == "]":
                return
            try:
                event, self._at = self._decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not self._past(getattr(error, "pos", self._at)):
                    return
                continue
            yield event

    def _past(self, place: int) -> bool:
        """Read more text for an incomplete event, or skip a damaged one; False at the end."""
        rest = len(self._text) - self._at
        if rest <= LONGEST_EVENT and self._more():
            return True
        following = _NEXT_EVENT.search(self._text, max(place, self._at + 1))
        if following is None:
            self.truncated = True
            return False
        self.damaged += 1
        self._at = following.start()
        return True

    def _more(self) -> bool:
        for piece in self._pieces:
            if piece:
                self._text = self._text[self._at :] + piece
                self._at = 0
                return True
        return False

    def _find_events(self) -> None:
        """Go to the first event; the text before it is the header."""
        while True:
            beginning = self._text.lstrip()
            if beginning.startswith("["):
                self._at = self._text.index("[") + 1
                return
            found = _EVENTS_KEY.search(self._text)
            if found is not None:
                self._at = found.end()
                self.header = _header(self._text[: found.start()])
                return
            if len(self._text) > LONGEST_HEADER or (beginning and not beginning.startswith("{")) or not self._more():
                what = "the file is empty" if not beginning else "there are no traceEvents in it"
                raise DataError(
                    f"{self._path}: not a PyTorch trace: {what}; give a file of torch.profiler's export_chrome_trace "
                    "(.json or .json.gz)"
                )


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text.rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


class _Collector:
    """Keeps the numbers of each relevant event."""

    def __init__(self) -> None:
        self.events = TraceEvents()
        self._device = array("d")
        self._host = array("d")
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._thread_names: dict[tuple[Any, Any], str] = {}

    def add(self, event: Any) -> None:
        """Add one decoded event."""
        if not isinstance(event, dict):
            return
        self.events.count += 1
        phase = event.get("ph")
        category = str(event.get("cat"))
        try:
            if phase == "X":
                self.events.kinds[category] += 1
                if category in _DEVICE_KINDS:
                    self._add_device(event, _DEVICE_KINDS[category])
                elif category in _HOST_KINDS:
                    self._add_host(event, _HOST_KINDS[category])
                elif category == "gpu_user_annotation":
                    self._add_device_step(event)
            elif phase == "i" and event.get("name") == "[memory]":
                self._add_memory(event)
            elif phase == "M" and event.get("name") == "thread_name":
                self._thread_names[event.get("pid"), event.get("tid")] = str(_arguments(event).get("name"))
        except (KeyError, TypeError, ValueError):
            self.events.kinds["malformed"] += 1

    def finish(self) -> None:
        """Convert the collected numbers to arrays."""
        self.events.names = list(self._names)
        self.events.threads = [self._thread_names.get(key, f"thread {key[1]}") for key in self._threads]
        self.events.device = Columns(DEVICE_COLUMNS, self._device)
        self.events.host = Columns(HOST_COLUMNS, self._host)
        self.events.steps.sort(key=lambda step: step[1])

    def _add_device(self, event: Mapping[str, Any], kind: int) -> None:
        arguments = _arguments(event)
        start, end = _span(event)
        device = arguments.get("device", arguments.get("inDevice", event.get("pid")))
        self._device.extend(
            (
                start,
                end,
                self._name(event),
                kind,
                _number(device, 0.0),
                _number(arguments.get("stream", event.get("tid")), -1.0),
                _number(arguments.get("correlation"), -1.0),
                _number(arguments.get("External id", arguments.get("external id")), -1.0),
                _number(arguments.get("bytes"), -1.0),
            )
        )

    def _add_host(self, event: Mapping[str, Any], kind: int) -> None:
        start, end = _span(event)
        name = str(event.get("name"))
        step = _STEP_NAME.match(name)
        if step is not None:
            self.events.steps.append((int(step[1]), start, end))
            return
        if kind in (OPERATOR, RANGE) and _COLLECTIVE.match(name):
            kind = ASYNCHRONOUS
        arguments = _arguments(event)
        self._host.extend(
            (
                start,
                end,
                self._name(event),
                kind,
                self._thread(event),
                _number(arguments.get("correlation"), -1.0),
                _number(arguments.get("External id", arguments.get("external id")), -1.0),
                0.0,
            )
        )

    def _add_device_step(self, event: Mapping[str, Any]) -> None:
        step = _STEP_NAME.match(str(event.get("name")))
        if step is not None:
            start, end = _span(event)
            first, last = self.events.device_steps.get(int(step[1]), (start, end))
            self.events.device_steps[int(step[1])] = min(first, start), max(last, end)

    def _add_memory(self, event: Mapping[str, Any]) -> None:
        arguments = _arguments(event)
        moment = float(event["ts"])
        kind = int(_number(arguments.get("Device Type"), float(_CPU)))
        allocated = int(_number(arguments.get("Total Allocated"), 0.0))
        self.events.peak_bytes[kind] = max(self.events.peak_bytes.get(kind, 0), allocated)
        size = _number(arguments.get("Bytes"), 0.0)
        self._host.extend((moment, moment, self._name(event), MEMORY, self._thread(event), kind, -1.0, size))

    def _name(self, event: Mapping[str, Any]) -> int:
        return self._names.setdefault(str(event.get("name")), len(self._names))

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._threads.setdefault((event.get("pid"), event.get("tid")), len(self._threads))


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    end = start + max(float(event.get("dur", 0.0)), 0.0)
    if not math.isfinite(end):
        raise ValueError(f"{start} to {end} is no span of time")
    return start, end


def _number(value: Any, missing: float) -> float:
    return float(value) if isinstance(value, (int, float)) else missing
