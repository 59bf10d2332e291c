"""The largest and the fastest micro-batch, found by trials of the real step.

In: a config (`search`) or a model in the caller's hands (`find`). Out: a `BatchSizeReport`. Every size is tried in
processes of its own, so that one that runs out of memory costs that trial and nothing else.
"""
