"""Frameworm inside a user's own, unmodified script.

In: a Python file and its arguments. Out: a run folder with steps, phases and findings, as for a run of
our own. `script` runs the file and `children` follows the processes it starts, `hooks`, `device_hooks` and `libraries`
watch the calls any training loop must make, `steps` and `timeline` find the steps among them, `samples` and `frames`
see which lines take the time, `record` makes the record. `isolation` runs a script so that nothing it does outlasts it.
"""
