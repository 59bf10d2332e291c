"""Judging long runs by a sample of their steps: what it says is what all steps say, within its own errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.usefixtures("_benchmarks")
def test_a_sample_says_what_all_steps_say(tmp_path: Path) -> None:
    from large_runs import Shape, write_run

    from frameworm.attach.record import judge_stored, stored_record
    from frameworm.guard.comparison import compare_folders
    from frameworm.records.store import RunFolder

    write_run(tmp_path / "a", Shape(12_000, 2))
    write_run(tmp_path / "b", Shape(12_000, 2, seed=1, parted=7_003))
    folder = RunFolder(tmp_path / "a")
    found = []
    for most_bytes in (None, 2**20):
        record = folder.read_summary()
        judge_stored(record, folder, most_bytes)
        found.append(record)
    exact, sampled = found
    assert [finding.code for finding in sampled.findings] == [finding.code for finding in exact.findings]
    for mine, theirs in zip(sampled.findings, exact.findings):
        assert mine.share == pytest.approx(theirs.share, abs=0.005), mine.code
        assert mine.evidence["share_low"] - 0.001 <= theirs.share <= mine.evidence["share_high"] + 0.001, mine.code
    assert [note.startswith("sample: ") for note in sampled.notes] == [True]
    assert exact.notes == []
    folder.summary_json.unlink()
    cut = stored_record(folder, 2**20)
    assert cut.steps == pytest.approx(12_000, rel=0.05)
    for name in ("data_wait", "forward", "backward"):
        assert cut.phases[name].share == pytest.approx(exact.phases[name].share, rel=0.05), name
    parting = compare_folders(tmp_path / "a", tmp_path / "b", exact=True).parting
    assert parting is not None
    assert parting.step == 7_003
    assert "large_runs" in sys.modules
