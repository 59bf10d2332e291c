"""Cells: one option of each axis. Which exist, which may be refused and why, and how few hold every pair of options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from options import BATCHES, LAYERS, LOADERS, LOSSES, OPTIMIZERS, OUTPUTS, SCHEDULERS

SHARDED = ("zero2", "zero3")
AXES: dict[str, tuple[Any, ...]] = {
    "output": tuple(OUTPUTS),
    "batch": tuple(BATCHES),
    "loader": tuple(LOADERS),
    "optimizer": tuple(OPTIMIZERS),
    "scheduler": tuple(SCHEDULERS),
    "loss": tuple(LOSSES),
    "layer": tuple(LAYERS),
    "strategy": ("single", "ddp", "zero1", *SHARDED),
    "accumulation": (1, 3),
    "resumed": (False, True),
}


@dataclass(frozen=True)
class Cell:
    """One way to train; each field is an axis."""

    output: str = "tensor"
    batch: str = "tuple"
    loader: str = "map"
    optimizer: str = "SGD momentum"
    scheduler: str = "none"
    loss: str = "function"
    layer: str = "plain"
    strategy: str = "single"
    accumulation: int = 1
    resumed: bool = False

    def __str__(self) -> str:
        words = [
            str(getattr(self, field.name)) for field in fields(self) if field.name not in ("accumulation", "resumed")
        ]
        return ", ".join([*words, f"accumulation {self.accumulation}", *(["resumed"] if self.resumed else [])])

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return 1 if self.strategy == "single" else 2

    @property
    def bitwise(self) -> bool:
        """Whether the same numbers are added in the same order as in a plain loop."""
        return self.strategy == "single" and self.accumulation == 1


class Rule(NamedTuple):
    """Options that belong together, and why."""

    options: Mapping[str, tuple[Any, ...]]
    reason: str

    def applies(self, chosen: Mapping[str, Any]) -> bool:
        """Whether all of its options are among the chosen ones."""
        return all(axis in chosen and chosen[axis] in options for axis, options in self.options.items())


IMPOSSIBLE = (
    Rule({"layer": ("sparse",), "optimizer": ("AdamW",)}, "torch's AdamW does not take sparse gradients"),
    Rule({"loss": ("none given",), "output": ("tuple",)}, "nothing says which part of a tuple holds the scores"),
    Rule({"loss": ("none given",), "batch": ("dataclass", "images")}, "nothing says where the batch holds its classes"),
)


class Refusal(NamedTuple):
    """A refusal that is right: which cells, what the message must say, and why nothing better is possible."""

    rule: Rule
    message: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        Rule(
            {"layer": ("sparse",), "strategy": SHARDED},
            "torch's fully_shard cannot divide sparse gradients, so a plain loop cannot either",
        ),
        "sparse",
    ),
)


def excluded(chosen: Mapping[str, Any]) -> str | None:
    """Why these options, of all or some axes, cannot be combined; None where they can."""
    return next((rule.reason for rule in IMPOSSIBLE if rule.applies(chosen)), None)


def refusal_of(cell: Cell) -> Refusal | None:
    """The refusal that this cell may get, if any."""
    return next((item for item in REFUSALS if item.rule.applies(vars(cell))), None)


Chosen = tuple[tuple[str, Any], ...]  # some axes with one option each, in the order of AXES


def combinations(strength: int, axes: Mapping[str, Sequence[Any]] = AXES) -> set[Chosen]:
    """All combinations of the options of so many axes that are possible."""
    found = set()
    for names in itertools.combinations(axes, strength):
        for options in itertools.product(*(axes[name] for name in names)):
            chosen = tuple(zip(names, options))
            if excluded(dict(chosen)) is None:
                found.add(chosen)
    return found


def cover(
    strength: int, *, seed: int = 0, most: int | None = None, axes: Mapping[str, Sequence[Any]] = AXES
) -> tuple[list[Cell], int]:
    """Few cells that together hold every possible combination of `strength` options.

    Each cell begins with a combination that is still missing and takes, axis by axis in random order, the option that
    adds most missing ones; of several such cells the best is kept. The same seed gives the same cells.

    Returns:
        The cells, at most `most`, and how many combinations they leave out.
    """
    draw = random.Random(seed)
    missing = combinations(strength, axes)
    waiting = sorted(missing, key=str)
    draw.shuffle(waiting)
    cells: list[Cell] = []
    while missing and (most is None or len(cells) < most):
        while waiting[-1] not in missing:
            waiting.pop()
        tries = (_fill(dict(waiting[-1]), strength, missing, axes, draw) for _ in range(4))
        best = max(tries, key=lambda chosen: len(_inside(chosen, strength, axes) & missing))
        missing -= _inside(best, strength, axes)
        cells.append(Cell(**best))
    return cells, len(missing)


def _inside(chosen: Mapping[str, Any], strength: int, axes: Mapping[str, Any]) -> set[Chosen]:
    """The combinations that a cell holds."""
    return set(itertools.combinations(((name, chosen[name]) for name in axes if name in chosen), strength))


def _fill(
    chosen: dict[str, Any], strength: int, missing: set[Chosen], axes: Mapping[str, Any], draw: random.Random
) -> dict[str, Any]:
    rest = [name for name in axes if name not in chosen]
    draw.shuffle(rest)
    for name in rest:
        possible = [option for option in axes[name] if excluded({**chosen, name: option}) is None]
        draw.shuffle(possible)

        def gain(option: Any, name: str = name) -> int:
            others = {**chosen, name: option}
            return sum(1 for item in _inside(others, strength, axes) if (name, option) in item and item in missing)

        chosen[name] = max(possible, key=gain)
    return chosen
