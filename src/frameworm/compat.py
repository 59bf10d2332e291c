"""Deprecated spellings: the old name, its replacement, and the version that removes it.

Each use warns and names the replacement. Pairs of documented names (`OptimizedDataLoader.create` and
`create_dataloader`, `training.micro_batch` and `batch_size`) are not deprecated: both stay, and neither warns.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)


@dataclass(frozen=True)
class OldSpelling:
    """A deprecated spelling.

    Attributes:
        old: The deprecated spelling.
        new: Its replacement.
        removed_in: The first version that no longer accepts the old one.
    """

    old: str
    new: str
    removed_in: str

    def __str__(self) -> str:
        return f"{self.old} is an old spelling and will be removed in frameworm {self.removed_in}: write {self.new}"


# Deprecated keywords of `Trainer`; for `DistributedTrainer`, the first two are regular keywords.
RENAMED_KEYWORDS = {
    "gradient_accumulation_steps": OldSpelling(
        "Trainer(gradient_accumulation_steps=...)", "Trainer(accumulation=...)", "0.3"
    ),
    "device_type": OldSpelling("Trainer(device_type=...)", "Trainer(device=...)", "0.3"),
}
_NEW_KEYWORDS = {"gradient_accumulation_steps": "accumulation", "device_type": "device"}
MIXED_PRECISION_KEYWORDS = {
    name: OldSpelling(f"Trainer({name}=True)", "trainer.enable_mixed_precision()", "0.3")
    for name in ("use_amp", "enable_mixed_precision")
}
PREDICT_SCALING = OldSpelling("predict --scaling weak", "predict --weak", "0.3")
EVERY = (*RENAMED_KEYWORDS.values(), *MIXED_PRECISION_KEYWORDS.values(), PREDICT_SCALING)


def warn_of(spelling: OldSpelling) -> None:
    """Issue a DeprecationWarning for the line outside this package that used an old spelling."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(str(spelling), DeprecationWarning, stacklevel=level)


def renamed_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """Return keyword settings with old names replaced by new ones, and warn about each."""
    for name in RENAMED_KEYWORDS.keys() & given.keys():
        warn_of(RENAMED_KEYWORDS[name])
    return {_NEW_KEYWORDS.get(name, name): value for name, value in given.items()}


def take_mixed_precision(given: dict[str, Any]) -> bool:
    """Remove the old keywords for mixed precision from settings; return True if any of them enables it."""
    found = [name for name in MIXED_PRECISION_KEYWORDS if name in given]
    for name in found:
        warn_of(MIXED_PRECISION_KEYWORDS[name])
    switched_on = [bool(given.pop(name)) for name in found]
    return any(switched_on)
