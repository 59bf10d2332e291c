"""A step is found by its number in a file of any length."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworm.records.schema import StepRecord
from frameworm.records.writer import StepSeeker, step_line


def lines_of(numbers: list[int]) -> list[str]:
    return [
        step_line(StepRecord(number, 1, 0.0, 0.1, 0.5, 0.1, 4, 4.0, metrics={"m": 1.5} if number % 7 else {})) + "\n"
        for number in numbers
    ]


def test_steps_are_found(tmp_path: Path) -> None:
    numbers = [number for number in range(3, 4_000) if number % 10]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(lines_of(numbers)))
    with path.open("rb") as file:
        seeker = StepSeeker(file)
        first, last = seeker.first(), seeker.last()
        assert first is not None
        assert last is not None
        assert (first.step, last.step) == (3, 3_999)
        for wanted in (0, 3, 4, 999, 1_000, 2_345, 3_999):
            found = seeker.at(wanted)
            assert found is not None
            assert found.step == min(number for number in numbers if number >= wanted)
        assert seeker.at(4_000) is None
        assert [step.step for step in seeker.onwards(3_988)] == [number for number in numbers if number >= 3_988]


@pytest.mark.parametrize("content", ["", "{}\n", "no steps\n", '{"step": 1'])
def test_files_without_a_step(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(content)
    with path.open("rb") as file:
        seeker = StepSeeker(file)
        assert (seeker.first(), seeker.last(), seeker.at(5)) == (None, None, None)


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    lines = lines_of(list(range(1, 2_000)))
    for index in range(0, len(lines), 3):
        lines[index] = lines[index][:40] + "\n"
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(lines) + lines[1][:50])
    with path.open("rb") as file:
        seeker = StepSeeker(file)
        last = seeker.last()
        assert last is not None
        assert last.step == 1_998
        found = seeker.at(1_000)
        assert found is not None
        assert found.step in (1_000, 1_001)
