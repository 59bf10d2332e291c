"""The manifest of a checkpoint: its files, where each tensor is in them, and all other state as JSON.

It is written last and read first. Its content is checked before use: it may only name files in its own folder, and the
parts of a tensor must make up the whole. Like everything that the writer process needs, it imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frameworm.errors import CheckpointError

FORMAT = 3
NAME = "manifest.json"
MOST_BYTES = 2**30
CHUNK_BYTES = 16 * 2**20  # bytes per checksum, so that several processors can share the work
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors(?:\.zst)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def shard_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class ShardFile:
    """Size and checksums that a file of tensors must have.

    Attributes:
        size_bytes: Its size.
        sha256: A checksum for every chunk of it.
        frames: Sizes of the chunks, each a zstd frame of `CHUNK_BYTES` raw bytes (the last may be smaller); None for an
            uncompressed file, whose chunks have `CHUNK_BYTES`.
    """

    size_bytes: int
    sha256: tuple[str, ...]
    frames: tuple[int, ...] | None = None

    @property
    def name_suffix(self) -> str:
        """Suffix of its name."""
        return "" if self.frames is None else ".zst"

    def chunk_sizes(self) -> list[int]:
        """Sizes of the chunks, each of which has a checksum."""
        if self.frames is not None:
            return list(self.frames)
        return [min(CHUNK_BYTES, self.size_bytes - place) for place in range(0, self.size_bytes, CHUNK_BYTES)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {"bytes": self.size_bytes, "sha256": list(self.sha256)}
        return plain if self.frames is None else {**plain, "frames": list(self.frames)}

    @classmethod
    def from_json(cls, fields: Any) -> ShardFile:
        """Restore from `to_json` and validate.

        Raises:
            ValueError: If it is damaged; also TypeError and KeyError.
        """
        checksums = tuple(fields["sha256"])
        if not all(_SHA256.fullmatch(item) for item in checksums):
            raise ValueError(checksums)
        frames = fields.get("frames")
        found = cls(_count(fields["bytes"]), checksums, None if frames is None else tuple(map(_count, frames)))
        sizes = found.chunk_sizes()
        if len(sizes) != len(checksums) or sum(sizes) != found.size_bytes:
            raise ValueError(fields)
        return found


@dataclass(frozen=True)
class Part:
    """Rows of a tensor, stored in a file under the tensor's name; a scalar counts as one row."""

    file: str
    first_row: int
    rows: int


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: its dtype by safetensors name, its shape, and its parts in order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Length of the first dimension."""
        return self.shape[0] if self.shape else 1

    def check(self, name: str) -> None:
        """Check that the parts make up the whole tensor.

        Raises:
            CheckpointError: If rows are missing, duplicated or beyond the end.
        """
        end = 0
        for part in self.parts:
            if part.first_row != end or part.rows < 0:
                break
            end += part.rows
        else:
            if end == self.rows and self.parts:
                return
        raise CheckpointError(f"the parts of {name} do not make up a tensor of shape {list(self.shape)}")


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: The step after which it was taken.
        files: Its files by name.
        tensors: Its tensors by name.
        shared: The state common to all ranks, encoded by `state_json.encode`.
        ranks: Each rank's own state.
    """

    step: int
    files: dict[str, ShardFile]
    tensors: dict[str, TensorEntry]
    shared: Any
    ranks: list[Any]

    def dump(self) -> str:
        """Serialize the manifest."""
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "parts": [[part.file, part.first_row, part.rows] for part in entry.parts],
            }
            for name, entry in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "step": self.step,
            "files": {name: file.to_json() for name, file in self.files.items()},
            "tensors": tensors,
            "shared": self.shared,
            "ranks": self.ranks,
        }
        return json.dumps({"sha256": _digest(content), "content": content})

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read and check a manifest.

        Raises:
            CheckpointError: If it is damaged, of another format, or inconsistent.
        """
        try:
            outer = json.loads(text)
            content = outer["content"]
            if _digest(content) != outer["sha256"]:
                raise CheckpointError(f"{NAME} is corrupt: its content does not match its checksum")
            if content["format"] != FORMAT:
                raise CheckpointError(f"{NAME} is of format {content['format']}, and this version reads {FORMAT}")
            files = {name: _file(name, fields) for name, fields in content["files"].items()}
            tensors = {name: _tensor(name, fields, files) for name, fields in content["tensors"].items()}
            if not isinstance(content["shared"], dict) or not isinstance(content["ranks"], list):
                raise TypeError
            return cls(_count(content["step"]), files, tensors, content["shared"], content["ranks"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{NAME} is not the manifest of a checkpoint, or only half of one") from None


def assemble(step: int, reports: Sequence[dict[str, Any]]) -> Manifest:
    """Build the manifest from the ranks' reports on their files.

    Raises:
        CheckpointError: If together they do not hold the whole state.
    """
    found: dict[str, list[Part]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    shared: Any = {}
    files = {}
    for rank, report in enumerate(reports):
        file = ShardFile.from_json(report["file"])
        file_name = shard_name(rank) + file.name_suffix
        files[file_name] = file
        for name, (dtype, shape, first_row, rows) in report["pieces"].items():
            found.setdefault(name, []).append(Part(file_name, first_row, rows))
            if kinds.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                raise CheckpointError(f"rank {rank} holds a {name} of another type or shape than the ranks before it")
        shared = merge(shared, merge(report["shared"]["replicated"], report["shared"]["owned"]))
    tensors = {}
    for name, parts in found.items():
        ordered = tuple(sorted(parts, key=lambda part: (part.first_row, part.rows)))
        tensors[name] = TensorEntry(*kinds[name], ordered)
        tensors[name].check(name)
    ranks = [report["own"] for report in reports]
    missing = sorted({*_names(shared), *_names(ranks)} - set(tensors))
    if missing:
        raise CheckpointError(f"the ranks do not hold the same state: no rank wrote {missing[0]}")
    return Manifest(step, files, tensors, shared, ranks)


def merge(first: Any, second: Any) -> Any:
    """Merge two encoded states: dicts are joined; for any other conflict the first wins."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first
    joined = {key: merge(part, second[key]) if key in second else part for key, part in first.items()}
    return {**joined, **{key: part for key, part in second.items() if key not in first}}


def _names(outline: Any) -> set[str]:
    if isinstance(outline, dict):
        if "$tensor" in outline:
            return {outline["$tensor"]}
        return set().union(*(_names(part) for part in outline.values()))
    return set().union(*(_names(part) for part in outline)) if isinstance(outline, list) else set()


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _file(name: str, fields: Any) -> ShardFile:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{NAME} names a file {name!r}, which is not a checkpoint's")
    file = ShardFile.from_json(fields)
    if name.endswith(".zst") != (file.frames is not None):
        raise ValueError(name)
    return file


def _tensor(name: str, fields: Any, files: dict[str, ShardFile]) -> TensorEntry:
    parts = tuple(Part(file, _count(first_row), _count(rows)) for file, first_row, rows in fields["parts"])
    for part in parts:
        if part.file not in files:
            raise CheckpointError(f"{NAME} places {name} in {part.file!r}, which it does not list")
    entry = TensorEntry(str(fields["dtype"]), tuple(_count(length) for length in fields["shape"]), parts)
    entry.check(name)
    if math.prod(entry.shape) > 2**62:
        raise ValueError(entry.shape)
    return entry
