"""Memory that one step frees is there for the next, where torch's allocator can be told so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import contextlib, os, resource, sys, time
from frameworm.cli.main import main
sys.argv = ["frameworm", "--version"]
with contextlib.suppress(SystemExit):
    main()
assert "torch" not in sys.modules, "too late: torch has asked already"
import torch
faults = []
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(32)]
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del tensors
    time.sleep(0.3)
print(os.environ["MIMALLOC_PURGE_DELAY"], sum(faults[2:]), flush=True)
os._exit(0)  # how an interpreter ends is no matter here, and takes a while
"""


def faults_of_steps(**variables: str) -> tuple[str, int]:
    kept = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**kept, **variables}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    delay, faults = ended.stdout.split()[-2:]
    return delay, int(faults)


def test_memory_that_a_step_frees_stays_for_the_next() -> None:
    delay, anew = faults_of_steps(MIMALLOC_PURGE_DELAY="10")
    assert delay == "10", "who set it is right"
    if anew < 20:
        pytest.skip("this torch has another allocator than mimalloc")
    delay, faults = faults_of_steps()
    assert delay == "10000"
    assert faults < anew / 4
