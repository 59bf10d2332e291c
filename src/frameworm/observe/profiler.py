"""Named nested scopes, and windows in which torch's own profiler records everything."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from frameworm.errors import DeviceError, StateError
from frameworm.observe.clocks.device_timer import DeviceTimer, choose_observed
from frameworm.observe.profiler_window import ProfilerWindow
from frameworm.report.run.measurements import render_scopes

# Completed events are processed once this many scopes wait for the device.
READ_AT = 64
# No host is this far ahead of its device, so waiting for the oldest of this many scopes takes no time.
MOST_IN_FLIGHT = 8_192
MOST_LOOKS = 1_000

_Event = torch.cuda.Event


class _Node:
    """All uses of one scope under one parent."""

    __slots__ = (
        "children",
        "count",
        "device_s",
        "failed",
        "max_s",
        "min_s",
        "name",
        "peak_bytes",
        "threads",
        "total_s",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: dict[str, _Node] = {}
        self.count = 0
        self.failed = 0
        self.total_s = 0.0
        self.min_s = float("inf")
        self.max_s = 0.0
        self.device_s: float | None = None
        self.peak_bytes: int | None = None
        self.threads: set[int] = set()

    def data(self) -> dict[str, Any]:
        """This scope and those inside it; a scope that was never closed gets the total of those inside."""
        children = [child.data() for child in self.children.values()]
        inside_s = sum(child["total_s"] for child in children)
        inside_device_s = sum(child["device_s"] or 0.0 for child in children)
        total_s = self.total_s if self.count else inside_s
        return {
            "name": self.name,
            "count": self.count,
            "failed": self.failed,
            "total_s": total_s,
            "self_s": max(0.0, total_s - inside_s),
            "mean_s": self.total_s / self.count if self.count else None,
            "min_s": self.min_s if self.count else None,
            "max_s": self.max_s if self.count else None,
            "device_s": self.device_s,
            "device_self_s": None if self.device_s is None else max(0.0, self.device_s - inside_device_s),
            "peak_bytes": self.peak_bytes,
            "threads": len(self.threads),
            "children": children,
        }


class _Scope(ContextDecorator):
    """One use of `PerformanceProfiler.profile`; as a decorator, every call is a use."""

    def __init__(self, profiler: PerformanceProfiler, name: str) -> None:
        self._profiler = profiler
        self._name = name

    def _recreate_cm(self) -> _Scope:
        return _Scope(self._profiler, self._name)

    def __enter__(self) -> _Scope:
        profiler = self._profiler
        self._node = profiler._enter(self)
        self._range = profiler._begin_ranges(self._name)
        self._begin = profiler._timer.mark()
        self._begin_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed_s = time.perf_counter() - self._begin_s
        profiler = self._profiler
        end = None if self._begin is None else profiler._timer.mark()
        profiler._end_ranges(self._range)
        profiler._leave(self, elapsed_s, end, failed=kind is not None)


class PerformanceProfiler:
    """Times named scopes as a tree, and records windows with `torch.profiler` on request.

    ::

        profiler = PerformanceProfiler()
        with profiler.profile("step"):
            with profiler.profile("forward"):
                ...
        profiler.print_summary()

    `profile` also works as a decorator and in any thread, and a scope is closed even if an exception is raised inside
    it. On a GPU each scope also gets the time between its beginning and end in the device's stream, from events that
    are read late: a scope never waits for the device.

    Args:
        device: `auto`: the current GPU if there is one.
        nvtx: Also mark the scopes as NVTX ranges, for Nsight Systems.

    Raises:
        DeviceError: The device does not exist, or NVTX is requested without a CUDA device.
    """

    def __init__(self, device: torch.device | str = "auto", *, nvtx: bool = False) -> None:
        if nvtx and not torch.cuda.is_available():
            raise DeviceError("nvtx=True marks ranges for a CUDA device, and torch sees none; leave it out")
        self._device = choose_observed(device)
        self._timer = DeviceTimer(self._device)
        self._nvtx = nvtx
        self._lock = threading.Lock()
        self._local = threading.local()
        self._root = _Node("")
        self._in_flight: deque[tuple[_Node, _Event, _Event]] = deque()
        self._looks: list[dict[str, Any]] = []
        self._looks_taken = 0
        self._peak_bytes: int | None = None
        self._window: ProfilerWindow | None = None
        self._traces: list[Path] = []
        self._notes: list[str] = []

    def profile(self, name: str) -> _Scope:
        """A scope: `with profiler.profile("forward"):`, or `@profiler.profile("forward")` on a function."""
        return _Scope(self, name)

    def record_gpu_memory(self, label: str | None = None) -> dict[str, Any]:
        """Record how much GPU memory torch holds now; without a GPU all values are None.

        Args:
            label: Name of this moment; default: the names of the scopes around it.

        Returns:
            `allocated_bytes`, `reserved_bytes` and `peak_bytes` so far.
        """
        stack = self._stack()
        look: dict[str, Any] = {
            "label": label if label is not None else "/".join(scope._name for scope in stack),
            "time": time.time(),
            "allocated_bytes": None,
            "reserved_bytes": None,
            "peak_bytes": None,
        }
        if self._timer.on:
            look["allocated_bytes"] = int(torch.cuda.memory_allocated(self._device))
            look["reserved_bytes"] = int(torch.cuda.memory_reserved(self._device))
            look["peak_bytes"] = int(torch.cuda.max_memory_allocated(self._device))
        with self._lock:
            self._looks_taken += 1
            self._looks.append(look)
            if len(self._looks) > MOST_LOOKS:
                del self._looks[1::2]
            if look["peak_bytes"] is not None:
                self._peak_bytes = max(self._peak_bytes or 0, look["peak_bytes"])
                if stack:
                    node = stack[-1]._node
                    node.peak_bytes = max(node.peak_bytes or 0, look["allocated_bytes"])
        return look

    @contextlib.contextmanager
    def window(
        self,
        path: str | Path,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> Iterator[PerformanceProfiler]:
        """Record some of the steps with `torch.profiler`; call `step()` at the end of each step.

        Each window is written to a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, including the
        scopes.

        Args:
            path: A `.json` or `.json.gz` file; later windows get a number added. A folder gets one file per window,
                with a name that TensorBoard's profiler plugin recognises (`.pt.trace.json.gz`).
            wait: Steps to skip before each window.
            warmup: Steps to record and discard, because recording slows down the first ones.
            active: Steps to keep.
            repeat: Number of windows; 0: until the end.
            memory: Also record allocations.
            shapes: Also record the shapes of the operators' inputs.
            stacks: Also record where in the source each operator was called.
        """
        if self._window is not None:
            raise StateError("a window is open already; leave it before the next one")
        window = ProfilerWindow(
            path,
            self._device,
            wait=wait,
            warmup=warmup,
            active=active,
            repeat=repeat,
            memory=memory,
            shapes=shapes,
            stacks=stacks,
        )
        self._window = window
        try:
            with window:
                yield self
        finally:
            self._window = None
            self._traces += window.paths
            self._notes += window.notes

    def step(self) -> None:
        """End a step, which advances an open window."""
        if self._window is not None:
            self._window.step()

    def summary(self) -> dict[str, Any]:
        """All scopes as a tree, memory, and the traces written; on a GPU this waits for pending scopes.

        Returns:
            `scopes`: for each its name, count, failed, total_s, self_s (without the scopes inside it), mean_s, min_s,
            max_s, device_s, device_self_s, peak_bytes, threads and children. Scopes of several threads with the same
            name and parent share an entry, so that their sum may exceed the elapsed time. Also `memory`, `traces`,
            `notes`.
        """
        self._read(wait=True)
        with self._lock:
            return {
                "device": str(self._device),
                "scopes": [child.data() for child in self._root.children.values()],
                "memory": {"peak_bytes": self._peak_bytes, "looks": self._looks_taken, "series": list(self._looks)},
                "traces": [str(path) for path in self._traces],
                "notes": list(dict.fromkeys(self._notes)),
            }

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print the scopes as a table."""
        print(render_scopes(self.summary()), end="", file=sys.stdout if file is None else file)

    def reset(self) -> None:
        """Clear all closed scopes and memory samples; scopes open now are counted when they close."""
        self._read(wait=True)
        with self._lock:
            self._root = _Node("")
            self._looks, self._looks_taken, self._peak_bytes = [], 0, None

    def _stack(self) -> list[_Scope]:
        stack: list[_Scope] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _enter(self, scope: _Scope) -> _Node:
        stack = self._stack()
        with self._lock:
            parent = stack[-1]._node if stack else self._root
            node = parent.children.get(scope._name)
            if node is None:
                node = parent.children[scope._name] = _Node(scope._name)
        stack.append(scope)
        return node

    def _leave(self, scope: _Scope, elapsed_s: float, end: _Event | None, *, failed: bool) -> None:
        stack = self._stack()
        # A generator can leave scopes open inside one that ends; they do not contain what follows.
        if scope in stack:
            del stack[stack.index(scope) :]
        node = scope._node
        with self._lock:
            node.count += 1
            node.failed += failed
            node.total_s += elapsed_s
            node.min_s = min(node.min_s, elapsed_s)
            node.max_s = max(node.max_s, elapsed_s)
            node.threads.add(threading.get_ident())
            if scope._begin is not None and end is not None:
                self._in_flight.append((node, scope._begin, end))
        if len(self._in_flight) >= READ_AT:
            self._read(wait=False)

    def _begin_ranges(self, name: str) -> Any:
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        if self._window is None:
            return None
        annotation = torch.profiler.record_function(name)
        annotation.__enter__()
        return annotation

    def _end_ranges(self, annotation: Any) -> None:
        if annotation is not None:
            annotation.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()

    def _read(self, *, wait: bool) -> None:
        """Process the scopes that the device has passed, oldest first."""
        with self._lock:
            while self._in_flight:
                node, begin, end = self._in_flight[0]
                if wait or len(self._in_flight) > MOST_IN_FLIGHT:
                    end.synchronize()
                elif not end.query():
                    return
                self._in_flight.popleft()
                node.device_s = (node.device_s or 0.0) + self._timer.seconds(begin, end)
                self._timer.give_back(begin, end)
