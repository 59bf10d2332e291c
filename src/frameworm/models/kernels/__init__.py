"""Triton kernels and calls of cuBLASLt behind the layers of the built-in models.

In: tensors on a GPU in the layout a layer prepared. Out: tensors. Imported late, and only where there is a GPU and
triton; the layers above decide whether a kernel fits and have a plain path beside it.
"""
