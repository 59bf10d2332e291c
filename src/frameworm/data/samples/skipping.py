"""Samples that cannot be read: the next one is used instead, and they are logged."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from frameworm.errors import DataError

MOST_TRIES = 100
MOST_NAMED = 10


class SkippedSample(NamedTuple):
    """A sample that was skipped, and why."""

    number: int
    reason: str


class SkippedLog:
    """A file in which all processes of a loader log skipped samples; deleted when its creator is gone."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="frameworm-skipped-")
        os.close(descriptor)
        self._path = Path(name)
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path = state["_path"]

    def add(self, index: int, error: BaseException) -> None:
        """Log a sample; the line is short enough for one atomic write."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        line = json.dumps([index, reason]) + "\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def read(self) -> list[SkippedSample]:
        """The skipped samples, each once, in the order in which they were first met."""
        found: dict[int, str] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            for line in self._path.read_text(encoding="utf-8").splitlines():
                index, reason = json.loads(line)
                found.setdefault(index, reason)
        return [SkippedSample(index, reason) for index, reason in found.items()]


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


class SkippingDataset(Dataset[Any]):
    """A map-style data set that replaces unreadable samples, so that batches keep their planned sizes."""

    def __init__(self, inner: Any, skipped: SkippedLog) -> None:
        self._inner = inner
        self._skipped = skipped
        self._many: Callable[[list[Any]], Any] | None = getattr(inner, "__getitems__", None)
        self._assembles = bool(getattr(inner, "assembles_batches", False))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._inner[index]
        except Exception as error:
            return self._another(index, error)

    def __getitems__(self, indices: list[Any]) -> Any:
        if self._many is not None:
            try:
                return self._many(indices)
            except Exception:
                if self._assembles:
                    raise  # it is unknown which sample of an assembled batch failed
        return [self[index] for index in indices]

    def _another(self, index: Any, error: Exception) -> Any:
        try:
            number, size = operator.index(index), len(self._inner)
        except TypeError:
            raise error from None
        for distance in range(1, min(MOST_TRIES, size)):
            self._skipped.add(number, error)
            number = (number + 1) % size
            try:
                return self._inner[number]
            except Exception as next_error:
                error = next_error
            if distance == min(MOST_TRIES, size) - 1:
                self._skipped.add(number, error)
        raise DataError(
            f"{min(MOST_TRIES, size)} samples in a row from {index} on cannot be read (data.on_error: skip); the last "
            f"problem was {type(error).__name__}: {error}"
        ) from error


def describe(skipped: list[list[SkippedSample]]) -> tuple[int, str | None]:
    """The number of samples skipped by all ranks, and a sentence that names the first few."""
    unread = sorted({item for part in skipped for item in part})
    if not unread:
        return 0, None
    named = ", ".join(f"{item.number} ({item.reason})" for item in unread[:MOST_NAMED])
    samples = "1 sample" if len(unread) == 1 else f"{len(unread)} samples"
    rest = "" if len(unread) <= MOST_NAMED else f" and {len(unread) - MOST_NAMED} more"
    text = f"{samples} could not be read; the next ones took their place (data.on_error: skip): {named}{rest}"
    return len(unread), text
