"""What compression left out of each parameter's gradient, to be sent with the next one.

A residual belongs to a parameter and lies where its bucket lies: one flat tensor per bucket, a slice per parameter.
When DDP divides the parameters into other buckets, the slices move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Scale = Tensor | float | None


class Named:
    """The parameters of a model by identity, name and position."""

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        # A compiled module's names have a part more; a checkpoint is to fit with and without.
        found = [(name.replace("_orig_mod.", ""), item) for name, item in model.named_parameters()]
        self._names = {id(item): name for name, item in found}
        self._positions = {id(item): position for position, (_, item) in enumerate(found)}
        self.parameters = dict(found)

    def name(self, parameter: Tensor) -> str:
        """Of a parameter of the model."""
        return self._names[id(parameter)]

    def names(self, parameters: Iterable[Tensor]) -> tuple[str, ...]:
        """Of several."""
        return tuple(self._names[id(item)] for item in parameters)

    def position(self, name: str) -> int:
        """The same number on all ranks."""
        return self._positions[id(self.parameters[name])]


class Residuals:
    """The residuals of all parameters, fp32.

    Args:
        named: Whose they are.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._flat: dict[tuple[str, ...], Tensor] = {}
        self._slices: dict[str, Tensor] = {}
        self._scale: Tensor | float | None = None  # of the loss, when the residuals were last used

    def of(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """The residual of a bucket that holds these parameters, one after the other."""
        flat = self._flat.get(names)
        if flat is None:
            flat = self._flat[names] = self._arrange(names, device)
        return flat

    def rescale(self, scale: Scale) -> None:
        """Bring all residuals to the loss scale of the gradients that come; a device is not waited for."""
        new: Tensor | float = 1.0 if scale is None else scale
        old, self._scale = self._scale, new
        if old is None or not self._slices:
            return
        on_device = any(isinstance(item, Tensor) and item.device.type != "cpu" for item in (old, new))
        if not on_device:
            ratio: Tensor | float = float(new) / float(old)
            if ratio == 1.0:
                return
        else:
            device = next(item.device for item in (new, old) if isinstance(item, Tensor) and item.is_cuda)
            ratio = (torch.as_tensor(new, device=device) / torch.as_tensor(old, device=device)).reshape(())
        torch._foreach_mul_(list(self._slices.values()), ratio)

    def clear(self) -> None:
        """Forget everything."""
        self._flat.clear()
        self._slices.clear()
        self._scale = None

    def state_dict(self) -> dict[str, object]:
        """By parameter name, on the CPU."""
        scale = self._scale
        return {
            "values": {name: item.detach().cpu().clone() for name, item in self._slices.items()},
            "scale": None if scale is None else float(scale),
        }

    def load(self, values: dict[str, Tensor], scale: float | None) -> list[str]:
        """Go on with saved ones; returns what does not fit."""
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
        """A flat tensor for these parameters, with what they had elsewhere."""
        counts = [self._named.parameters[name].numel() for name in names]
        flat = torch.zeros(sum(counts), device=device)
        moved = set(names)
        for old in [old for old in self._flat if moved.intersection(old)]:
            del self._flat[old]  # slices that have not moved yet keep it alive
        for name, place in zip(names, flat.split(counts)):
            if name in self._slices:
                place.copy_(self._slices[name])
            self._slices[name] = place
        return flat
