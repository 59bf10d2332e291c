"""Runs in object storage as local folders to read from: records at once, checkpoints when a verb needs them.

The copies are in the user's private folder for notes between processes. Only changed objects are copied again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from frameworm.errors import RunFolderError, StorageError
from frameworm.records.atomic import private_folder, refuse_link, write_atomic
from frameworm.records.objects.place import Facts, Place, check_url, is_url, last_part
from frameworm.records.reading import read_json
from frameworm.records.store import RunFolder

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
OWNER = "owner.json"
SOURCE = ".storage.json"
ANSWER_S = 60.0
_SEEN = ".seen.json"
_PART = re.compile(
    rf"{CHECKPOINTS}/(step-\d{{8,18}}(?:\.\d{{1,6}})?)/(manifest\.json|rank-\d{{5,9}}\.safetensors(?:\.zst)?)"
)
_FEW = re.compile(r"config\.yaml|summary\.json")


def parts_of_checkpoints(names: list[str]) -> dict[str, set[str]]:
    """Return the checkpoints among object names, complete or not, with the names of their files."""
    found: dict[str, set[str]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match:
            found.setdefault(match[1], set()).add(match[2])
    return found


def age_of(checkpoint: str) -> tuple[int, int]:
    """Step and attempt of a checkpoint, from its name."""
    step, _, attempt = checkpoint.removeprefix("step-").partition(".")
    return int(step), int(attempt or 0)


def whole_checkpoints(place: Place) -> list[str]:
    """Return the complete checkpoints, oldest first. The manifest is written last, so one with a manifest is complete.

    Raises:
        StorageError: The objects cannot be listed.
    """
    parts = parts_of_checkpoints(list(place.find(CHECKPOINTS)))
    return sorted((name for name, files in parts.items() if MANIFEST in files), key=age_of)


def records_of(names: Mapping[str, Facts]) -> dict[str, Facts]:
    """Select the objects of a run that a reader of records needs."""
    return {name: facts for name, facts in names.items() if "/" not in name and name not in (OWNER, CHECKPOINTS)}


def holds_run(names: Iterable[str]) -> bool:
    """True if object names are those of a run."""
    first = ("config.yaml", "summary.json")
    return any(name in first or name.startswith(("steps-rank", f"{CHECKPOINTS}/")) for name in names)


def local_copy(url: str) -> Path:
    """Return the folder for the local copy of a URL.

    Raises:
        RunFolderError: There is no private folder for it.
    """
    url = check_url(url)
    try:
        folder = private_folder() / "objects" / hashlib.sha256(url.encode()).hexdigest()[:16] / last_part(url)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"no place for a copy of {url}: {error.strerror or error}; set TMPDIR") from None
    return folder


def copy_records(place: Place, folder: Path) -> None:
    """Update the records in a folder from those in storage.

    Raises:
        StorageError: Storage refuses the request, or there is no run.
    """
    names = place.find()
    if not holds_run(names):
        raise StorageError(f"{place.url} holds no run; `frameworm runs URL` lists the runs under a URL", missing=True)
    _copy(place, folder, records_of(names), names)


def _copy(place: Place, folder: Path, names: Mapping[str, Facts], there: Collection[str]) -> None:
    """Copy the objects `names` that have changed, and remove copies of objects that are not in `there` any more."""
    seen: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        seen = dict(read_json(folder / _SEEN))
    for name in seen.keys() - set(there):  # left from another run at this URL
        (folder / name).unlink(missing_ok=True)
    for name, facts in names.items():
        target = folder / name
        if seen.get(name) == facts.stamp and target.is_file():
            continue
        refuse_link(target)
        passing = folder / f".{name}.tmp"
        try:
            place.get(name, passing)
            if facts.written_at is not None:  # runs are listed by their age
                os.utime(passing, (facts.written_at, facts.written_at))
            passing.replace(target)
        except StorageError as error:
            passing.unlink(missing_ok=True)
            if not error.missing:  # if missing, it was removed after it was listed
                raise
        except OSError as error:
            raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from error
    kept = {name: stamp for name, stamp in seen.items() if name in there}
    write_atomic(folder / _SEEN, json.dumps({**kept, **{name: facts.stamp for name, facts in names.items()}}))


def local_run(path: str | Path) -> Path:
    """Return a run's folder: the path itself, or for a URL an updated local copy of the run's records.

    Raises:
        StorageError: There is no run at this URL, or it cannot be reached.
        MissingPackageError: The package for this kind of URL is not installed.
    """
    if not is_url(path):
        return Path(path)
    place = Place(str(path))
    folder = local_copy(place.url)
    copy_records(place, folder)
    write_atomic(folder / SOURCE, json.dumps({"url": place.url}))
    return folder


def local_root(path: str | Path, *, few: bool = False) -> Path:
    """Return a folder of runs, or of one run: the path itself, or a local copy of the records under a URL.

    Args:
        path: A path or a URL.
        few: Copy only what a list of runs needs.

    Raises:
        StorageError: The URL cannot be reached.
        MissingPackageError: The package for this kind of URL is not installed.
    """
    if not is_url(path):
        return Path(path)
    place = Place(str(path))
    names = place.find()
    root = local_copy(place.url)
    if holds_run(names):
        local_run(place.url)
        return root
    runs: dict[str, dict[str, Facts]] = {}
    for name, facts in names.items():
        run, _, rest = name.partition("/")
        if rest:
            runs.setdefault(run, {})[rest] = facts
    runs = {run: objects for run, objects in runs.items() if holds_run(objects)}
    for folder in root.iterdir():
        if folder.name not in runs and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    for run, objects in runs.items():
        refuse_link(root / run)
        (root / run).mkdir(exist_ok=True)
        url = f"{place.url}/{run}"
        wanted = {name: facts for name, facts in records_of(objects).items() if not few or _FEW.fullmatch(name)}
        _copy(Place(url), root / run, wanted, objects)
        write_atomic(root / run / SOURCE, json.dumps({"url": url}))
        if (root / run / CHECKPOINTS).exists() or any(name.startswith(f"{CHECKPOINTS}/") for name in objects):
            (root / run / CHECKPOINTS).mkdir(exist_ok=True)  # marks the folder as a run, even if no records exist yet
    return root


def source_of(folder: Path) -> str | None:
    """Return the URL that a folder is a copy of, or is copied to; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        url = read_json(folder / SOURCE, 2**16)["url"]
        return url if is_url(url) else None
    return None


def shown(folder: RunFolder) -> str:
    """Return the name to show for a run: its URL if the folder is only a copy."""
    with contextlib.suppress(OSError):
        if folder.path.resolve().is_relative_to((private_folder() / "objects").resolve()):
            return source_of(folder.path) or str(folder.path)
    return str(folder.path)
