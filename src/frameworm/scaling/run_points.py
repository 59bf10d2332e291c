"""From a folder of stored runs to points that may be compared, and a list of those that may not, with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frameworm.errors import RunFolderError
from frameworm.records.store import RunFolder
from frameworm.scaling.points import Mode, Point
from frameworm.scaling.run_facts import RunFacts, differences, read_run

DEFAULT_WARMUP = 1
MOST_DEPTH = 6
INCOMPLETE, UNREADABLE, NOT_COMPARABLE = "incomplete", "unreadable", "not comparable"
# Words of a run's name that say where it ran, not what it is.
_PLACE_WORD = re.compile(r"(single|multi|gpus?|cpus?|ddp|nodes?|ranks?|\d+(gpus?|cpus?|ep|epochs?|nodes?|ranks?)?)")


@dataclass(frozen=True, slots=True)
class Excluded:
    """A run that is listed and not counted."""

    run: str
    kind: str  # incomplete, unreadable, not comparable
    reason: str


@dataclass(frozen=True, slots=True)
class Collection:
    """Points for `analyse`, and what was left out of them."""

    points: tuple[Point, ...]
    excluded: tuple[Excluded, ...] = ()
    notes: tuple[str, ...] = ()


def collect(
    root: str | os.PathLike[str], warmup: int = DEFAULT_WARMUP, datasets: Sequence[str] | None = None
) -> Collection:
    """Read every run below a folder.

    Args:
        root: Searched with its subfolders; may be a run itself.
        warmup: Epochs at the beginning of each run that do not count; where no run of a data set has others, they do,
            with a note.
        datasets: Only these, written in any case, with or without underscores; all unless given.

    Raises:
        RunFolderError: There is no such folder, it holds no run, or none of these data sets.
    """
    root = Path(root)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise RunFolderError(f"{root} {what}; give the folder that holds the runs")
    folders = find_all_runs(root)
    if not folders:
        raise RunFolderError(
            f"{root} holds no runs; `frameworm train --out {root}/NAME` or `frameworm scale` make some"
        )
    facts, excluded = _read_all(folders, root, warmup)
    if datasets:
        wanted = {plain_name(name) for name in datasets}
        there = sorted({run.dataset for run in facts})
        missing = [name for name in datasets if plain_name(name) not in {plain_name(item) for item in there}]
        if missing and not excluded:
            raise RunFolderError(
                f"{root} has no runs of {', '.join(missing)}; it has {', '.join(there) or 'no finished ones'}"
            )
        facts = [run for run in facts if plain_name(run.dataset) in wanted]
    measured = {run.dataset for run in facts if not run.notes}
    for run in facts:
        if run.notes and run.dataset in measured:
            excluded.append(Excluded(run.name, INCOMPLETE, run.notes[0].partition(":")[0] + ", and others have more"))
    return group_runs([run for run in facts if not (run.notes and run.dataset in measured)], excluded)


def find_all_runs(root: Path) -> list[RunFolder]:
    """Run folders at or below `root`, by path; runs are not searched for further runs."""
    found: list[RunFolder] = []
    seen: set[Path] = set()

    def walk(path: Path, depth: int) -> None:
        # Folders may be links, to a place already seen or to one of their own parents.
        place = path.resolve()
        if place in seen:
            return
        seen.add(place)
        folder = RunFolder(path)
        if folder.summary_json.exists() or folder.step_files():
            found.append(folder)
            return
        before = len(found)
        if depth < MOST_DEPTH:
            for child in _folders(path):
                walk(child, depth + 1)
        # A config alone may be that of a whole sweep; where no run is below it, it is of a run that got no further.
        if len(found) == before and folder.holds_run():
            found.append(folder)

    walk(root, 0)
    return found


def _folders(path: Path) -> list[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError:
        return []
    return [path / name for name in names if not name.startswith(".") and name != "checkpoints"]


def plain_name(name: str) -> str:
    """A data set's name without case and marks, so that AGNews is ag_news."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_all(folders: Iterable[RunFolder], root: Path, warmup: int) -> tuple[list[RunFacts], list[Excluded]]:
    facts: list[RunFacts] = []
    excluded: list[Excluded] = []
    for folder in folders:
        name = os.path.relpath(folder.path, root) if folder.path != root else folder.path.name
        if not folder.summary_json.exists():
            excluded.append(Excluded(name, INCOMPLETE, "no summary.json: it still runs, or was killed"))
            continue
        try:
            run = read_run(folder, name, warmup)
            run.point(name, "strong", [run.measurement])
        except RunFolderError as error:
            excluded.append(Excluded(name, UNREADABLE, str(error)))
            continue
        except (TypeError, ValueError, AttributeError) as error:
            reason = f"{folder.summary_json} holds values of the wrong kind: {error}"
            excluded.append(Excluded(name, UNREADABLE, reason))
            continue
        if run.status != "completed":
            excluded.append(Excluded(name, INCOMPLETE, f"its status is {run.status}, not completed"))
        elif not run.measurement.samples_per_s:
            excluded.append(Excluded(name, INCOMPLETE, "no speed was measured: too few steps"))
        else:
            facts.append(run)
    return facts, excluded


def group_runs(facts: Sequence[RunFacts], excluded: Sequence[Excluded] = ()) -> Collection:
    """Put runs of one configuration together, as strong and weak scaling curves.

    Runs of one device share their curve with every way of communicating; runs that go into no curve of two world sizes
    are listed if their data set has such a curve, and stand alone if it has none.
    """
    left_out = list(excluded)
    curves: list[tuple[Mode, list[RunFacts]]] = []
    alone: list[RunFacts] = []
    for family in _partition(facts, lambda run: run.work_key):
        used: set[str] = set()
        singles = [run for run in family if run.world_size == 1]
        variants = _partition([run for run in family if run.world_size > 1], lambda run: run.sending_key)
        for variant in variants or [[]]:
            for mode, members in _curves_of([*singles, *variant]):
                curves.append((mode, members))
                used.update(run.name for run in members)
        alone += [run for run in family if run.name not in used]
    with_curve = {run.dataset for _, members in curves for run in members}
    for run in alone:
        if run.dataset in with_curve:
            rivals = [members for _, members in curves if members[0].dataset == run.dataset]
            left_out.append(Excluded(run.name, NOT_COMPARABLE, _why_not(run, rivals)))
    standing = [run for run in alone if run.dataset not in with_curve]
    for members in _partition(standing, lambda run: (run.work_key, run.sending_key, run.world_size, run.global_batch)):
        curves.append(("strong", members))
    notes = [f"{run.name}: {note}" for run in facts for note in run.notes]
    return Collection(tuple(_points(curves)), tuple(left_out), tuple(notes + _strangers(standing)))


def _curves_of(runs: Sequence[RunFacts]) -> list[tuple[Mode, list[RunFacts]]]:
    found: list[tuple[Mode, list[RunFacts]]] = []
    for members in _partition(runs, lambda run: run.global_batch):
        if len({run.world_size for run in members}) > 1 and members[0].global_batch is not None:
            found.append(("strong", members))
    for members in _partition(runs, lambda run: run.device_batch):
        if len({run.world_size for run in members}) > 1 and members[0].device_batch is not None:
            found.append(("weak", members))
    return found


def _points(curves: Sequence[tuple[Mode, list[RunFacts]]]) -> list[Point]:
    """Points with a name for each curve; curves of one data set never share name and mode."""
    points: list[Point] = []
    taken: set[tuple[str, str, Mode]] = set()
    for mode, members in curves:
        first = min(members, key=lambda run: (run.world_size, run.name))
        name = variant_name(first)
        several = [run for run in members if run.world_size > 1]
        batch = f"batch {first.global_batch}" if mode == "strong" else f"batch {first.device_batch} per device"
        for addition in ("", several[0].sending if several else "", batch, *(f"({n})" for n in range(2, 1000))):
            if (first.dataset, f"{name} {addition}".strip(), mode) not in taken:
                name = f"{name} {addition}".strip()
                break
        taken.add((first.dataset, name, mode))
        for same_size in _partition(members, lambda run: run.world_size):
            points.append(same_size[0].point(name, mode, [run.measurement for run in same_size]))
    return points


def variant_name(run: RunFacts) -> str:
    """What a run's name says beyond its data set and where it ran: `optimized` of ag_news_ddp_4gpu_optimized."""
    of_dataset = set(re.split(r"[_\W]+", run.dataset.lower())) | {plain_name(run.dataset)}
    words = [word for word in re.split(r"[_\W]+", run.title) if word and word.lower() not in of_dataset]
    return " ".join(word for word in words if not _PLACE_WORD.fullmatch(word.lower()))


def _why_not(run: RunFacts, curves: Sequence[Sequence[RunFacts]]) -> str:
    """What sets a run apart from the curve it is most like."""
    found = [_apart(run, members) for members in curves]
    nearest = min(found, key=len)
    if not nearest:
        return "it differs from the runs of its data set in what cannot be named"
    return "; ".join(nearest[:3]) + (f"; and {len(nearest) - 3} more" if len(nearest) > 3 else "")


def _apart(run: RunFacts, members: Sequence[RunFacts]) -> list[str]:
    other = next((item for item in members if item.world_size == run.world_size), None)
    other = other or max(members, key=lambda item: item.world_size)
    found = differences(run, other)
    if not found and run.global_batch != other.global_batch:
        found.append(f"global batch {run.global_batch}, where the others have {other.global_batch}")
    return found


def _strangers(standing: Sequence[RunFacts]) -> list[str]:
    """Why runs of one data set and several world sizes still make no curve."""
    notes = []
    for members in _partition(standing, lambda run: run.dataset):
        sizes = {run.world_size for run in members}
        if len(sizes) > 1:
            first, last = members[0], next(run for run in members if run.world_size != members[0].world_size)
            notes.append(f"{last.name} cannot be compared with {first.name}: {'; '.join(_apart(last, [first]))}")
    return notes


def _partition(runs: Iterable[RunFacts], key: object) -> list[list[RunFacts]]:
    """Runs with equal keys together, in the order they come."""
    groups: dict[object, list[RunFacts]] = {}
    assert callable(key)
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())
