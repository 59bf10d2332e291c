"""The manifest of a checkpoint: which files belong to it, where each tensor lies in them, and all else as JSON.

It is the last file to be written, and the first to be read. Whatever it says is checked before anything is done with
it: it may name files of its own folder only, and the parts of a tensor must make up the whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frameworm.engine.outline import merge
from frameworm.errors import CheckpointError

FORMAT = 2
NAME = "manifest.json"
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class ShardFile:
    """A file of tensors, by what must be found in its place."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """Rows of a tensor in a file, where they go by the tensor's name; one without dimensions is one row."""

    file: str
    first_row: int
    rows: int


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: its type by safetensors' name, its shape, and the parts in order that make it up."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Length of the first dimension."""
        return self.shape[0] if self.shape else 1

    def check(self, name: str) -> None:
        """Refuse parts that do not make up the whole.

        Raises:
            CheckpointError: Rows are missing, there twice, or beyond the end.
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
    """What a checkpoint consists of.

    Attributes:
        step: After which step it was taken.
        files: Its files by name.
        tensors: Its tensors by name.
        shared: What is everybody's, as `outline.encode` gives it.
        ranks: What was each rank's.
    """

    step: int
    files: dict[str, ShardFile]
    tensors: dict[str, TensorEntry]
    shared: Any
    ranks: list[Any]

    def dump(self) -> str:
        """The manifest as text."""
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
            "files": {name: {"bytes": file.size_bytes, "sha256": file.sha256} for name, file in self.files.items()},
            "tensors": tensors,
            "shared": self.shared,
            "ranks": self.ranks,
        }
        return json.dumps({"sha256": _digest(content), "content": content})

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read and check a manifest.

        Raises:
            CheckpointError: It is damaged, of another format, or contradicts itself.
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
    """The manifest from what the ranks reported of their shares (see `describe`).

    Raises:
        CheckpointError: Together they do not hold the whole state.
    """
    found: dict[str, list[Part]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    shared: Any = {}
    for rank, report in enumerate(reports):
        for name, (dtype, shape, first_row, rows) in report["pieces"].items():
            found.setdefault(name, []).append(Part(shard_name(rank), first_row, rows))
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
        raise CheckpointError(f"the ranks do not hold the same state: nobody wrote {missing[0]}")
    files = {shard_name(rank): ShardFile(report["bytes"], report["sha256"]) for rank, report in enumerate(reports)}
    return Manifest(step, files, tensors, shared, ranks)


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
        raise CheckpointError(f"{NAME} names a file {name!r}, which is none of a checkpoint")
    if not _SHA256.fullmatch(fields["sha256"]):
        raise ValueError(fields["sha256"])
    return ShardFile(_count(fields["bytes"]), fields["sha256"])


def _tensor(name: str, fields: Any, files: dict[str, ShardFile]) -> TensorEntry:
    parts = tuple(Part(file, _count(first_row), _count(rows)) for file, first_row, rows in fields["parts"])
    for part in parts:
        if part.file not in files:
            raise CheckpointError(f"{NAME} looks for {name} in {part.file!r}, which is none of its files")
    entry = TensorEntry(str(fields["dtype"]), tuple(_count(length) for length in fields["shape"]), parts)
    entry.check(name)
    if math.prod(entry.shape) > 2**62:
        raise ValueError(entry.shape)
    return entry
