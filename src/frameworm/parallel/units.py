"""Which parts of a model are sharded, gathered and freed as a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from frameworm.errors import ModelError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, inner ones before outer ones, without the model itself.

    Layers are those that the model declares (`checkpoint_layers`), and modules of a class that a ModuleList or a
    Sequential repeats (in a Sequential only those with submodules). A module that shares a parameter with the outside
    is left out: the parameter must be present when either side is computed.
    """
    chosen: set[nn.Module] = set(getattr(model, "checkpoint_layers", None) or ())
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            chosen.update(_repeated(module.children(), blocks_only=isinstance(module, nn.Sequential)))
    chosen.discard(model)
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    return [module for module in reversed(list(model.modules())) if module in chosen and _is_apart(module, owners)]


def _repeated(modules: Iterable[nn.Module], *, blocks_only: bool) -> Iterator[nn.Module]:
    candidates = [
        module
        for module in modules
        if not isinstance(module, _CONTAINERS)
        and any(True for _ in module.parameters())
        and not (blocks_only and not any(True for _ in module.children()))
    ]
    counts = Counter(type(module) for module in candidates)
    return (module for module in candidates if counts[type(module)] > 1)


def _is_apart(module: nn.Module, owners: dict[int, set[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(owners[id(parameter)] <= inside for parameter in module.parameters())


def check_shardable(model: nn.Module, strategy: str) -> None:
    """Reject models that torch's fully_shard cannot divide.

    Raises:
        ModelError: Names the parameter.
    """
    first: tuple[str, nn.Parameter] | None = None
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"strategy {strategy} divides parameters by their first dimension, and {name} has none; "
                "give it the shape (1,), or use zero1"
            )
        first = first or (name, parameter)
        if parameter.dtype != first[1].dtype:
            raise ModelError(
                f"strategy {strategy} needs parameters of one type: {first[0]} is {_word(first[1])} and {name} is "
                f"{_word(parameter)}; use ddp, or gpu.mixed_precision instead of a model in two types"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(True for _ in module.parameters(recurse=False)):
            raise ModelError(
                f"strategy {strategy} cannot divide sparse gradients, which {name or type(module).__name__} has; make "
                "it with sparse=False, or use ddp or zero1"
            )


def _word(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
