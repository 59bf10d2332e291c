"""The table of runs: which there are, and how they are."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from made_runs import append_steps, set_times, step, summary, write_run

from frameworm.records.observations import Flops, ModelFlops
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line
from frameworm.watch import catalogue, judging
from frameworm.watch import run as watched
from frameworm.watch.catalogue import Catalogue, Row


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SCAN_S", 0.0)
    monkeypatch.setattr(watched, "SHORTEST_REFRESH_S", 0.0)
    monkeypatch.setattr(watched, "REFRESH_S", 60.0)  # whole, though others may have the cores
    monkeypatch.setattr(judging, "SHORTEST_S", 0.0)
    monkeypatch.setattr(judging, "COST_SHARE", 1e9)


def by_name(root: Path) -> dict[str, Row]:
    return {row.name: row for row in Catalogue(root).rows()}


def test_finished_running_and_killed_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "done")
    write_run(tmp_path, "failed", status="failed", steps=20)
    write_run(tmp_path, "goes_on", finished=False, ranks=2, slow_rank=1)
    set_times(write_run(tmp_path, "killed", finished=False), time.time() - 3600)
    rows = by_name(tmp_path)
    assert {name: row.status for name, row in rows.items()} == {
        "done": "completed",
        "failed": "failed",
        "goes_on": "running",
        "killed": "unfinished",
    }
    done, running, killed = rows["done"], rows["goes_on"], rows["killed"]
    assert (done.model, done.steps, done.loss, done.verdict) == ("text_classifier", 300, 0.31, "input_bound")
    assert (running.model, running.steps, running.verdict) == ("text_classifier", 300, "padding_waste")
    assert (killed.model, killed.steps, killed.verdict) == ("text_classifier", 300, None)
    assert running.samples_per_s == pytest.approx(2 * killed.samples_per_s, rel=0.3)  # type: ignore[operator]


def test_a_resumed_run_runs_again_though_it_has_a_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", status="interrupted")
    set_times(folder, time.time() - 600)
    found = Catalogue(tmp_path)
    assert found.rows()[0].status == "interrupted"
    append_steps(folder, 301, 320)
    (row,) = found.rows()
    assert (row.status, row.steps) == ("running", 320)
    assert found.record(row.id)[1].device == "NVIDIA H200"  # type: ignore[index]
    RunFolder(folder).write_summary(summary(folder, "demo", "completed", 320, 1, []))
    assert found.rows()[0].status == "completed"


def test_what_a_run_said_when_it_began_holds_while_it_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", finished=False, ranks=2)
    found = Catalogue(tmp_path)
    (row,) = found.rows()
    assert found.record(row.id)[1].mfu is None  # type: ignore[index]
    begun = summary(folder, "demo", "running", 0, 2, [])
    model = ModelFlops(0.0, per_token=5e9)
    begun.flops = Flops(1.0, precision="bf16", peak_per_s=2 * 989e12, model=model)
    RunFolder(folder).write_begun(begun)
    append_steps(folder, 301, 320)
    Path(folder, "begun.json").touch()
    record = found.record(row.id)[1]  # type: ignore[index]
    assert record.device == "NVIDIA H200"
    assert record.flops is not None
    assert record.flops.per_step == pytest.approx(2 * 32 * 40 * 5e9, rel=0.1)
    assert record.mfu == pytest.approx(record.flops.per_step / record.throughput.step_s.mean / 2 / 989e12, rel=0.05)
    (folder / "begun.json").write_text("{")
    assert found.record(row.id) is not None


def test_a_copied_run_is_not_taken_for_one_that_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a")
    moment = time.time()
    os.utime(folder / "summary.json", (moment - 30, moment - 30))
    os.utime(folder / "steps-rank0.jsonl", (moment, moment))
    assert Catalogue(tmp_path).rows()[0].status == "completed"


def test_a_run_that_was_resumed_and_killed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", status="interrupted")
    append_steps(folder, 301, 310)
    set_times(folder, time.time() - 600)
    moment = time.time() - 1200
    os.utime(folder / "summary.json", (moment, moment))
    assert Catalogue(tmp_path).rows()[0].status == "unfinished"


def test_steps_that_take_longer_than_a_minute(tmp_path: Path) -> None:
    for name, step_s in (("slow", 100.0), ("killed", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        steps = [step(number) for number in range(1, 5)]
        for item in steps:
            item.step_s = step_s
        (folder / "steps-rank0.jsonl").write_text("".join(step_line(item) + "\n" for item in steps))
        set_times(folder, time.time() - 300)
    assert {name: row.status for name, row in by_name(tmp_path).items()} == {"slow": "running", "killed": "unfinished"}
    (tmp_path / "slow" / "system-rank0.jsonl").touch()
    set_times(tmp_path / "slow", time.time() - 300)
    assert by_name(tmp_path)["slow"].status == "unfinished", "a sampler would have written meanwhile"


def test_clocks_of_the_disk_that_are_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "past", finished=False)
    set_times(folder, time.time() - 86_400)
    found = Catalogue(tmp_path)
    assert found.rows()[0].status == "unfinished"
    append_steps(folder, 301, 302)
    set_times(folder, time.time() - 86_300)
    assert found.rows()[0].status == "running", "its files change, whatever the clock says"
    set_times(folder, time.time() + 86_400)
    assert found.rows()[0].status == "running"


def test_runs_come_and_go(tmp_path: Path) -> None:
    found = Catalogue(tmp_path / "runs")
    assert found.rows() == []
    write_run(tmp_path / "runs", "a", steps=20)
    (row,) = found.rows()
    assert found.find(row.id) is not None
    shutil.rmtree(tmp_path / "runs" / "a")
    assert found.rows() == []
    assert found.find(row.id) is None
    assert found.record(row.id) is None


def test_a_half_written_summary_is_no_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=20)
    text = (folder / "summary.json").read_text()
    for broken in (text[:100], "{}", "[1]", '{"name": 5}', ""):
        (folder / "summary.json").write_text(broken)
        assert Catalogue(tmp_path).rows()[0].status == "running"


def test_sweeps_and_single_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "sweep/runs/world-2", steps=20)
    (tmp_path / "sweep" / "config.yaml").write_text("name: sweep\n")
    assert list(by_name(tmp_path)) == ["sweep/runs/world-2"]
    single = Catalogue(folder)
    assert [row.name for row in single.rows()] == ["world-2"]
    assert single.is_run
    assert not Catalogue(tmp_path).is_run
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("workload: gpt\n")
    assert by_name(tmp_path)["begun"].model == "gpt"


def test_links_are_not_followed(tmp_path: Path) -> None:
    real = write_run(tmp_path / "private", "secret", steps=20)
    root = tmp_path / "root"
    folder = write_run(root, "own", steps=20, finished=False)
    (root / "link").symlink_to(real)
    (root / "up").symlink_to(tmp_path)
    (root / "round").symlink_to(root)
    (folder / "summary.json").symlink_to(real / "summary.json")
    rows = by_name(root)
    assert list(rows) == ["own"]
    assert rows["own"].status == "running", "a summary outside the folder is not its own"


def test_names_that_are_no_text(tmp_path: Path) -> None:
    write_run(tmp_path, os.fsdecode(b"caf\xe9"), steps=20)
    (row,) = Catalogue(tmp_path).rows()
    row.name.encode("utf-8")


def test_two_hundred_runs_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_run(tmp_path / "pattern", "a", steps=20)
    for number in range(200):
        (tmp_path / "runs" / f"run-{number}").mkdir(parents=True)
        for name in ("summary.json", "config.yaml", "steps-rank0.jsonl"):
            shutil.copy(pattern / name, tmp_path / "runs" / f"run-{number}" / name)
        set_times(tmp_path / "runs" / f"run-{number}", 1_700_000_000.0 + number)
    found = Catalogue(tmp_path / "runs")
    rows = found.rows()
    assert [row.name for row in rows[:2]] == ["run-199", "run-198"]
    assert len(rows) == 200
    monkeypatch.setattr(RunFolder, "read_summary", lambda self: pytest.fail("read again"))
    assert found.rows() == rows


def test_only_a_few_runs_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MOST_INDEXED", 3)
    for number in range(6):
        write_run(tmp_path, f"run-{number}", steps=10)
    found = Catalogue(tmp_path)
    for row in found.rows():
        assert found.find(row.id) is not None
    assert len(found._indexed) == 3
