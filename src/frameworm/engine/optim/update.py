"""From gradients to new parameters: weight, unscale, clip, update, clear; steps with bad gradients are skipped."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.adamw_kernel import FusedUpdate
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.host_adamw import HostAdamW, are_plain, clip, norm_of
from frameworm.engine.optim.schedule import AnySchedule
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private.optimizers import accepts_found_inf, found_inf, hooks_of, mark_stepped
from frameworm.torch_private.tensors import any_not_finite_, foreach_mul_, foreach_norm, sparse_values


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the momentum of a fused SGD to zero before its first step.

    torch allocates it uninitialized and fills it in the first update. If that update is skipped, the next one would
    start from whatever was in memory.
    """
    inner = getattr(optimizer, "optim", optimizer)  # inside a ZeroRedundancyOptimizer
    if not isinstance(inner, torch.optim.SGD):
        return
    for group in inner.param_groups:
        # With dampening, a first update from zero momentum would give another result.
        if not (group["fused"] and group["momentum"]) or group["dampening"]:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and inner.state[parameter].get("momentum_buffer") is None:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Update:
    """Applies the gradients of one step.

    Args:
        parameters: In the order in which their gradients are summed; those that the optimizer does not hold are
            ignored.
        check: Also skip steps with bad gradients when nothing is clipped.

    Attributes:
        lr: The first group's learning rate in the last step.
        clip_norm: Largest total norm of the gradients; None for no clipping.
        parameters: The parameters that the optimizer holds; frozen ones have no gradient.
        look: Check in every step which gradients are bad; on a CPU every bad step is checked anyway.
        finite: For each parameter in `judged`, whether its gradient was finite in the last bad step that was checked.
        judged: The parameters that had a gradient in the last step.
        averages: Moving averages of the weights, updated with every step; None if there are none.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        schedule: AnySchedule,
        precision: Precision,
        clip_norm: float | None,
        device: torch.device | None = None,
        strategy: Strategy | None = None,
        check: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self._strategy = strategy
        self._in_order = list(parameters)
        self.parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self.averages: AveragedWeights | None = None
        self.follow()
        self._scaler = precision.scaler
        self.clip_norm = clip_norm
        self._skips_on_device = accepts_found_inf(optimizer)
        assert device is not None or strategy is not None
        where = strategy.update_device if strategy is not None else device
        self._on_cpu = where is not None and where.type == "cpu"
        if not self._on_cpu:
            begin_momentum(optimizer)
        self._sharded_by = strategy if strategy is not None and strategy.shards_parameters else None
        # torch's own zero_grad records a profiler range at every call, which costs more than the clearing.
        own = getattr(optimizer.zero_grad, "__func__", None)
        self._clears_itself = own is not torch.optim.Optimizer.zero_grad
        self.lr: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | None = None
        self.skipped: torch.Tensor | None = None
        self.one_pass: FusedUpdate | None = None
        self.half_weights: HalfWeights | None = None
        self._on_host = HostAdamW(optimizer) if self._on_cpu and HostAdamW.suits(optimizer) else None
        # Sharded gradients are checked by their norm over all ranks.
        self._checks = check and self._scaler is None and clip_norm is None and (self._on_cpu or self._skips_on_device)
        self._wanted_check = check
        self._no, self._yes = (torch.tensor(value, device="cpu") for value in (0.0, 1.0))
        self.look = False
        self.finite: torch.Tensor | None = None
        self.judged: list[nn.Parameter] = []

    def follow(self) -> bool:
        """Pick up parameters frozen, unfrozen or added to the optimizer since the last call; return whether any."""
        optimizer, strategy = self.optimizer, self._strategy
        groups = (optimizer if strategy is None else strategy.given(optimizer)).param_groups
        trainable = [item.requires_grad for group in groups for item in group["params"]]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        held = {id(item): item for group in groups for item in group["params"]}
        known = [item for item in self._in_order if held.pop(id(item), None) is not None]
        self.parameters = [*known, *held.values()]
        if self.averages is not None:
            self.averages.follow(self.parameters)
        return True

    def average(self, averages: AveragedWeights) -> None:
        """Keep moving averages of the weights from now on."""
        averages.follow(self.parameters)
        self.averages = averages

    def find_one_pass(self) -> FusedUpdate | None:
        """Return a one-pass clip and update, or None where unsupported; it pays off in a graph but costs host time."""
        if self._scaler is not None or hooks_of(self.optimizer) or self._on_cpu:
            return None
        parameters = [item for item in self.parameters if item.requires_grad]
        if FusedUpdate.supports(self.optimizer, parameters, parameters[0].device) is not None:
            return None
        return FusedUpdate(self.optimizer, parameters, self.half_weights)

    @property
    def note(self) -> str | None:
        """What the summary says about bad gradients, if anything."""
        if self._on_cpu or self._skips_on_device:
            return None
        name = type(self.optimizer).__name__
        if self._scaler is not None:
            return (
                f"the host waits for the device in every step: {name} cannot skip a step by itself "
                "(use its fused form, fused=True)"
            )
        if self.clip_norm is not None or self._wanted_check:
            return f"steps with non-finite gradients are not skipped: {name} does not accept found_inf (use fused=True)"
        return None

    def end_step(self) -> None:
        """Keep the step's learning rate, then let the schedule set the next one."""
        lr = self.optimizer.param_groups[0]["lr"]
        self.lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        self.schedule.after_step()

    def apply(self, factor: torch.Tensor | None) -> None:
        """Update the parameters with the current gradients, entirely on the device.

        Args:
            factor: Multiplies the gradients first (a tensor on the device); None for 1.
        """
        self._apply(factor)
        if self.averages is not None:
            self.averages.update(self.skipped)

    def _apply(self, factor: torch.Tensor | None) -> None:
        optimizer, scaler = self.optimizer, self._scaler
        gradients: list[torch.Tensor] = []
        if self.one_pass is not None:
            self.grad_norm, self.skipped = self.one_pass(self.clip_norm, self.clip_norm is not None, factor)
            self.clear()
            return
        self.grad_norm = self.skipped = None
        if self.half_weights is not None:
            self.half_weights.collect()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if factor is not None or self.clip_norm is not None or self._checks or self.look:
            having = [item for item in self.parameters if item.grad is not None]
            if self._sharded_by is None:
                gradients = [item.grad for item in having if item.grad is not None]
            else:
                gradients = self._sharded_by.own_gradients(having)
            self.judged = having
            if self.look and gradients:
                self._note(_finite(gradients))
            self.grad_norm = self._weigh_and_clip(having, gradients, factor)
        if scaler is not None:
            self.skipped = found_inf(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        elif self.grad_norm is not None:
            if self._on_cpu:
                self._step_if(isfinite(self.grad_norm.item()))
            else:
                self._step_unless(torch.isfinite(self.grad_norm).logical_not_().float())
        elif self._checks and gradients:
            if self._on_cpu:
                self._step_if(self._all_finite(gradients))
            else:
                device = gradients[0].device
                self._step_unless(_any_bad(gradients, torch.zeros((), device=device), torch.ones((), device=device)))
        else:
            self._step()
        self.clear()
        if self.half_weights is not None:
            self.half_weights.refresh()

    def _weigh_and_clip(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Weight and clip the gradients; return their norm before clipping, None if it is not needed."""
        if factor is not None:
            foreach_mul_(gradients, factor.to("cpu") if self._on_cpu else factor)
        if self.clip_norm is None and (not self._checks or self._sharded_by is None):
            return None
        plain = self._on_host is not None and self._sharded_by is None and bool(gradients) and are_plain(gradients)
        norm = norm_of(gradients) if plain else get_total_norm(gradients)
        if self._on_cpu and not self.look and not isfinite(norm.item()):
            self.finite = _finite(gradients)  # clipping by a bad norm would spoil them all
        if self._sharded_by is None:
            assert self.clip_norm is not None
            # Within the limit they would be multiplied by 1; on a CPU, reading the norm is cheaper.
            if not (self._on_cpu and norm.item() + 1e-6 <= self.clip_norm):
                if plain:
                    clip(gradients, self.clip_norm, norm)
                else:
                    clip_grads_with_norm_(parameters, self.clip_norm, norm)
            return norm
        norm = self._sharded_by.norm_over_ranks(parameters, gradients, norm)
        if self.clip_norm is None:
            return norm
        foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _note(self, finite: torch.Tensor) -> None:
        """Keep the last bad step's result: it is read later, when good steps may have followed."""
        before = self.finite
        if self._on_cpu:
            self.finite = before if finite.all() else finite
        elif before is None or before.shape != finite.shape or torch.cuda.is_current_stream_capturing():
            self.finite = finite
        else:  # without synchronizing
            self.finite = torch.where(finite.all(), before, finite)

    def clear(self) -> None:
        """Drop the gradients."""
        if self.half_weights is not None:
            self.half_weights.clear()
        if self._clears_itself:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _all_finite(self, gradients: list[torch.Tensor]) -> bool:
        """Check the gradients themselves when no norm is needed."""
        # A norm takes a third of the time of checking each value, and non-finite values make it non-finite.
        if isfinite(sum(norm.item() for norm in foreach_norm(_values(gradients)))):
            return True
        finite = _finite(gradients)
        if finite.all():  # finite, but too large to be squared
            return True
        if not self.look:
            self.finite = finite
        return False

    def _step_if(self, fine: bool) -> None:
        """Step only if the gradients are fine; on a CPU the host knows without waiting."""
        self.skipped = self._no if fine else self._yes
        if fine:
            self._step()
        else:
            mark_stepped(self.optimizer)

    def _step(self) -> None:
        if self._on_host is None or not self._on_host.step():
            self.optimizer.step()

    def _step_unless(self, bad: torch.Tensor) -> None:
        """Let the optimizer itself skip its update on the device, if it can."""
        if self._skips_on_device:
            self.skipped = bad
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = self.skipped  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        else:
            self.optimizer.step()


def _any_bad(gradients: list[torch.Tensor], flag: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Set the flag to 1 if any gradient is not finite, in one pass that changes nothing else."""
    any_not_finite_(_values(gradients), flag, one)
    return flag


def _finite(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([item.isfinite().all() for item in _values(gradients)])


def _values(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; for sparse ones, their stored values."""
    return [sparse_values(item) if item.is_sparse else item for item in gradients]
