"""Where the time goes, measured without slowing it down.

In: marks set by a training step, device events, samples of the machine, profiler traces. Out: records. `clocks/`
times the phases of a step, `trace/` reads profiler traces, `system/` samples the machine, `loggers/` tells experiment
trackers of a run; `monitor` and `profiler` are the classes that users put into loops of their own.
"""
