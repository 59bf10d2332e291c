"""Write the changes of a tuning run into the script itself, as a small diff, or say why that is impossible.

Where to write is known from the run: the lines at which optimizers, loaders and a framework's options were created,
models were called and gradients computed. Each switch has a writer, which finds its place in the script or says why
there is none; if one change cannot be written, the others still are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frameworm.attach.trial.switches import options_of
from frameworm.tune.scripts.by_hand import (
    attention_lines,
    block_lines,
    trimming_function,
)
from frameworm.tune.scripts.source import Edit, Keyword, NoPatchError, Source, Span, names_in, names_set_in

_CALLED = {"data_parallel": "DistributedDataParallel", "zeroing": "call of zero_grad", "copy": "copy of a batch"}
_CHANGED_BY_WHOLE_BATCHES = ("batch_size", "batch_sampler", "sampler", "drop_last")
_FULLY_SHARD, _RESHARD = "fully_shard", "reshard_after_forward"


@dataclass(frozen=True)
class Written:
    """A script with changes in it.

    Attributes:
        text: The script.
        changes: The switches that were written, with their values.
        left: The other switches, and why they were not.
    """

    text: str
    changes: dict[str, Any]
    left: dict[str, str]


def write_changes(text: str, changes: Mapping[str, Any], facts: Mapping[str, Any]) -> Written:
    """Write as many of the changes into the script as possible.

    Args:
        text: The script.
        changes: Switches and their values.
        facts: What is known about the script, including its `places` as recorded: kind, line and name.
    """
    script = _Script(text, facts)
    options = options_of(changes, facts)
    edits: list[Edit] = []
    done: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, value in changes.items():
        try:
            new = script.with_options(options[name]) if name in options else _WRITERS[name](script, value)
            script.source.written([*edits, *new])
        except NoPatchError as error:
            left[name] = str(error)
        else:
            edits += new
            done[name] = value
    return Written(script.source.written(edits), done, left)


class _Script:
    """A script and what its run has shown about it."""

    def __init__(self, text: str, facts: Mapping[str, Any]) -> None:
        self.source = Source(text)
        self.facts = facts
        # A line that ran several times is recorded several times.
        self.places: Sequence[tuple[str, int, str]] = sorted(
            {(kind, int(at), str(name)) for kind, at, name in facts["places"]}
        )

    def of_kind(self, kind: str) -> list[tuple[int, str]]:
        """Lines of a kind, with the recorded names."""
        return [(line, name) for place, line, name in self.places if place == kind]

    def makers(self, kind: str) -> list[ast.Call]:
        """The calls that create objects of a kind."""
        found = []
        for line, name in self.of_kind(kind):
            call = self.source.call_that_makes(line, name)
            if call is None:
                raise NoPatchError(
                    f"line {line} makes the {name or _CALLED.get(kind, kind)} in a way that cannot be added to"
                )
            found.append(call)
        if not found:
            raise NoPatchError(f"the {_CALLED.get(kind, kind)} is made by a library, not by the script")
        return found

    def with_keywords(self, calls: Sequence[ast.Call], known: Sequence[str] | None = None, **wanted: str) -> list[Edit]:
        """Add keyword arguments to calls, or change their values.

        Args:
            calls: The calls.
            known: Names that the script is known to pass; None: judge by its text alone.
            **wanted: The arguments.
        """
        for call in calls:
            written = {item.arg for item in call.keywords}
            may_hold = self.source.words() if known is None else set(known)
            hidden = [name for name in wanted if None in written and name not in written and name in may_hold]
            if hidden:
                raise NoPatchError(f"line {call.lineno} gives its arguments by **, and {hidden[0]} may be one of them")
        return [Keyword(call, name, value) for call in calls for name, value in wanted.items()]

    def with_options(self, wanted: Mapping[str, str]) -> list[Edit]:
        """Set options of the script's framework in the call that creates the options object."""
        taker, maker = self.facts["framework"]["arguments"], self.facts.get("options_made_by")
        places = self.of_kind("options")
        if not places:
            by = (
                f"by {maker}, from a command line or a config: give it there"
                if maker
                else ("in another file: write it there")
            )
            raise NoPatchError(f"{taker} is made {by}")
        calls = []
        for line, name in places:
            found = self.source.calls_at(line, name)
            if not found:
                raise NoPatchError(f"line {line} makes {name} in a way that cannot be added to")
            calls.append(found[-1])
        return self.with_keywords(calls, self.facts.get("options_given") or (), **wanted)

    def models(self) -> list[tuple[str, ast.stmt]]:
        """The trained models: the name of each, and the statement that assigns it."""
        found: dict[str, ast.stmt] = {}
        for line, name in self.of_kind("model"):
            statement = self.source.statement_that_names(name, line) if name else None
            if statement is None:
                told = f"a model that line {line} calls" if not name else f"{name}, which line {line} calls,"
                raise NoPatchError(f"{told} gets no name of its own in the script")
            found[name] = statement
        if not found:
            raise NoPatchError("no model that is trained has a name in the script")
        return list(found.items())

    def torch(self) -> tuple[str, list[Edit]]:
        """The name of torch in the script, with an import if there is none."""
        return self.source.name_of_module("torch")

    def passes(self) -> list[tuple[ast.stmt, ast.stmt, list[ast.stmt]]]:
        """Each backward pass with its forward pass, as two statements of one block, and that block."""
        found = []
        forward = {line for line, _ in self.of_kind("model")}
        others = {line for kind in ("backward", "update") for line, _ in self.of_kind(kind)}
        for line, _ in self.of_kind("backward"):
            for last in [item for call in self.source.calls_at(line) for item in self.source.statements_around(call)]:
                block = self.source.block_of(last)
                first: ast.stmt | None = None
                for statement in block[: block.index(last) + 1]:
                    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                    if first is None and forward.intersection(lines):
                        first = statement
                    if others.intersection(lines) and statement is not last:
                        first = None
                if first is not None:
                    found.append((first, last, block))
                    break
        if not found:
            raise NoPatchError("the model's call and the backward pass do not lie in one block of the script")
        return found


def _at_the_top(line: str) -> Callable[[_Script, Any], list[Edit]]:
    def write(script: _Script, value: Any) -> list[Edit]:
        torch, imports = script.torch()
        return [
            *imports,
            script.source.behind(script.source.after_imports(), "", line.format(torch=torch, value=value)),
        ]

    return write


def _attention(script: _Script, value: str) -> list[Edit]:
    torch, imports = script.torch()
    return [*imports, *script.source.at_the_top(*(line.format(torch=torch) for line in attention_lines(value)))]


def _keywords(kind: str, **wanted: str) -> Callable[[_Script, Any], list[Edit]]:
    def write(script: _Script, value: Any) -> list[Edit]:
        given = {name: text.format(value=value) for name, text in wanted.items()}
        return script.with_keywords(script.makers(kind), **given)

    return write


def _of_the_model(line: str) -> Callable[[_Script, Any], list[Edit]]:
    def write(script: _Script, value: Any) -> list[Edit]:
        models = script.models()
        torch, imports = script.torch() if "{torch}" in line else ("", [])
        return [*imports, *(script.source.behind(at, line.format(model=name, torch=torch)) for name, at in models)]

    return write


def _blocks(script: _Script, value: Any) -> list[Edit]:
    if not (script.facts.get("block_list") or script.facts.get("block_classes")):
        raise NoPatchError("the blocks do not lie in one list of the model, and their classes cannot be imported")
    edits: list[Edit] = []
    for name, statement in script.models():
        lines, modules = block_lines(
            name, script.facts, script.source.free_name("block", "part", "child"), script.source.defined()
        )
        for module, kind in modules:
            edits.append(script.source.behind(script.source.after_imports(), f"from {module} import {kind}"))
        edits.append(script.source.behind(statement, *lines))
    return edits


def _copies(script: _Script, value: Any) -> list[Edit]:
    lines = script.of_kind("copy")
    if not lines:
        raise NoPatchError("the copies of batches are made by a library, not by the script")
    calls = [call for line, _ in lines for call in script.source.calls_at(line, "to", "cuda")]
    free = [call for call in calls if "non_blocking" not in {item.arg for item in call.keywords}]
    return script.with_keywords(free, non_blocking="True")


def _dropped_gradients(script: _Script, value: Any) -> list[Edit]:
    calls = [call for line, _ in script.of_kind("zeroing") for call in script.source.calls_at(line, "zero_grad")]
    if not calls:
        raise NoPatchError("the call of zero_grad is made by a library, not by the script")
    return [Span(script.source.end(call.func), script.source.end(call), "()") for call in calls]


def _kept_gathered(script: _Script, value: Any) -> list[Edit]:
    return script.with_keywords(_sharding(script), **{_RESHARD: "False"})


def _sharding(script: _Script) -> list[ast.Call]:
    calls = script.source.calls_of(_FULLY_SHARD)
    if not calls:
        raise NoPatchError("fully_shard is called by a library, not by the script")
    return calls


def _one_shard_call(script: _Script, value: Any) -> list[Edit]:
    """Remove all calls but the last, and loops that contain nothing else."""
    source = script.source
    edits: list[Edit] = []
    for call in _sharding(script)[:-1]:
        statement = source.statement_of(call)
        if not (isinstance(statement, ast.Expr) and statement.value is call):
            raise NoPatchError(f"line {call.lineno} uses what fully_shard returns; leave that call out")
        while len(source.block_of(statement)) == 1 and isinstance(source.parent(statement), (ast.For, ast.If)):
            around = source.parent(statement)
            assert isinstance(around, (ast.For, ast.If))
            if around.orelse:
                break
            statement = around
        if len(source.block_of(statement)) == 1:
            raise NoPatchError(f"line {call.lineno} calls fully_shard where nothing else is done; leave that call out")
        edits.append(source.without(statement))
    if not edits:
        raise NoPatchError(
            "one line of the script makes all calls of fully_shard; leave out those for parts of the model"
        )
    return edits


def _gathered_once(script: _Script, value: Any) -> list[Edit]:
    """Tell DistributedDataParallel before each pass whether an update follows, as the loop itself decides."""
    source = script.source
    if (script.facts.get("data_parallel") or {}).get("looks_for_unused"):
        raise NoPatchError("it looks for unused parameters, and would miss those that only the first passes use")
    models = [name for name, _ in script.models()]
    first, _, block = _only(script.passes())
    loop = source.loop_around(first)
    updates = [call for line, _ in script.of_kind("update") for call in source.calls_at(line)]
    if len(models) != 1 or loop is None or not updates:
        raise NoPatchError("the loop does not show which pass is the last of an update")
    guards = [item for item in source.ancestors(updates[0]) if isinstance(item, ast.If) and item in block]
    if guards:
        condition = guards[0].test
        between = block[block.index(first) : block.index(guards[0])]
        inner = source.code_of(condition)
    elif (
        isinstance(loop, ast.For)
        and isinstance(loop.target, ast.Name)
        and isinstance(loop.iter, ast.Call)
        and names_in(loop.iter.func) == {"range"}
        and len(loop.iter.args) == 1
        and source.start(updates[0]) > source.end(loop)
    ):
        condition, between = loop.iter.args[0], []
        count = source.code_of(condition)
        inner = f"{loop.target.id} == {count if isinstance(condition, (ast.Name, ast.Attribute)) else f'({count})'} - 1"
    else:
        raise NoPatchError("the loop does not show which pass is the last of an update")
    changed = {name for statement in between for name in names_set_in(statement)}
    calls = [node for node in ast.walk(condition) if isinstance(node, ast.Call) and names_in(node.func) != {"len"}]
    if changed & names_in(condition) or calls or "\n" in inner:
        raise NoPatchError(f"whether an update follows ({inner.splitlines()[0]}) is known only after the pass")
    return [source.before(first, f"{models[0]}.require_backward_grad_sync = {inner}")]


def _only(found: Sequence[Any]) -> Any:
    if len(found) != 1:
        raise NoPatchError("the script computes gradients at several places")
    return found[0]


def _half_precision(script: _Script, value: Any) -> list[Edit]:
    """Put the statements from the model's call up to the backward pass under autocast."""
    source = script.source
    torch, imports = script.torch()
    edits: list[Edit] = list(imports)
    for first, last, block in script.passes():
        inside = block[block.index(first) : block.index(last)]
        if not inside:
            raise NoPatchError(f"line {first.lineno} computes the loss and its gradients in one statement")
        line = f'with {torch}.autocast("{script.facts["device"]}", dtype={torch}.bfloat16):'
        edits += source.under(line, inside)
    return edits


def _whole(script: _Script, value: Any) -> list[Edit]:
    """Give shuffling loaders a sampler of whole batches."""
    edits: list[Edit] = []
    reason = "the script makes no loader whose order it shows: DataLoader(data, batch_size=..., shuffle=True)"
    for call in script.makers("loader"):
        try:
            edits += _in_whole_batches(script, call)
        except NoPatchError as error:
            reason = str(error)
    if not edits:
        raise NoPatchError(reason)
    return edits


def _in_whole_batches(script: _Script, call: ast.Call) -> list[Edit]:
    source = script.source
    given: dict[str, ast.expr] = dict(zip(("dataset", "batch_size", "shuffle", "sampler"), call.args))
    given.update((item.arg, item.value) for item in call.keywords if item.arg is not None)
    data, size, shuffle, sampler = (given.get(name) for name in ("dataset", "batch_size", "shuffle", "sampler"))
    shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
    may_hold_more = any(item.arg is None for item in call.keywords) or len(call.args) > 4
    if data is None or size is None or not (shuffles or sampler) or may_hold_more or "batch_sampler" in given:
        raise NoPatchError(f"line {call.lineno} makes a loader whose order it does not show")
    read = source.attribute_of_iterated(*_CHANGED_BY_WHOLE_BATCHES)
    if read is not None:
        raise NoPatchError(f"line {read.lineno} reads {source.code_of(read)}, which would be another")
    samplers = ("BatchSampler",) if sampler is not None else ("BatchSampler", "RandomSampler")
    classes, imports = source.names_from("torch.utils.data", *samplers)
    edits: list[Edit] = list(imports)
    text = {name: source.code_of(node) for name, node in given.items()}
    if sampler is not None:
        order = text["sampler"]
    else:
        if not isinstance(data, (ast.Name, ast.Attribute)):  # it is used twice
            name = source.free_name("dataset", "data", "samples")
            statement = source.statement_of(call)
            if "\n" in text["dataset"] or not isinstance(statement, (ast.Assign, ast.Expr, ast.Return)):
                raise NoPatchError(f"line {call.lineno} makes the data set inside of the loader's call; give it a name")
            edits += [source.before(statement, f"{name} = {text['dataset']}"), source.instead(data, name)]
            text["dataset"] = name
        drawn = f", generator={text['generator']}" if "generator" in given else ""
        order = f"{classes[1]}({text['dataset']}{drawn})"
    batches = f"{classes[0]}({order}, {text['batch_size']}, {text.get('drop_last', 'False')})"
    edits.append(source.instead(size, "None"))
    if sampler is not None:
        edits.append(source.instead(sampler, batches))
    else:
        assert shuffle is not None
        keyword = source.parent(shuffle)
        if isinstance(keyword, ast.keyword):
            edits.append(source.instead(keyword, f"sampler={batches}"))
        else:
            edits += [source.instead(shuffle, "False"), Keyword(call, "sampler", batches)]
    if "drop_last" in given:
        edits.append(source.instead(given["drop_last"], "False"))
    return edits


def _trimmed(script: _Script, value: Any) -> list[Edit]:
    """Wrap each collate function in one that trims the batch."""
    source = script.source
    layout = script.facts.get("padding")
    if layout is None:
        raise NoPatchError("its batches are not a flat mapping or sequence of tensors, all of them alike")
    calls = script.makers("loader")
    torch, imports = script.torch()
    partial, more = source.name_of_module("functools")
    edits: list[Edit] = [*imports, *more]
    name = source.free_name("collate_trimmed")
    for line, _ in script.of_kind("other_loader"):
        if any(call in calls for call in source.calls_at(line)):
            raise NoPatchError(f"line {line} also makes loaders that do not shuffle, whose batches stay as they are")
    for call in calls:
        given = {item.arg: item.value for item in call.keywords}
        if None in given and "collate_fn" in source.words() and "collate_fn" not in given:
            raise NoPatchError(f"line {call.lineno} gives its arguments by **, and collate_fn may be one of them")
        own = given.get("collate_fn")
        if own is None and len(call.args) > 6:
            raise NoPatchError(f"line {call.lineno} gives collate_fn without its name")
        collate = f"{torch}.utils.data.default_collate" if own is None else source.code_of(own)
        edits.append(Keyword(call, "collate_fn", f"{partial}.partial({name}, {collate})"))
    around = [next(item for item in (call, *source.ancestors(call)) if item in source.tree.body) for call in calls]
    first = min((item for item in around if isinstance(item, ast.stmt)), key=lambda item: item.lineno)
    above = [] if isinstance(first, (ast.FunctionDef, ast.ClassDef, ast.If)) else ["", ""]
    edits.append(source.before(first, *above, *trimming_function(name, layout), "", ""))
    return edits


def _never(reason: str) -> Callable[[_Script, Any], list[Edit]]:
    def write(script: _Script, value: Any) -> list[Edit]:
        raise NoPatchError(reason)

    return write


_WRITERS: dict[str, Callable[[_Script, Any], list[Edit]]] = {
    "tf32": _at_the_top('{torch}.set_float32_matmul_precision("high")'),
    "autocast": _half_precision,
    "fused_optimizer": _keywords("optimizer", fused="True"),
    "compile": _of_the_model("{model}.compile()"),
    "compile_blocks": _blocks,
    "cuda_graphs": _of_the_model('{model}.compile(mode="reduce-overhead")'),
    "attention": _attention,
    "none_gradients": _dropped_gradients,
    "channels_last": _of_the_model("{model}.to(memory_format={torch}.channels_last)"),
    "cudnn_benchmark": _at_the_top("{torch}.backends.cudnn.benchmark = True"),
    "threads": _at_the_top("{torch}.set_num_threads({value})"),
    "workers": _keywords("loader", num_workers="{value}"),
    "whole_batches": _whole,
    "pin_memory": _keywords("loader", pin_memory="True"),
    "non_blocking": _copies,
    "late_losses": _never("what is logged, and when, is for the script to say"),
    "trim_padding": _trimmed,
    "bucket_mib": _keywords("data_parallel", bucket_cap_mb="{value}"),
    "bucket_views": _keywords("data_parallel", gradient_as_bucket_view="True"),
    "static_graph": _keywords("data_parallel", static_graph="True"),
    "gather_once": _gathered_once,
    "shard_calls": _one_shard_call,
    "keep_gathered": _kept_gathered,
}
