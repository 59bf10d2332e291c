"""Profiler traces as data: a Chrome or Perfetto file in, a `records.trace.TraceSummary` out.

`events` parses the file within bounded memory, `device` and `host` analyse what each side did, `read` combines both.
Reading a trace needs no torch.
"""

from __future__ import annotations

from frameworm.observe.trace.read import read_trace

__all__ = ["read_trace"]
