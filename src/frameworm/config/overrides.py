"""Settings from outside the file: `--set a.b=v` and `FRAMEWORM_A_B=v`, matched against the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from frameworm.config.describe import LONGEST_SHOWN, is_text, suggest
from frameworm.config.keys import KeyPath, Tree, dotted, is_section, nearest_key, unknown_key_text
from frameworm.config.problems import FROM_ENVIRONMENT, FROM_OVERRIDE, Origin, Origins, Problem
from frameworm.config.source import YamlError, parse_value

PREFIX = "FRAMEWORM_"

# Variables with the prefix that are not settings. FRAMEWORM_DATA: folder of the data sets that the tests read.
# FRAMEWORM_RANKS_PER_GPU: read by launch/environment.py.
RESERVED = frozenset({"FRAMEWORM_DATA", "FRAMEWORM_RANKS_PER_GPU"})
# Variables that frameworm's own processes pass to each other.
RESERVED_PREFIX = "FRAMEWORM_INTERNAL_"


class Assignment(NamedTuple):
    """One setting from outside the file."""

    path: KeyPath
    value: Any
    origin: Origin


def variable_name(path: KeyPath) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + "_".join(str(part) for part in path).upper()


def assignments_of_environment(
    environ: Mapping[str, str], tree: Tree, own_workload: bool
) -> Iterator[Assignment | Problem]:
    """Yield every FRAMEWORM_* variable as an assignment or a problem; empty variables are ignored."""
    settings = {path: field for path, field in tree.items() if not is_section(tree, path)}
    known = {variable_name(path): path for path in settings}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(RESERVED_PREFIX) or not environ[name]:
            continue
        origin = Origin(_one_line(name), rank=FROM_ENVIRONMENT)
        plain = re.sub("_+", "_", name).upper()
        path = known.get(plain)
        if path is None:
            path = _guess(plain.removeprefix(PREFIX).strip("_").lower(), tree)
            if not (own_workload and path[0] == "model" and len(path) > 1):
                closest, alike = nearest_key(path, settings)
                meant = suggest(f"{variable_name(closest)} ({dotted(closest)})", alike)
                yield Problem((path,), f"unknown key{meant}", origin=origin)
                continue
        yield _assignment(path, environ[name], tree, origin)


def _guess(name: str, tree: Tree) -> KeyPath:
    """The path that an unknown variable seems to mean: its section, if it begins with one, and the rest."""
    for path in tree:
        if is_section(tree, path) and name.startswith(f"{path[0]}_"):
            return (path[0], name[len(str(path[0])) + 1 :])
    return (name,)


def assignments_of_overrides(
    overrides: Sequence[str], tree: Tree, own_workload: bool
) -> Iterator[Assignment | Problem]:
    """Yield every `a.b=v` as an assignment or a problem."""
    for text in overrides:
        origin = Origin(f"--set {_one_line(text)}", rank=FROM_OVERRIDE)
        name, equals, raw = text.partition("=")
        path: KeyPath = tuple(name.strip().split("."))
        if not equals or not name.strip():
            yield Problem((), "expected key=value, as in training.lr=3e-4", origin=origin)
        elif path in tree or (own_workload and path[0] == "model" and len(path) > 1 and all(path)):
            yield _assignment(path, raw, tree, origin)
        else:
            yield Problem((path,), unknown_key_text(path, tree), origin=origin)


def _assignment(path: KeyPath, raw: str, tree: Tree, origin: Origin) -> Assignment | Problem:
    takes_text = path in tree and is_text(tree[path])
    try:
        value = parse_value(raw)
    except YamlError as error:
        # A path or a name is text, even if it is not valid YAML.
        return Assignment(path, raw, origin) if takes_text else Problem((path,), str(error), origin=origin)
    if takes_text and value is not None and value is not False and not isinstance(value, str):
        value = raw.strip()
    return Assignment(path, value, origin)


def _one_line(text: str) -> str:
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= 2 * LONGEST_SHOWN else shown[: 2 * LONGEST_SHOWN - 3] + "..."


def assign(values: dict[str, Any], origins: Origins, assignment: Assignment) -> None:
    """Apply one assignment to the values; mappings are merged key by key."""
    path, value, origin = assignment
    target: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        inner = target.get(part)
        if inner is None or (depth > 1 and not isinstance(inner, dict)):
            inner = target[part] = {}
        if not isinstance(inner, dict):
            # A section that is not a mapping is reported by the validation.
            return
        target = inner
    _put(target, path, value, origin, origins)


def _put(target: dict[Any, Any], path: KeyPath, value: Any, origin: Origin, origins: Origins) -> None:
    origins[path] = origin
    leaf = path[-1]
    if isinstance(value, dict):
        if not isinstance(target.get(leaf), dict):
            target[leaf] = {}
        for name, item in value.items():
            _put(target[leaf], (*path, str(name)), item, origin, origins)
        return
    for stale in [known for known in origins if len(known) > len(path) and known[: len(path)] == path]:
        del origins[stale]
    target[leaf] = value
