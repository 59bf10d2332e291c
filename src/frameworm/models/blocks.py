"""Find the blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FEW_BLOCKS = 5
_FURTHER_CLASS = 0.1


def find_repeated_blocks(model: nn.Module, beside: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Find the blocks that make up most of a model: all instances of the repeated class with the most parameters.

    Only classes with submodules count, except containers such as `nn.Sequential`. If a class has very few instances and
    itself repeats a block (such as the two towers of a text-image model), that block is used instead.

    Args:
        model: The model.
        beside: Blocks found earlier; modules inside or around them do not count.
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
    """Find the blocks that a model repeats, one list per class: for instance an encoder's layers, then a decoder's.

    The first list is that of `find_repeated_blocks`. A further class counts if it has at least a tenth as many
    parameters.
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
    """Group modules with submodules by class, without those inside another module of the same class."""
    found: dict[type[nn.Module], list[nn.Module]] = {}
    inside: dict[type[nn.Module], set[nn.Module]] = {}
    taken = {module for block in beside for module in block.modules()}
    for module in model.modules():  # a module comes before its submodules
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
    """Group blocks of one class by the shapes of their tensors, which the compiler treats as constants."""
    groups: dict[Any, list[nn.Module]] = {}
    for block in blocks:
        held = [*block.named_parameters(), *block.named_buffers()]
        groups.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in held), []).append(block)
    return list(groups.values())
