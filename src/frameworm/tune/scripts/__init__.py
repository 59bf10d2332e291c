"""Tuning of a user's own script: trials of it with switches set from outside, proofs, and the results.

In: a script and its arguments. Out: switches that make it faster, each proved. `process` starts and controls trials,
`comparing` compares the results of their steps, `search` decides what to try, `result` stores the outcome.
"""
