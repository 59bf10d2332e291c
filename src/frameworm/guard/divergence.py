"""Where two runs diverge: the first step whose loss is not bit-identical."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from frameworm.errors import RunFolderError
from frameworm.records.reading import open_plain
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import StepReader, StepSeeker

COMPARED_BYTES = 16 * 2**20  # steps of both runs: what can be read step by step in about a second
_MOST_PROBES = 1_024  # of all ranks together
_FEWEST_PROBES = 8  # per rank


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far two runs are identical.

    Attributes:
        compared_steps: Steps that both have recorded, on the ranks that both have.
        step: The first step that differs; None if none does.
        rank: Rank of that step.
        what: `loss`, or `gradient norm` if the losses are still identical.
        before: Its value in the first run.
        after: Its value in the other run.
        is_searched: True if the files are large, so that the step was searched for and not every step was compared.
    """

    compared_steps: int
    step: int | None = None
    rank: int | None = None
    what: str | None = None
    before: float | None = None
    after: float | None = None
    is_searched: bool = False


def first_divergence(before: RunFolder, after: RunFolder, most_bytes: int | None = COMPARED_BYTES) -> Divergence | None:
    """Compare the losses of two runs step by step; None if there is no step that both have recorded.

    Args:
        before: A run.
        after: Another run.
        most_bytes: In larger files the step is searched for: first in steps spread over the run, then by bisection
            before the first of them that differs. Differences in single steps between them are missed. None: never
            search.

    Raises:
        RunFolderError: The steps cannot be read.
    """
    mine, theirs = before.step_files(), after.step_files()
    ranks = [rank for rank in mine if rank in theirs]
    try:
        size = sum(files[rank].stat().st_size for rank in ranks for files in (mine, theirs))
        if most_bytes is None or size <= most_bytes:
            parts = [_of_rank(rank, StepReader(mine[rank]), StepReader(theirs[rank])) for rank in ranks]
        else:
            parts = _search({rank: (mine[rank], theirs[rank]) for rank in ranks})
    except OSError as error:
        raise RunFolderError(f"cannot read the steps of {before.path} and {after.path}: {error}") from error
    compared = max((part.compared_steps for part in parts), default=0)
    if not compared:
        return None
    is_searched = any(part.is_searched for part in parts)
    parted = [part for part in parts if part.step is not None]
    # Within one step a loss tells more than a norm, because the norm covers all ranks.
    first = min(parted, key=lambda part: (part.step, part.what != "loss", part.rank), default=None)
    return Divergence(compared, is_searched=is_searched) if first is None else first


def _of_rank(rank: int, before: StepReader, after: StepReader) -> Divergence:
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
        found = _difference(compared, rank, mine, other)
        if found is not None:
            return found
    return Divergence(compared)


def _search(files: Mapping[int, tuple[Path, Path]]) -> list[Divergence]:
    """Find the divergence on some ranks from a few of their steps; it includes the rank that diverges first.

    Runs that diverge stay different, because every later step starts with other weights. So the first probed step that
    differs lies after the divergence, and bisection finds it. A rank whose steps are identical up to where another rank
    diverges does not diverge before it.
    """
    parts: list[Divergence] = []
    probes = max(_FEWEST_PROBES, _MOST_PROBES // len(files))
    until: int | None = None
    for rank, (before, after) in files.items():
        with open_plain(before) as file, open_plain(after) as other_file:
            search = _Search(rank, StepSeeker(file), StepSeeker(other_file))
            parts.append(search.first(probes) if until is None else search.before(until))
        until = parts[-1].step if parts[-1].step is not None else until
    return parts


class _Search:
    """Searches for the step from which on two files differ."""

    def __init__(self, rank: int, mine: StepSeeker, theirs: StepSeeker) -> None:
        self._rank = rank
        self._mine = mine
        self._theirs = theirs
        self._compared = 0

    def first(self, probes: int) -> Divergence:
        """Find the divergence by probing steps spread over the run, then bisecting."""
        firsts = [step for seeker in (self._mine, self._theirs) if (step := seeker.first()) is not None]
        lasts = [step for seeker in (self._mine, self._theirs) if (step := seeker.last()) is not None]
        if len(firsts) < 2:
            return Divergence(0, is_searched=True)
        low, high = max(step.step for step in firsts), min(step.step for step in lasts)
        same = low - 1
        for index in range(probes + 1):
            number = low + (high - low) * index // probes
            found = self._at(number)
            if found is not None:
                return self._between(same, found)
            same = number
        return Divergence(self._compared, is_searched=True)

    def before(self, step: int) -> Divergence:
        """Find the divergence if it is at `step` or before it."""
        found = self._at(step - 1)
        if found is not None and found.step is not None and found.step < step:
            return self._between(0, found)
        return self._at(step) or Divergence(self._compared, is_searched=True)

    def _between(self, same: int, found: Divergence) -> Divergence:
        """Bisect for the first differing step between an identical one and a differing one."""
        while found.step is not None and found.step - same > 1:
            middle = (same + found.step) // 2
            earlier = self._at(middle)
            if earlier is None or earlier.step == found.step:
                same = middle
            else:
                found = earlier
        return replace(found, compared_steps=self._compared)

    def _at(self, number: int) -> Divergence | None:
        """Compare the first step from this number on that both have recorded; None if it is identical or missing."""
        mine, theirs = self._mine.at(number), self._theirs.at(number)
        while mine is not None and theirs is not None and mine.step != theirs.step:
            if mine.step < theirs.step:
                mine = self._mine.at(theirs.step)
            else:
                theirs = self._theirs.at(mine.step)
        if mine is None or theirs is None:
            return None
        self._compared += 1
        return _difference(self._compared, self._rank, mine, theirs, is_searched=True)


def _difference(
    compared: int, rank: int, mine: StepRecord, other: StepRecord, *, is_searched: bool = False
) -> Divergence | None:
    """Compare two records of the same step; None if they are identical."""
    for what, one, two in (("loss", mine.loss, other.loss), ("gradient norm", mine.grad_norm, other.grad_norm)):
        # The text distinguishes -0.0 from 0.0 and treats all nan as equal.
        if repr(one) != repr(two):
            return Divergence(compared, mine.step, rank, what, one, two, is_searched)
    return None


def _forward(steps: Iterator[StepRecord], step: StepRecord | None, wanted: int) -> StepRecord | None:
    """Advance to the first step, starting with the current one, that is not before `wanted`."""
    while step is not None and step.step < wanted:
        step = next(steps, None)
    return step
