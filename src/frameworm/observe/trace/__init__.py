"""Profiler traces as data: a Chrome or Perfetto file in, a `records.trace.TraceSummary` out.

`events` parses and bounds the file, `device` and `host` account for what each side did, `read` puts both together.
Reading a trace needs no torch.
"""

from __future__ import annotations

from frameworm.observe.trace.read import read_trace

__all__ = ["read_trace"]
