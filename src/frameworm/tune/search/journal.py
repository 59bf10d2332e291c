"""The journal of a search: one JSON line when a trial begins and one when it ends, so that a search can resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from frameworm.errors import RunFolderError
from frameworm.records.atomic import open_to_append, replacing, write_atomic
from frameworm.records.reading import parse_json, read_bytes
from frameworm.tune.search.found import finite

VERSION = 1
JOURNAL_NAME = "journal.jsonl"
SUMMARY_NAME = "tune.json"


class Finished(NamedTuple):
    """A trial or proof that ended: its result as plain values, and its duration in seconds."""

    result: dict[str, Any]
    wall_s: float


class Journal:
    """Stores finished trials on disk; without a folder only in this process.

    Args:
        folder: Folder of the search, created if necessary; None: nothing is written.
        start: Identifies the search. A folder that holds another search is rejected.

    Raises:
        RunFolderError: The folder holds another search, or cannot be written.
    """

    def __init__(self, folder: str | Path | None, start: str) -> None:
        self.folder = None if folder is None else Path(folder)
        self._finished: dict[tuple[str, str], Finished] = {}
        self._begun: dict[tuple[str, str], int] = {}
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = self._read(start)
        except OSError as error:
            raise RunFolderError(f"cannot use {self.folder}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{self.folder / JOURNAL_NAME} is damaged ({error}); give another folder") from error
        if not known:
            self._write({"event": "search", "version": VERSION, "start": start})

    @property
    def resumed(self) -> int:
        """Trials and proofs that an earlier process finished."""
        return len(self._finished)

    def finished(self, kind: str, name: str) -> Finished | None:
        """The result of a trial or proof, if it was finished."""
        return self._finished.get((kind, name))

    def begun(self, kind: str, name: str) -> int:
        """How often it was started without finishing: it may be what killed the search."""
        return self._begun.get((kind, name), 0)

    def begin(self, kind: str, name: str, label: str) -> None:
        """Record the start of a trial or proof."""
        self._begun[kind, name] = self.begun(kind, name) + 1
        self._write({"event": "begin", "kind": kind, "id": name, "label": label})

    def end(self, kind: str, name: str, result: dict[str, Any], wall_s: float) -> None:
        """Record its end; after this it is never repeated."""
        self._finished[kind, name] = Finished(result, wall_s)
        self._begun.pop((kind, name), None)
        self._write({"event": "end", "kind": kind, "id": name, "wall_s": wall_s, "result": result})

    def write_summary(self, values: dict[str, Any]) -> None:
        """Replace `tune.json`."""
        if self.folder is not None:
            write_atomic(self.folder / SUMMARY_NAME, json.dumps(finite(values), indent=1) + "\n")

    def _read(self, start: str) -> bool:
        """Read an existing journal; returns whether there was a search."""
        assert self.folder is not None
        path = self.folder / JOURNAL_NAME
        if not path.exists():
            return False
        data = read_bytes(path)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            # The search died while writing the last line.
            with replacing(path) as file:
                file.write(data[:whole])
        lines = [parse_json(line) for line in data[:whole].splitlines() if line.strip()]
        if not lines:
            return False
        head = lines[0]
        if head.get("version") != VERSION or head.get("start") != start:
            raise RunFolderError(
                f"{self.folder} holds the search of another config or machine; give another folder, or delete this one"
            )
        for line in lines[1:]:
            place = (line["kind"], line["id"])
            if line["event"] == "begin":
                self._begun[place] = self._begun.get(place, 0) + 1
            else:
                self._finished[place] = Finished(line["result"], line["wall_s"])
                self._begun.pop(place, None)
        return True

    def _write(self, line: dict[str, Any]) -> None:
        if self.folder is None:
            return
        with os.fdopen(open_to_append(self.folder / JOURNAL_NAME), "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
