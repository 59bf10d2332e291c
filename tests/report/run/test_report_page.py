"""The page of a stored run comes from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameworm.errors import RunFolderError
from frameworm.records.observations import SystemSample
from frameworm.records.samples import sample_line
from frameworm.records.schema import Batch, Phase, RunRecord, json_ready
from frameworm.records.store import RunFolder
from frameworm.report.run.page import page_of, samples_of


def make_folder(path: Path, steps: int = 60, slow: int = 40) -> RunFolder:
    folder = RunFolder(path)
    record = RunRecord("stored", "completed", {"torch": "2.13"}, Batch(4, 1, 1, 4), steps=steps)
    record.phases = {"forward": Phase(0.01, 1.0)}
    folder.write_summary(record)
    folder.write_config("name: stored\n")
    lines = []
    for number in range(1, steps + 1):
        step_s = 0.5 if number == slow else 0.01
        step = {"step": number, "epoch": 1, "time": 0.0, "step_s": step_s, "loss": 1.0 / number, "lr": 0.1}
        step |= {"samples": 4, "count": 4.0, "phases": {"forward": 0.01, "checkpoint": step_s - 0.01}}
        lines.append(json.dumps(json_ready(step)))
    folder.steps(0).write_text("\n".join(lines) + "\n")
    folder.system(0).write_text("".join(sample_line(SystemSample(n, gpu_busy=0.5)) + "\n" for n in range(20)))
    return folder


def test_everything_on_disk_is_on_the_page(tmp_path: Path) -> None:
    page = page_of(make_folder(tmp_path))
    for part in ("stored", 'id="timeline"', 'id="loss"', "GPU busy over the run", "name: stored", "checkpoint 490 ms"):
        assert part in page


def test_a_newer_record_is_taken(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    record = folder.read_summary()
    record.verdict = "healthy"
    assert "Verdict: healthy" in page_of(folder, record)
    assert "Verdict" not in page_of(folder)


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for path in (folder.config, folder.steps(0), folder.system(0)):
        path.unlink()
    folder.system(1).mkdir()
    page = page_of(folder)
    assert "No steps were recorded." in page
    assert "Resolved config" not in page
    assert 'id="system"' not in page


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with folder.system(0).open("a") as file:
        file.write('{"time": 21, "gpu_bu')
    with folder.steps(0).open("a") as file:
        file.write('{"step": 61')
    assert len(samples_of(folder)[0]) == 20
    assert 'id="timeline"' in page_of(folder)


def test_without_a_summary_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"summary\.json does not exist"):
        page_of(RunFolder(tmp_path))
