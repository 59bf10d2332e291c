"""The network lab for benchmarks: scripts/network_lab.py is a script and is loaded by its path."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

LAB = Path(__file__).parents[1] / "scripts" / "network_lab.py"


@functools.cache
def load_lab() -> ModuleType:
    """scripts/network_lab.py as a module."""
    specification = importlib.util.spec_from_file_location("network_lab", LAB)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["network_lab"] = module  # its dataclasses look their module up
    specification.loader.exec_module(module)
    return module
