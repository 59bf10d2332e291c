"""Where two runs part: the first step whose loss is not the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import StepReader


@dataclass(frozen=True, slots=True)
class Parting:
    """How far two runs are the same.

    Attributes:
        compared_steps: Steps that both have recorded, on the ranks that both have.
        step: The first step that is not the same in both; None: all are.
        rank: Whose step that is.
        what: `loss`, or `gradient norm` where the losses are still the same.
    """

    compared_steps: int
    step: int | None = None
    rank: int | None = None
    what: str | None = None
    before: float | None = None
    after: float | None = None


def first_parting(before: RunFolder, after: RunFolder) -> Parting | None:
    """Compare the losses of two runs step by step; None where there is no step that both have recorded.

    Raises:
        RunFolderError: Their steps cannot be read.
    """
    mine, theirs = before.step_files(), after.step_files()
    parts = [_of_rank(rank, StepReader(mine[rank]), StepReader(theirs[rank])) for rank in mine if rank in theirs]
    compared = max((part.compared_steps for part in parts), default=0)
    if not compared:
        return None
    parted = [part for part in parts if part.step is not None]
    # In the same step a loss tells more than a norm: the norm is of all ranks.
    first = min(parted, key=lambda part: (part.step, part.what != "loss", part.rank), default=None)
    return Parting(compared) if first is None else first


def _of_rank(rank: int, before: StepReader, after: StepReader) -> Parting:
    theirs = iter(after)
    other = next(theirs, None)
    compared = 0
    for mine in before:
        other = _forward(theirs, other, mine.step)
        if other is None:
            break
        if other.step != mine.step:
            continue
        compared += 1
        for what, one, two in (("loss", mine.loss, other.loss), ("gradient norm", mine.grad_norm, other.grad_norm)):
            # Text tells -0.0 from 0.0 and takes one nan for another.
            if repr(one) != repr(two):
                return Parting(compared, mine.step, rank, what, one, two)
    return Parting(compared)


def _forward(steps: Iterator[StepRecord], step: StepRecord | None, wanted: int) -> StepRecord | None:
    """The first of the steps, beginning with the one at hand, that is not before the wanted one."""
    while step is not None and step.step < wanted:
        step = next(steps, None)
    return step
