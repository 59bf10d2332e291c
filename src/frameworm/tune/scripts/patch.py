"""The changes that a tuning found, written into the script itself: a small diff, or why there is none.

Where to write is known from the run: the lines at which optimizers, loaders and a framework's options were made and
models were called.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.attach.trial.switches import options_of

# Switches that become keywords of a call that the script makes, and those that become lines of their own.
_KEYWORDS: dict[str, tuple[str, dict[str, str]]] = {
    "fused_optimizer": ("optimizer", {"fused": "True"}),
    "workers": ("loader", {"num_workers": "{value}"}),
    "pin_memory": ("loader", {"pin_memory": "True"}),
    "bucket_mib": ("data_parallel", {"bucket_cap_mb": "{value}"}),
    "bucket_views": ("data_parallel", {"gradient_as_bucket_view": "True"}),
    "static_graph": ("data_parallel", {"static_graph": "True"}),
    "none_gradients": ("zeroing", {"set_to_none": "True"}),
    "non_blocking": ("copy", {"non_blocking": "True"}),
}
_AT_THE_TOP = {
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "threads": "torch.set_num_threads({value})",
    "attention": "",  # by its value
}
_LEFT_OUT = {
    "flash": ("mem_efficient", "cudnn"),
    "efficient": ("flash", "cudnn"),
    "cudnn": ("flash", "mem_efficient"),
    "math": ("flash", "mem_efficient", "cudnn"),
}
_OF_THE_MODEL = {
    "channels_last": "{model}.to(memory_format=torch.channels_last)",
    "compile": "{model}.compile()",
    "cuda_graphs": '{model}.compile(mode="reduce-overhead")',
    "compile_blocks": "for block in {model}.{blocks}:\n{indent}    block.compile()",
}
_OWN_AFFAIR = {
    "trim_padding": "how samples are padded is decided in many ways; the line to write by hand says what to do",
    "shard_calls": "where fully_shard is called is not followed; write it by hand",
    "keep_gathered": "where fully_shard is called is not followed; write it by hand",
    "late_losses": "what is logged when is for the script to say; write it by hand",
    "gather_once": "which pass is the last of an update is for the script to say; write it by hand",
}
_MAKES: dict[str, tuple[str, ...]] = {
    "loader": ("DataLoader",),
    "optimizer": (),
    "data_parallel": (),
    "zeroing": ("zero_grad",),
    "copy": ("to", "cuda"),
}
_CALLED = {
    "data_parallel": "DistributedDataParallel",
    "zeroing": "call of zero_grad",
    "copy": "copy of a batch",
}


class NoPatchError(Exception):
    """There is no place in the script to write a change; the message says why."""


def patched(source: str, changes: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The script with the changes in it.

    Args:
        source: The script.
        changes: Switches and their values.
        facts: What is known about the script; of its `places`, kind, line and name, as they were noted.

    Raises:
        NoPatchError: One of the changes has no place of its own.
    """
    places: Sequence[Sequence[Any]] = facts["places"]
    options = options_of(changes, facts)
    keywords = {"options": {key: text for item in options.values() for key, text in item.items()}}
    for name, value in changes.items():
        if name in _KEYWORDS and name not in options:
            kind, wanted = _KEYWORDS[name]
            keywords.setdefault(kind, {}).update({key: text.format(value=value) for key, text in wanted.items()})
    is_batched = False
    # From the last line on: what is written at one must not move the others.
    for line, kind, name in sorted({(int(line), kind, str(name)) for kind, line, name in places}, reverse=True):
        if kind == "copy" and keywords.get(kind):
            source = _with_copies(source, line, keywords[kind])
        elif keywords.get(kind):
            source = _with_keywords(source, line, kind, _MAKES.get(kind, (name,)), keywords[kind])
        if kind == "loader" and changes.get("whole_batches"):
            one_by_one, source = source, _in_whole_batches(source, line)
            is_batched = is_batched or source != one_by_one
    for kind, wanted in keywords.items():
        if wanted and kind not in {place[0] for place in places}:
            raise NoPatchError(_why_no_place(kind, wanted, facts))
    if changes.get("whole_batches") and not is_batched:
        raise NoPatchError(
            "whole_batches: the script makes no loader by DataLoader(data, batch_size=..., shuffle=True)"
        )
    known = {*_KEYWORDS, *options, "whole_batches"}
    changes = {name: value for name, value in changes.items() if name not in known}
    tree = ast.parse(source)
    added: dict[int, list[str]] = {}
    for name, value in changes.items():
        if name in _AT_THE_TOP:
            if not _has_name(tree, "torch"):
                raise NoPatchError(f"{name}: the script does not import torch under its own name")
            lines = [_AT_THE_TOP[name].format(value=value)]
            if name == "attention":
                lines = [f"torch.backends.cuda.enable_{other}_sdp(False)" for other in _LEFT_OUT[value]]
            added.setdefault(_after_imports(tree), []).extend(lines)
        elif name in _OF_THE_MODEL:
            models = sorted({str(model) for kind, _, model in places if kind == "model"})
            if name == "compile_blocks" and facts.get("block_list") is None:
                raise NoPatchError(f"{name}: the blocks do not all lie in one list of the model")
            place, text = _after_model(source, tree, name, models, facts.get("block_list"))
            added.setdefault(place, []).append(text)
        elif name in _OWN_AFFAIR:
            raise NoPatchError(f"{name}: {_OWN_AFFAIR[name]}")
        else:
            raise NoPatchError(f"{name}: it goes around the model's call and its loss, which only you can tell apart")
    rows = source.splitlines(keepends=True)
    for place in sorted(added, reverse=True):
        rows[place:place] = [f"{line}\n" for line in added[place]]
    return "".join(rows)


def as_diff(before: str, after: str, name: str) -> str:
    """What `git apply` and `patch -p1` take."""
    return "".join(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    )


def _why_no_place(kind: str, keywords: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    if kind != "options":
        return f"{', '.join(keywords)}: the {_CALLED.get(kind, kind)} is made by a library, not by the script"
    taker, maker = facts["framework"]["arguments"], facts.get("options_made_by")
    by = f"by {maker}, from a command line or a config: give it there" if maker else "in another file: write it there"
    return f"{taker} is made {by}"


def _with_keywords(source: str, line: int, kind: str, names: Sequence[str], keywords: Mapping[str, str]) -> str:
    """The call at a line with keywords added; those that it has are replaced."""
    what = names[0] if kind == "options" else f"the {_CALLED.get(kind, kind)}"
    call = _call_at(ast.parse(source), line, names)
    if call is None or call.end_lineno is None or call.end_col_offset is None:
        raise NoPatchError(f"line {line} makes {what} in a way that cannot be added to")
    if kind == "zeroing" and call.args:
        raise NoPatchError(f"line {line} calls zero_grad({ast.unparse(call.args[0])}); leave that argument out")
    if any(item.arg is None for item in call.keywords):
        raise NoPatchError(f"line {line} gives {what} its arguments by **")
    rows = source.splitlines(keepends=True)
    # From the last on: what is written in place of one must not move the others.
    for item in sorted((item for item in call.keywords if item.arg in keywords), key=_end, reverse=True):
        value = item.value
        if value.lineno != value.end_lineno:
            raise NoPatchError(f"line {line} sets {item.arg} over several lines")
        _replace(rows, value, keywords[str(item.arg)])
    known = {item.arg for item in call.keywords}
    new = [f"{key}={value}" for key, value in keywords.items() if key not in known]
    if new:
        call = _call_at(ast.parse("".join(rows)), line, names)
        assert call is not None
        rows = _added_to(rows, call, new)
    return "".join(rows)


def _with_copies(source: str, line: int, keywords: Mapping[str, str]) -> str:
    """All copies of a line with keywords added; there are often several."""
    rows = source.splitlines(keepends=True)
    for call in sorted(_calls_at(ast.parse(source), line, _MAKES["copy"]), key=_end, reverse=True):
        new = [f"{key}={value}" for key, value in keywords.items() if key not in {item.arg for item in call.keywords}]
        rows = _added_to(rows, call, new) if new else rows
    return "".join(rows)


def _replace(rows: list[str], node: ast.expr, text: str) -> None:
    """Write something else in place of an expression that lies on one line."""
    row = rows[node.lineno - 1].encode()  # columns count bytes
    rows[node.lineno - 1] = (row[: node.col_offset] + text.encode() + row[node.end_col_offset :]).decode()


def _in_whole_batches(source: str, line: int) -> str:
    """The source with a sampler of whole batches in the loader at a line, if that one shuffles by itself."""
    tree = ast.parse(source)
    call = _call_at(tree, line, _MAKES["loader"])
    if call is None or any(item.arg is None for item in call.keywords):
        return source
    given: dict[str, ast.expr] = dict(zip(("dataset", "batch_size", "shuffle"), call.args))
    given.update((str(item.arg), item.value) for item in call.keywords)
    data, size, shuffle = (given.get(name) for name in ("dataset", "batch_size", "shuffle"))
    if data is None or size is None or not (isinstance(shuffle, ast.Constant) and shuffle.value is True):
        return source
    if not _name_of(data) or not _has_name(tree, "torch") or given.keys() & {"sampler", "batch_sampler", "generator"}:
        return source
    text = {name: ast.get_source_segment(source, value) for name, value in given.items()}
    batches = (
        f"torch.utils.data.BatchSampler(torch.utils.data.RandomSampler({text['dataset']}), {text['batch_size']}, "
        f"{text.get('drop_last', 'False')})"
    )
    keywords = {"batch_size": "None", "shuffle": "False", "drop_last": "False"}
    rows = source.splitlines(keepends=True)
    for value in reversed(call.args[1:3]):
        if value.lineno != value.end_lineno:
            return source
        _replace(rows, value, "None" if value is size else "False")
    there = {str(item.arg) for item in call.keywords}
    changed = {name: word for name, word in keywords.items() if name in there}
    return _with_keywords("".join(rows), line, "loader", _MAKES["loader"], {**changed, "sampler": batches})


def _added_to(rows: list[str], call: ast.Call, new: Sequence[str]) -> list[str]:
    """Arguments more, behind the last one; on lines of their own where that is how the call is written."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    last = max(arguments, key=_end, default=None)
    at_line, at_column = (call.end_lineno, (call.end_col_offset or 1) - 1) if last is None else _end(last)
    assert at_line is not None
    row = rows[at_line - 1].encode()
    before, behind = row[:at_column], row[at_column:]
    first = b"" if last is None else rows[last.lineno - 1].encode()[: last.col_offset]
    if last is not None and not first.strip() and (call.end_lineno or 0) > at_line:
        comma = b"" if behind.lstrip().startswith(b",") else b","
        rows[at_line - 1] = (before + comma + behind).decode()
        rows[at_line:at_line] = [f"{first.decode()}{item},\n" for item in new]
    else:
        rows[at_line - 1] = (before + (b"" if last is None else b", ") + ", ".join(new).encode() + behind).decode()
    return rows


def _end(node: ast.expr | ast.keyword) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _call_at(tree: ast.Module, line: int, names: Sequence[str]) -> ast.Call | None:
    """The outermost call at a line that makes an object, by its name where that is known."""
    return max(_calls_at(tree, line, names), key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)


def _calls_at(tree: ast.Module, line: int, names: Sequence[str]) -> list[ast.Call]:
    """The calls at a line by the last part of their name; without names those that make an object."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    there = [node for node in calls if node.lineno <= line <= (node.end_lineno or node.lineno)]
    called = [(node, _last_name(node.func)) for node in there]
    return [node for node, name in called if (name in names if names else name[:1].isupper())]


def _last_name(node: ast.expr) -> str:
    """Of what is called, also where that is an attribute of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else _name_of(node)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _name_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _has_name(tree: ast.Module, name: str) -> bool:
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    return any(alias.name == name and alias.asname is None for node in imports for alias in node.names)


def _after_imports(tree: ast.Module) -> int:
    """The line behind the imports at the top."""
    return max(node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))


def _after_model(
    source: str, tree: ast.Module, name: str, models: Sequence[str], blocks: str | None
) -> tuple[int, str]:
    """The line behind the statement that gives the model its name, and what to write there."""
    if len(models) != 1:
        raise NoPatchError(f"{name}: no one model that is trained has a name in the script")
    statement = _assignments(tree).get(models[0])
    if statement is None:
        raise NoPatchError(f"{name}: the script does not give the model that it calls a name")
    row = source.splitlines()[statement.lineno - 1]
    indent = row[: len(row) - len(row.lstrip())]
    text = _OF_THE_MODEL[name].format(model=models[0], blocks=blocks, indent=indent)
    return statement.end_lineno or statement.lineno, indent + text


def _assignments(tree: ast.Module) -> dict[str, ast.stmt]:
    """The last statement that gives each name its value, unless it is given inside of a loop."""
    found: dict[str, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            continue
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.Assign) and len(part.targets) == 1:
                name = _name_of(part.targets[0])
                if name and (name not in found or part.lineno > found[name].lineno):
                    found[name] = part
    return found
