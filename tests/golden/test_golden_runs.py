"""Run folders that an earlier version wrote are read, exported and resumed as before.

Each kind of run was stopped within an epoch and stored with its checkpoint. Numbers are compared as in
`test_golden_losses`; exported tensors must be equal on every machine, because nothing is computed.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from golden_cases import ALONE, RUN_KINDS, STORED_RUNS, TOGETHER, differences, run_kinds, stored_losses
from golden_outlines import check, run_outlines

HAS_ZSTD = sys.version_info >= (3, 14) or importlib.util.find_spec("zstandard") is not None


def _readable(kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if HAS_ZSTD or kind != "zstd"]


def _copies(kinds: Sequence[str], folder: Path) -> None:
    for kind in kinds:
        shutil.copytree(STORED_RUNS / kind, folder / "runs" / kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kinds", "world_size"), [(ALONE, 1), (TOGETHER, 2)], ids=["alone", "together"])
def test_resumed_runs_continue_as_they_did(kinds: Sequence[str], world_size: int, tmp_path: Path) -> None:
    kinds = _readable(kinds)
    _copies(kinds, tmp_path)
    expected = {kind: ranks for kind, ranks in stored_losses("resumed").items() if kind in kinds}
    assert differences(run_kinds("resume", kinds, tmp_path, world_size), expected, drawn=RUN_KINDS) == []
    for kind in kinds:
        assert check(run_outlines(tmp_path / "runs" / kind, kind)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verbs_read_stored_runs(tmp_path: Path) -> None:
    """`diagnose`, `runs`, `evaluate` and `export`; the sha256 is that of all exported tensors."""
    kinds = _readable(tuple(RUN_KINDS))
    _copies(kinds, tmp_path)
    expected = {kind: ranks for kind, ranks in stored_losses("read").items() if kind in kinds}
    assert differences(run_kinds("read", kinds, tmp_path), expected) == []


def test_stored_runs_are_small() -> None:
    sizes = {
        kind: sum(file.stat().st_size for file in (STORED_RUNS / kind).rglob("*") if file.is_file())
        for kind in RUN_KINDS
    }
    assert max(sizes.values()) < 150_000, sizes
    assert sum(sizes.values()) < 1_000_000, sizes
