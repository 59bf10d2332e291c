"""How many floating-point operations a model's step takes.

In: a step that runs inside `counter.FlopCounter`, on real or fake tensors. Out: a `FlopCount`, which `records.flops`
turns into FLOPs per sample and token. `formulas` has the arithmetic of each operation.
"""
