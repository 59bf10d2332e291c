"""Where two runs part: same seed, same bits; and the first step that differs is found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from frameworm.cli.guard import compare
from frameworm.config.load import load_config
from frameworm.engine.run import run
from frameworm.guard.divergence import Divergence, first_divergence
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line
from frameworm.report.checks.guard import divergence_text


def run_of(path: Path, *ranks: list[tuple[int, float | None, float | None]]) -> RunFolder:
    path.mkdir()
    for rank, steps in enumerate(ranks):
        lines = [
            step_line(StepRecord(step, 1, 0.0, 0.1, loss, 0.1, 4, 4.0, grad_norm=norm)) for step, loss, norm in steps
        ]
        (path / f"steps-rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(path)


def test_the_first_different_step_of_any_rank_is_found(tmp_path: Path) -> None:
    base = [(1, 0.5, 1.0), (2, 0.4, math.nan), (3, None, 1.0), (4, 0.3, 1.0)]
    before = run_of(tmp_path / "a", base, base)
    assert first_divergence(before, run_of(tmp_path / "same", base, base)) == Divergence(4)
    later = [*base[:3], (4, 0.3 + 1e-16, 1.0)]
    found = first_divergence(before, run_of(tmp_path / "b", base, later))
    assert found == Divergence(4, 4, 1, "loss", 0.3, 0.3 + 1e-16)
    norm = [base[0], (2, 0.4, 1.0), *base[2:]]
    found = first_divergence(before, run_of(tmp_path / "c", norm, later))
    assert found is not None
    assert (found.step, found.rank, found.what) == (2, 0, "gradient norm")
    words = divergence_text(found)
    assert "in step 2: the gradient norm of rank 0 is nan and 1; all steps before it are bitwise equal" in words


def test_only_what_both_have_is_compared(tmp_path: Path) -> None:
    before = run_of(tmp_path / "a", [(1, 0.5, None), (3, 0.4, None), (4, 0.3, None)])
    after = run_of(tmp_path / "b", [(2, 0.9, None), (3, 0.4, None), (5, 0.1, None)], [(1, 9.0, None)])
    assert first_divergence(before, after) == Divergence(1)
    (tmp_path / "empty").mkdir()
    assert first_divergence(before, RunFolder(tmp_path / "empty")) is None


@pytest.mark.slow
def test_same_seed_same_bits(tmp_path: Path, data_cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "configs/quickstart.yaml"
    fixed = ["training.max_steps=20", "model.dropout=0.1", f"data.cache_dir={data_cache_dir}", "observe.progress=off"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(load_config(config, [*fixed, f"seed={seed}"]), out=tmp_path / name)
    compare(tmp_path / "a", tmp_path / "b", exact=False, as_json=False)
    assert "divergence  none: loss and gradient norm are bitwise equal in all 20" in capsys.readouterr().out
    compare(tmp_path / "a", tmp_path / "c", exact=False, as_json=True)
    other = json.loads(capsys.readouterr().out)["parting"]
    assert (other["step"], other["what"], other["rank"]) == (1, "loss", 0)
    files = [sorted((tmp_path / name).glob("checkpoints/step-*/*.safetensors")) for name in ("a", "b", "c")]
    weights = [[path.read_bytes() for path in found] for found in files]
    assert weights[0]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


@pytest.mark.gpu
def test_same_seed_same_bits_on_one_gpu(tmp_path: Path, data_cache_dir: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = Path(__file__).parents[2] / "configs/quickstart.yaml"
    fixed = ["training.max_steps=40", "model.dropout=0.1", f"data.cache_dir={data_cache_dir}", "observe.progress=off"]
    for name in ("a", "b"):
        run(load_config(config, [*fixed, "gpu.device=cuda", "gpu.deterministic=true"]), out=tmp_path / name)
    assert first_divergence(RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")) == Divergence(40)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("parted", [1, 2, 333, 1_499, 1_500, None])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_search_in_long_runs_finds_what_reading_them_finds(tmp_path: Path, parted: int | None, rank: int) -> None:
    base = [(step, 1 / step, 0.5) for step in range(1, 1_501)]
    later = [item if parted is None or item[0] < parted else (item[0], item[1] + 1e-9, 0.5) for item in base]
    before = run_of(tmp_path / "a", base, base, base)
    after = run_of(tmp_path / "b", *(later if number == rank else base for number in range(3)))
    exact, searched = first_divergence(before, after, None), first_divergence(before, after, 1)
    assert exact is not None
    assert searched is not None
    assert searched.is_searched
    assert (searched.step, searched.what, searched.rank) == (exact.step, exact.what, exact.rank)
    assert (searched.before, searched.after) == (exact.before, exact.after)
    words = divergence_text(searched)
    assert ("none found" in words) == (parted is None)
    assert "--exact" in words or parted == 1
