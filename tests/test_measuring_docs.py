"""The examples of docs/measuring.md and docs/communication.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import frameworm.distributed

DOCS = Path(__file__).parents[1] / "docs"
MEASURING = DOCS / "measuring.md"


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, check=False, cwd=DOCS.parent
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.slow
def test_measuring_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Also without a guard for `__main__`: nothing that the trials need is defined in the script."""
    script = tmp_path / "measuring.py"
    script.write_text("\n".join(examples("measuring.md")))
    printed = ran(str(script)).stdout
    for words in ("bottleneck analysis", "samples/s", "training step", "memory of", "before and after", "checklist"):
        assert words in printed
    assert printed.splitlines()[-1] == "64 True"


def test_every_measuring_name_has_its_section() -> None:
    sections = re.findall(r"^#+ (\w+)$", MEASURING.read_text(encoding="utf-8"), re.MULTILINE)
    sections += re.findall(r"^#+ (\w+)$", (DOCS / "communication.md").read_text(encoding="utf-8"), re.MULTILINE)
    expected = {
        "BottleneckAnalyzer",
        "CompressedDDP",
        "GradientCompressor",
        "benchmark_compression",
        "benchmark_training_step",
        "find_optimal_batch_size",
        "measure_optimization_effectiveness",
        "print_optimization_checklist",
        "profile_memory_usage",
    }
    assert expected <= set(sections)
    assert expected <= set(frameworm.distributed.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressor = GradientCompressor(", "benchmark_compression("])
def test_examples_of_one_process_run(tmp_path: Path, name: str) -> None:
    (text,) = (text for text in examples("communication.md") if name in text)
    script = tmp_path / "example.py"
    script.write_text(text)
    assert ran(str(script)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["enable_gradient_compression(", "CompressedDDP("])
def test_examples_of_several_ranks_run(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    (text,) = (text for text in examples("communication.md") if f"{name}" in text and "torchrun" in text)
    script = tmp_path / "example.py"
    script.write_text(text)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script))
