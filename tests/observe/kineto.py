"""Traces made by hand, with the fields that Kineto writes. Times in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST = 4711
BASE = 3869443572000.0  # what the clock of a real trace shows


class Trace:
    """Collects events; `launch` adds the runtime call, the device event and the flow between them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": BASE, "pid": HOST, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "ts": BASE, "pid": HOST, "tid": 1, "args": {"name": "thread 1 (main)"}},
        ]
        self._correlation = 100

    def span(
        self, category: str, name: str, start: float, end: float, tid: Any = 1, pid: Any = HOST, **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": BASE + start,
                "dur": end - start,
                "args": args,
            }
        )

    def step(self, number: int, start: float, end: float) -> None:
        self.span("user_annotation", f"ProfilerStep#{number}", start, end, **{"External id": 1})
        self.span("gpu_user_annotation", f"ProfilerStep#{number}", start, end, 7, 0)

    def operator(self, name: str, start: float, end: float, tid: Any = 1, **args: Any) -> None:
        self.span("cpu_op", name, start, end, tid, **args)

    def call(self, name: str, start: float, end: float, tid: Any = 1) -> None:
        self._correlation += 1
        self.span("cuda_runtime", name, start, end, tid, cbid=211, correlation=self._correlation)

    def launch(
        self,
        name: str,
        called: float,
        start: float,
        end: float,
        *,
        stream: int = 7,
        device: int = 0,
        tid: Any = 1,
        call: str = "cudaLaunchKernel",
        call_us: float = 2.0,
        category: str = "kernel",
        **args: Any,
    ) -> None:
        self.call(call, called, called + call_us, tid)
        number = self._correlation
        args = {"device": device, "context": 1, "stream": stream, "correlation": number, **args}
        self.span(category, name, start, end, stream, device, **args)
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", "pid": HOST, "tid": tid, "ts": BASE + called, **flow})
        self.events.append({"ph": "f", "pid": device, "tid": stream, "ts": BASE + start, "bp": "e", **flow})

    def copy(self, kind: str, called: float, start: float, end: float, *, size: int = 4096, **more: Any) -> None:
        more = {"call": "cudaMemcpyAsync", **more}
        self.launch(f"Memcpy {kind}", called, start, end, category="gpu_memcpy", bytes=size, **more)

    def memory(self, moment: float, size: int, total: int, tid: Any = 1, kind: int = 1) -> None:
        args = {"Total Reserved": 2 * total, "Total Allocated": total, "Bytes": size, "Device Id": 0, "Addr": 1}
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": HOST,
                "tid": tid,
                "ts": BASE + moment,
                "args": {**args, "Device Type": kind},
            }
        )

    def text(self, **header: Any) -> str:
        data = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150}],
            "displayTimeUnit": "ms",
            **header,
            "traceEvents": self.events,
            "traceName": "t.json",
        }
        return json.dumps(data, indent=1)

    def write(self, path: Path, **header: Any) -> Path:
        data = self.text(**header).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
