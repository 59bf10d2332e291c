"""Write one rank's part of a checkpoint from memory to disk. The writer process runs this; it imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from frameworm.engine.checkpoint.file_writer import Layout, copy_file, pays, write_file
from frameworm.engine.checkpoint.manifest import ShardFile, shard_name
from frameworm.engine.checkpoint.zstd import zstd_functions
from frameworm.errors import CheckpointError, MissingPackageError
from frameworm.records.atomic import refuse_link, sync_folder

_WORTH_A_TRY_BYTES = 2**20


@dataclass(frozen=True)
class WriteOrder:
    """What to write and where.

    Attributes:
        draft: The folder that becomes the checkpoint.
        rank: The rank whose part it is.
        layout: Layout of the file.
        memory_bytes: Size of the memory that the layout refers to.
        compression: off, zstd, or auto (only if that makes the file durable sooner).
        fast: A folder on faster storage to write to first, before moving the file to the draft.
    """

    draft: str
    rank: int
    layout: Layout
    memory_bytes: int
    compression: str = "off"
    fast: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        layout = {"header": self.layout.header.decode("latin-1"), "segments": self.layout.segments}
        return {**vars(self), "layout": layout}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> WriteOrder:
        """Restore from `to_json`."""
        layout = fields["layout"]
        segments = [(place, length) for place, length in layout["segments"]]
        return cls(**{**fields, "layout": Layout(layout["header"].encode("latin-1"), segments)})


class ShardWriter:
    """Writes ranks' files and learns from each how fast the disk is."""

    def __init__(self) -> None:
        self._disk_bytes_per_s: float | None = None

    def write(self, order: WriteOrder, memory: memoryview, taken: Callable[[], None]) -> tuple[ShardFile, list[str]]:
        """Write a file that is durable on return.

        Args:
            order: What to write and where.
            memory: The memory that the layout refers to.
            taken: Called if the memory is no longer needed before the file is durable.

        Returns:
            The file and notes for the user.

        Raises:
            OSError: If writing fails.
            CheckpointError: If zstd is asked for and not installed.
            RunFolderError: If the draft is a symbolic link.
        """
        draft = Path(order.draft)
        draft.mkdir(parents=True, exist_ok=True)
        refuse_link(draft)
        parts = order.layout.parts(memory)
        compress, notes = self._compressor(order, parts)
        name = shard_name(order.rank) + ("" if compress is None else ".zst")
        begin = perf_counter()
        file = None
        if order.fast is not None:
            file, problem = self._write_first(Path(order.fast), draft / name, parts, compress, taken)
            notes += [] if problem is None else [problem]
        if file is None:
            with _removed_on_error(draft / name):
                file = write_file(draft / name, parts, compress=compress)
        if compress is None:
            self._disk_bytes_per_s = file.size_bytes / max(1e-9, perf_counter() - begin)
        sync_folder(draft)
        return file, notes

    def _write_first(
        self,
        fast: Path,
        target: Path,
        parts: list[memoryview],
        compress: Callable[[bytes], bytes] | None,
        taken: Callable[[], None],
    ) -> tuple[ShardFile | None, str | None]:
        """Write to the fast storage, then move to the target; if the fast storage fails, return None and why."""
        # Runs may share a fast folder; their drafts have different paths.
        mark = hashlib.sha256(str(target.parent.resolve()).encode()).hexdigest()[:16]
        passing = fast / f"{mark}-{target.name}"
        try:
            try:
                fast.mkdir(parents=True, exist_ok=True)
                file = write_file(passing, parts, compress=compress, sync=False)
            except OSError as error:
                return None, f"checkpoint.dir ({fast}) refuses: {error.strerror or error}; written without it"
            taken()
            with _removed_on_error(target):
                copy_file(passing, target, file)
            return file, None
        finally:
            with contextlib.suppress(OSError):
                passing.unlink(missing_ok=True)

    def _compressor(
        self, order: WriteOrder, parts: list[memoryview]
    ) -> tuple[Callable[[bytes], bytes] | None, list[str]]:
        """Choose whether to compress this file; return the function and notes."""
        if order.compression == "off":
            return None, []
        try:
            compress, _ = zstd_functions()
        except MissingPackageError as error:
            if order.compression == "zstd":
                raise CheckpointError(str(error)) from None
            return None, []
        if order.compression == "zstd":
            return compress, []
        if self._disk_bytes_per_s is None or sum(len(part) for part in parts) < _WORTH_A_TRY_BYTES:
            return None, []  # the first file shows how fast the disk is
        worth_it, left, speed = pays(parts, compress, self._disk_bytes_per_s)
        if not worth_it:
            return None, []
        note = (
            f"checkpoints are compressed (zstd) to {left:.0%}: the disk takes {self._disk_bytes_per_s / 1e6:,.0f} MB/s "
            f"and compressing {speed / 1e6:,.0f} MB/s"
        )
        return compress, [note]


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Any:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
