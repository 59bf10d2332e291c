"""`frameworm guard` and `frameworm compare`, as a user sees them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from synthetic_runs import MACHINE, QUIET, store, times

from frameworm.cli.main import main
from frameworm.records.schema import Memory, Quality, Throughput


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def frameworm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["frameworm", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Ended(code, *capsys.readouterr())

    store(tmp_path / "before", times(1, QUIET, 277))
    store(tmp_path / "same", times(2, QUIET, 277), started="2026-01-02T00:00:00")
    store(tmp_path / "slow", [value * 1.15 for value in times(3, QUIET, 277)], started="2026-01-03T00:00:00")
    return call


def _fits(text: str) -> None:
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert len(text.splitlines()) <= 45


def test_ok(frameworm: Callable[..., Ended]) -> None:
    ended = frameworm("guard", "same", "--baseline", "before")
    assert ended.code == 0, ended
    assert "verdict     ok" in ended.stdout
    assert "one run on each side" in ended.stdout
    _fits(ended.stdout)


def test_regression_names_the_phase(frameworm: Callable[..., Ended]) -> None:
    ended = frameworm("guard", "slow", "--baseline", "before")
    assert ended.code == 1
    assert "verdict     regression" in ended.stdout
    assert "backward explains it: +" in ended.stdout
    assert "typical step +1" in ended.stdout
    _fits(ended.stdout)
    assert frameworm("guard", "slow", "--baseline", "before", "--max-regression", "40%").code == 0
    assert frameworm("guard", "slow", "--baseline", "before", "--max-regression", "off").code == 0


def test_json(frameworm: Callable[..., Ended]) -> None:
    ended = frameworm("guard", "slow", "--baseline", "before", "--json")
    found = json.loads(ended.stdout)
    assert found["verdict"] == "regression"
    assert found["exit_code"] == ended.code == 1
    check = next(item for item in found["checks"] if item["name"] == "typical_step")
    assert check["low"] < check["change"] < check["high"]
    assert found["explanation"]["phase"] == "backward"
    compared = json.loads(frameworm("compare", "before", "slow", "--json").stdout)
    assert compared["typical"]["low"] < compared["typical"]["ratio"] < compared["typical"]["high"]
    assert any("backward explains" in sentence for sentence in compared["sentences"])


def test_targets_need_no_baseline(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    store(tmp_path / "quick", times(6, QUIET, 277), throughput=Throughput(samples_per_s=1500.0))
    met = frameworm("guard", "quick", "--targets")
    assert met.code == 0, met
    assert "guard · quick against its targets" in met.stdout
    assert "samples/s > 1,000 1,500 met" in " ".join(met.stdout.split())
    missed = frameworm("guard", "quick", "--target", "samples_per_s=2000")
    assert missed.code == 1
    assert "verdict     missed" in missed.stdout
    assert "samples/s 1,500, target > 2,000" in missed.stdout
    _fits(missed.stdout)
    # Another target that nobody asked about does not matter, one that was asked for must be known.
    assert "CPU" not in missed.stdout
    unknown = frameworm("guard", "quick", "--target", "io_wait=0.5")
    assert unknown.code == 3
    assert "io_wait was not measured in quick" in unknown.stdout
    assert frameworm("guard", "quick", "--targets", "--target", "samples_per_s=off", "--target", "cpu=off").code == 3
    wrong = frameworm("guard", "quick", "--target", "samples=1")
    assert wrong.code == 2
    assert "samples_per_s" in wrong.stderr
    assert "--targets" in frameworm("guard", "quick").stderr


def test_targets_beside_a_baseline(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    speed = Throughput(samples_per_s=1500.0)
    store(tmp_path / "again", times(2, QUIET, 277), throughput=speed)
    store(tmp_path / "slower", [value * 1.15 for value in times(3, QUIET, 277)], throughput=speed)
    missed = frameworm("guard", "again", "--baseline", "before", "--target", "samples_per_s=1e9", "--json")
    found = json.loads(missed.stdout)
    assert (missed.code, found["verdict"], found["exit_code"]) == (1, "missed", 1)
    assert found["targets"]["again"][0]["grade"] == "missed"
    worse = frameworm("guard", "slower", "--baseline", "before", "--target", "samples_per_s=1e9")
    assert "verdict     regression" in worse.stdout
    assert "target > 1e+09" in worse.stdout
    assert frameworm("guard", "again", "--baseline", "before", "--target", "samples_per_s=1").code == 0


def test_a_failed_run_meets_no_targets(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    store(tmp_path / "broken", times(6, QUIET, 277), throughput=Throughput(samples_per_s=1500.0), status="failed")
    ended = frameworm("guard", "broken", "--targets")
    assert ended.code == 3
    assert "broken is failed" in ended.stdout


def test_two_sweeps_are_compared(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    stored = Path(__file__).parents[1] / "golden" / "stored" / "sweep"
    for name in ("first", "second"):
        shutil.copytree(stored, tmp_path / name)
    for path in (tmp_path / "second").rglob("config.yaml"):
        path.write_text(path.read_text().replace("d_model: 16", "d_model: 64"))
    ended = frameworm("compare", "first", "second")
    assert ended.code == 0, ended
    for words in ("epoch time", "samples/s", "speedup", "efficiency", "model.d_model: 16 → 64"):
        assert words in ended.stdout
    found = json.loads(frameworm("compare", "first", "second", "--json").stdout)
    assert found["changes"][0]["pairs"][1]["speedup_gain"] == 1.0
    assert found["changes"][0]["settings"][0]["name"] == "model.d_model"
    mixed = frameworm("compare", "first", "before")
    assert mixed.code == 2
    assert "two runs or two such folders" in mixed.stderr


def test_memory_and_quality(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    memory = Memory(peak_bytes=480 * 2**20, host_peak_bytes=480 * 2**20)
    store(tmp_path / "large", times(4, QUIET, 277), memory=memory)
    ended = frameworm("guard", "large", "--baseline", "before")
    assert ended.code == 1
    assert "host memory +20.0%, limit +10%" in ended.stdout
    assert frameworm("guard", "large", "--baseline", "before", "--max-memory", "30%").code == 0
    store(tmp_path / "worse", times(5, QUIET, 277), quality=Quality(0.153, 0.164, 0.94))
    ended = frameworm("guard", "worse", "--baseline", "before")
    assert ended.code == 1
    assert "validation accuracy -2.4 pp, limit -1 pp" in ended.stdout
    assert frameworm("guard", "worse", "--baseline", "before", "--max-accuracy-drop", "3%").code == 0
    store(tmp_path / "broken", times(6, QUIET, 277), quality=Quality(float("nan"), None, None))
    ended = frameworm("guard", "broken", "--baseline", "before")
    assert ended.code == 1
    assert "train loss: it is not finite any more" in ended.stdout


def test_inconclusive(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    store(tmp_path / "other", times(4, QUIET, 277), environment={**MACHINE, "device": "NVIDIA H100"})
    ended = frameworm("guard", "other", "--baseline", "before")
    assert ended.code == 3
    assert "different hardware: device is NVIDIA H100, and cpu in the baseline" in " ".join(ended.stdout.split())
    assert frameworm("guard", "other", "--baseline", "before", "--allow-different-hardware").code == 0
    store(tmp_path / "short", times(4, QUIET, 9))
    assert frameworm("guard", "short", "--baseline", "before").code == 3
    store(tmp_path / "failed", times(4, QUIET, 277), status="failed")
    assert frameworm("guard", "failed", "--baseline", "before").code == 3
    assert frameworm("guard", "same", "--baseline", "failed").code == 2


def test_baseline_files(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    file = tmp_path / "perf" / "base.json"
    guard = ("guard", "--baseline", str(file))
    ended = frameworm(*guard, "before")
    assert ended.code == 2
    assert "--update-baseline" in ended.stderr
    assert frameworm(*guard, "before", "--update-baseline").code == 0
    ended = frameworm(*guard, "same", "--update-baseline")
    assert (ended.code, len(json.loads(file.read_text())["runs"])) == (0, 2)
    assert "now holds 2 runs" in ended.stdout
    kept = file.read_text()
    ended = frameworm(*guard, "slow", "--update-baseline")
    assert ended.code == 1
    assert file.read_text() == kept
    assert "--accept" in ended.stdout
    assert frameworm(*guard, "slow").code == 1
    assert frameworm(*guard, "slow", "--update-baseline", "--accept").code == 0
    assert [run["name"] for run in json.loads(file.read_text())["runs"]] == ["slow"]
    assert frameworm(*guard, "before").code == 0
    assert str(tmp_path) not in file.read_text(), "a baseline is committed: it names no folders of a machine"


def test_several_runs(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    file = str(tmp_path / "base.json")
    assert frameworm("guard", "before", "same", "--baseline", file, "--update-baseline").code == 0
    store(tmp_path / "slow2", [value * 1.15 for value in times(8, QUIET, 277)])
    ended = frameworm("guard", "slow", "slow2", "--baseline", file)
    assert ended.code == 1
    assert "(2 runs)" in ended.stdout
    assert "one run on each side" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("guard", "none", "--baseline", "before"), "does not exist"),
        (("guard", "same", "--baseline", "none.json"), "there is no baseline"),
        (("guard", "same", "--baseline", "same"), "with itself"),
        (("guard", "same", "same", "--baseline", "before"), "given twice"),
        (("guard", "same", "--baseline", "before", "--max-regression", "5"), "--max-regression"),
        (("guard", "same", "--baseline", "before", "--update-baseline"), "needs a file"),
        (("guard", "same", "--baseline", "before", "--accept"), "--update-baseline"),
        (("guard", "half", "--baseline", "before"), "other work"),
        (("compare", "same", "none"), "does not exist"),
        (("compare", "same", "same"), "given twice"),
    ],
)
def test_mistakes_are_told_in_one_line(
    frameworm: Callable[..., Ended], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    store(tmp_path / "half", times(4, QUIET, 277), parameters=64_000)
    ended = frameworm(*arguments)
    assert ended.code == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_compare(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    environment = {**MACHINE, "torch": "2.13.0"}
    fast = [value * 0.7 for value in times(7, QUIET, 277)]
    store(tmp_path / "compiled", fast, compile_model=True, environment=environment)
    ended = frameworm("compare", "before", "compiled")
    assert ended.code == 0
    assert "B is faster: the typical step takes" in ended.stdout
    assert "x the speed" in ended.stdout
    assert "gpu.compile_model: no → yes" in ended.stdout
    assert "torch: unknown → 2.13.0" in ended.stdout
    assert "backward explains it: -" in ended.stdout
    _fits(ended.stdout)
    ended = frameworm("compare", "before", "same")
    assert "no difference in speed outside of noise" in ended.stdout
    assert "settings    the same" in ended.stdout
    _fits(ended.stdout)


def test_compare_takes_what_is_there(frameworm: Callable[..., Ended], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "same", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "cut" / "config.yaml").unlink()
    ended = frameworm("compare", "before", "cut")
    assert ended.code == 0
    assert "B is unfinished" in ended.stdout
    (tmp_path / "cut" / "steps-rank0.jsonl").write_text("")
    ended = frameworm("compare", "before", "cut")
    assert ended.code == 0
    assert "too few steps" in ended.stdout
