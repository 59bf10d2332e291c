"""Muon for the matrices of hidden layers, AdamW for all else, as one optimizer.

Muon makes the update of a matrix orthogonal, which is about the matrix as a whole: under zero1 every rank updates whole
matrices of its own, under zero2 and zero3 the update is gathered (in bfloat16, in which torch computes it) and each
rank applies its rows. Rates are matched to AdamW's, so that one `training.lr` and `weight_decay` is for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from frameworm.models.blocks import find_block_classes
from frameworm.parallel.shards import first_row, is_part, like_part, own_part

MUON_EPS = 1e-7
_FLAGS = ("grad_scale", "found_inf")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Modules with modules inside them that multiply by matrices of their own.
_PRODUCTS = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that hidden layers multiply by: what Muon is for.

    In a model that repeats blocks these are the matrices of the blocks; what comes before and after them (embeddings,
    projections of the input, heads) is not hidden. In any other model all but the last matrix are. Embeddings, also
    those that a head shares, and matrices that nothing is multiplied by (norms, tables beside a block's layers) are
    none.
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
    return not any(True for _ in module.children())  # a custom layer; next to other layers it is more likely a table


class WholeMuon(torch.optim.Muon):
    """torch's Muon, also for divided matrices, for rates on the device, and for updates that are left out there."""

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
            closure: Computes the loss again.
            grad_scale: What the gradients must be divided by, on the device.
            found_inf: Not 0 where this update must change nothing, on the device.
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
        from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

        assert parameter.grad is not None
        gradient, weights = own_part(parameter.grad), own_part(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        momentum = own_part(state["momentum_buffer"])
        if scale is not None:
            gradient = gradient / scale
        if bad is not None:
            gradient = torch.where(bad, momentum, gradient)  # which leaves the momentum exactly as it is
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        if is_part(parameter):
            update = like_part(update.bfloat16(), parameter).full_tensor()
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if is_part(parameter):
            begin = first_row(parameter)
            update = update[begin : begin + weights.shape[0]]
        matched = _adjust_lr(1.0, group["adjust_lr_fn"], parameter.shape)
        rate = group["lr"] if bad is None else group["lr"] * (~bad).float()
        weights.mul_(1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            weights.addcmul_(update.to(weights.dtype), rate.to(weights.dtype), value=-matched)
        else:
            weights.add_(update, alpha=-rate * matched)


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over groups of one optimizer; a group's `rule` says which of them updates it.

    Args:
        params: Parameters or groups of them; those without a `rule` are AdamW's.
        lr: Rate of both.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Decoupled decay of both.
        fused: AdamW's one kernel for the whole update.
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
        """Let both work on these very groups, and on one state."""
        by_rule: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
        for group in self.param_groups:
            by_rule[group["rule"]].append(group)
        # Each adds the settings to the groups that only it knows.
        self._muon = WholeMuon(by_rule["muon"], adjust_lr_fn="match_rms_adamw") if by_rule["muon"] else None
        self._adamw = torch.optim.AdamW(by_rule["adamw"]) if by_rule["adamw"] else None
        for inner in (self._muon, self._adamw):
            if inner is not None:
                inner.state = self.state
        self._step_supports_amp_scaling = all(group["fused"] for group in by_rule["adamw"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update these, too."""
        super().add_param_group(param_group)
        if self._muon is not None or self._adamw is not None:
            self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have gradients; the flags of a loss scaler are heeded on the device."""
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
