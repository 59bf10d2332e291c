"""Alerts about real run folders: files change as a training changes them, and the alert comes."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import append_steps, set_times, step, summary, write_run

from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line
from frameworm.watch import catalogue, judging
from frameworm.watch import run as watched
from frameworm.watch.alerts import Alert, Alerts
from frameworm.watch.catalogue import Catalogue


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SCAN_S", 0.0)
    monkeypatch.setattr(watched, "SHORTEST_REFRESH_S", 0.0)
    monkeypatch.setattr(watched, "REFRESH_S", 60.0)  # whole, though others may have the cores
    monkeypatch.setattr(judging, "SHORTEST_S", 0.0)
    monkeypatch.setattr(judging, "COST_SHARE", 1e9)


def begin(root: Path) -> Alerts:
    alerts = Alerts(Catalogue(root), [])
    assert alerts.look(0.0) == []
    return alerts


def kinds(alerts: Alerts, now: float = 0.0) -> list[str]:
    return [alert.kind for alert in alerts.look(now) if alert.kind != "disk"]


def append(folder: Path, steps: list[StepRecord], rank: int = 0) -> None:
    with (folder / f"steps-rank{rank}.jsonl").open("a") as file:
        file.writelines(step_line(item) + "\n" for item in steps)


def test_one_step_whose_loss_is_no_number(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", finished=False)
    alerts = begin(tmp_path)
    steps = [step(number) for number in range(301, 306)]
    steps[2].loss = math.nan
    append(folder, steps)
    (alert,) = (item for item in alerts.look(5.0) if item.kind != "disk")
    assert alert == Alert("loss", "a", "a: the loss is nan in step 303", 305)
    append(folder, [step(306)])
    assert kinds(alerts, 10.0) == []


def test_a_rank_that_becomes_slow_for_the_others(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", ranks=2, steps=60, finished=False)
    alerts = begin(tmp_path)
    for rank in range(2):
        steps = [step(number, rank, ranks=2) for number in range(61, 400)]
        for item in steps:
            item.phases["backward"] += 0.03 * (rank == 1)
            item.phases["communication_exposed"] += 0.03 * (rank == 0)
            item.step_s += 0.03
            item.rank_wait_s = 0.03 * (rank == 0)
        append(folder, steps, rank)
    assert "straggler" in kinds(alerts, 5.0)
    assert kinds(alerts, 10.0) == []


def test_a_verdict_that_changes(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=40, finished=False)
    alerts = begin(tmp_path)
    steps = [step(number) for number in range(41, 400)]
    for item in steps:
        item.phases["data_wait"] += 0.2
        item.step_s += 0.2
    append(folder, steps)
    (alert,) = (item for item in alerts.look(5.0) if item.kind != "disk")
    assert (alert.kind, alert.text) == ("verdict", "a: padding waste before, now input bound")


def test_throughput_that_falls(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", steps=20, finished=False)
    alerts = begin(tmp_path)
    at, told = 20, []
    for minute in range(10):
        more = 100 if minute < 8 else 30
        append_steps(folder, at + 1, at + more)
        at += more
        told.append(kinds(alerts, 61.0 * (minute + 1)))
    assert told == [[]] * 8 + [["slow"], []]


def test_a_run_that_is_killed_and_one_that_fails(tmp_path: Path) -> None:
    killed = write_run(tmp_path, "killed", steps=30, finished=False)
    failed = write_run(tmp_path, "failed", steps=30, finished=False)
    alerts = begin(tmp_path)
    set_times(killed, time.time() - 3600)
    RunFolder(failed).write_summary(summary(failed, "demo", "failed", 30, 1, []))
    catalogue_of = alerts._catalogue
    for known in catalogue_of._known.values():  # nothing was seen to change within the last minute
        known.changed_at = None
        known.written = None
    told = {alert.text for alert in alerts.look(70.0) if alert.kind == "ended"}
    assert told == {"killed has written nothing for a minute", "failed failed"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    write_run(small_disk, "a", steps=20)
    script = f"sh -c 'cat >> {tmp_path / 'told'}'"
    alerts = Alerts(Catalogue(small_disk), [script])
    assert alerts.look(0.0) == []
    (small_disk / "checkpoint").write_bytes(b"0" * 4_050_000)
    for now in (5.0, 10.0):
        alerts.tell(alerts.look(now))
    told = json.loads((tmp_path / "told").read_text())
    assert (told["kind"], told["run"]) == ("disk", None)
    assert "% full" in told["text"]
    (small_disk / "checkpoint").unlink()
    assert alerts.look(15.0) == []
