"""Clocks for the phases of a step, on the host and on the device, and for communication.

In: `mark(phase)` calls of a step and the buckets that DDP sends. Out: seconds per phase that add up to the step
(`phases`, `device_clock`), exposed communication (`communication`), waits between ranks (`ranks`), profiler windows
(`windows`). Device events are read a few steps late, when the device has long passed them.
"""
