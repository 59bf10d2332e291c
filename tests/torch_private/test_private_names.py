"""The names of modules are those that torch gives them once they are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from frameworm.torch_private.names import (
    COMPILER, COMPILER_FAILURES, COMPILER_STATISTICS, FUNCTIONAL_COLLECTIVES, GPU_COMPILER, PICKLED_TENSORS
)
assert "torch" not in sys.modules
import torch
assert COMPILER not in sys.modules
torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1))
assert COMPILER in sys.modules and COMPILER_STATISTICS in sys.modules and COMPILER_FAILURES in sys.modules
import torch.distributed.tensor
assert FUNCTIONAL_COLLECTIVES in sys.modules
import torch._inductor.compile_fx
assert GPU_COMPILER in sys.modules
tensor = torch.ones(2)
kind = tensor.__reduce_ex__(2)[0]
assert f"{kind.__module__} {kind.__name__}" in PICKLED_TENSORS, kind
"""


@pytest.mark.slow
def test_modules_go_by_their_names() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
