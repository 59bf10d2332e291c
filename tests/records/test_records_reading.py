"""Stored files are read within bounds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.records import reading
from frameworm.records.reading import (
    blocks,
    open_plain,
    parse_json,
    read_json,
    read_lines,
    read_tail,
    read_text,
    sample_lines,
)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_plain_files_are_read(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    for read in (
        open_plain,
        read_text,
        read_json,
        lambda name: list(read_lines(name)),
        lambda name: read_tail(name, 9),
    ):
        with pytest.raises(OSError, match=r"plain file|directory"):
            read(path)


def test_a_link_to_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1]


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b" " * 11)
    assert len(read_text(tmp_path / "file", 11)) == 11
    with pytest.raises(OSError, match="larger than"):
        read_text(tmp_path / "file", 10)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 101 + "]" * 101,
        '{"a":' * 200 + "1" + "}" * 200,
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 400,
        "-" + "9" * 5_000,
        "[1",
    ],
    ids=["lists", "objects", "many lists", "many objects", "digits", "more digits", "cut off"],
)
def test_json_that_nobody_wrote_is_refused_by_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**120), 2**120) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@pytest.mark.slow
def test_json_is_read_back_as_it_was_written(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


def test_a_line_without_an_end_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_LINE_BYTES", 10)
    (tmp_path / "lines").write_bytes(b"x" * 25 + b"\nshort\n")
    assert [len(line) for line in read_lines(tmp_path / "lines")] == [10, 10, 6, 6]


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a" * 100 + b"end\xff")
    assert read_tail(tmp_path / "log", 4) == "end\ufffd"
    assert len(read_tail(tmp_path / "log", 1_000)) == 104


def test_a_sample_is_spread_evenly_and_every_line_is_as_likely(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:06d}{'x' * (number % 37)}\n" for number in range(50_000)))
    size = path.stat().st_size
    most = size // 20
    assert blocks(100, 100) == [(0, 100)]
    places = blocks(size, most)
    assert len(places) >= 16
    part = size / len(places)
    assert all(int(index * part) <= begin < end <= (index + 1) * part + 1 for index, (begin, end) in enumerate(places))
    numbers = [int(line[:6]) for line in sample_lines(path, most)]
    assert numbers == sorted(set(numbers)), "in order, and none twice"
    assert 0.045 < len(numbers) / 50_000 < 0.055
    # Nothing that comes every so many lines is met more or less often than it is there.
    for period in (10, 64, 100):
        share = sum(number % period == 0 for number in numbers) / len(numbers)
        assert share == pytest.approx(1 / period, rel=0.25)
    assert [int(line[:6]) for line in sample_lines(path, size)] == list(range(50_000))
