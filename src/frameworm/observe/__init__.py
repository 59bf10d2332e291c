"""Measure where time goes without slowing the training down.

In: marks set by a training step, device events, samples of the machine, profiler traces. Out: records. `clocks/`
times the phases of a step, `trace/` reads profiler traces, `system/` samples the machine, `loggers/` reports to
experiment trackers; `monitor` and `profiler` are the classes for users' own loops.
"""
