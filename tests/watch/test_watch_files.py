"""Growing files: nothing twice, nothing half, nothing from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frameworm.watch.files import MOST_LINE_BYTES, Follower, Inside


def texts(follower: Follower) -> list[bytes]:
    return [line.text for line in follower.read(0).lines]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    follower = Follower(Inside(tmp_path), path)
    assert texts(follower) == [b"one"]
    assert texts(follower) == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    portion = follower.read(0)
    assert [line.text for line in portion.lines] == [b"two", b"three"]
    assert [line.offset for line in portion.lines] == [4, 8]
    assert not portion.restarted


@pytest.mark.parametrize("change", ["replaced", "shortened", "rewritten", "removed"])
def test_a_file_that_is_not_the_same_is_read_anew(tmp_path: Path, change: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    follower = Follower(Inside(tmp_path), path)
    assert len(texts(follower)) == 3
    if change == "replaced":
        (tmp_path / "new").write_bytes(b"one\nzwei\nthree\nfour\n")
        (tmp_path / "new").replace(path)
    elif change == "shortened":
        os.truncate(path, 4)
    elif change == "rewritten":
        with path.open("r+b") as file:
            file.write(b"uno\ndos\ntres.\ncuatro\n")
    else:
        path.unlink()
    portion = follower.read(0)
    assert portion.restarted
    expected = path.read_bytes().splitlines() if path.exists() else []
    assert [line.text for line in portion.lines] == expected
    assert not follower.read(0).restarted


def test_a_file_that_comes_later(tmp_path: Path) -> None:
    follower = Follower(Inside(tmp_path), tmp_path / "lines")
    assert follower.read(0) == ([], False, 0, 1.0)
    (tmp_path / "lines").write_bytes(b"one\n")
    assert texts(follower) == [b"one"]


def test_a_large_file_comes_in_portions(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 90}".encode() for number in range(40_000)]
    (tmp_path / "lines").write_bytes(b"\n".join(lines) + b"\n")
    follower = Follower(Inside(tmp_path), tmp_path / "lines")
    found, portions, behind = [], 0, 1
    while behind:
        portion = follower.read(0)
        found += [line.text for line in portion.lines]
        behind, portions = portion.behind, portions + 1
    assert found == lines
    assert portions > 10


def test_a_line_without_an_end_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\n" + b"x" * (2 * MOST_LINE_BYTES + 5) + b"\ntwo\n")
    follower = Follower(Inside(tmp_path), tmp_path / "lines")
    found = [line for _ in range(6) for line in texts(follower)]
    assert found == [b"one", b"two"]


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret\n")
    (root / "own").write_text("own\n")
    (root / "link").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "inner").symlink_to(root / "own")
    inside = Inside(root)
    assert inside.read_text(root / "inner", 100) == "own\n"
    for path in (root / "link", root / "folder" / "secret", root / ".." / "outside" / "secret", Path("/etc/passwd")):
        with pytest.raises(OSError, match="leads out"):
            inside.read_text(path, 100)
        assert texts(Follower(inside, path)) == []


def test_a_root_with_a_neighbour_of_a_longer_name(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs-private").mkdir()
    (tmp_path / "runs-private" / "file").write_text("secret")
    with pytest.raises(OSError, match="leads out"):
        Inside(tmp_path / "runs").read_text(tmp_path / "runs" / ".." / "runs-private" / "file", 100)


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    inside = Inside(tmp_path)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("nul\0byte")):
        with pytest.raises(OSError):
            inside.open(path)


def test_the_end_of_a_log_begins_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first line\nsecond \xff line\nthird")
    assert Inside(tmp_path).tail(tmp_path / "log", 12) == "third"
    assert Inside(tmp_path).tail(tmp_path / "log", 1000) == "first line\nsecond \ufffd line\nthird"
    with pytest.raises(OSError, match="larger than"):
        Inside(tmp_path).read_text(tmp_path / "log", 3)


def test_a_backlog_is_read_as_a_sample_and_then_every_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:08d}\n" for number in range(50_000)) + "half")
    follower = Follower(Inside(tmp_path), path, backlog_bytes=45_000)
    seen: list[int] = []
    portion = follower.read(0)
    while portion.weight > 1:
        seen += [int(line.text) for line in portion.lines]
        assert all(int(line.text) * 9 == line.offset for line in portion.lines)
        assert portion.weight == follower.thinning == pytest.approx(10, rel=0.01)
        assert portion.behind
        portion = follower.read(0)
    # The last line that is whole tells how far the file goes.
    assert [int(line.text) for line in portion.lines] == [49_999]
    seen.append(49_999)
    assert seen == sorted(set(seen))
    assert len(seen) == pytest.approx(5_000, rel=0.05)
    assert follower.read(0).lines == []
    with path.open("a") as file:
        file.write("way\nnew\n")
    portion = follower.read(0)
    assert ([line.text for line in portion.lines], portion.weight, portion.restarted) == (
        [b"halfway", b"new"],
        1.0,
        False,
    )
    path.write_text("other\n")
    portion = follower.read(0)
    assert ([line.text for line in portion.lines], portion.restarted, follower.thinning) == ([b"other"], True, 1.0)
