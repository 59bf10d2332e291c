"""Copy a run folder to object storage: checkpoints atomically, records as they grow. Imports no torch.

All state is in the files: what is in the folder and not in storage has to be uploaded. So an uploader can be killed at
any moment, and the next one continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from frameworm.engine.checkpoint import manifest as manifests
from frameworm.engine.checkpoint.commit import Retention, figure_in, figure_of, stored_folders, superseded
from frameworm.engine.checkpoint.manifest import Manifest
from frameworm.errors import CheckpointError, RunFolderError, StorageError
from frameworm.records.atomic import make_folder_in, refuse_link, write_atomic
from frameworm.records.objects.place import Place, safe_name
from frameworm.records.objects.runs import (
    CHECKPOINTS,
    MANIFEST,
    OWNER,
    SOURCE,
    age_of,
    holds_run,
    parts_of_checkpoints,
)
from frameworm.records.reading import parse_json, read_bytes, read_json, read_text

LATEST = f"{CHECKPOINTS}/latest"
SUMMARY = ("summary.json", "summary.txt")  # uploaded last: it says that everything else is there
_HELD = ".uploading"
_MOST_AT_ONCE_BYTES = 64 * 2**20
_MOST_MARK_BYTES = 2**16
_FOLDERS = ("tensorboard",)


@dataclass(frozen=True)
class Ownership:
    """Which run is at a URL, and which process may write there.

    Attributes:
        url: The place.
        run: A random ID of the run.
        owner: A random ID of the process that trains it now, or did last.
        former: The previous owner, from whom this one may take over; None if there is none.
        earlier: Owners before that, all of this folder; each may have ended before it marked the place.
    """

    url: str
    run: str
    owner: str
    former: str | None = None
    earlier: tuple[str, ...] = ()

    @property
    def predecessors(self) -> tuple[str, ...]:
        """Previous owners, most recent first."""
        return self.earlier if self.former is None else (self.former, *self.earlier)

    def write(self, folder: Path) -> None:
        """Store it in the run folder.

        Raises:
            RunFolderError: If it cannot be written.
        """
        write_atomic(folder / SOURCE, json.dumps(vars(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Ownership | None:
        """Read it from a run folder; None if the folder is not uploaded."""
        try:
            fields = read_json(folder / SOURCE, _MOST_MARK_BYTES)
            earlier = tuple(str(owner) for owner in fields.get("earlier", ()))
            return cls(str(fields["url"]), str(fields["run"]), str(fields["owner"]), fields.get("former"), earlier)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def read_mark(place: Place) -> tuple[str, str] | None:
    """Return the run and owner with which a place is marked; None if it is not.

    Raises:
        StorageError: If it cannot be read.
    """
    try:
        found = parse_json(place.read(OWNER, _MOST_MARK_BYTES))
        return str(found["run"]), str(found["owner"])
    except StorageError as error:
        if error.missing:
            return None
        raise
    except (ValueError, KeyError, TypeError):
        raise StorageError(f"{place.url}/{OWNER} is damaged: remove it, and check what lies there") from None


def claim(place: Place, ownership: Ownership) -> None:
    """Mark a place as belonging to this run and this process.

    Raises:
        RunFolderError: If it holds another run, or another process has resumed this one.
        StorageError: If it cannot be read or written.
    """
    mark = read_mark(place)
    if mark is None:
        if ownership.former is None and holds_run(place.find()):
            raise RunFolderError(_TAKEN.format(url=place.url))
    elif mark[0] != ownership.run:
        # A mark without a run is left by a training that never began.
        if ownership.former is not None or holds_run(place.find()):
            raise RunFolderError(_TAKEN.format(url=place.url))
    elif mark[1] not in (ownership.owner, *ownership.predecessors):
        raise RunFolderError(f"another process has resumed the run at {place.url}; this one uploads nothing more")
    if mark != (ownership.run, ownership.owner):
        place.write(OWNER, json.dumps({"run": ownership.run, "owner": ownership.owner}).encode())


_TAKEN = "{url} already holds a run; resume it with --resume auto, or give another --out"


class Uploader:
    """Uploads one run folder.

    Args:
        folder: The run folder.
        place: Where to upload.
        ownership: The mark that the place has or will get.
        retention: Which checkpoints to keep there.
        uploaded: Called with the name of each checkpoint that is now in storage.
        progress: Called whenever data has arrived.

    Raises:
        RunFolderError: If the place is the run folder itself, into which training writes.
    """

    def __init__(
        self,
        folder: Path,
        place: Place,
        ownership: Ownership,
        retention: Retention,
        uploaded: Callable[[str], None] = lambda name: None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        if place.is_folder(folder):
            raise RunFolderError(f"{place.url} is the run folder itself; give a URL elsewhere")
        self.folder = folder
        self.place = place
        self._ownership = ownership
        self._retention = retention
        self._uploaded = uploaded
        self._progress = progress
        self._checkpoints = folder / CHECKPOINTS
        self._claimed = False
        self._whole: set[str] | None = None  # in storage; None until storage has been listed
        self._stale: set[str] = set()  # in storage, but different from those of the same name here
        self._sent: set[str] = set()
        self._damaged: set[str] = set()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._figures: dict[str, float | None] = {}

    def work(self, *, records: bool, without: Collection[str] = SUMMARY) -> None:
        """Upload what is missing: all checkpoints, newest first, and records if `records` is set.

        Raises:
            StorageError: If storage refuses or does not answer; what has arrived until then counts.
            RunFolderError: If the place belongs to another run or process.
        """
        if not self._claimed:
            claim(self.place, self._ownership)
            self._claimed = True
        if self._whole is None:
            self._whole = self._look()
        while (path := self._next()) is not None:
            self._upload(path)
        if records:
            self._upload_records(without)

    def left(self, without: Collection[str] = ()) -> list[str]:
        """List what is in the folder and not in storage."""
        whole = self._whole or set()
        waiting = [f"{CHECKPOINTS}/{path.name}" for path in self._missing(whole)]
        return waiting + [name for name in self._changed() if name not in without]

    def _look(self) -> set[str]:
        """List the complete checkpoints in storage, and remove what earlier uploads left unfinished."""
        parts = parts_of_checkpoints(list(self.place.find(CHECKPOINTS)))
        whole = {name for name, files in parts.items() if MANIFEST in files}
        for name in set(parts) - whole:
            self._remove(name, parts[name])
        same = set()
        for _, _, path in stored_folders(self._checkpoints):
            if path.name in whole:
                # A resumed run may have written a step again, because the one in storage was damaged.
                text = self.place.read(f"{CHECKPOINTS}/{path.name}/{MANIFEST}", manifests.MOST_BYTES)
                if text == read_bytes(path / MANIFEST, manifests.MOST_BYTES):
                    same.add(path.name)
        # A checkpoint not present here differs from a later one of its name: the run went back to an earlier step.
        self._stale = whole - same
        if self._checkpoints.is_dir():
            shutil.rmtree(self._held, ignore_errors=True)
        return whole

    @property
    def _held(self) -> Path:
        return self.folder / _HELD

    def _next(self) -> Path | None:
        """Return the newest checkpoint that is missing in storage and to be kept there."""
        assert self._whole is not None
        missing = self._missing(self._whole)
        return missing[-1] if missing else None

    def _missing(self, whole: set[str]) -> list[Path]:
        here = {path.name: path for _, _, path in stored_folders(self._checkpoints) if path.name not in self._damaged}
        missing = [path for name, path in here.items() if name not in whole or name in self._stale]
        if not missing:
            return []
        stored = [(*age_of(name), name) for name in sorted({*here, *whole}, key=age_of)]
        past = superseded(stored, max(here, key=age_of), self._retention, self._figure)
        return [path for path in missing if path.name not in past]

    def _upload(self, path: Path) -> None:
        """Upload a checkpoint: its files, the records up to it, its manifest, `latest`; then remove old ones."""
        assert self._whole is not None
        name = path.name
        held = self._hold(path)
        try:
            text = read_text(held / MANIFEST, manifests.MOST_BYTES)
            self._verify()  # or its files might end up under a successor's manifest
            if name in self._stale:
                self.place.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
                self._whole.discard(name)
                self._stale.discard(name)
            for file in Manifest.parse(text).files:
                target = f"{CHECKPOINTS}/{name}/{file}"
                if target not in self._sent:
                    self.place.put(held / file, target, self._progress)
                    self._sent.add(target)
        except FileNotFoundError:
            self._release(name)
            if (path / MANIFEST).exists():
                self._damaged.add(name)
            return  # or it was pruned meanwhile; the next pruning removes what is left of it in storage
        except CheckpointError:
            self._damaged.add(name)
            return
        self._upload_records(SUMMARY)
        self._verify()
        self.place.write(f"{CHECKPOINTS}/{name}/{MANIFEST}", text.encode())
        self._whole.add(name)
        self._figures[name] = figure_in(text, self._retention.metric)
        self._release(name)
        self._progress()
        newest = max(self._whole & {item.name for _, _, item in stored_folders(self._checkpoints)} | {name}, key=age_of)
        if newest == name:
            self.place.write(LATEST, f"{name}\n".encode())
        self._uploaded(name)
        self._prune(newest)

    def _hold(self, path: Path) -> Path:
        """Hard-link the files of a checkpoint, so that local pruning does not remove them during an upload."""
        held = self._held / path.name
        try:
            make_folder_in(self.folder, held)
            for file in path.iterdir():
                refuse_link(file)
                with contextlib.suppress(FileExistsError):
                    os.link(file, held / file.name)
        except FileNotFoundError:
            shutil.rmtree(held, ignore_errors=True)
            return path
        except OSError:  # a file system without links
            return path
        return held

    def _release(self, name: str) -> None:
        self._sent = {item for item in self._sent if not item.startswith(f"{CHECKPOINTS}/{name}/")}
        shutil.rmtree(self._held / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._held.rmdir()

    def _verify(self) -> None:
        """Raise if another process has taken over."""
        claim(self.place, replace(self._ownership, former=self._ownership.owner, earlier=()))

    def _prune(self, newest: str) -> None:
        """Remove checkpoints not to be kept, manifests first, and what interrupted uploads left."""
        parts = parts_of_checkpoints(list(self.place.find(CHECKPOINTS)))
        self._whole = {name for name, files in parts.items() if MANIFEST in files}
        stored = [(*age_of(name), name) for name in sorted(self._whole, key=age_of)]
        if newest not in self._whole:
            raise StorageError(f"{self.place.url} does not list {newest}, which has been uploaded", unreachable=True)
        for name in superseded(stored, newest, self._retention, self._figure):
            self._remove(name, parts[name])
            self._whole.discard(name)
        for name in parts:
            if MANIFEST not in parts[name] and age_of(name) <= age_of(newest):
                self._remove(name, parts[name])

    def _figure(self, name: str) -> float | None:
        if name not in self._figures and (self._checkpoints / name / MANIFEST).is_file():
            self._figures[name] = figure_of(self._checkpoints / name, self._retention.metric)
        if name not in self._figures:
            text = self.place.read(f"{CHECKPOINTS}/{name}/{MANIFEST}", manifests.MOST_BYTES)
            self._figures[name] = figure_in(text.decode("utf-8", errors="replace"), self._retention.metric)
        return self._figures[name]

    def _remove(self, name: str, files: set[str]) -> None:
        # Remove the manifest first: without it the rest does not count.
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self.place.remove(f"{CHECKPOINTS}/{name}/{file}")
        self.place.remove_folder(f"{CHECKPOINTS}/{name}")

    def _changed(self) -> dict[str, tuple[int, int]]:
        """Return records that have changed since their upload, with their size and modification time."""
        found = {}
        for folder in (self.folder, *(self.folder / name for name in _FOLDERS)):
            if folder.is_symlink() or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                name = path.relative_to(self.folder).as_posix()
                if path.is_symlink() or not path.is_file() or not safe_name(name):
                    continue
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found[name] = (status.st_size, status.st_mtime_ns)
        return {name: stamp for name, stamp in found.items() if self._stamps.get(name) != stamp}

    def _upload_records(self, without: Collection[str]) -> None:
        changed = {name: stamp for name, stamp in self._changed().items() if name not in without}
        if changed:
            self._verify()
        for name in sorted(changed, key=lambda name: name in SUMMARY):
            path = self.folder / name
            try:
                if changed[name][0] <= _MOST_AT_ONCE_BYTES:
                    with path.open("rb") as file:
                        self.place.write(name, file.read(_MOST_AT_ONCE_BYTES))
                else:
                    self.place.put(path, name, self._progress)
            except FileNotFoundError:
                continue
            self._stamps[name] = changed[name]
            self._progress()
