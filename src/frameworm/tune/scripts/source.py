"""A script's text and syntax tree: finds calls and statements, and writes changes in their place.

Changes are spans of the original text, so that one change does not move another.
"""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_DEEPER = "    "
_BODIES = ("body", "orelse", "finalbody")


class NoPatchError(Exception):
    """The change has no place in the script; the message says why."""


class Span(NamedTuple):
    """Text that replaces some bytes of the source; it is inserted if both ends are equal."""

    start: int
    end: int
    text: str


class Keyword(NamedTuple):
    """A keyword argument of a call, added or given a new value."""

    call: ast.Call
    name: str
    value: str


Edit = Span | Keyword


class Source:
    """A script to write changes into.

    Args:
        text: The script.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._rows = [0]
        for row in self._bytes.split(b"\n"):
            self._rows.append(self._rows[-1] + len(row) + 1)
        self._newline = "\r\n" if b"\r\n" in self._bytes else "\n"
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    # Finding

    def calls_at(self, line: int, *names: str) -> list[ast.Call]:
        """The calls that a line is part of, optionally only those with one of these last names."""
        there = [node for node in self._calls if node.lineno <= line <= _last_line(node)]
        return [node for node in there if not names or last_name(node.func) in names]

    def call_that_makes(self, line: int, kind: str) -> ast.Call | None:
        """The call at a line that creates an object: by its class name, else a capitalised one, else the outermost."""
        calls = self.calls_at(line)
        named = [node for node in calls if last_name(node.func) == kind]
        like_classes = [node for node in calls if last_name(node.func)[:1].isupper()]
        return max(named or like_classes or calls, key=lambda node: (node.lineno, -self.start(node)), default=None)

    def calls_of(self, function: str) -> list[ast.Call]:
        """All calls of an imported function, also under another name, in the order of the text."""
        imported = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        names = {item.asname or item.name for node in imported for item in node.names if item.name == function}
        found = [node for node in self._calls if _name_of(node.func) in names or _is_attribute(node.func, function)]
        return sorted(found, key=self.start)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain a node, innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def parent(self, node: ast.AST) -> ast.AST:
        """The node that directly contains a node."""
        return self._parents[node]

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block of statements that contains a statement."""
        parent = self._parents[statement]
        blocks = [getattr(parent, name, []) for name in _BODIES]
        return next(block for block in blocks if isinstance(block, list) and statement in block)

    def statement_at(self, line: int, block: Sequence[ast.stmt]) -> ast.stmt | None:
        """The one of these statements that a line is part of."""
        return next((item for item in block if item.lineno <= line <= _last_line(item)), None)

    def statements_around(self, node: ast.AST) -> list[ast.stmt]:
        """The statements in the same function that contain a node, innermost first."""
        found = []
        for item in self.ancestors(node):
            if isinstance(item, _SCOPES):
                break
            if isinstance(item, ast.stmt):
                found.append(item)
        return found

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function that contains a node, or the whole script."""
        return next((item for item in self.ancestors(node) if isinstance(item, _SCOPES)), self.tree)

    def statement_that_names(self, name: str, line: int) -> ast.stmt | None:
        """The last statement that assigns a name: in the function that contains a line, or elsewhere.

        Loops usually pass a name on, so assignments in them count only if there are no others. If the assignment is
        inside an `if` that only assigns the name, the whole `if` is returned.
        """
        found = [node for node in ast.walk(self.tree) if isinstance(node, (ast.Assign, ast.AnnAssign))]
        found = [node for node in found if any(_name_of(target) == name for target in _targets(node))]
        if name.startswith("self."):  # another class may have an attribute of the same name
            found = [node for node in found if self._is_in_class(node, line)] or found
        here = [node for node in found if (scope := self.scope_of(node)) is self.tree or _covers(scope, line)]
        once = [node for node in here or found if not self._is_in_loop(node)]
        last: ast.stmt | None = max(once or here or found, key=lambda node: node.lineno, default=None)
        while last is not None and isinstance(around := self._parents[last], (ast.If, ast.Try, ast.With)):
            if any(node.lineno > _last_line(last) for node in ast.walk(around) if _loads(node, name)):
                break
            last = around
        return last

    def _is_in_class(self, node: ast.AST, line: int) -> bool:
        """Whether a node is in a class that also contains a line."""
        return any(isinstance(item, ast.ClassDef) and _covers(item, line) for item in self.ancestors(node))

    def _is_in_loop(self, node: ast.AST) -> bool:
        for item in self.ancestors(node):
            if isinstance(item, _SCOPES):
                return False
            if isinstance(item, _LOOPS):
                return True
        return False

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | ast.AsyncFor | None:
        """The innermost loop around a node, in the same function."""
        for item in self.ancestors(node):
            if isinstance(item, _LOOPS):
                return item
            if isinstance(item, _SCOPES):
                return None
        return None

    def attribute_of_iterated(self, *attributes: str) -> ast.Attribute | None:
        """Where one of these attributes is read from something that the script loops over; None if nowhere."""
        loops = [
            node.iter for node in ast.walk(self.tree) if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension))
        ]
        named = [node for loop in loops for node in ast.walk(loop) if isinstance(node, (ast.Name, ast.Attribute))]
        # For `self.loader` the whole expression, not `self`.
        iterated = {_name_of(node) for node in named if not isinstance(self._parents[node], ast.Attribute)} - {""}
        read = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute) and node.attr in attributes]
        return next((node for node in read if _name_of(node.value) in iterated), None)

    def words(self) -> set[str]:
        """All keyword names and strings in the script."""
        found = {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.keyword) and node.arg}
        return found | {
            node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }

    def free_name(self, *wanted: str) -> str:
        """The first of these names that the script does not use."""
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        used |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        used |= {node.name for node in ast.walk(self.tree) if isinstance(node, _SCOPES[:2] + _SCOPES[3:])}
        used |= {
            item.asname or item.name
            for node in ast.walk(self.tree)
            for item in getattr(node, "names", ())
            if isinstance(item, ast.alias)
        }
        return next(
            name for name in (*wanted, *(f"{wanted[0]}_{number}" for number in range(1, 99))) if name not in used
        )

    def defined(self) -> set[str]:
        """Names of the classes and imports at the top level of the script."""
        imported = [
            item.asname or item.name
            for node in self.tree.body
            for item in getattr(node, "names", ())
            if isinstance(item, ast.alias)
        ]
        return {*imported, *(node.name for node in self.tree.body if isinstance(node, ast.ClassDef))}

    def code_of(self, node: ast.expr) -> str:
        """The text of an expression."""
        return self._bytes[self.start(node) : self.end(node)].decode()

    # Positions

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """The start of a node, in bytes."""
        return self._rows[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """The end of a node, in bytes."""
        return self._rows[_last_line(node) - 1] + (node.end_col_offset or 0)

    def indent_of(self, statement: ast.stmt) -> str:
        """The indentation of a statement."""
        return (
            " " * statement.col_offset
            if "\t" not in self._row(statement.lineno)
            else (self._row(statement.lineno)[: statement.col_offset])
        )

    def _row(self, line: int) -> str:
        return self._bytes[self._rows[line - 1] : self._rows[line]].decode()

    # Writing

    def behind(self, statement: ast.stmt, *lines: str) -> Span:
        """Insert lines after a statement, with its indentation."""
        return self._lines(_last_line(statement) + 1, self.indent_of(statement), lines)

    def before(self, statement: ast.stmt, *lines: str) -> Span:
        """Insert lines before a statement, with its indentation."""
        first = min([statement.lineno, *(item.lineno for item in getattr(statement, "decorator_list", ()))])
        return self._lines(first, self.indent_of(statement), lines)

    def _lines(self, line: int, indent: str, lines: Sequence[str]) -> Span:
        at = min(self._rows[min(line, len(self._rows)) - 1], len(self._bytes))
        lacks_newline = at == len(self._bytes) and not self._bytes.endswith(b"\n")
        text = "".join(f"{indent}{item}".rstrip() + self._newline for item in lines)
        return Span(at, at, self._newline + text if lacks_newline else text)

    def instead(self, node: ast.expr | ast.keyword, text: str) -> Span:
        """Replace an expression or an argument."""
        return Span(self.start(node), self.end(node), text)

    def without(self, statement: ast.stmt) -> Span:
        """Remove the lines of a statement."""
        return Span(self._rows[statement.lineno - 1], min(self._rows[_last_line(statement)], len(self._bytes)), "")

    def under(self, line: str, statements: Sequence[ast.stmt]) -> list[Span]:
        """Put consecutive statements into the block of a line such as `with ...:`.

        Raises:
            NoPatchError: They contain a multi-line string, which indenting would change.
        """
        for node in (node for item in statements for node in ast.walk(item)):
            if isinstance(node, (ast.JoinedStr, ast.Constant)) and node.lineno != _last_line(node):
                raise NoPatchError(f"line {node.lineno} begins a text of several lines")
        rows = range(statements[0].lineno, _last_line(statements[-1]) + 1)
        starts = [self._rows[row - 1] for row in rows if self._row(row).strip()]
        opening = f"{self.indent_of(statements[0])}{line}{self._newline}"
        return [Span(at, at, _DEEPER if at != starts[0] else opening + _DEEPER) for at in starts]

    def after_imports(self) -> ast.stmt:
        """The top-level statement after which a library can be set up: its import, with the imports that follow."""
        body = self.tree.body
        places = [place for place, node in enumerate(body) if isinstance(node, (ast.Import, ast.ImportFrom))]
        if not places:
            raise NoPatchError("the script imports nothing at its top")
        of_torch = [place for place in places if any(_package(name) == "torch" for name in _modules(body[place]))]
        last = (of_torch or places)[0]
        while last + 1 in places:
            last += 1
        return body[last]

    def at_the_top(self, *lines: str) -> list[Edit]:
        """Insert lines that set up a library after its import and a blank line."""
        place = self.after_imports()
        return [self.behind(place, ""), self.behind(place, *lines)]

    def names_from(self, module: str, *names: str) -> tuple[list[str], list[Edit]]:
        """The names of a module's objects in the script, and the edits needed for that.

        They are added to an existing import from that module; if there is none they are accessed through the package.
        """
        imports = [node for node in self.tree.body if isinstance(node, ast.ImportFrom) and node.module == module]
        if not imports:
            package, edits = self.name_of_module(_package(module))
            return [f"{package}{module.removeprefix(_package(module))}.{name}" for name in names], edits
        known = {item.name: item.asname or item.name for node in imports for item in node.names}
        edits = [self._joining(imports[0], name) for name in names if name not in known]
        return [known.get(name, name) for name in names], edits

    def _joining(self, statement: ast.ImportFrom, name: str) -> Span:
        """Add a name to an import, in alphabetical order if the others are."""
        others = statement.names
        later = next((item for item in others if item.name > name), None)
        if later is not None and [item.name for item in others] == sorted(item.name for item in others):
            at = self._rows[later.lineno - 1] + later.col_offset
            return Span(at, at, f"{name}, ")
        at = self._rows[(others[-1].end_lineno or 0) - 1] + (others[-1].end_col_offset or 0)
        return Span(at, at, f", {name}")

    def name_of_module(self, module: str) -> tuple[str, list[Edit]]:
        """The name of a module in the script, and the edits needed to import it."""
        imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        for node in imports:
            for item in node.names if isinstance(node, ast.Import) else ():
                if item.name == module or (item.asname is None and _package(item.name) == module):
                    return item.asname or module, []
        plain = [node for node in imports if _modules(node) != ["__future__"]]
        if not plain:
            raise NoPatchError("the script imports nothing at its top")
        beside = [node for node in plain if any(_package(name) == module for name in _modules(node))]
        later = [node for node in plain if isinstance(node, ast.Import) and node.names[0].name > module]
        places = beside or [node for node in later if node.lineno <= _group_end(plain)]
        line = f"import {module}"
        if places:
            return module, [self.before(places[0], line)]
        group = [node for node in plain if isinstance(node, ast.Import) and node.lineno <= _group_end(plain)]
        return module, [self.behind(group[-1], line) if group else self.before(plain[0], line)]

    def written(self, edits: Sequence[Edit]) -> str:
        """The script with the edits applied."""
        keywords: dict[ast.Call, dict[str, str]] = {}
        for edit in edits:
            if isinstance(edit, Keyword):
                keywords.setdefault(edit.call, {})[edit.name] = edit.value
        spans = list(dict.fromkeys(edit for edit in edits if isinstance(edit, Span)))
        for call, wanted in keywords.items():
            spans += self._arguments(call, wanted)
        left_out = [span for span in spans if span.end > span.start and not span.text]
        # Nothing is inserted into removed text.
        spans = [
            span
            for span in spans
            if not any(
                span is not other
                and other.start <= span.start
                and span.end <= other.end
                and span.end > other.start
                and span.start < other.end
                for other in left_out
            )
        ]
        pieces, at = [], 0
        # A stable sort, in the order of the edits; whole lines come before text that belongs to the following line.
        for span in sorted(spans, key=lambda span: (span.start, span.end, not span.text.endswith("\n"))):
            if span.start < at:
                raise NoPatchError("two changes meet at one place")
            pieces += [self._bytes[at : span.start], span.text.encode()]
            at = span.end
        after = b"".join([*pieces, self._bytes[at:]]).decode()
        try:
            ast.parse(after)
        except SyntaxError as error:
            raise NoPatchError(f"what is written would not be Python: {error}") from None
        return after

    def _arguments(self, call: ast.Call, wanted: Mapping[str, str]) -> list[Span]:
        """Change a call's arguments and append new ones, on separate lines if the others are."""
        there = {item.arg: item for item in call.keywords if item.arg is not None}
        spans = [
            Span(self.start(there[name].value), self.end(there[name].value), value)
            for name, value in wanted.items()
            if name in there
        ]
        new = [f"{name}={value}" for name, value in wanted.items() if name not in there]
        if not new:
            return spans
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not arguments:
            return [*spans, Span(self.end(call) - 1, self.end(call) - 1, ", ".join(new))]
        last = max(arguments, key=self.end)
        if isinstance(last, ast.GeneratorExp) and self.end(last) == self.end(call):  # it shares the call's parentheses
            return [
                Span(self.start(last), self.start(last), "("),
                Span(self.end(call), self.end(call), f", {', '.join(new)})"),
            ]
        end = self.end(last)
        while self._bytes[end : self.end(call)].lstrip()[:1] == b")" and self._is_bracketed(call, end):
            end = self._bytes.index(b")", end) + 1
        indent = self._row(last.lineno).encode()[: last.col_offset]
        if indent.strip() or _last_line(call) == _last_line(last):
            return [*spans, Span(end, end, "".join(f", {item}" for item in new))]
        comma = [] if self._bytes[end:].lstrip().startswith(b",") else [Span(end, end, ",")]
        lines = self._lines(_last_line(last) + 1, indent.decode(), [f"{item}," for item in new])
        return [*spans, *comma, lines]

    def _is_bracketed(self, call: ast.Call, end: int) -> bool:
        """Whether the parenthesis after an argument is its own, not the call's."""
        return self._bytes.index(b")", end) + 1 < self.end(call)


def as_diff(before: str, after: str, name: str) -> str:
    """A diff for `git apply` and `patch -p1`."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def last_name(node: ast.expr) -> str:
    """The last part of a called name, also for an attribute of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else _name_of(node)


def names_in(node: ast.AST) -> set[str]:
    """The plain names that occur in a node."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def names_set_in(node: ast.AST) -> set[str]:
    """The plain names that are assigned in a node."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _name_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _is_attribute(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _last_line(node: ast.expr | ast.stmt | ast.keyword) -> int:
    return node.end_lineno or node.lineno


def _covers(node: ast.AST, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or 0))  # type: ignore[attr-defined]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    return [
        part for target in targets for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]


def _loads(node: ast.AST, name: str) -> TypeGuard[ast.expr]:
    """Whether a node reads a name."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    return isinstance(node.ctx, ast.Load) and _name_of(node) == name


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [item.name for item in node.names] if isinstance(node, ast.Import) else []


def _package(name: str) -> str:
    return name.partition(".")[0]


def _group_end(imports: Sequence[ast.stmt]) -> int:
    """The last line of the first group of imports, up to a blank line or other code."""
    last = _last_line(imports[0])
    for node in imports[1:]:
        if node.lineno != last + 1:
            break
        last = _last_line(node)
    return last
