"""Weights kept in the dtype that autocast would cast them to, beside the parameters themselves.

Under autocast every matrix product casts its weight, and the weight's gradient is cast back: two small kernels per
parameter and step, which are noticeable in a step replayed as one graph. Here the cast weights persist between steps.
Forward and backward read them in place of the parameters, and their gradients stay in half precision until the update,
which writes parameter and cast weight in one pass (adamw_kernel). All values equal autocast's bit for bit: what is
cast, when it is rounded and what is summed in fp32 stays the same. (A compiler may keep more digits than bf16 has in a
gradient that is cast right away; a gradient kept in bf16 is rounded once.)

A model names the parameters that autocast casts wherever it reads them: `autocast_parameters()` returns pairs of a
module and a parameter name. Other parameters, and those that several modules share, are left alone. A parameter with
gradient hooks is read itself, cast by autocast as usual, because its hooks need its fp32 gradients one by one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from frameworm.torch_private.tensors import foreach_copy_, has_gradient_hooks, version_of


class HalfWeights:
    """The cast weights of a model.

    Args:
        places: Pairs of a module and the name of one of its parameters.
        dtype: The dtype that autocast casts to.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        for module, name in places:
            parameter = module._parameters[name]
            assert parameter is not None
            half = nn.Parameter(torch.empty_like(parameter, dtype=dtype, requires_grad=False))
            self._places.append((module._parameters, name, parameter, half))
        self._parameters: list[Tensor] = [parameter for _, _, parameter, _ in self._places]
        self.tensors: list[Tensor] = [half for *_, half in self._places]
        self._of = {id(parameter): half for parameter, half in zip(self._parameters, self.tensors)}
        self.refresh()

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype | None) -> HalfWeights | None:
        """Create those that a model names; None if it names none or the dtype is not bf16."""
        named = getattr(model, "autocast_parameters", None)
        if named is None or dtype != torch.bfloat16:
            return None
        users = Counter(id(item) for _, item in model.named_parameters(remove_duplicate=False))
        places = []
        for module, name in named():
            parameter = module._parameters.get(name)  # a parametrized weight is not in _parameters
            if type(parameter) is not nn.Parameter or not parameter.requires_grad or users[id(parameter)] != 1:
                continue
            if parameter.dtype == torch.float32:
                places.append((module, name))
        return cls(places, dtype) if places else None

    def beside(self, parameter: Tensor) -> Tensor | None:
        """Return the cast weight of a parameter, if it has one."""
        return self._of.get(id(parameter))

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the tensor that gets a parameter's gradient in the next backward pass: the cast weight or itself."""
        half = self.beside(parameter)
        return parameter if half is None or has_gradient_hooks(parameter) else half

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make modules read the cast weights during forward and backward, except for parameters with gradient hooks."""
        for held, name, parameter, half in self._places:
            if not has_gradient_hooks(parameter):
                held[name] = half
        try:
            yield
        finally:
            for held, name, parameter, _ in self._places:
                held[name] = parameter

    def follow(self) -> None:
        """Cast again if the parameters were written to since the last update."""
        if self._versions != [version_of(item) for item in self._parameters]:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all parameters again."""
        foreach_copy_(self.tensors, self._parameters)
        self._versions = [version_of(item) for item in self._parameters]

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients of the cast weights to the parameters, summed in fp32."""
        for parameter, half in zip(self._parameters, self.tensors):
            gradient, half.grad = half.grad, None
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad.add_(gradient)

    def clear(self) -> None:
        """Drop the gradients."""
        for half in self.tensors:
            half.grad = None
