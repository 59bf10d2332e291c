"""The benchmark of the models' kernels runs, and says which shapes cannot be used."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from triton_here import needs_kernels

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.gpu
@needs_kernels
@pytest.mark.usefixtures("interpreted_kernels")
@pytest.mark.timeout(300)
def test_every_kernel_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    script = str(FOLDER / "model_kernels.py")
    monkeypatch.setattr(sys, "argv", [script, "--smoke", "--rounds", "1", "--repeats", "1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 0
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert set(results) == {
        "norm",
        "causal forward",
        "causal backward, queries",
        "causal backward, keys",
        "short forward",
        "short backward",
        "loss",
    }
    for name, found in results.items():
        shipped = [label for label in found["us"] if label.startswith("shipped")]
        assert len(shipped) == 1, name
        assert len(found["us"]) >= 2, name
        assert found["best_beside_shipped"]["value"] > 0
    assert results["norm"]["shipped_beside_torch"]["value"] > 0
    assert "shipped" in capsys.readouterr().out


def test_a_shape_that_cannot_be_used_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    script = runpy.run_path(str(FOLDER / "model_kernels.py"))

    def fails() -> None:
        raise RuntimeError("out of shared memory\nand more")

    cpu = torch.device("cpu")
    found = script["measure"]("planted", {"shipped 1": lambda: None, "2": fails}, 1, 1, cpu)
    assert found["refused"] == {"2": "RuntimeError: out of shared memory"}
    assert list(found["us"]) == ["shipped 1"]
    with pytest.raises(RuntimeError, match="out of shared memory"):  # what ships must run
        script["measure"]("planted", {"shipped 1": fails, "2": lambda: None}, 1, 1, cpu)


def test_without_a_gpu_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(FOLDER))
    script = str(FOLDER / "model_kernels.py")
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 2
    assert "there is none here" in capsys.readouterr().out
