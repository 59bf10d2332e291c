"""Each private name for tensors still does what frameworm takes it for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameworm.torch_private import tensors
from frameworm.torch_private.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    To,
    TorchDispatchMode,
)


def test_many_tensors_in_one_launch() -> None:
    several = [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    tensors.foreach_mul_(several, 2.0)
    tensors.foreach_mul_(several, torch.tensor(0.5))
    assert [item.tolist() for item in several] == [[2.0] * 2, [3.0] * 3]
    targets = [torch.empty(2), torch.empty(3)]
    tensors.foreach_copy_(targets, several, non_blocking=True)
    assert [item.tolist() for item in targets] == [[2.0] * 2, [3.0] * 3]
    norms = tensors.foreach_norm(several)
    assert torch.allclose(torch.stack(list(norms)), torch.tensor([8.0**0.5, 27.0**0.5]))


@pytest.mark.parametrize(("value", "bad"), [(1.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_any_not_finite_raises_a_flag_and_changes_nothing(value: float, bad: float) -> None:
    gradients, flag = [torch.ones(2), torch.tensor([value])], torch.zeros(())
    tensors.any_not_finite_(gradients, flag, torch.ones(()))
    assert flag.item() == bad
    assert gradients[0].tolist() == [1.0, 1.0]


def test_parse_to() -> None:
    assert tensors.parse_to("cpu", torch.float16) == To(torch.device("cpu"), torch.float16, False, None)
    assert tensors.parse_to(torch.float64).device is None
    assert tensors.parse_to(memory_format=torch.channels_last).memory_format is torch.channels_last
    with pytest.raises(RuntimeError):
        tensors.parse_to("cpu", copy=True)


def test_version_grows_with_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) > before


def test_gradient_hooks_of_both_kinds_are_seen() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert not tensors.has_gradient_hooks(tensor)
    for register in (tensor.register_hook, tensor.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert tensors.has_gradient_hooks(tensor)
        handle.remove()
        assert not tensors.has_gradient_hooks(tensor)


def test_storage_id_names_memory() -> None:
    tensor, empty = torch.zeros(4), torch.empty(0)
    assert tensors.storage_id(tensor) == tensors.storage_id(tensor[1:]) == tensors.storage_id(tensor.untyped_storage())
    assert tensors.storage_id(empty) != tensors.storage_id(torch.empty(0))
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert tensors.storage_id(fake) == tensors.storage_id(fake[1:])


def test_shared_memory_is_shared_and_as_long_as_asked() -> None:
    memory = tensors.shared_memory(4096)
    assert memory.is_shared()
    assert (memory.nbytes, memory.dtype) == (4096, torch.uint8)


def test_sparse_parts_as_they_stand() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    assert tensors.sparse_values(tensor).tolist() == [2.0, 3.0]  # not added up
    assert tensors.sparse_indices(tensor).tolist() == [[1, 1]]
    assert tensors.sparse_count(tensor) == 2


def test_local_part() -> None:
    plain = torch.zeros(2)
    assert tensors.local_part(plain) is plain
    from torch.distributed.tensor import DTensor

    assert "_local_tensor" in DTensor.__slots__ or "_local_tensor" in DTensor.__annotations__


class Wrapper(Tensor):
    @staticmethod
    def __new__(cls, shape: torch.Size) -> Wrapper:
        return tensors.make_wrapper(cls, shape, torch.float32, torch.device("cpu"))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return torch.full((1,), 7.0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function.__name__


def test_make_wrapper_and_without_subclass_functions() -> None:
    made = Wrapper(torch.Size([2, 3]))
    assert torch.neg(made) == "neg"
    with tensors.without_subclass_functions():
        assert made.shape == (2, 3)
        assert torch.neg(made).item() == 7
    assert not tensors.is_traceable_wrapper_subclass(torch.zeros(1))


def test_dispatch_modes_see_operations_and_their_schemas() -> None:
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add_(1)
    assert [tensors.schema_of(item).name for item in seen] == ["aten::ones", "aten::add_"]
    assert [tensors.schema_of(item).is_mutable for item in seen] == [False, True]
    assert tensors.overload_packet(seen[1]) is torch.ops.aten.add_
    assert tensors.schema_of(len) is None
    assert tensors.overload_packet(len) is len


def test_fake_tensors_have_shapes_only() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = nn.Linear(3, 2)(torch.ones(4, 3))
        assert isinstance(made, FakeTensor)
        assert made.shape == (4, 2)
        with pytest.raises(DataDependentOutputException):
            made.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            made.nonzero()


def test_trees() -> None:
    value = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    leaves, spec = tensors.tree_flatten(value)
    assert tensors.tree_leaves(value) == leaves
    assert tensors.tree_unflatten(leaves, spec) == value
    assert tensors.tree_map(type, value) == {"a": [Tensor, int], "b": (Tensor,)}
    assert tensors.tree_map_only(int, lambda item: item + 1, [1, "x"]) == [2, "x"]
