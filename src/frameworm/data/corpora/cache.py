"""Token stores on disk, addressed by a hash of their inputs.

A store is a folder named after a hash of the texts, the tokenizer and the reader. It is written next to its final place
and renamed when complete, under a file lock: if several processes start at once, one builds and the others wait, and a
killed build leaves nothing that could be mistaken for a store. A store whose files do not have the sizes recorded in
its meta.json is rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from frameworm.errors import DataError
from frameworm.records.atomic import open_to_append, replacing
from frameworm.records.reading import open_plain, read_json

_INDEX = "index.json"
_DTYPES = ("uint16", "uint32")
_FILES = ("tokens.bin", "offsets.npy", "labels.npy")


@dataclass(frozen=True)
class TokenStore:
    """Token sequences of one split, memory-mapped: sample i is `tokens[offsets[i]:offsets[i + 1]]`."""

    folder: Path
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]  # empty if there are no labels
    meta: dict[str, Any]

    def __reduce__(self) -> tuple[Callable[[Path], TokenStore], tuple[Path]]:
        """Pickle as the folder, so that another process maps the files itself."""
        return open_store, (self.folder,)


class TokenWriter:
    """Writes token sequences batch by batch; only lengths and labels stay in memory."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        self.dtype = np.dtype(_DTYPES[0] if vocab_size <= 2**16 else _DTYPES[1])
        self.lengths: list[int] = []
        self.labels: list[int] = []
        self._file = file

    def append(self, sequences: Sequence[NDArray[Any]], labels: Sequence[int] = ()) -> None:
        """Append sequences, each with its label if there are labels."""
        assert not labels or len(labels) == len(sequences)
        self.lengths.extend(len(sequence) for sequence in sequences)
        self.labels.extend(labels)
        if sequences:
            self._file.write(np.concatenate(sequences).astype(self.dtype).tobytes())


class TokenCache:
    """A folder of token stores.

    Args:
        folder: `data.cache_dir`; auto: a folder in the user's home.
    """

    def __init__(self, folder: str | Path = "auto") -> None:
        self.folder = Path.home() / ".cache" / "frameworm" if folder == "auto" else Path(folder).expanduser()

    def content_hash(self, files: Sequence[Path], root: Path) -> str:
        """Hash the contents of the files and their names relative to `root`.

        The result is cached by the files' sizes and times, so that unchanged files are not read twice.
        """
        seen = hashlib.sha256()
        for path in files:
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
            seen.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n".encode())
        known = self._read_index().get(seen.hexdigest())
        if isinstance(known, str):
            return known
        content = hash_files(files, root)
        # Failing to cache it only means that the next start reads the files again.
        with contextlib.suppress(OSError), self.lock("index"):
            index = {**self._read_index(), seen.hexdigest(): content}
            with replacing(self.folder / _INDEX) as file:
                file.write(json.dumps(index, indent=0).encode())
        return content

    def get(self, key: str) -> TokenStore | None:
        """The store with that key; None if it is missing or incomplete."""
        try:
            return open_store(self.folder / key)
        except (OSError, ValueError):
            return None

    def get_or_build(self, key: str, build: Callable[[Path], None]) -> TokenStore:
        """Open a store, building it first if necessary.

        Args:
            key: Name of the store, from `store_key`.
            build: Fills the folder it is given, with `write_store`.

        Raises:
            DataError: The cache folder cannot be written.
        """
        store = self.get(key)
        if store is not None:
            return store
        try:
            with self.lock(key) as exclusive:
                store = self.get(key)  # another process may have built it while this one waited
                if store is not None:
                    return store
                if exclusive:
                    for remains in self.folder.glob(f"tmp-{key}-*"):
                        shutil.rmtree(remains, ignore_errors=True)
                self._build(key, build)
        except OSError as error:
            raise DataError(
                f"the token cache {self.folder} cannot be written ({error.strerror or error}); set data.cache_dir to a "
                "folder with enough space that you may write to"
            ) from error
        return open_store(self.folder / key)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold the lock of that name; yields False if the file system has no locks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(self.folder / f"{name}.lock"), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                # Two processes may then both build the store; the rename keeps the result whole.
                yield False
            else:
                yield True

    def _build(self, key: str, build: Callable[[Path], None]) -> None:
        target = self.folder / key
        folder = Path(tempfile.mkdtemp(prefix=f"tmp-{key}-", dir=self.folder))
        try:
            folder.chmod(0o755)
            build(folder)
            if target.exists():
                shutil.rmtree(target)  # processes that have it mapped keep their data
            try:
                folder.rename(target)
            except OSError:
                if self.get(key) is None:  # otherwise another builder finished first, for lack of locks
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read_index(self) -> dict[str, Any]:
        try:
            index = read_json(self.folder / _INDEX)
        except (OSError, ValueError):
            return {}
        return index if isinstance(index, dict) else {}


def store_key(*parts: str) -> str:
    """Name of the store built from these parts: content, tokenizer, reader."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def hash_files(files: Sequence[Path], root: Path) -> str:
    """SHA-256 over the files' names below `root` and their contents, in the order given."""
    whole = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        try:
            with open_plain(path) as file:
                while block := file.read(2**20):
                    content.update(block)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        whole.update(f"{path.relative_to(root)}\0{content.hexdigest()}\n".encode())
    return whole.hexdigest()


def write_store(folder: Path, meta: dict[str, Any], fill: Callable[[TokenWriter], None]) -> None:
    """Write the files of a store.

    Args:
        folder: An empty folder.
        meta: Stored with the tokens; its `vocab_size` decides the width of a token.
        fill: Appends all sequences to the writer it is given.
    """
    with (folder / "tokens.bin").open("wb") as file:
        writer = TokenWriter(file, int(meta["vocab_size"]))
        fill(writer)
    offsets = np.concatenate([[0], np.cumsum(writer.lengths, dtype=np.int64)]).astype(np.int64)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "labels.npy", np.asarray(writer.labels, dtype=np.int64))
    meta = {
        **meta,
        "samples": len(writer.lengths),
        "tokens": int(offsets[-1]),
        "dtype": writer.dtype.name,
        "file_bytes": {name: (folder / name).stat().st_size for name in _FILES},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def open_store(folder: Path) -> TokenStore:
    """Map a store into memory.

    Raises:
        OSError: A file is missing.
        ValueError: A file does not match meta.json.
    """
    meta = read_json(folder / "meta.json")
    if not isinstance(meta, dict) or not isinstance(meta.get("file_bytes"), dict):
        raise ValueError(f"{folder / 'meta.json'} does not describe a token store")
    for name in _FILES:
        if (folder / name).stat().st_size != meta["file_bytes"].get(name):
            raise ValueError(f"{folder / name} is not as long as when it was written")
    if meta.get("dtype") not in _DTYPES:  # with an object dtype the file's bytes would be used as pointers
        raise ValueError(f"{folder / 'meta.json'} does not describe a token store")
    dtype = np.dtype(meta["dtype"])
    # np.asarray drops the memmap class, whose bookkeeping makes small reads several times slower.
    tokens = (
        np.asarray(np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")) if meta["tokens"] else np.empty(0, dtype)
    )
    offsets = np.load(folder / "offsets.npy")
    labels = np.load(folder / "labels.npy")
    if len(tokens) != meta["tokens"] or len(offsets) != meta["samples"] + 1 or len(labels) not in (0, meta["samples"]):
        raise ValueError(f"{folder}: meta.json and the arrays disagree")
    return TokenStore(folder, tokens, offsets, labels, meta)
