"""Files and folders that are written so that nothing outside of them is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from frameworm.errors import RunFolderError
from frameworm.records.atomic import (
    make_folder_in,
    open_to_append,
    private_folder,
    replacing,
    write_atomic,
    written_anew,
)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to the file `victim`."""
    (tmp_path / "victim").write_text("words\n")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    return tmp_path / "link"


def _unharmed(link: Path) -> bool:
    return (link.parent / "victim").read_text() == "words\n"


def test_a_link_is_replaced_by_the_file_and_not_written_through(link: Path) -> None:
    write_atomic(link, "new\n")
    assert _unharmed(link)
    assert not link.is_symlink()
    assert link.read_text() == "new\n"


def test_nothing_is_left_of_a_file_that_could_not_be_finished(tmp_path: Path) -> None:
    def write_half() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_anew_in_the_place_of_a_link_or_a_hard_link(link: Path) -> None:
    other = link.with_name("hard")
    other.hardlink_to(link.with_name("victim"))
    for path in (link, other):
        with written_anew(path) as file:
            file.write(b"new\n")
        assert path.read_bytes() == b"new\n"
    assert _unharmed(link)


def test_nothing_is_appended_through_a_link_or_to_a_pipe(link: Path) -> None:
    with pytest.raises(OSError, match="symbolic"):
        open_to_append(link)
    assert _unharmed(link)
    os.mkfifo(link.with_name("pipe"))
    for flags in (os.O_WRONLY, os.O_RDWR):
        with pytest.raises(OSError, match=r"plain file|No such device"):
            open_to_append(link.with_name("pipe"), flags)


def test_folders_are_made_below_a_link_but_not_through_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    root = tmp_path / "root"
    make_folder_in(root, root / "trials" / "one")
    make_folder_in(root, root / "trials" / "one")
    assert (tmp_path / "real" / "trials" / "one").is_dir()
    (tmp_path / "elsewhere").mkdir()
    (root / "proofs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="proofs is a link"):
        make_folder_in(root, root / "proofs" / "one")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("taken_by", ["link", "file", "open folder", "another user"])
def test_a_private_folder_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_by: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder()
    assert folder == private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    if taken_by == "open folder":
        folder.chmod(0o755)
    elif taken_by == "another user":
        folder.rename(folder.with_name(f"frameworm-{os.getuid() + 1}"))
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    else:
        folder.rename(tmp_path / "own")
        if taken_by == "link":
            folder.symlink_to(tmp_path / "own")
        else:
            folder.touch(0o600)
    with pytest.raises(OSError, match="only you can open"):
        private_folder()
