"""Memory that one step frees is there for the next, where torch's allocator can be told so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_COMMAND = """
import contextlib, os, resource, sys, time
from frameworm.cli.main import main
sys.argv = ["frameworm", "--version"]
with contextlib.suppress(SystemExit):
    main()
assert "torch" not in sys.modules, "too late: torch has asked already"
"""
_ASKED = _COMMAND + 'print(os.environ["MIMALLOC_PURGE_DELAY"])'
_FAULTS = (
    _COMMAND
    + """
import torch
faults = []
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(32)]
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del tensors
    time.sleep(0.3)
print(sum(faults[2:]), flush=True)
os._exit(0)  # how an interpreter ends is no matter here, and takes a while
"""
)


def _has_mimalloc() -> bool:
    libraries = (Path(torch.__file__).parent / "lib").glob("*c10.*")
    return any(b"MIMALLOC" in path.read_bytes().upper() for path in libraries)


def printed(program: str, **variables: str) -> str:
    """The last word that a program prints."""
    kept = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **variables}, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[-1]


@pytest.mark.slow
def test_the_command_line_asks_before_torch_is_loaded_unless_the_user_did() -> None:
    assert printed(_ASKED) == "10000"
    assert printed(_ASKED, MIMALLOC_PURGE_DELAY="10") == "10"


@pytest.mark.slow
@pytest.mark.skipif(not _has_mimalloc(), reason="this torch is built without mimalloc, as those for x86 are")
def test_memory_that_a_step_frees_stays_for_the_next() -> None:
    anew = int(printed(_FAULTS, MIMALLOC_PURGE_DELAY="10"))
    assert anew >= 20, "what torch does by itself does no harm any more: there is nothing to ask it for"
    assert int(printed(_FAULTS)) < anew / 4
