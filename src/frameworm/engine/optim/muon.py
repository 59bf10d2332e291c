"""Muon for the matrices of hidden layers, AdamW for everything else, as one optimizer.

Muon orthogonalizes the update of a matrix, which needs the whole matrix: under zero1 every rank updates whole matrices;
under zero2 and zero3 the update is gathered (in bfloat16, in which torch computes it) and each rank applies its rows.
Rates are matched to AdamW's, so one `training.lr` and `weight_decay` serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from frameworm.models.blocks import find_block_classes
from frameworm.parallel.shards import first_row, is_part, like_part, own_part
from frameworm.torch_private.optimizers import muon_factor, orthogonalised

MUON_EPS = 1e-7
_FLAGS = ("grad_scale", "found_inf")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Modules that multiply by matrices of their own although they may contain other modules.
_PRODUCTS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that hidden layers multiply by: what Muon is for.

    In a model that repeats blocks these are the matrices of the blocks; what comes before and after them (embeddings,
    input projections, heads) is not hidden. In any other model they are all matrices but the last. Embeddings,
    including those shared with a head, and matrices that nothing is multiplied by (norms, tables beside a block's
    layers) never count.
    """
    blocks = {module for kind in find_block_classes(model) for block in kind for module in block.modules()}
    tables = {id(item) for module in model.modules() if isinstance(module, _EMBEDDINGS) for item in module.parameters()}
    found: dict[int, nn.Parameter] = {}
    outside: set[int] = set()
    for module in model.modules():
        matrices = [item for item in module.parameters(recurse=False) if _is_matrix(item)]
        if blocks and module not in blocks:
            outside.update(map(id, matrices))
        elif _multiplies(module, in_block=bool(blocks)):
            found.update((id(item), item) for item in matrices)
    candidates = list(found.values()) if blocks else list(found.values())[:-1]
    return [item for item in candidates if id(item) not in tables and id(item) not in outside]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1 and parameter.is_floating_point()


def _multiplies(module: nn.Module, *, in_block: bool) -> bool:
    if isinstance(module, _PRODUCTS):
        return True
    if not in_block or isinstance(module, (*_EMBEDDINGS, *_NORMS, ParametrizationList)):
        return False
    return not any(True for _ in module.children())  # a custom layer; beside other layers it is more likely a table


class WholeMuon(torch.optim.Muon):
    """torch's Muon, extended to sharded matrices, learning rates on the device and updates skipped on the device."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> float | None:
        """Update the matrices that have gradients.

        Args:
            closure: Recomputes the loss.
            grad_scale: Divides the gradients, on the device.
            found_inf: If not 0, this update changes nothing; on the device.
        """
        held = [item for group in self.param_groups for item in group["params"]]
        on_host = not any(isinstance(group["lr"], Tensor) for group in self.param_groups)
        if grad_scale is None and found_inf is None and on_host and not any(map(is_part, held)):
            result: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bad = None if found_inf is None else found_inf.reshape(()) != 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, bad, grad_scale)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], bad: Tensor | None, scale: Tensor | None) -> None:
        assert parameter.grad is not None
        gradient, weights = own_part(parameter.grad), own_part(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        momentum = own_part(state["momentum_buffer"])
        if scale is not None:
            gradient = gradient / scale
        if bad is not None:
            gradient = torch.where(bad, momentum, gradient)  # leaves the momentum unchanged
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        if is_part(parameter):
            update = like_part(update.bfloat16(), parameter).full_tensor()
        update = orthogonalised(update, group)
        if is_part(parameter):
            begin = first_row(parameter)
            update = update[begin : begin + weights.shape[0]]
        matched = muon_factor(group, parameter.shape)
        rate = group["lr"] if bad is None else group["lr"] * (~bad).float()
        weights.mul_(1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            weights.addcmul_(update.to(weights.dtype), rate.to(weights.dtype), value=-matched)
        else:
            weights.add_(update, alpha=-rate * matched)


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over the groups of one optimizer; a group's `rule` selects which of them updates it.

    Args:
        params: Parameters or groups of them; AdamW updates those without a `rule`.
        lr: Learning rate of both.
        betas: For AdamW.
        eps: For AdamW.
        weight_decay: Decoupled decay of both.
        fused: Whether AdamW uses its fused kernel.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        fused: bool | None = None,
    ) -> None:
        self._muon: WholeMuon | None = None
        self._adamw: torch.optim.AdamW | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused, "rule": "adamw"}
        super().__init__(params, defaults)
        self._link()

    def _link(self) -> None:
        """Make both work on this optimizer's own groups and state."""
        by_rule: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
        for group in self.param_groups:
            by_rule[group["rule"]].append(group)
        # Each adds its own settings to its groups.
        self._muon = WholeMuon(by_rule["muon"], adjust_lr_fn="match_rms_adamw") if by_rule["muon"] else None
        self._adamw = torch.optim.AdamW(by_rule["adamw"]) if by_rule["adamw"] else None
        for inner in (self._muon, self._adamw):
            if inner is not None:
                inner.state = self.state
        self._step_supports_amp_scaling = all(group["fused"] for group in by_rule["adamw"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to update."""
        super().add_param_group(param_group)
        if self._muon is not None or self._adamw is not None:
            self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients; a loss scaler's flags are read on the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flags = {name: getattr(self, name) for name in _FLAGS if hasattr(self, name)}
        if self._muon is not None:
            self._muon.step(**flags)
        if self._adamw is not None:
            for name, value in flags.items():
                setattr(self._adamw, name, value)
            try:
                self._adamw.step()
            finally:
                for name in flags:
                    delattr(self._adamw, name)
        return loss
