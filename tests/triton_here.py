"""Where the kernels of triton are tested: on a GPU, or without one in triton's interpreter.

The latter if triton is installed and the environment holds TRITON_INTERPRET=1; `make kernels` does both.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1",
)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
