"""Weights kept in the numbers that autocast would cast them to, beside the parameters themselves.

Under autocast every matrix product casts its weight, and the weight's gradient is cast back: two small kernels per
parameter and step, which a step that is replayed as one graph feels. Here the cast weights live on from step to step.
Forward and backward read them in place of the parameters, and their gradients stay in half precision until the update
takes them; it writes parameter and cast weight in one pass (adamw_kernel). All values are those of autocast, to the
bit: what is cast, when it is rounded and what is added up in fp32 stays the same. (A compiler may keep more digits of a
gradient that is cast on the spot than bf16 has; kept in bf16 it is rounded once.)

A model says which parameters autocast casts wherever it reads them: `autocast_parameters()` gives pairs of a module and
the name of its parameter. Others, and those that several modules share, stay as they are.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class HalfWeights:
    """The cast weights of a model.

    Args:
        places: Modules and the names of their parameters.
        dtype: What autocast casts to.
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
        """Those of a model that names them; None where there are none, or nothing is cast."""
        named = getattr(model, "autocast_parameters", None)
        if named is None or dtype != torch.bfloat16:
            return None
        users = Counter(id(item) for _, item in model.named_parameters(remove_duplicate=False))
        places = []
        for module, name in named():
            parameter = module._parameters.get(name)  # a parametrized weight is not among them
            if type(parameter) is not nn.Parameter or not parameter.requires_grad or users[id(parameter)] != 1:
                continue
            if parameter.dtype == torch.float32:
                places.append((module, name))
        return cls(places, dtype) if places else None

    def beside(self, parameter: Tensor) -> Tensor | None:
        """The cast weight of a parameter, if it has one."""
        return self._of.get(id(parameter))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Modules read the cast weights; for forward and backward."""
        for held, name, _, half in self._places:
            held[name] = half
        try:
            yield
        finally:
            for held, name, parameter, _ in self._places:
                held[name] = parameter

    def follow(self) -> None:
        """Cast anew what somebody has written into the parameters since the last update."""
        if self._versions != [item._version for item in self._parameters]:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all parameters anew."""
        torch._foreach_copy_(self.tensors, self._parameters)
        self._versions = [item._version for item in self._parameters]

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients at hand to those of the parameters, in fp32."""
        for parameter, half in zip(self._parameters, self.tensors):
            gradient, half.grad = half.grad, None
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad.add_(gradient)

    def clear(self) -> None:
        """Forget the gradients."""
        for half in self.tensors:
            half.grad = None
