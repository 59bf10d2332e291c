"""How messages describe a setting: what it accepts, what was given, and the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

CLOSE = 0.6
LONGEST_SHOWN = 60

SMALL_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


def members(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield every type that an annotation allows, each with the metadata that limits it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        yield from members(inner, [*metadata, *extra])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from members(member, metadata)
    else:
        yield annotation, metadata


def kinds(field: FieldInfo) -> set[Any]:
    """Return the plain types that a field allows; a Literal counts as itself."""
    return {kind for kind, _ in members(field.annotation)}


def is_text(field: FieldInfo) -> bool:
    """True if the field accepts any text."""
    return str in kinds(field)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class that a field holds, if any."""
    for kind, _ in members(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe in words what a field accepts: `auto or a whole number, 1 or more`."""
    words = allowed_words(annotation)
    phrases = [
        _phrase(kind, limits)
        for kind, limits in members(annotation, metadata)
        if kind not in (NoneType, bool) and get_origin(kind) is not Literal
    ]
    if phrases or "true" in words or len(words) == 1:
        return _either([*words, *phrases])
    return "one of " + ", ".join(words)


def expected_of(field: FieldInfo) -> str:
    """`expected` for a field of a section."""
    return expected(field.annotation, field.metadata)


def allowed_words(annotation: Any) -> list[str]:
    """Return the words among the values of an annotation."""
    plain = {kind for kind, _ in members(annotation)}
    words = [str(word) for kind, _ in members(annotation) if get_origin(kind) is Literal for word in get_args(kind)]
    return words + (["off"] if NoneType in plain else []) + (["true", "false"] if bool in plain else [])


def item_annotation(annotation: Any) -> Any:
    """Return the annotation of the items of a list or tuple, or else the annotation itself."""
    for kind, _ in members(annotation):
        if get_origin(kind) in (list, tuple):
            return get_args(kind)[0]
    return annotation


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _phrase(kind: Any, metadata: Sequence[Any]) -> str:
    origin = get_origin(kind)
    if origin is tuple:
        count = len(get_args(kind))
        return f"{SMALL_NUMBERS.get(count, count)} {_plural(get_args(kind)[0])}"
    if origin is list:
        return f"a list of {_plural(get_args(kind)[0])}"
    if kind is int:
        return "a whole number" + _limits(metadata, ", ")
    if kind is float:
        return "a number" + _limits(metadata, ", ")
    if kind is str:
        return "text"
    return "a section"


def _plural(annotation: Any) -> str:
    """Items of a list, in the plural: its words, or the kind of number."""
    words = allowed_words(annotation)
    if words:
        return ", ".join(words)
    kind, metadata = next(members(annotation))
    noun = {int: "whole numbers", float: "numbers"}.get(kind, "texts")
    return noun + _limits(metadata, " ")


def _limits(metadata: Sequence[Any], comma: str) -> str:
    """The allowed range in words, from pydantic's limits."""
    low: tuple[Any, bool] | None = None
    high: tuple[Any, bool] | None = None
    for limit in _flat(metadata):
        if isinstance(limit, Ge):
            low = (limit.ge, True)
        elif isinstance(limit, Gt):
            low = (limit.gt, False)
        elif isinstance(limit, Le):
            high = (limit.le, True)
        elif isinstance(limit, Lt):
            high = (limit.lt, False)
    if low is None:
        return ""
    if high is None:
        return f"{comma}{low[0]} or more" if low[1] else f" above {low[0]}"
    start = f" from {low[0]}" if low[1] else f" above {low[0]}"
    return start + (f" to {high[0]}" if high[1] else f" to below {high[0]}")


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    """Yield the limits, which are in the metadata or inside a FieldInfo there."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def show(value: Any) -> str:
    """Format a value for a message: short, on one line, printable."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large number"
    text = repr(value)
    if len(text) > LONGEST_SHOWN:
        text = text[: LONGEST_SHOWN - 3] + "..."
    return " ".join(text.split())


def likeness(one: str, other: str) -> float:
    """Similarity of two names, from 0 to 1; case and dashes do not count."""
    return SequenceMatcher(None, _plain(one), _plain(other), autojunk=False).ratio()


def _plain(name: str) -> str:
    return name[:200].lower().replace("-", "_").replace(" ", "_")


def nearest(given: str, names: Sequence[str]) -> tuple[str, float]:
    """Return the most similar name and its similarity."""
    assert names
    best = max(names, key=lambda name: likeness(given, name))
    return best, likeness(given, best)


def suggest(name: str, alike: float) -> str:
    """End of a message: the nearest valid word."""
    return f"; did you mean {name}?" if alike >= CLOSE else f"; nearest is {name}"
