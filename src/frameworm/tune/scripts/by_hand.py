"""Lines of code that do in a script what a switch does from outside, for the patch and for manual editing."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from frameworm.attach.trial.switches import by_hand

_LEFT_OUT = {
    "flash": ("mem_efficient", "cudnn"),
    "efficient": ("flash", "cudnn"),
    "cudnn": ("flash", "mem_efficient"),
    "math": ("flash", "mem_efficient", "cudnn"),
}
_WIDTH_STEP = 8


def lines_by_hand(changes: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What to write into the script for some changes, as lines to paste if possible.

    Args:
        changes: Switches and their values.
        facts: What is known about the script.
    """
    lines: list[str] = []
    for name, value in changes.items():
        said = by_hand({name: value}, facts)
        if said != by_hand({name: value}):  # its framework has its own options for this
            lines += said
        elif name == "attention":
            lines += [line.format(torch="torch") for line in attention_lines(value)]
        elif name == "compile_blocks" and (facts.get("block_list") or facts.get("block_classes")):
            written, modules = block_lines("model", facts)
            lines += [*(f"from {module} import {kind}" for module, kind in modules), *written]
        elif name == "autocast":
            lines += [
                f'with torch.autocast("{facts["device"]}", dtype=torch.bfloat16):',
                "    output = model(...)",
                "    loss = ...  # loss.backward() stays outside",
            ]
        elif name == "trim_padding" and facts.get("padding"):
            lines += [*said, *trimming_function("collate_trimmed", facts["padding"])]
            lines.append("DataLoader(..., collate_fn=functools.partial(collate_trimmed, COLLATE))")
        else:
            lines += said
    return lines


def attention_lines(wanted: str) -> list[str]:
    """Lines that select one attention back end by disabling the others; `{torch}` is the module's name."""
    return [f"{{torch}}.backends.cuda.enable_{other}_sdp(False)" for other in _LEFT_OUT[wanted]]


def block_lines(
    model: str, facts: Mapping[str, Any], block: str = "block", defined: Collection[str] = ()
) -> tuple[list[str], list[tuple[str, str]]]:
    """A loop that compiles the blocks of a model, and the classes to import for it, as module and name.

    Args:
        model: The variable that holds the model.
        facts: What is known about the script.
        block: Loop variable.
        defined: Names that the script already defines.
    """
    if facts.get("block_list"):
        return [f"for {block} in {model}.{facts['block_list']}:", f"    {block}.compile()"], []
    classes = [(str(module), str(kind)) for module, kind in facts.get("block_classes") or ()]
    kinds = [kind for _, kind in classes]
    any_of = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
    missing = [(module, kind) for module, kind in classes if kind not in defined and module != "__main__"]
    return [
        f"for {block} in {model}.modules():",
        f"    if isinstance({block}, {any_of}):",
        f"        {block}.compile()",
    ], missing


def trimming_function(name: str, layout: Mapping[str, Any]) -> Sequence[str]:
    """A function that collates samples and removes columns that hold only padding.

    Args:
        name: Name of the function.
        layout: See `frameworm.attach.trial.padding_layout`.
    """

    def batch_of(key: Any) -> str:
        return f"batch[{json.dumps(key)}]"

    real = " | ".join(f"({batch_of(key)} {test})" for key, test in layout["real"])
    real = real if len(layout["real"]) == 1 else f"({real})"
    keys = tuple(layout["cut"])
    is_left = layout["side"] == "left"
    cut = "[:, -width:]" if is_left else "[:, :width]"
    width = f"{batch_of(keys[0])}.shape[1] - int(columns.min())" if is_left else "int(columns.max()) + 1"
    lines = [
        f"def {name}(collate, samples):",
        '    """A batch without the columns that only pad it."""',
        "    batch = collate(samples)",
        f"    columns = {real}.any(0).nonzero()",
        f"    width = {width}",
        f"    width = -(-width // {_WIDTH_STEP}) * {_WIDTH_STEP}  # a few widths, not one for each length",
    ]
    if layout["form"] == "mapping":
        return [
            *lines,
            f"    for name in {json.dumps(keys)}:",
            f"        batch[name] = batch[name]{cut}.contiguous()",
            "    return batch",
        ]
    if len(keys) == layout["length"]:
        each = f"item{cut}.contiguous() for item in batch"
    else:
        each = f"item{cut}.contiguous() if place in {keys!r} else item for place, item in enumerate(batch)"
    return [*lines, f"    return [{each}]" if layout["form"] == "list" else f"    return tuple({each})"]
