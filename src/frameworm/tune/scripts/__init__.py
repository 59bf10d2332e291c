"""Tuning of a user's own script: trials of it with switches set from outside, proofs, and what comes of them.

In: a script and its arguments. Out: switches that make it faster, each proved. `process` starts trials and talks to
them, `compare` holds what their steps gave against each other, `search` decides what to try, `result` keeps it.
"""
