"""Clocks for the phases of a step, on the host and on the device, and for communication.

In: `mark(phase)` calls of a step and the buckets DDP sends. Out: seconds per phase that add up to the step (`phases`,
`device_clock`), exposed communication (`communication`), waits between ranks (`ranks`), windows of the profiler
(`windows`). Device events are read some steps later, when they are long done.
"""
