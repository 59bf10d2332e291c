"""Triton kernels and cuBLASLt calls behind the layers of the built-in models.

In: tensors on a GPU, in the layout that a layer prepared. Out: tensors. Imported only where there is a GPU and triton;
the layers above decide whether a kernel fits, and have a plain fallback.
"""
