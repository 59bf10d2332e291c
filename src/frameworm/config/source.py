"""Config files as text: converts YAML to plain values that remember their lines, and back.

The words are those of YAML 1.1 (`on`, `off`, `yes`, `no`), because configs use them; the numbers are those of YAML 1.2,
because 1.1 reads `3e-4` as text and `1:30` as ninety.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from frameworm.config.keys import KeyPath
from frameworm.config.problems import Origin, Origins, Problem
from frameworm.errors import RunFolderError

CORE = "tag:yaml.org,2002:"
DEEPEST = 20
MOST_NODES = 20_000

TRUE_WORDS = ("true", "on", "yes")
BOOLEAN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF|yes|Yes|YES|no|No|NO)$")
NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
WHOLE_NUMBER = re.compile(r"^[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+)$")
NUMBER = re.compile(
    r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF|nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Composes nodes with our words and numbers."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that the loader would not read as text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        """Write shared values out instead of using aliases."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> ScalarNode:
    # Other styles would fold these characters, which YAML treats as line breaks.
    style = '"' if any(character in "\x85\u2028\u2029\ufeff" for character in text) else None
    return dumper.represent_scalar(f"{CORE}str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{CORE}bool", BOOLEAN, list("tTfFoOyYnN"))
    _kind.add_implicit_resolver(f"{CORE}null", NULL, ["~", "n", "N", ""])
    _kind.add_implicit_resolver(f"{CORE}int", WHOLE_NUMBER, list("-+0123456789"))
    _kind.add_implicit_resolver(f"{CORE}float", NUMBER, list("-+0123456789."))


class YamlError(Exception):
    """Raised for text that is not YAML; `line` counts from 1."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class SourceReader:
    """Converts the nodes of one text to values, origins and problems."""

    def __init__(self, label: str, rank: int = 0) -> None:
        self.label = label
        self.rank = rank
        self.origins = Origins()
        self.problems: list[Problem] = []
        self._nodes_seen = 0

    def read(self, text: str) -> Any:
        """Return the value of the whole text; None if it is empty."""
        node = compose(text)
        return None if node is None else self._value(node, ())

    def _problem(self, path: KeyPath, node: Node, text: str) -> None:
        keys = (path,) if path and isinstance(path[0], str) else ()
        self.problems.append(Problem(keys, text, origin=self._origin(node)))

    def _origin(self, node: Node) -> Origin:
        return Origin(self.label, node.start_mark.line + 1, self.rank)

    def _value(self, node: Node, path: KeyPath) -> Any:
        # Aliases can expand a small text into a huge or endless value.
        self._nodes_seen += 1
        if self._nodes_seen > MOST_NODES or len(path) > DEEPEST:
            if not any(problem.text.startswith("too ") for problem in self.problems):
                self._problem(path[:2], node, "too large or nested too deeply for a config")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            if node.tag != f"{CORE}seq":
                self._problem(path, node, f"the tag {_tag(node)} is not allowed; write a plain list")
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node, path)

    def _item(self, node: Node, path: KeyPath) -> Any:
        self.origins.setdefault(path, self._origin(node))
        return self._value(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[Any, Any]:
        if node.tag != f"{CORE}map":
            self._problem(path, node, f"the tag {_tag(node)} is not allowed; write a plain mapping")
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._problem(path, key_node, "a key must be a single word")
                continue
            if key_node.value == "<<" and key_node.style is None:
                self._problem((*path, "<<"), key_node, "merge keys are not supported; write the settings out")
                continue
            # Settings have names as keys; only values inside a workload's own settings may have other keys.
            key = key_node.value if len(path) < 2 else self._scalar(key_node, path)
            inner = (*path, key if isinstance(key, str) else key_node.value)
            if key in values:
                first = self.origins[inner].line
                self._problem(inner, key_node, f"given twice, first on line {first}; keep one of them")
                continue
            self.origins[inner] = self._origin(key_node)
            values[key] = self._value(value_node, inner)
        return values

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.removeprefix(CORE)
        text = node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool" and BOOLEAN.match(text):
                return text.lower() in TRUE_WORDS
            if kind == "int" and WHOLE_NUMBER.match(text):
                return int(text.replace("_", ""), 16 if "0x" in text else 10)
            if kind == "float" and (NUMBER.match(text) or WHOLE_NUMBER.match(text)):
                return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
        except ValueError:
            self._problem(path, node, "a number with too many digits")
            return None
        if kind in ("bool", "int", "float"):
            self._problem(path, node, f"the value does not fit its tag !!{kind}")
        else:
            self._problem(path, node, f"the tag {_tag(node)} is not allowed; write a plain value")
        return None


def _tag(node: Node) -> str:
    name = str(node.tag)
    name = "!!" + name.removeprefix(CORE) if name.startswith(CORE) else name
    return name[:60] if name.isprintable() else repr(name)[1:-1][:60]


def compose(text: str) -> Node | None:
    """Parse a YAML text into its node tree.

    Raises:
        YamlError: The text is not YAML.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node: Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        character = error.character if isinstance(error.character, int) else 0
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character U+{character:04X} is not allowed in YAML", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(str(error.problem or error.context).split())
        if "'\\t'" in reason:
            reason += "; indent with spaces"
        raise YamlError(f"not valid YAML: {reason}", mark.line + 1 if mark else 1) from None
    except RecursionError:
        raise YamlError("too large or nested too deeply for a config", 1) from None
    except (ValueError, OverflowError):
        # The scanner does not convert these errors for escapes such as "\UFFFFFFFF".
        line = loader.line + 1 if loader is not None else 1
        raise YamlError("not valid YAML: an invalid escape or number", line) from None
    return node


def parse_value(text: str) -> Any:
    """Parse the value of an override: a YAML scalar, list or mapping.

    Raises:
        YamlError: The text is not such a value.
    """
    reader = SourceReader("")
    value = reader.read(text)
    if reader.problems:
        raise YamlError(reader.problems[0].text, 1)
    return value


def stored_values(path: Path, text: str) -> dict[str, Any]:
    """Return the config that a run stored, as plain values.

    Raises:
        RunFolderError: It is not valid.
    """
    try:
        values = SourceReader(path.name).read(text)
    except YamlError as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
    return values if isinstance(values, dict) else {}


def write_yaml(values: dict[str, Any]) -> str:
    """Write YAML text that `SourceReader` reads back to the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
