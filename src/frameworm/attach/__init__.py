"""frameworm inside a user's own, unmodified script.

In: a Python file and its arguments. Out: a run folder with steps, phases and findings, as for a run of our own.
`script` runs the file and `children` follows the processes it starts; `hooks`, `device_hooks` and `libraries` watch the
calls that any training loop makes; `steps` and `timeline` find the steps among them; `samples` and `frames` show which
lines take the time; `record` builds the record. `isolation` runs a script so that none of its effects remain.
"""
