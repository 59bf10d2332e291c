"""`frameworm verify-gpus`: rehearsed with two processes on the CPU, and its answers where something is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from frameworm.cli.main import app
from frameworm.errors import DeviceError, RunFolderError
from frameworm.report.checks.gpus import render_verification, render_verification_page, speed_rows
from frameworm.tune.verify import verify
from frameworm.tune.verify.equality import Outcome, judge_equality
from frameworm.tune.verify.verify import Claim, Speed, Verification, verify_gpus


def found(**changes: Any) -> Verification:
    speed = Speed("ag_news", "captured", "generated texts", 2, 0.004, 0.0021, (0.0023, 0.0021, 0.0026), 1.0)
    result = Verification(Path("x"), 2, False, False, {"device": "GPU <X>", "torch": "2.13", "nccl": None})
    result.checks.append(Claim("equal", "equal?", "holds", "all equal", {"strategy": "ddp"}))
    result.speeds.append(
        Speed(
            **{**{name: getattr(speed, name) for name in speed.__dataclass_fields__}, "measured_s": 0.0022, **changes}
        )
    )
    return result


def test_one_gpu_is_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="FRAMEWORM_RANKS_PER_GPU=2"):
        verify_gpus(tmp_path / "out")
    with pytest.raises(DeviceError, match="shows 1"):
        verify_gpus(tmp_path / "out", gpus=4)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(RunFolderError, match="in use"):
        verify_gpus(tmp_path, on_cpu=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"in_interval": True}, "as predicted"),
        ({"in_interval": False, "measured_s": 0.0046}, "100% slower than predicted"),
        ({"in_interval": None}, "not judged"),
        ({"failed": "exit code 1: no"}, "exit code 1: no"),
    ],
)
def test_what_was_measured_is_set_beside_what_was_predicted(changes: dict[str, Any], word: str) -> None:
    result = found(**changes)
    data = json.loads(json.dumps(result.to_dict()))
    (row,) = speed_rows(data)
    assert row[-1] == word
    assert word in render_verification(data)
    page = render_verification_page(data)
    assert word in page
    assert "GPU &lt;X&gt;" in page
    assert result.holds is ("failed" not in changes)
    assert math.isclose(data["speeds"][0]["speedup"], 0.004 / changes.get("measured_s", 0.0022))


def test_what_fails_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    result = found(in_interval=True)
    result.checks.append(Claim("silent", "?", "fails", "they still waited"))
    text = render_verification(result.to_dict())
    assert "FAILS" in text
    assert "NOT everything holds" in text


@pytest.mark.parametrize(
    ("captured", "again", "equal", "words"),
    [
        (0.0, None, True, "all losses and all 2 tensors are equal"),
        (1e-7, 0.0, False, "1 of 2 tensors differ, and two unrecorded trainings are equal"),
        (1e-7, None, False, "1 of 2 tensors differ"),
        (2e-7, 1e-7, True, "where two unrecorded trainings differ by"),
        (1e-3, 1e-7, False, "where two unrecorded trainings differ by"),
    ],
)
def test_captured_steps_may_differ_as_unrecorded_ones_do(
    captured: float, again: float | None, equal: bool, words: str
) -> None:
    """Kernels that add in any order give other bits each time, and a wrong step differs by far more."""
    weights = torch.ones(1000, dtype=torch.float64)

    def outcome(by: float) -> Outcome:
        return Outcome([0.5, 0.25 + by], {"weight": weights + by, "steps": torch.tensor(60)})

    found, text, evidence = judge_equality(outcome(captured), outcome(0.0), None if again is None else outcome(again))
    assert found is equal
    assert words in text
    assert evidence["losses_equal"] is (captured == 0)
    assert evidence["tensors_that_differ"] == (["weight"] if captured else [])
    if again and captured:
        assert evidence["distance"] == pytest.approx(captured, rel=0.01)
        assert evidence["distance_of_two_unrecorded"] == pytest.approx(again, rel=0.01)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)  # twenty trainings, whose processes share two cores with other tests
def test_it_is_rehearsed_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kit"
    monkeypatch.setattr(verify, "EQUAL_STEPS", 24)
    monkeypatch.setattr(verify, "SILENCE_GRACE_S", 60.0)  # other tests take the cores of those that end
    done = CliRunner().invoke(app, ["verify-gpus", "--rehearse-on-cpu", "--out", str(out), "--budget", "24"])
    assert done.exit_code == 0, done.output
    data = json.loads((out / "verify.json").read_text())
    assert [(item["name"], item["verdict"]) for item in data["checks"]] == [
        ("equal", "holds"),
        ("equal", "holds"),
        ("silent", "holds"),
        ("killed", "holds"),
    ]
    assert data["checks"][0]["evidence"]["replayed_steps"] > 5
    assert {item["training"] for item in data["speeds"]} == {"ag_news", "gpt2_124m"}
    predictions = json.loads((out / "predictions.json").read_text())["predictions"]
    for item, predicted in zip(data["speeds"], predictions):
        assert item["predicted_s"] == predicted["predicted_s"]
        summary = json.loads((out / "runs" / f"{item['training']}-{item['mode']}-2gpus" / "summary.json").read_text())
        assert item["measured_s"] == summary["throughput"]["step_s"]["mean"]
        assert (
            predicted["predicted_at"] < (out / "runs" / f"{item['training']}-{item['mode']}-2gpus.log").stat().st_mtime
        )
    assert "all losses" in done.output
