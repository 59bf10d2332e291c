"""When each gradient became ready in backward: `gradients.json` of a run on one device, used to predict many."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frameworm.errors import RunFolderError
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json

FILE_NAME = "gradients.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class GradientTime:
    """One parameter's gradient."""

    size_bytes: int
    shape: tuple[int, ...]
    ready_s: float | None  # from the start of the step's last backward; None if it was not seen


@dataclass(frozen=True)
class GradientTimes:
    """The gradients of a model, in the order of its parameters.

    Attributes:
        steps: Number of steps measured; times are their medians.
        backward_s: Duration of the last backward of those steps.
        note: Why there are no times, or a remark about them.
    """

    gradients: tuple[GradientTime, ...]
    steps: int = 0
    backward_s: float | None = None
    note: str | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def measured(self) -> bool:
        """True if every gradient was seen."""
        return bool(self.gradients) and all(item.ready_s is not None for item in self.gradients)

    def save(self, folder: Path) -> None:
        """Write the file into a run folder."""
        write_atomic(folder / FILE_NAME, json.dumps(asdict(self)) + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GradientTimes:
        """Read what `save` wrote; unknown keys of later versions are ignored."""
        return cls(
            tuple(
                GradientTime(
                    int(item["size_bytes"]),
                    tuple(int(side) for side in item["shape"]),
                    None if item.get("ready_s") is None else float(item["ready_s"]),
                )
                for item in data["gradients"]
            ),
            int(data.get("steps") or 0),
            None if data.get("backward_s") is None else float(data["backward_s"]),
            data.get("note"),
        )

    @classmethod
    def load(cls, folder: Path) -> GradientTimes | None:
        """Return the gradients of a run, or None if it recorded none.

        Raises:
            RunFolderError: The file is damaged.
        """
        path = folder / FILE_NAME
        try:
            return cls.from_dict(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path} is damaged: {error}; run the training again or remove the file") from error
