"""AdamW and clipping on a CPU without torch's bookkeeping.

torch's own step sorts its tensors by device and type, checks for hooks and counts the steps of every tensor separately,
and clipping sorts once more: on a small model that takes longer than the arithmetic. The results here are the same, bit
for bit, and the optimizer remains torch's: its state is used in place, so torch can save, load or step it at any time.
Only the step counts move: each becomes an element of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.torch_private.execution import profiler_enabled
from frameworm.torch_private.optimizers import (
    fused_adamw_,
    hooks_of,
    hooks_of_all,
    is_patched_by_scheduler,
    make_state,
    mark_stepped,
)
from frameworm.torch_private.tensors import foreach_mul_, foreach_norm


class HostAdamW:
    """Steps torch's fused AdamW for parameters in host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[_Group] = []

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer can be stepped here."""
        return type(optimizer) is torch.optim.AdamW and all(_is_usual(group) for group in optimizer.param_groups)

    def step(self) -> bool:
        """Update the parameters that have gradients; return False if nothing was done and torch must step instead."""
        optimizer = self._optimizer
        if _is_watched(optimizer) or not all(_is_usual(group) for group in optimizer.param_groups):
            return False
        found = self._gradients()
        if found is None:
            if not self._plan():
                return False
            found = self._gradients()
            assert found is not None
        with torch.no_grad():
            for group, held, gradients in zip(optimizer.param_groups, self._groups, found):
                held.step(group, gradients)
        mark_stepped(optimizer)
        return True

    def _gradients(self) -> list[list[Tensor]] | None:
        """Return the gradients of each group; None if anything differs from the plan."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if len(groups) != len(self._groups):
            return None
        found = []
        for group, held in zip(groups, self._groups):
            gradients = []
            planned = iter(held.entries)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                entry = next(planned, None)
                if entry is None or not entry.holds(parameter, state) or not _is_plain(gradient):
                    return None
                gradients.append(gradient)
            if len(gradients) != len(held.entries):
                return None
            found.append(gradients)
        return found

    def _plan(self) -> bool:
        """Collect all parameters and their state; return False if any of them cannot be stepped here."""
        self._groups = []
        for group in self._optimizer.param_groups:
            members = [item for item in group["params"] if item.grad is not None]
            if not all(self._optimizer.state.get(item) for item in members):
                self._begin(group, members)
            states = [self._optimizer.state.get(item, {}) for item in members]
            if not all(map(_can_be_stepped, members, states)):
                self._groups = []
                return False
            self._groups.append(_Group(members, states))
        return True

    def _begin(self, group: dict[str, Any], members: Sequence[nn.Parameter]) -> None:
        """Have torch create the initial state; its first step would too, but takes a second to load the compiler."""
        if all(_is_plain(item) and item.grad is not None and _is_plain(item.grad) for item in members):
            make_state(self._optimizer, group)


class _Entry:
    """A parameter and its state at the time of planning."""

    __slots__ = ("average", "parameter", "square", "state", "step")

    def __init__(self, parameter: nn.Parameter, state: dict[str, Any], step: Tensor) -> None:
        self.parameter = parameter
        self.state = state
        self.average: Tensor = state["exp_avg"]
        self.square: Tensor = state["exp_avg_sq"]
        self.step = step

    def holds(self, parameter: nn.Parameter, states: Any) -> bool:
        state = self.state
        return (
            parameter is self.parameter
            and states.get(parameter) is state
            and state["step"] is self.step
            and state["exp_avg"] is self.average
            and state["exp_avg_sq"] is self.square
        )


class _Group:
    """The tensors of one parameter group."""

    def __init__(self, parameters: Sequence[nn.Parameter], states: Sequence[dict[str, Any]]) -> None:
        counts = [state["step"] for state in states]
        self._count = torch.stack(counts) if counts else torch.zeros(0)
        self._steps = list(self._count.unbind())
        for state, step in zip(states, self._steps):
            state["step"] = step
        self.entries = [_Entry(*item) for item in zip(parameters, states, self._steps)]
        self._parameters: list[Tensor] = list(parameters)
        self._averages = [entry.average for entry in self.entries]
        self._squares = [entry.square for entry in self.entries]

    def step(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        """Update once with the group's current settings."""
        if not gradients:
            return
        self._count += 1
        beta1, beta2 = group["betas"]
        fused_adamw_(
            self._parameters, gradients, self._averages, self._squares, [], self._steps,
            amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip


def are_plain(gradients: Iterable[Tensor]) -> bool:
    """Whether `norm_of` and `clip` accept these gradients."""
    return all(map(_is_plain, gradients))


def norm_of(gradients: list[Tensor]) -> Tensor:
    """`torch.nn.utils.get_total_norm` of plain gradients; at least one is required."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
    return norm


def clip(gradients: list[Tensor], clip_norm: float, norm: Tensor) -> None:
    """`torch.nn.utils.clip_grads_with_norm_` of plain gradients."""
    foreach_mul_(gradients, torch.clamp(clip_norm / (norm + 1e-6), max=1.0))


def _is_plain(gradient: Tensor) -> bool:
    kind = type(gradient)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and gradient.dtype is torch.float32
        and gradient.layout is torch.strided
        and gradient.is_cpu
    )


def _can_be_stepped(parameter: nn.Parameter, state: dict[str, Any]) -> bool:
    parts = [state.get(name) for name in ("step", "exp_avg", "exp_avg_sq")]
    tensors = [parameter, parameter.grad, *parts]
    if not all(isinstance(item, Tensor) and _is_plain(item) for item in tensors):
        return False
    return bool(state["step"].ndim == 0)


def _is_usual(group: dict[str, Any]) -> bool:
    """Whether `_Group.step` computes this group's update."""
    odd = group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]
    settings = (*group["betas"], group["eps"], group["weight_decay"])
    return not odd and group.get("decoupled_weight_decay", True) and not any(isinstance(i, Tensor) for i in settings)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's own step must run: it was replaced, has hooks, or a profiler records it."""
    changed = vars(optimizer).get("step")  # replaced; torch's schedulers do so too, which is harmless
    return bool(
        (changed is not None and not is_patched_by_scheduler(changed))
        or hooks_of(optimizer)
        or hooks_of_all()
        or profiler_enabled()
    )
