"""`frameworm predict` as typed: after a real run on one device, by hand, and with what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import CommandLine, command_line

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
HAND = ("--compute-ms", "100", "--gradient-mb", "100")


@pytest.fixture
def frameworm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "here", tmp_path / "cache", monkeypatch, capsys) as line:
        yield line


@pytest.mark.slow
def test_a_run_is_recorded_and_predicted(frameworm: CommandLine) -> None:
    settings = ("training.max_steps=16", "model.d_model=32", "model.num_layers=1", "training.global_batch=8")
    words = [word for setting in settings for word in ("--set", setting)]
    assert frameworm("train", "--config", CONFIG, "--out", "run", *words).code == 0
    seen = json.loads((frameworm.folder / "run" / "gradients.json").read_text())
    assert seen["steps"] >= 5
    times = [item["ready_s"] for item in seen["gradients"]]
    assert all(0 < moment <= seen["backward_s"] for moment in times)
    assert times[0] > times[-1], "the first layer's gradient comes last"
    asked = ("--world-sizes", "1,2,4,8,64", "--bandwidth-gbps", "10", "--latency-us", "50")
    ended = frameworm("predict", "run", *asked, "--price-per-gpu-hour", "3", "--out", "there")
    assert ended.code == 0, ended.stderr
    for word in ("speedup", "efficiency", "█", "break-even", "not known", "64", "cost", "10 Gbit/s"):
        assert word in ended.stdout
    data = json.loads((frameworm.folder / "there" / "prediction.json").read_text())
    assert [row["world_size"] for row in data["rows"]] == [1, 2, 4, 8, 64]
    assert all(row["step_s"]["low"] <= row["step_s"]["value"] <= row["step_s"]["high"] for row in data["rows"])
    summary = json.loads((frameworm.folder / "run" / "summary.json").read_text())
    phases = summary["phases"]
    compute_s = sum(item["mean_s"] for name, item in phases.items() if name not in ("validation", "checkpoint"))
    assert data["rows"][0]["step_s"]["value"] == pytest.approx(compute_s, rel=0.35)
    ElementTree.fromstring((frameworm.folder / "there" / "prediction.svg").read_text())
    # Other settings of the run, and another strategy.
    changed = frameworm("predict", "run", *asked, "--strategy", "zero3", "--set", "parallel.bucket_cap_mb=1", "--json")
    assert json.loads(changed.stdout)["strategy"] == "zero3"


def test_by_hand(frameworm: CommandLine) -> None:
    ended = frameworm("predict", *HAND, "--fabric", "1gbe", "--world-sizes", "4", "--json")
    assert json.loads(ended.stdout)["rows"][0]["status"] == "negative_scaling"
    nodes = ("--fabric", "ndr", "--gpus-per-node", "8", "--links-per-node", "8", "--world-sizes", "8,1024")
    ended = frameworm("predict", *HAND, *nodes)
    assert "nodes of 8" in ended.stdout
    assert "strong scaling: the global batch stays" in ended.stdout
    assert "weak scaling: the batch per device stays" in frameworm("predict", *HAND, *nodes, "--weak").stdout
    (frameworm.folder / "case.json").write_text(
        json.dumps({"compute_ms": 25, "gradient_mb": 16, "sync_ms": 45, "sync_world_size": 4})
    )
    ended = frameworm("predict", "--case", "case.json", "--world-sizes", "1,4", "--json")
    assert json.loads(ended.stdout)["rows"][1]["communication_s"] == pytest.approx(0.045, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (HAND, "--network"),
        ((*HAND, "--fabric", "1gbe", "--bandwidth-gbps", "1"), "give one of"),
        ((*HAND, "--fabric", "carrier-pigeon"), "infiniband-ndr"),
        ((*HAND, "--bandwidth-gbps", "-1"), "bandwidth"),
        ((*HAND, "--fabric", "1gbe", "--world-sizes", "two"), "--world-sizes"),
        ((*HAND, "--fabric", "1gbe", "--world-sizes", "0"), "world sizes"),
        ((*HAND, "--fabric", "1gbe", "--strategy", "magic"), "zero2"),
        ((*HAND, "--fabric", "1gbe", "--compression", "zip"), "int4"),
        ((*HAND, "--fabric", "1gbe", "--compression", "int4", "--strategy", "zero2"), "ddp"),
        ((*HAND, "--fabric", "1gbe", "--scaling", "both"), "strong or weak"),
        ((*HAND, "--fabric", "1gbe", "--set", "parallel.bucket_cap_mb=1"), "config.yaml"),
        (("--compute-ms", "10", "--fabric", "1gbe"), "--gradient-mb"),
        (("nowhere", "--fabric", "1gbe"), "nowhere"),
        (("--fabric", "1gbe"), "run's folder"),
        ((*HAND, "--network", "nothing.json"), "frameworm network"),
    ],
)
def test_what_cannot_be(frameworm: CommandLine, words: tuple[str, ...], said: str) -> None:
    ended = frameworm("predict", *words)
    assert ended.code == 2
    assert said in ended.stderr
    assert not ended.stdout
