"""The largest and the fastest micro-batch, found by trials of the real step.

In: a config (`search`) or a live model (`find`). Out: a `BatchSizeReport`. Every size is tried in separate processes,
so that one that runs out of memory costs only that trial.
"""
