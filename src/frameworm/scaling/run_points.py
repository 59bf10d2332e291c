"""Turns a folder of stored runs into comparable points, and a list of excluded runs with the reasons."""

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
# Words in a run's name that say where it ran, not what it is.
_PLACE_WORD = re.compile(r"(single|multi|gpus?|cpus?|ddp|nodes?|ranks?|\d+(gpus?|cpus?|ep|epochs?|nodes?|ranks?)?)")


@dataclass(frozen=True, slots=True)
class Excluded:
    """A run that is listed but does not count."""

    run: str
    kind: str  # incomplete, unreadable, not comparable
    reason: str


@dataclass(frozen=True, slots=True)
class Collection:
    """Points for `analyse`, and the runs that were excluded."""

    points: tuple[Point, ...]
    excluded: tuple[Excluded, ...] = ()
    notes: tuple[str, ...] = ()


def collect(
    root: str | os.PathLike[str], warmup: int = DEFAULT_WARMUP, datasets: Sequence[str] | None = None
) -> Collection:
    """Read every run below a folder.

    Args:
        root: Searched with its subfolders; it may be a run itself.
        warmup: Epochs to ignore at the beginning of each run; if no run of a data set has others, they count, with a
            note.
        datasets: Only these, ignoring case and underscores; default: all.

    Raises:
        RunFolderError: There is no such folder, it contains no run, or none of these data sets.
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
    """Return run folders at or below `root`, sorted by path; runs are not searched for further runs."""
    found: list[RunFolder] = []
    seen: set[Path] = set()

    def walk(path: Path, depth: int) -> None:
        # Folders may be links to a place already seen or to one of their own parents.
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
        # A config alone may belong to a whole sweep; if there is no run below it, it belongs to a run that got no
        # further.
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
    """Normalise a data set's name to letters and digits in lower case, so that AGNews equals ag_news."""
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
    """Group runs of one configuration into strong and weak scaling curves.

    Runs on one device share their curve with every kind of communication. Runs that fit no curve of two world sizes are
    listed as excluded if their data set has such a curve, and stand alone otherwise.
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
    """Make points with a name for each curve; curves of one data set never share name and mode."""
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
    """Return what a run's name adds to its data set and place: `optimized` in ag_news_ddp_4gpu_optimized."""
    of_dataset = set(re.split(r"[_\W]+", run.dataset.lower())) | {plain_name(run.dataset)}
    words = [word for word in re.split(r"[_\W]+", run.title) if word and word.lower() not in of_dataset]
    return " ".join(word for word in words if not _PLACE_WORD.fullmatch(word.lower()))


def _why_not(run: RunFacts, curves: Sequence[Sequence[RunFacts]]) -> str:
    """Describe how a run differs from the most similar curve."""
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
    """Explain why runs of one data set at several world sizes make no curve."""
    notes = []
    for members in _partition(standing, lambda run: run.dataset):
        sizes = {run.world_size for run in members}
        if len(sizes) > 1:
            first, last = members[0], next(run for run in members if run.world_size != members[0].world_size)
            notes.append(f"{last.name} cannot be compared with {first.name}: {'; '.join(_apart(last, [first]))}")
    return notes


def _partition(runs: Iterable[RunFacts], key: object) -> list[list[RunFacts]]:
    """Group runs with equal keys, keeping their order."""
    groups: dict[object, list[RunFacts]] = {}
    assert callable(key)
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())
