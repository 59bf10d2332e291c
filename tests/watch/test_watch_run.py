"""One run, indexed while it grows."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from made_runs import BEGAN, append_steps, sample, step, write_run

from frameworm.attach.record import judge_stored, stored_record
from frameworm.records.samples import sample_line
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line
from frameworm.watch import run as watched
from frameworm.watch.files import Inside
from frameworm.watch.judging import Judge
from frameworm.watch.run import WatchedRun


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "SHORTEST_REFRESH_S", 0.0)
    monkeypatch.setattr(watched, "REFRESH_S", 60.0)  # whole, though others may have the cores
    monkeypatch.setattr(watched, "SHORTEST_BUSY_S", 0.0)


def index(folder: Path) -> WatchedRun:
    return WatchedRun(RunFolder(folder), Inside(folder.parent))


def read_all(run: WatchedRun) -> WatchedRun:
    run.refresh()
    while run.behind:
        run.refresh()
    return run


def write_lines(folder: Path, *lines: str) -> None:
    with (folder / "steps-rank0.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_reading_bit_by_bit_is_reading_at_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=40, finished=False)
    growing = read_all(index(folder))
    for first in range(41, 240, 50):
        append_steps(folder, first, first + 49)
        growing.refresh()
    at_once = read_all(index(folder))
    assert growing.series(None, None, 500) == at_once.series(None, None, 500)
    assert growing.series(None, None, 500)["x"][-1] == 240
    assert growing.first().latest == at_once.first().latest  # type: ignore[union-attr]


def test_a_resumed_run_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=200, finished=False)
    run = read_all(index(folder))
    RunFolder(folder).truncate_steps(0, 100)
    append_steps(folder, 101, 120)
    read_all(run)
    assert run.series(None, None, 500)["x"] == list(range(1, 121))
    assert run.first().sums.aggregate.steps == 120  # type: ignore[union-attr]


def test_many_ranks_are_read_side_by_side_a_moment_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, "a", steps=2, ranks=4, finished=False)
    for rank in range(4):
        append_steps(folder, 3, 1_500, rank, ranks=4)
    monkeypatch.setattr(watched, "REFRESH_S", 1e-9)
    run = index(folder)
    run.refresh()
    assert list(run.ranks) == [0], "one portion is the least"
    assert 0 < run.progress() < 0.25
    while run.behind:
        run.refresh()
        counts = [item.sums.aggregate.steps for item in run.ranks.values()]
        assert max(counts) - min(counts) < 800 or len(counts) < 4
    assert counts == [1_500] * 4
    for _ in range(8):
        run.refresh()
    assert len(run.system) == 4
    assert run.progress() == 1.0


def test_a_part_of_a_long_run_is_shown_step_by_step(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    append_steps(folder, 1, 5_000)
    run = read_all(index(folder))
    whole = run.series(None, None, 100)
    assert len(whole["x"]) <= 100
    assert sum(whole["count"]) == 5_000
    assert run.first().bins.stride > 1  # type: ignore[union-attr]
    part = run.series(2_000, 2_050, 600)
    assert part["x"] == list(range(2_000, 2_051))
    assert part["count"] == [1] * 51
    assert part["channels"]["loss"]["mean"][0] == pytest.approx(step(2_000).loss, rel=1e-5)
    (folder / "steps-rank0.jsonl").unlink()
    assert run.series(2_000, 2_050, 600)["x"], "what is in memory is shown of a folder that is gone"


def test_a_deleted_folder_is_an_empty_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=20, finished=False)
    run = read_all(index(folder))
    for path in folder.glob("*.jsonl"):
        path.unlink()
    run.refresh()
    assert run.series(None, None, 100)["x"] == []
    assert run.machine(100) == {}
    assert run.heat("work_s", 10)["ranks"] == []


def test_lines_that_no_run_writes_are_survived(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    good = json.loads(step_line(step(5)))
    write_lines(
        folder,
        "not json",
        "[]",
        "{}",
        "nul\0l",
        json.dumps({**good, "step": "five"}),
        json.dumps({**good, "step_s": "nan"}),
        json.dumps({**good, "time": "inf"}),
        json.dumps({**good, "loss": "nan", "phases": {"x": 1e308, "y": 1e308}, "metrics": {"m": -1e300}}),
        json.dumps({**good, "step": 2**62}),
        json.dumps(good),
        "[" * 100_000,
    )
    for line in ("{}", "null", '{"time": "x"}', '{"time": 5, "cpu_cores": [null]}', '{"time": 5, "rss_bytes": "many"}'):
        with (folder / "system-rank0.jsonl").open("a") as file:
            file.write(line + "\n")
    run = read_all(index(folder))
    for answer in (run.series(None, None, 50), run.machine(50), run.heat("work_s", 50)):
        json.dumps(answer, allow_nan=False)
    assert run.series(None, None, 50)["count"] == [1, 1, 1, 1]
    record = Judge(run).record("running", None)
    json.dumps(record.to_dict(), allow_nan=False)


def test_clocks_that_jump(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    steps = [step(number) for number in range(1, 31)]
    for item in steps[10:]:
        item.time -= 3600
    for item in steps[20:]:
        item.time += 7200
    write_lines(folder, *(step_line(item) for item in steps))
    lines = [sample_line(sample(number, began=BEGAN - 3600 * (number > 5))) for number in range(10)]
    (folder / "system-rank0.jsonl").write_text("\n".join(lines) + "\n")
    run = read_all(index(folder))
    assert [event.kind for event in run.events] == ["clock", "pause"]
    x = run.machine(100)["0"]["x"]
    assert x == sorted(x)
    assert x[-1] < 60
    rates = run.machine(100)["0"]["channels"]["network_sent_bytes_per_s"]["mean"]
    assert all(rate is None or rate >= 0 for rate in rates)


def test_what_happens_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    steps = [step(number) for number in range(98, 104)]
    steps[1].skipped = True
    steps[4].loss = steps[5].loss = math.nan
    write_lines(folder, *(step_line(item) for item in steps))
    run = read_all(index(folder))
    assert [(event.kind, event.step) for event in run.events] == [("skipped", 99), ("epoch", 101), ("loss", 102)]
    assert run.first().epoch_ends == {1: 100, 2: 103}  # type: ignore[union-attr]


def test_the_slow_rank_stands_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=200, ranks=4, slow_rank=2, finished=False)
    heat = read_all(index(folder)).heat("work_s", 20)
    assert heat["ranks"] == [0, 1, 2, 3]
    assert len(heat["x"]) == 20
    for column in range(20):
        slowest = max(range(4), key=lambda rank: heat["rows"][rank][column])
        assert slowest == 2
    assert "phase:backward" in heat["channels"]


@pytest.mark.slow
def test_bins_wider_than_columns_leave_no_holes(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    append_steps(folder, 1, 3_000)
    append_steps(folder, 1, 2_900, rank=1)
    rows = read_all(index(folder)).heat("step_s", 400)["rows"]
    assert all(value is not None for value in rows[0])
    assert rows[1][-1] is None


def test_a_run_that_goes_on_is_judged_as_diagnose_judges_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=200, ranks=2, slow_rank=1, finished=False)
    record = Judge(read_all(index(folder))).record("running", None)
    expected = stored_record(RunFolder(folder))
    judge_stored(expected, RunFolder(folder))
    assert record.status == "running"
    assert record.verdict == expected.verdict == "padding_waste"
    assert {item.code for item in expected.findings} <= {item.code for item in record.findings}
    assert record.throughput == expected.throughput
    assert record.quality.val_loss == 2.1 / 2


def test_no_step_yet_is_no_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: a\n")
    run = read_all(index(folder))
    record = Judge(run).record("running", None)
    assert (record.verdict, record.findings, record.steps) == ("inconclusive", [], 0)


def test_links_to_files_outside_are_not_read(tmp_path: Path) -> None:
    real = write_run(tmp_path / "private", "a", steps=20, finished=False)
    folder = tmp_path / "root" / "a"
    folder.mkdir(parents=True)
    (folder / "steps-rank0.jsonl").symlink_to(real / "steps-rank0.jsonl")
    (folder / "system-rank0.jsonl").symlink_to(real / "system-rank0.jsonl")
    run = read_all(index(folder))
    assert run.series(None, None, 100)["x"] == []
    assert run.machine(100) == {}


@pytest.mark.slow
def test_of_a_long_run_a_sample_is_shown_and_what_follows_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, "long", steps=6_000, ranks=2, finished=False, slow_rank=1)
    exact = read_all(index(folder))
    monkeypatch.setattr(watched, "STEPS_BACKLOG_BYTES", 300_000)
    run = read_all(index(folder))
    shown, whole = run.series(None, None, 100), exact.series(None, None, 100)
    assert 0 < run.ranks[0].sums.aggregate.steps < 1_200
    assert run.progress() == 1.0
    assert sum(shown["count"]) == pytest.approx(6_000, rel=0.1)
    for name in ("loss", "step_s", "phase:backward"):
        means, others = (found["channels"][name]["mean"] for found in (shown, whole))
        assert sum(means) / len(means) == pytest.approx(sum(others) / len(others), rel=0.1), name
    # Nothing between two blocks of the sample is taken for a pause.
    assert {event.kind for event in run.events} == {"epoch"}
    # A part of it is read again step by step.
    part = run.series(3_000, 3_050, 100)
    assert (part["x"], set(part["count"])) == (list(range(3_000, 3_051)), {1})
    # So is one that lies between two blocks.
    bins = run.ranks[0].bins.between(None, None)
    left, right = max(itertools.pairwise(bins), key=lambda pair: pair[1].first - pair[0].last)
    first, last = int(left.last) + 1, int(right.first) - 1
    assert run.ranks[0].bins.between(first, last) == []
    assert run.series(first, last, 1_000)["count"] == [1] * (last - first + 1)

    record, full = Judge(run).record("running", None), Judge(exact).record("running", None)
    assert record.steps == full.steps == 6_000
    assert [finding.code for finding in record.findings] == [finding.code for finding in full.findings]
    assert any(note.startswith("sample: findings are by") for note in record.notes)
    assert not any(note.startswith("sample: ") for note in full.notes)
    assert record.throughput.samples_per_s == pytest.approx(full.throughput.samples_per_s, rel=0.02)

    append_steps(folder, 6_001, 6_100, ranks=2)
    read_all(run)
    latest = run.ranks[0].latest
    assert latest is not None
    assert latest.step == 6_100
    assert run.series(6_001, 6_100, 200)["x"] == list(range(6_001, 6_101))
