"""Modules and parameters of a loss function, which train beside the model.

They are small, and every rank holds them whole under every strategy: rank 0's values are broadcast once, and gradients
are averaged over the ranks after backward. Tensors of the model itself, which a loss may also hold, are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frameworm.errors import ModelError
from frameworm.torch_private.modules import change_own_tensors

PREFIX = "loss_fn/"  # no parameter name of a model begins like this
_BUCKET_BYTES = 25 * 2**20


class Beside:
    """Modules and loose parameters that are not part of the model.

    Args:
        model: The model, whose modules and parameters are excluded.
        modules: Modules by their path in the loss function; "" is the loss function itself.
        loose: Parameters outside of modules.
        held: Ids of the parameters that the optimizer holds; None: unknown, and all are assumed to be trained.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        modules: Mapping[str, nn.Module] | None = None,
        loose: Mapping[str, Tensor] | None = None,
        held: Collection[int] | None = None,
    ) -> None:
        self.modules: dict[str, nn.Module] = dict(modules or {})
        self._loose: dict[str, Tensor] = dict(loose or {})
        own = set() if model is None else set(model.modules())
        # A module may hold the model itself, for example to compute losses from its outputs.
        self._of_model = {
            place: tuple(
                name + "." for name, module in held.named_modules(remove_duplicate=False) if module in own and name
            )
            for place, held in self.modules.items()
        }
        self._shared = set() if model is None else {id(item) for item in chain(model.parameters(), model.buffers())}
        self.parameters: dict[str, Any] = {}
        known: set[int] = set()
        for name, item in chain(self._each("named_parameters"), self._loose.items()):
            if id(item) not in known:
                known.add(id(item))
                self.parameters[PREFIX + name] = item
        self._held = known if held is None else held

    def _each(self, what: str) -> Iterator[tuple[str, Tensor]]:
        """Parameters or buffers of the modules, by name, without the model's own."""
        for place, held in self.modules.items():
            for name, item in getattr(held, what)():
                if id(item) not in self._shared and not name.startswith(self._of_model[place]):
                    yield _joined(place, name), item

    def tied(self) -> str | None:
        """The name of a parameter that one of these modules shares with the model, if any."""
        for place, held in self.modules.items():
            for name, item in held.named_parameters():
                if id(item) in self._shared and not name.startswith(self._of_model[place]):
                    return PREFIX + _joined(place, name)
        return None

    def buffers(self) -> list[Tensor]:
        """The current buffers; a module may replace them."""
        return [item for _, item in self._each("named_buffers")]

    def replicas(self, device: torch.device) -> dict[str, Any]:
        """The parameters on the training device, which the ranks keep equal."""
        return {name: item for name, item in self.parameters.items() if item.device.type == device.type}

    def buffers_on(self, device: torch.device) -> list[Tensor]:
        """The buffers on a device."""
        return [item for item in self.buffers() if item.device.type == device.type]

    def place(self, device: torch.device) -> None:
        """Move the loss function and everything that trains to a device, keeping the parameter objects.

        Anything else that it holds, such as an average of the model in host memory, stays where it is.
        """
        for place, held in self.modules.items():
            if place and not any(id(item) in self._held for item in held.parameters()):
                continue
            for name, module in held.named_modules():
                if not (name + ".").startswith(self._of_model[place]):
                    change_own_tensors(module, lambda item: item.to(device))
        for item in self._loose.values():
            if id(item) in self._held:
                item.data = item.data.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        found: dict[str, Any] = {}
        for place, held in self.modules.items():
            shared = {name for name, item in held.state_dict(keep_vars=True).items() if id(item) in self._shared}
            for name, item in held.state_dict().items():
                if name not in shared and not name.startswith(self._of_model[place]):
                    found[_joined(place, name)] = item
        return {**found, **{name: item.detach() for name, item in self._loose.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`.

        Raises:
            ValueError: It belongs to another loss function.
        """
        own = self.state_dict()
        odd = sorted(own.keys() ^ state.keys())
        if odd:
            raise ValueError(f"it {'does not have' if odd[0] in own else 'has'} {odd[0]}")
        for name, item in own.items():
            if isinstance(item, Tensor) and item.shape != getattr(state[name], "shape", None):
                raise ValueError(f"{name} has another shape")
        for place, held in self.modules.items():
            prefix = _joined(place, "")
            names = [name for name in held.state_dict() if prefix + name in own]
            held.load_state_dict({name: state[prefix + name] for name in names}, strict=False)
        with torch.no_grad():
            for name, item in self._loose.items():
                item.copy_(state[name])


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


class BesideGradients:
    """Averages the gradients of parameters beside the model over the ranks.

    The ranks agree on which parameters have gradients in the first step, or in every step if steps differ (`asks`).
    """

    def __init__(self, sum_over_ranks: Callable[[Tensor], None], world_size: int, *, asks: bool) -> None:
        self._sum_over_ranks = sum_over_ranks
        self._world_size = world_size
        self._asks = asks
        self._present: list[bool] | None = None
        self._used: list[bool] = []

    def ask_again(self) -> None:
        """Agree again in the next step, because the parameters have changed."""
        self._present = None

    def average(self, parameters: list[nn.Parameter], device: torch.device) -> None:
        """Replace the gradients by their mean over the ranks; a parameter without gradient on any rank keeps none.

        Raises:
            ModelError: A step used other parameters than the first.
        """
        if not parameters:
            return
        present = [item.grad is not None for item in parameters]
        if self._present is None or self._asks:
            counts = torch.tensor(present, dtype=torch.float32, device=device)
            self._sum_over_ranks(counts)
            self._present, self._used = present, [count > 0 for count in counts.tolist()]
        elif present != self._present:
            raise ModelError(
                "a step used other parameters of loss_fn than the first; set parallel.find_unused_parameters=true "
                "(or find_unused_parameters=True)"
            )
        gradients: list[Tensor] = []
        for parameter, used in zip(parameters, self._used):
            if used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        average(gradients, self._sum_over_ranks, self._world_size)


@torch.no_grad()
def send_values(tensors: list[Tensor]) -> None:
    """Broadcast rank 0's values to all ranks."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def average(gradients: list[Tensor], sum_over_ranks: Callable[[Tensor], None], world_size: int) -> None:
    """Replace gradients, which all ranks have for the same parameters, by their mean over the ranks."""
    for bucket in _buckets(gradients):
        first = bucket[0]
        in_place = len(bucket) == 1 and (first.is_sparse or first.is_contiguous())
        flat = first if in_place else torch.cat([item.flatten() for item in bucket])
        sum_over_ranks(flat)
        flat.mul_(1 / world_size)
        if not in_place:
            for gradient, part in zip(bucket, flat.split([item.numel() for item in bucket])):
                gradient.copy_(part.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Group consecutive gradients of one dtype up to a size limit; large and sparse ones get their own bucket."""
    found: list[list[Tensor]] = []
    filled = _BUCKET_BYTES
    for gradient in gradients:
        alone = gradient.is_sparse or not found or found[-1][0].is_sparse or found[-1][0].dtype != gradient.dtype
        if alone or filled + gradient.nbytes > _BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(gradient)
        filled += 0 if gradient.is_sparse else gradient.nbytes
    return found
