"""Tensors: nested containers of them, lists of them in one call, their storages, and tensors that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from frameworm.torch_private.lookup import attribute, function

# Fake tensors have shapes and no values: dry runs of a model. Dispatch modes see every operation of a step: counters of
# FLOPs and of memory. Trees walk nested batches in torch's own order. Classes are needed when frameworm is imported, so
# without one of these the import fails and names it.
__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "any_not_finite_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "has_gradient_hooks",
    "is_traceable_wrapper_subclass",
    "local_part",
    "make_wrapper",
    "overload_packet",
    "parse_to",
    "schema_of",
    "shared_memory",
    "sparse_count",
    "sparse_indices",
    "sparse_values",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
]

_Tensor = TypeVar("_Tensor", bound=Tensor)

# Many tensors in one launch instead of one launch each.
foreach_copy_ = function(torch, "_foreach_copy_")
foreach_mul_ = function(torch, "_foreach_mul_")
foreach_norm = function(torch, "_foreach_norm")
# Raises a flag on the device where a gradient is not finite, in one pass and without waiting for the device.
any_not_finite_ = function(torch, "_amp_foreach_non_finite_check_and_unscale_")


class To(NamedTuple):
    """What a call of `Tensor.to` asks for; None where it says nothing about it."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    memory_format: torch.memory_format | None


def parse_to(*inputs: Any, **named: Any) -> To:
    """The arguments of `Tensor.to`, which come in many forms.

    Raises:
        TypeError, RuntimeError: They are something else, such as `copy=True`.
    """
    return To(*attribute(torch._C._nn, "_parse_to")(*inputs, **named))


def version_of(tensor: Tensor) -> int:
    """A number that grows with every change in place."""
    version: int = attribute(tensor, "_version")
    return version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks run when the tensor gets its gradient; those on its node in the autograd graph cannot be seen."""
    return bool(attribute(tensor, "_backward_hooks") or attribute(tensor, "_post_accumulate_grad_hooks"))


def storage_id(tensor: Tensor | torch.UntypedStorage) -> int:
    """Names the memory behind a tensor, also where it has no address: empty and fake ones."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    found: int = attribute(storage, "_cdata")
    return found


def shared_memory(size_bytes: int) -> Tensor:
    """Bytes that other processes can read; the public way would make them here first and then copy them."""
    storage = attribute(torch.UntypedStorage, "_new_shared")(size_bytes, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they stand; the public way refuses one with several entries for one place."""
    found: Tensor = attribute(tensor, "_values")()
    return found


def sparse_indices(tensor: Tensor) -> Tensor:
    """The places of `sparse_values`."""
    found: Tensor = attribute(tensor, "_indices")()
    return found


def sparse_count(tensor: Tensor) -> int:
    """How many entries a sparse tensor of any layout holds."""
    found: int = attribute(tensor, "_nnz")()
    return found


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a divided tensor without asking the other ranks; every other tensor as it is.

    Without the attribute a divided tensor counts as whole, in reports of memory only.
    """
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def make_wrapper(kind: type[_Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _Tensor:
    """A tensor of a subclass without memory of its own."""
    made: _Tensor = attribute(Tensor, "_make_wrapper_subclass")(kind, shape, dtype=dtype, device=device)
    return made


def schema_of(operation: Any) -> Any:
    """The names of an operation's arguments and whether it changes one; None for one of a higher order."""
    return getattr(operation, "_schema", None)


def overload_packet(operation: Callable[..., Any]) -> Any:
    """The operation behind an overload, which formulas for FLOPs are registered under; others as they are."""
    return getattr(operation, "_overloadpacket", operation)


def without_subclass_functions() -> Any:
    """A context in which functions of torch do not ask subclasses of Tensor."""
    return attribute(torch._C, "DisableTorchFunctionSubclass")()
