"""Finds the blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FEW_BLOCKS = 5
_FURTHER_CLASS = 0.1


def find_repeated_blocks(model: nn.Module, beside: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The blocks that make up most of a model: all instances of the repeated class that holds the most parameters.

    Only classes that are made of other modules count, and containers such as `nn.Sequential` do not. A class with very
    few instances that itself repeats a block (the two towers of a model for text and images) gives way to that block.

    Args:
        model: Where to look.
        beside: Blocks found before; modules that lie in one of them or hold one do not count.
    """
    blocks: list[nn.Module] = []
    held = 0
    for instances in _outermost_by_class(model, beside).values():
        size = _parameter_count(instances)
        finer = len(blocks) < _FEW_BLOCKS and len(instances) > len(blocks) and 2 * size >= held
        if len(instances) > 1 and size and (finer if blocks and size <= held else size > held):
            blocks, held = instances, size
    return blocks


def find_block_classes(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks that a model repeats, one list for each class: an encoder's layers, then its decoder's.

    The first list is what `find_repeated_blocks` finds. A further class counts if it holds a tenth as many parameters.
    """
    found: list[list[nn.Module]] = []
    taken: list[nn.Module] = []
    while (blocks := find_repeated_blocks(model, taken)) and (
        not found or _parameter_count(blocks) >= _FURTHER_CLASS * _parameter_count(found[0])
    ):
        found.append(blocks)
        taken += blocks
    return found


def _parameter_count(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {one for module in modules for one in module.parameters()})


def _outermost_by_class(model: nn.Module, beside: Collection[nn.Module] = ()) -> dict[type[nn.Module], list[nn.Module]]:
    """The modules with modules inside them by class, without those that lie in another one of their class."""
    found: dict[type[nn.Module], list[nn.Module]] = {}
    inside: dict[type[nn.Module], set[nn.Module]] = {}
    taken = {module for block in beside for module in block.modules()}
    for module in model.modules():  # a module comes before those inside it
        kind = type(module)
        if module is model or kind in CONTAINERS or not any(True for _ in module.children()):
            continue
        if not taken.isdisjoint(module.modules()):
            continue
        if module not in inside.setdefault(kind, set()):
            found.setdefault(kind, []).append(module)
            inside[kind].update(module.modules())
    return found


def alike(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Blocks of one class by the shapes of what they hold: the compiler takes those for constants."""
    groups: dict[Any, list[nn.Module]] = {}
    for block in blocks:
        held = [*block.named_parameters(), *block.named_buffers()]
        groups.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in held), []).append(block)
    return list(groups.values())
