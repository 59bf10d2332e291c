"""AdamW and clipping on a CPU in as many calls as there is arithmetic.

torch's own step sorts its tensors by device and type, asks for hooks and counts the steps of every tensor apart, and
clipping sorts once more: on a small model all that takes longer than the arithmetic. What is computed here is the same,
bit for bit, and the optimizer stays torch's: its state is used in place, so that torch can save, load or step it at any
time. Only the counts of steps move, into one tensor of which each is an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer


class HostAdamW:
    """Steps a fused AdamW of torch whose parameters are in the host's memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[_Group] = []

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of those that can be stepped here."""
        return type(optimizer) is torch.optim.AdamW and all(_is_usual(group) for group in optimizer.param_groups)

    def step(self) -> bool:
        """Update the parameters that have gradients; False: nothing was done, and torch has to do it."""
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
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        return True

    def _gradients(self) -> list[list[Tensor]] | None:
        """The gradients of each group; None where anything is not as it was planned."""
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
        """Look at all that takes part; False: something is not for this."""
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
        """Have torch make the state that its first step would make; that step loads the compiler, for a second."""
        if all(_is_plain(item) and item.grad is not None and _is_plain(item.grad) for item in members):
            self._optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]


class _Entry:
    """A parameter and its state, as planned."""

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
    """The tensors of one group."""

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
        """One update with the settings that the group has now."""
        if not gradients:
            return
        self._count += 1
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            self._parameters, gradients, self._averages, self._squares, [], self._steps,
            amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip


def are_plain(gradients: Iterable[Tensor]) -> bool:
    """Whether the two functions below may be asked."""
    return all(map(_is_plain, gradients))


def norm_of(gradients: list[Tensor]) -> Tensor:
    """`torch.nn.utils.get_total_norm` of plain gradients, of which there is one at least."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip(gradients: list[Tensor], clip_norm: float, norm: Tensor) -> None:
    """`torch.nn.utils.clip_grads_with_norm_` of plain gradients."""
    torch._foreach_mul_(gradients, torch.clamp(clip_norm / (norm + 1e-6), max=1.0))


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
    """Whether this group is updated as `_Group.step` does it."""
    odd = group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]
    settings = (*group["betas"], group["eps"], group["weight_decay"])
    return not odd and group.get("decoupled_weight_decay", True) and not any(isinstance(i, Tensor) for i in settings)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody waits for torch's own step: one who changed it, a hook, or a profiler that marks it."""
    changed = vars(optimizer).get("step")  # torch's schedulers do that, which is no matter, and so may others
    return bool(
        (changed is not None and not hasattr(changed, "_wrapped_by_lr_sched"))
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )
