"""The built-in workloads: a model, its loss and its data, from a config.

In: a config. Out: a `Workload` (`workloads.build_workload`), built-in or from a user's function, and its loaders
(`loaders`). `text_classifier` and `gpt` are the models; the other modules are layers that run fast on a GPU and fall
back to plain torch; `kernels/` has the Triton and cuBLAS code that they call.
"""
