"""Problems of a config as data, and how each becomes one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from frameworm.config.describe import (
    CLOSE,
    allowed_words,
    expected,
    expected_of,
    is_text,
    item_annotation,
    kinds,
    nearest,
    section_of,
    show,
    suggest,
)
from frameworm.config.keys import KeyPath, Tree, dotted, key_tree, unknown_key_text
from frameworm.errors import ConfigError

FROM_FILE, FROM_ENVIRONMENT, FROM_OVERRIDE = 0, 1, 2

COMBINATION = "frameworm_combination"


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a file and line, a variable or a `--set`."""

    label: str
    line: int | None = None
    rank: int = FROM_FILE

    def __str__(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


class Origins(dict[KeyPath, Origin]):
    """The origin of every value that was given.

    All instances are equal, because the origin of a setting is not part of its value.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


@dataclass(frozen=True)
class Problem:
    """One mistake in a config.

    Attributes:
        keys: The keys involved; the message names the one given last, or else the first.
        text: What is wrong and what to do.
        at: Further keys whose place is worth showing if none of `keys` was given.
        origin: The place, if it is already known.
    """

    keys: tuple[KeyPath, ...]
    text: str
    at: tuple[KeyPath, ...] = ()
    origin: Origin | None = None


def combination_error(keys: Sequence[str], text: str) -> PydanticCustomError:
    """Build the error that a section's validator raises when several of its keys conflict."""
    return PydanticCustomError(COMBINATION, "{text}", {"keys": tuple(keys), "text": text})


def make_error(problems: Iterable[Problem], origins: Origins, source: str = "") -> ConfigError:
    """Build one error from all problems, one line each, in the order of the file, the variables and the overrides."""
    placed = [_place(problem, origins, source) for problem in problems]
    placed.sort(key=lambda item: (item[0].rank, item[0].line or 0))
    lines = []
    for origin, key, text in placed:
        line = ": ".join(part for part in (str(origin), key, text) if part)
        if line not in lines:
            lines.append(line)
    return ConfigError("\n".join(lines))


def _place(problem: Problem, origins: Origins, source: str) -> tuple[Origin, str, str]:
    if problem.origin is not None:
        return problem.origin, dotted(problem.keys[0]) if problem.keys else "", problem.text
    given = [path for path in problem.keys if path in origins]
    if given:
        named = max(given, key=lambda path: origins[path].rank)
        return origins[named], dotted(named), problem.text
    for path in (*problem.at, *(key[:length] for key in problem.keys for length in range(len(key) - 1, 0, -1))):
        if path in origins:
            return origins[path], dotted(problem.keys[0]), problem.text
    return Origin(source), dotted(problem.keys[0]) if problem.keys else "", problem.text


def problems_of(
    error: ValidationError, root: type[BaseModel], model_section: type[BaseModel] | None = None
) -> list[Problem]:
    """Convert pydantic's errors to problems in our own words, one per key."""
    tree = key_tree(root, model_section)
    found: dict[KeyPath, Problem] = {}
    for line in error.errors(include_url=False):
        path = _path(tuple(line["loc"]), tree, line["type"])
        if line["type"] == COMBINATION:
            context = line["ctx"]
            problem = Problem(tuple((*path, key) for key in context["keys"]) or (path,), context["text"])
        else:
            problem = Problem((path,), _text(line, path, tree, root))
        found.setdefault(path if line["type"] != COMBINATION else problem.keys[0], problem)
    return list(found.values())


def _path(loc: KeyPath, tree: Tree, kind: str) -> KeyPath:
    """The key an error is about: its location without the names that pydantic gives to members of a union."""
    if kind in ("extra_forbidden", "invalid_key"):
        return tuple(str(part) for part in loc)
    for length in range(len(loc), 0, -1):
        if loc[:length] in tree:
            if kind == "missing":
                return loc[:length]
            return loc[:length] + tuple(part for part in loc[length:] if isinstance(part, int))
    return loc


def _text(line: Any, path: KeyPath, tree: Tree, root: type[BaseModel]) -> str:
    if line["type"] in ("extra_forbidden", "invalid_key"):
        return unknown_key_text(path, tree)
    if line["type"] == "value_error":
        return " ".join(str(line["ctx"]["error"]).split())
    given = line["input"]
    if not path or (path not in tree and path[:-1] not in tree):
        return f"expected a mapping with keys such as {', '.join(list(root.model_fields)[:3])}, got {show(given)}"
    is_item = path not in tree
    field = tree[path[:-1] if is_item else path]
    section = section_of(field)
    if section is not None and line["type"].startswith("model_"):
        inner = [str(key[-1]) for key in tree if key[:-1] == path][:3]
        off = "off or " if type(None) in kinds(field) else ""
        such_as = f" with keys such as {', '.join(inner)}" if inner else ""
        return f"expected {off}a section{such_as}, got {show(given)}"
    wanted = expected(item_annotation(field.annotation)) if is_item else expected_of(field)
    text = f"expected {wanted}, got {show(given)}"
    words = allowed_words(item_annotation(field.annotation) if is_item else field.annotation)
    if isinstance(given, str) and words:
        name, alike = nearest(given, words)
        only_words = wanted.startswith("one of") or "number" not in wanted
        if only_words or alike >= CLOSE:
            text += suggest(name, alike)
    elif is_text(field) and not isinstance(given, (dict, list, type(None))):
        text += "; put it in quotes"
    return text
