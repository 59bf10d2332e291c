"""Reads stored records by the types of their fields; a value of the wrong type raises an error that names its place."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Record = TypeVar("_Record")
_Reader = Callable[[Any, str], Any]
LARGEST = 2**63  # largest whole number accepted; no run writes a larger one
_NOT_FINITE = ("nan", "inf", "-inf")  # how `json_ready` writes them
_FLOAT = frozenset({float})
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read_record(kind: type[_Record], data: Any, place: str = "") -> _Record:
    """Build a record from plain data; unknown keys of later versions are ignored.

    Args:
        kind: A dataclass whose fields are numbers, texts, lists, mappings and other such dataclasses.
        data: Parsed JSON.
        place: Where the data is in the file, for error messages.

    Raises:
        TypeError: A value has the wrong type or is missing.
    """
    if not isinstance(data, Mapping):
        raise _wrong(data, "a mapping", place)
    values = {}
    plainly: Any = kind  # mypy does not see that a class can be hashed
    for name, (plain, numeric, of_floats, read) in _fields(plainly).items():
        value = data.get(name, dataclasses.MISSING)
        found = type(value)
        if (  # the fast path, for nearly all values
            found in plain
            or (found is int and numeric and -LARGEST < value < LARGEST)
            or (found is dict and of_floats and _FLOAT.issuperset(map(type, value.values())))
        ):
            values[name] = value
        elif value is not dataclasses.MISSING:
            value = read(value, f"{place}.{name}" if place else name)
            if value is not dataclasses.MISSING:
                values[name] = value
    return kind(**values)


@functools.cache
def _fields(kind: type) -> dict[str, tuple[frozenset[type], bool, bool, _Reader]]:
    """Per field: types accepted as they are, whether it is a number, whether it is dict[str, float], its reader."""
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    found: dict[str, tuple[frozenset[type], bool, bool, _Reader]] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        parts = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        plain = frozenset(parts & {float, str, bool, types.NoneType})
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        reader = functools.partial(_read, hint, has_default)
        found[field.name] = (plain, bool(parts & {int, float}), hint == dict[str, float], reader)
    return found


def _read(hint: Any, has_default: bool, value: Any, place: str) -> Any:
    """Convert a value to a type hint; MISSING for null if the field has a default."""
    if hint is Any:
        return value
    if isinstance(hint, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
        assert len(inner) == 1, hint
        return None if value is None else _read(inner[0], False, value, place)
    if value is None and has_default:
        return dataclasses.MISSING
    origin = typing.get_origin(hint) or hint
    if origin is list:
        if not isinstance(value, list):
            raise _wrong(value, "a list", place)
        (item,) = typing.get_args(hint)
        return [_read(item, False, entry, f"{place}[{number}]") for number, entry in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping", place)
        _, item = typing.get_args(hint)
        return {str(name): _read(item, False, entry, f"{place}.{name}") for name, entry in value.items()}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return read_record(hint, value, place)
    return _scalar(hint, value, place)


def _scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is float and value in _NOT_FINITE:
        return float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and is_number and abs(value) < LARGEST and value == int(value):
        return int(value)
    if kind is float and is_number and abs(value) < LARGEST * LARGEST:
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise _wrong(value, _WORDS[kind], place)


def _wrong(value: Any, wanted: str, place: str) -> TypeError:
    text = repr(value)
    return TypeError(f"{place or 'it'} is {text if len(text) <= 40 else text[:40] + '...'}, not {wanted}")
