"""Runs as the guard reads them, and baseline files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_runs import MACHINE, QUIET, figures, store, times

from frameworm.errors import BaselineError, RunFolderError
from frameworm.guard.baseline import MOST_RUNS, Baseline, read_baseline, with_runs, write_baseline
from frameworm.guard.measure import measure_calls
from frameworm.guard.regression import judge
from frameworm.guard.run_metrics import BLOCK_LIMIT, RunMetrics, crowding, read_run, read_runs
from frameworm.records.observations import SystemSummary
from frameworm.records.schema import Compilation, Statistics


def test_a_file_judges_as_its_runs_do(tmp_path: Path) -> None:
    runs = [read_run(store(tmp_path / f"run{seed}", times(seed, QUIET, 1234))) for seed in range(3)]
    path = tmp_path / "perf" / "base.json"
    write_baseline(Baseline(path, runs))
    after = [figures([value * 1.08 for value in times(9, QUIET, 1234)])]
    direct, stored = judge(runs, after), judge(read_baseline(path).runs, after)
    for mine, theirs in zip(direct.checks, stored.checks):
        assert (mine.name, mine.verdict) == (theirs.name, theirs.verdict)
        assert mine.change == pytest.approx(theirs.change, abs=1e-4)
    assert direct.explanation is not None
    assert stored.explanation is not None
    assert direct.explanation.phase == stored.explanation.phase


def test_a_file_is_small_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    write_baseline(Baseline(path, [figures(times(1, QUIET, 100_000))]))
    text = path.read_text()
    assert len(text) < 20_000
    assert len(text.splitlines()) < 100
    (stored,) = json.loads(text)["runs"]
    assert len(stored["mean_s"]) <= BLOCK_LIMIT
    assert stored["measured_steps"] == 100_000
    assert stored["environment"] == MACHINE


def test_runs_are_added_replaced_and_bounded(tmp_path: Path) -> None:
    baseline = Baseline(tmp_path / "base.json", [figures(times(1, QUIET, 60), "first")])
    baseline = with_runs(baseline, [figures(times(2, QUIET, 60), "second")])
    baseline = with_runs(baseline, [figures(times(3, QUIET, 60), "first")])
    assert [run.name for run in baseline.runs] == ["second", "first"]
    for number in range(20):
        baseline = with_runs(baseline, [figures(times(number, QUIET, 60), f"run{number}")])
    assert len(baseline.runs) == MOST_RUNS
    assert baseline.runs[-1].name == "run19"


def test_nan_survives_the_file(tmp_path: Path) -> None:
    run = figures(times(1, QUIET, 60), quality={"train_loss": float("nan")})
    write_baseline(Baseline(tmp_path / "base.json", [run]))
    (stored,) = read_baseline(tmp_path / "base.json").runs
    assert stored.quality["train_loss"] != stored.quality["train_loss"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "format"),
        ('{"format": "another"}', "format"),
        ('{"format": "frameworm baseline", "version": 99}', "version 99"),
        ('{"format": "frameworm baseline", "version": 1}', "damaged"),
        ('{"format": "frameworm baseline", "version": 1, "runs": []}', "no run"),
        ('{"format": "frameworm baseline", "version": 1, "runs": [3]}', "damaged"),
        ('{"format": "frameworm baseline", "version": 1, "runs": [{"name": "x", "mean_s": ["a"]}]}', "damaged"),
        ('{"format": "frameworm baseline", "version": 1, "runs": [{"name": "x", "mean_s": [-1]}]}', "damaged"),
        (
            '{"format": "frameworm baseline", "version": 1, "runs": [{"name": "x", "mean_s": [1], "steps": "1"}]}',
            "damaged",
        ),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(BaselineError, match=said) as error:
        read_baseline(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_missing_and_unreadable_places(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="--update-baseline"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(RunFolderError, match="not a run"):
        read_baseline(tmp_path)
    store(tmp_path / "run", times(1, QUIET, 60))
    with pytest.raises(BaselineError, match="twice"):
        read_runs([str(tmp_path / "run"), str(tmp_path / "." / "run")])
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(RunFolderError, match="damaged"):
        read_runs([str(tmp_path / "run")])
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match="cannot write"):
        write_baseline(Baseline(tmp_path / "file" / "base.json", [figures(times(1, QUIET, 60))]))


def test_warmup_is_left_out(tmp_path: Path) -> None:
    run = read_run(store(tmp_path / "run", [0.04] * 60))
    assert run.left_out == 5
    assert run.measured_steps == 60
    assert run.typical_s == pytest.approx(0.04)
    assert run.mean_step_s == pytest.approx(0.04)
    assert run.work.tokens_per_step == pytest.approx(1300)
    assert run.phases["backward"].value == pytest.approx(0.03)


def test_compilations_are_left_out_where_there_were_some(tmp_path: Path) -> None:
    steps = [0.04] * 200
    steps[10] = steps[20] = 5.0
    steps[150] = 0.5  # a stall, long after
    compiled = store(tmp_path / "compiled", steps, compilation=Compilation(10.0, 1, 2))
    run = read_run(compiled)
    assert run.left_out == 7
    assert max(run.mean_s) == pytest.approx(0.5)
    assert max(read_run(store(tmp_path / "plain", steps)).mean_s) == pytest.approx(5.0)


def test_checkpoints_and_validation_are_no_part_of_a_step(tmp_path: Path) -> None:
    folder = store(tmp_path / "run", [0.04] * 60)
    lines = folder.steps(0).read_text().splitlines()
    step = json.loads(lines[40])
    step["step_s"] += 3.0
    step["phases"] |= {"checkpoint": 1.0, "validation": 2.0}
    lines[40] = json.dumps(step)
    folder.steps(0).write_text("\n".join(lines) + "\nbroken\n")
    run = read_run(folder)
    assert run.mean_step_s == pytest.approx(0.04)
    assert run.phases["validation"].value == pytest.approx(2.0 / 60)


def test_a_run_without_a_summary_is_unfinished(tmp_path: Path) -> None:
    folder = store(tmp_path / "run", [0.04] * 60)
    folder.summary_json.unlink()
    run = read_run(folder)
    assert run.status == "unfinished"
    assert run.measured_steps == 60


def _spread(mean: float) -> Statistics:
    return Statistics(mean, 0.0, mean, mean, mean, mean, mean)


def test_what_other_programs_took(tmp_path: Path) -> None:
    system = SystemSummary(samples=9, cpu_busy=_spread(1.0), cpu_process=_spread(4.0))
    assert read_run(store(tmp_path / "run", [0.04] * 60, system=system)).crowding == pytest.approx(0.5)
    assert crowding(busy=0.97, own=0.97) == 0
    assert crowding(busy=0.5, own=0.1) == 0  # half of the cores were idle


def test_calls_are_measured_as_steps() -> None:
    now = 0.0
    calls = 0

    def step() -> None:
        nonlocal now, calls
        calls += 1
        now += 1.0 if calls <= 5 else 0.01

    run = measure_calls(step, "mine", warmup=5, measured_s=1.0, clock=lambda: now)
    assert run.typical_s == pytest.approx(0.01)
    assert max(run.mean_s) == pytest.approx(0.01)
    assert 95 <= run.measured_steps <= 105
    assert isinstance(run, RunMetrics)


def test_short_calls_are_timed_together() -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 2**-16

    run = measure_calls(step, "mine", measured_s=0.0, clock=lambda: now)
    assert run.measured_steps == 60
    assert run.steps == 60 * 33
    assert run.typical_s == pytest.approx(2**-16)
