"""`best.yaml`: the user's own file with the changed settings, each with a comment that says why."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from frameworm.config.load import dump_config, load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.config.source import SourceReader, YamlError, compose, write_yaml
from frameworm.errors import ConfigError
from frameworm.report.kit import tables
from frameworm.report.tune.tables import numbers, setting, times_and_ends
from frameworm.tune.search.result import Accepted, TuneResult

_WIDTH = 120
_INDENT = 2
_BREAKS_FLOW = set(",[]{}")
_MISSING = object()
# Reasons for knobs that no finding had named.
_NO_FINDINGS = {
    "usual gain": "usually a gain",
    "together": "tried together",
    "tried again": "tried again after other changes",
    "interaction": "because of other changes",
}

Comment = Callable[[str], str]


def render_best(result: TuneResult, original: str | None) -> str:
    """The text of `best.yaml`; `load_config` reads it back to `result.best`.

    Args:
        result: The search.
        original: The file that the search started from. Its comments and order are kept; settings from overrides are
            written out. If it is None or cannot be edited in place, the whole config is written.

    Raises:
        ConfigError: The model section holds a value that is not plain data.
    """
    first = dump_config(result.start)
    for text in (original, first):
        changed = None if text is None else _in_place(text.removeprefix("\ufeff"), result)
        if changed is not None:
            return _header(result) + changed
    lines = [f"# {key}: {_comment(result, key)}" for key in result.changes]
    return _header(result) + "".join(f"{line}\n" for line in lines) + dump_config(result.best)


def _in_place(text: str, result: TuneResult) -> str | None:
    """The text edited to match the best config; None if that fails."""
    present = _config_of(text)
    if present is None:
        return None
    for key, value in differences(present, result.best).items():
        if value is _MISSING:
            return None
        changed = _with_setting(text, key, value, _comment(result, key))
        if changed is None:
            return None
        text = changed
    # Aliases, tags and other notations are not parsed here: reading the result back decides whether it is right.
    reread = _config_of(text)
    return text if reread is not None and not differences(reread, result.best) else None


def differences(one: Config, other: Config) -> dict[str, Any]:
    """Dotted keys whose values differ, with the values of the other config."""
    mine, theirs = _flat(one), _flat(other)
    return {key: theirs.get(key, _MISSING) for key in {**mine, **theirs} if not _same(mine, theirs, key)}


def _flat(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            found.update((f"{name}.{key}", item) for key, item in value.items())
        else:
            found[name] = value
    return found


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    one, other = mine.get(key, _MISSING), theirs.get(key, _MISSING)
    # To Python 1, 1.0 and True are equal; to a workload they may not be.
    return one == other and type(one) is type(other)


def _config_of(text: str) -> Config | None:
    reader = SourceReader("")
    try:
        values = reader.read(text)
        if reader.problems or not isinstance(values, dict):
            return None
        return load_config_from_mapping(values, environ={})
    except (YamlError, ConfigError):
        return None


# Comments


def _header(result: TuneResult) -> str:
    whole = result.speedup
    if not result.accepted:
        told = "nothing was found that is faster and learns the same"
    elif whole is None:
        told = "faster by the lines marked `tune:`; there was no budget left to prove them together"
    else:
        gain = times_and_ends(whole)
        told = f"{gain} as fast as before by the lines marked `tune:`, and it learns the same"
        other = [item for item in result.accepted if item.candidate.numerics_effect == "more"]
        if other:
            told = f"{gain} as fast as before by the lines marked `tune:`, some of them approximate"
            if all(item.checked is not None for item in other):
                told += "; paired trainings show that it learns as well"
    return f"# By frameworm tune: {told}.\n"


def _comment(result: TuneResult, key: str) -> str:
    """Why a line is as it is."""
    source = _source(result, key)
    if source is None:
        return "set for this search on the command line or by a variable"
    speedup = source.speedup
    parts = [f"tune: {times_and_ends(speedup)}"]
    if not source.proved_alone:
        parts.append("by its trial and proved with the rest")
    if source.attempt.why:
        why = source.attempt.why
        parts.append(_NO_FINDINGS.get(why) or f"because of {why.replace('_', ' ')}")
    proof = source.attempt.proof
    precision = proof is not None and proof.change == "precision"
    parts.append(numbers("precision" if precision else source.candidate.numerics_effect, source.checked))
    partners = [name for name in source.candidate.changes if name != key and name in result.changes]
    if partners:
        parts.append(f"one change with {' and '.join(partners)}")
    before = result.changes.get(key)
    if before is not None:
        parts.append(f"was {setting(before[0])}")
    return tables.plain(", ".join(parts))


def _source(result: TuneResult, key: str) -> Accepted | None:
    """The last change that set a key."""
    found = [item for item in result.accepted if key in item.candidate.changes]
    return found[-1] if found and key in result.changes else None


# Lines


def _with_setting(text: str, key: str, value: Any, comment: str) -> str | None:
    """The text with one setting changed or added; None if it cannot be edited."""
    try:
        root = compose(text)
    except YamlError:
        return None  # the previous edit broke it, for example in place of an anchor
    if not isinstance(root, MappingNode) or root.flow_style:
        return None
    section, _, name = key.partition(".")
    if not name:
        return _in_mapping(text, root, section, value, comment)
    inner = _child(root, section)
    if inner is None:
        line = f"{name}: {_written(value, section)}"
        return f"{_ended(text)}\n{section}:\n{' ' * _INDENT}{_commented(line, comment, _INDENT)}"
    if isinstance(inner, MappingNode):
        return _in_mapping(text, inner, name, value, comment, section)
    if isinstance(inner, ScalarNode) and inner.value == "" and inner.style is None:
        return _insert_line(text, inner.start_mark.line, f"{name}: {_written(value, section)}", comment, _INDENT)
    return None


def _in_mapping(text: str, node: MappingNode, name: str, value: Any, comment: str, section: str = "") -> str | None:
    """Change a key of a mapping, or add it after the last one."""
    written = _written(value, section, flow=bool(node.flow_style))
    child = _child(node, name)
    if child is not None:
        # A line of a flow mapping holds several settings, so the comment names the one it is about.
        return _replaced(text, child, written, f"{name}: {comment}" if node.flow_style else comment)
    if node.flow_style:
        end = node.end_mark.index - 1
        inside = text[node.start_mark.index + 1 : end].rstrip()
        comma = "" if not inside or inside.endswith(",") else ", "
        text = f"{text[:end].rstrip()}{comma}{name}: {written}{text[end:]}"
        return _comment_above(text, node.start_mark.line, f"{name}: {comment}")
    if not node.value:
        return None
    column = node.value[0][0].start_mark.column
    return _insert_line(text, _last_line(node), f"{name}: {written}", comment, column)


def _replaced(text: str, child: Node, written: str, comment: str) -> str | None:
    start, end = child.start_mark, child.end_mark
    if start.line != end.line:
        return None
    line_end = text.find("\n", end.index)
    rest = text[end.index : line_end if line_end >= 0 else len(text)].strip()
    space = "" if start.index and text[start.index - 1].isspace() else " "
    text = text[: start.index] + space + written + text[end.index :]
    lines = text.split("\n")
    trailing = f"{lines[start.line].rstrip()}  # {comment}"
    if rest == "" and len(trailing) <= _WIDTH:
        lines[start.line] = trailing
        return "\n".join(lines)
    return _comment_above(text, start.line, comment)


def _insert_line(text: str, after: int, content: str, comment: str, column: int) -> str:
    lines = _ended(text).split("\n")
    lines.insert(after + 1, " " * column + _commented(content, comment, column).rstrip("\n"))
    return "\n".join(lines)


def _commented(content: str, comment: str, column: int) -> str:
    """A line with a trailing comment, or with the comment above it if that would be too long."""
    whole = f"{content}  # {comment}"
    if column + len(whole) <= _WIDTH:
        return f"{whole}\n"
    above = f"\n{' ' * column}".join([*_wrapped(comment, column), content])
    return f"{above}\n"


def _comment_above(text: str, line: int, comment: str) -> str:
    lines = text.split("\n")
    column = len(lines[line]) - len(lines[line].lstrip(" "))
    lines[line:line] = [" " * column + piece for piece in _wrapped(comment, column)]
    return "\n".join(lines)


def _wrapped(comment: str, column: int) -> list[str]:
    return [f"# {piece}" for piece in textwrap.wrap(comment, _WIDTH - column - 2)]


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _child(node: MappingNode, name: str) -> Node | None:
    return next((value for key, value in node.value if isinstance(key, ScalarNode) and key.value == name), None)


def _last_line(node: Node) -> int:
    """The last line of a block's last value; the block node itself ends after blank lines."""
    if isinstance(node, MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    end = node.end_mark
    return int(end.line - 1 if end.column == 0 and end.line > node.start_mark.line else end.line)


def _written(value: Any, section: str, flow: bool = False) -> str:
    """A value as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(_written(item, 'model', True) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{_written(key, 'model', True)}: {_written(item, 'model', True)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    # Settings accept the bare word; in a workload's own section it would be a boolean.
    if value == "off" and section != "model":
        return "off"
    if isinstance(value, str) and flow and _BREAKS_FLOW.intersection(value):
        return json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return write_yaml({"key": value}).removeprefix("key:").strip()
