"""The compression error of each parameter's gradient, to be sent with the next one.

A residual belongs to a parameter but is stored per bucket: one flat tensor per bucket, with a slice per parameter. When
DDP changes its buckets, the slices move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from frameworm.torch_private.tensors import foreach_mul_

Scale = Tensor | float | None


class Named:
    """The parameters of a model by identity, name and position."""

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        # Compiled modules have an extra part in their names; a checkpoint should fit both kinds.
        found = [(name.replace("_orig_mod.", ""), item) for name, item in model.named_parameters()]
        self._names = {id(item): name for name, item in found}
        self._positions = {id(item): position for position, (_, item) in enumerate(found)}
        self.parameters = dict(found)

    def name(self, parameter: Tensor) -> str:
        """The name of a parameter."""
        return self._names[id(parameter)]

    def names(self, parameters: Iterable[Tensor]) -> tuple[str, ...]:
        """The names of several parameters."""
        return tuple(self._names[id(item)] for item in parameters)

    def position(self, name: str) -> int:
        """The position of a parameter, equal on all ranks."""
        return self._positions[id(self.parameters[name])]


class Residuals:
    """The residuals of all parameters, fp32.

    Args:
        named: The parameters.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._flat: dict[tuple[str, ...], Tensor] = {}
        self._slices: dict[str, Tensor] = {}
        self._scale: Tensor | float | None = None  # loss scale when the residuals were last used
        self._given: Scale = None  # kept alive while another stream may still read it

    def of(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """The residual of a bucket that holds these parameters in this order."""
        flat = self._flat.get(names)
        if flat is None:
            flat = self._flat[names] = self._arrange(names, device)
        return flat

    def rescale(self, scale: Scale) -> None:
        """Convert all residuals to the loss scale of the coming gradients, without waiting for a device."""
        new: Tensor | float = 1.0 if scale is None else scale
        old, self._given = self._scale, scale
        device = next((item.device for item in (new, old) if isinstance(item, Tensor) and item.is_cuda), None)
        if device is None:
            self._scale = new
            if old is not None and self._slices and float(new) != float(old):
                foreach_mul_(list(self._slices.values()), float(new) / float(old))
            return
        # The last scale has fixed memory, which replays of a captured CUDA graph can read.
        kept = _number_on(device, old)
        if kept is None:
            kept = torch.as_tensor(new if old is None else old, device=device, dtype=torch.float32).reshape(()).clone()
        ratio = torch.as_tensor(new, device=device).reshape(()) / kept
        if self._slices:
            foreach_mul_(list(self._slices.values()), ratio)
        kept.copy_(torch.as_tensor(new, device=device).reshape(()))
        self._scale = kept

    def clear(self) -> None:
        """Forget everything."""
        self._flat.clear()
        self._slices.clear()
        self._scale = None

    def state_dict(self) -> dict[str, object]:
        """The residuals by parameter name, on the CPU."""
        scale = self._scale
        return {
            "values": {name: item.detach().cpu().clone() for name, item in self._slices.items()},
            "scale": None if scale is None else float(scale),
        }

    def load(self, values: dict[str, Tensor], scale: float | None) -> list[str]:
        """Restore saved residuals; returns notes about those that do not fit."""
        self.clear()
        notes, unknown = [], []
        for name, value in values.items():
            parameter = self._named.parameters.get(name)
            if parameter is None:
                unknown.append(name)
            elif parameter.numel() != value.numel():
                notes.append(f"error feedback of {name} starts from nothing: the parameter has another size now")
            else:
                self._slices[name] = value.to(parameter.device, torch.float32, copy=True).reshape(-1)
        if unknown:
            some = ", ".join(unknown[:3]) + (" and others" if len(unknown) > 3 else "")
            notes.append(f"error feedback of parameters that the model does not have was left out: {some}")
        self._scale = scale
        return notes

    def _arrange(self, names: Sequence[str], device: torch.device) -> Tensor:
        """A flat tensor for these parameters, filled with their existing residuals."""
        counts = [self._named.parameters[name].numel() for name in names]
        flat = torch.zeros(sum(counts), device=device)
        moved = set(names)
        for old in [old for old in self._flat if moved.intersection(old)]:
            del self._flat[old]  # slices that have not moved yet keep its memory alive
        for name, place in zip(names, flat.split(counts)):
            if name in self._slices:
                place.copy_(self._slices[name])
            self._slices[name] = place
        return flat


def _number_on(device: torch.device, number: Scale) -> Tensor | None:
    """The number if it is a tensor on this device already."""
    return number if isinstance(number, Tensor) and number.device == device else None
