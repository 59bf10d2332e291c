"""From gradients to new parameters: weigh, unscale, clip, update, clear; a step with bad gradients is left out."""

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


def accepts_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can leave out a step by itself, told by a flag on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give a fused SGD a momentum of zero before its first step.

    torch takes memory as it finds it and fills it in the first update. Where that is left out, the next update starts
    from whatever lay there.
    """
    inner = getattr(optimizer, "optim", optimizer)  # of one whose state is divided among ranks
    if not isinstance(inner, torch.optim.SGD):
        return
    for group in inner.param_groups:
        # With dampening the first update is another one than from zero.
        if not (group["fused"] and group["momentum"]) or group["dampening"]:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and inner.state[parameter].get("momentum_buffer") is None:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Update:
    """Applies the gradients of one step.

    Args:
        parameters: In the order in which their gradients are added up; those that the optimizer does not hold are left
            alone.
        check: Leave out steps with bad gradients also where nothing is clipped.

    Attributes:
        lr: The first group's learning rate in the last step.
        clip_norm: The largest norm of all gradients together; None: they are not clipped.
        parameters: Those that the optimizer holds; frozen ones have no gradient.
        look: Note which gradients are bad in every step; on a CPU that is done by itself where a step is bad.
        finite: For each parameter with a gradient, whether that was finite in the last bad step that was looked at.
        judged: These parameters.
        averages: Moving averages of the weights, kept up with every update; None: there are none.
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
        # torch's own way of clearing records a profiler range at every call, which costs more than the clearing.
        own = getattr(optimizer.zero_grad, "__func__", None)
        self._clears_itself = own is not torch.optim.Optimizer.zero_grad
        self.lr: torch.Tensor | float | None = None
        self.grad_norm: torch.Tensor | None = None
        self.skipped: torch.Tensor | None = None
        self.one_pass: FusedUpdate | None = None
        self.halves: HalfWeights | None = None
        self._on_host = HostAdamW(optimizer) if self._on_cpu and HostAdamW.suits(optimizer) else None
        # Sharded gradients are judged by their norm over all ranks.
        self._checks = check and self._scaler is None and clip_norm is None and (self._on_cpu or self._skips_on_device)
        self._wanted_check = check
        self._no, self._yes = (torch.tensor(value, device="cpu") for value in (0.0, 1.0))
        self.look = False
        self.finite: torch.Tensor | None = None
        self.judged: list[nn.Parameter] = []

    def follow(self) -> bool:
        """Take in what was frozen, unfrozen or given to the optimizer since the last call; whether anything was."""
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
        """Clipping and update in one pass, where that is the same; worth it inside a graph, costly for the host."""
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        if self._scaler is not None or any(hooks) or self._on_cpu:
            return None
        parameters = [item for item in self.parameters if item.requires_grad]
        if FusedUpdate.supports(self.optimizer, parameters, parameters[0].device) is not None:
            return None
        return FusedUpdate(self.optimizer, parameters, self.halves)

    @property
    def note(self) -> str | None:
        """What the summary has to say about bad gradients, if anything."""
        if self._on_cpu or self._skips_on_device:
            return None
        name = type(self.optimizer).__name__
        if self._scaler is not None:
            return (
                f"the host waits for the device in every step: {name} cannot leave out a step by itself "
                "(use its fused form, fused=True)"
            )
        if self.clip_norm is not None or self._wanted_check:
            return (
                f"steps with non-finite gradients are not left out: {name} does not accept found_inf (use fused=True)"
            )
        return None

    def end_step(self) -> None:
        """Keep the step's learning rate, then let the schedule set the next one."""
        lr = self.optimizer.param_groups[0]["lr"]
        self.lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        self.schedule.after_step()

    def apply(self, factor: torch.Tensor | None) -> None:
        """Update the parameters with the gradients at hand; all of it happens on the device.

        Args:
            factor: What the gradients must be multiplied with first (a tensor on the device), or None for 1.
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
        if self.halves is not None:
            self.halves.collect()
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
            self.skipped = _found_inf(scaler, optimizer)
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
        if self.halves is not None:
            self.halves.refresh()

    def _weigh_and_clip(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the gradients' norm before clipping, None where nothing is clipped."""
        if factor is not None:
            torch._foreach_mul_(gradients, factor.to("cpu") if self._on_cpu else factor)
        if self.clip_norm is None and (not self._checks or self._sharded_by is None):
            return None
        plain = self._on_host is not None and self._sharded_by is None and bool(gradients) and are_plain(gradients)
        norm = norm_of(gradients) if plain else get_total_norm(gradients)
        if self._on_cpu and not self.look and not isfinite(norm.item()):
            self.finite = _finite(gradients)  # before a bad norm spoils them all
        if self._sharded_by is None:
            assert self.clip_norm is not None
            # Within the limit they are multiplied by one; on a CPU asking costs less.
            if not (self._on_cpu and norm.item() + 1e-6 <= self.clip_norm):
                if plain:
                    clip(gradients, self.clip_norm, norm)
                else:
                    clip_grads_with_norm_(parameters, self.clip_norm, norm)
            return norm
        norm = self._sharded_by.norm_over_ranks(parameters, gradients, norm)
        if self.clip_norm is None:
            return norm
        torch._foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _note(self, finite: torch.Tensor) -> None:
        """Keep it unless all is well: who asks about a bad step does so later, when good ones may have followed."""
        before = self.finite
        if self._on_cpu:
            self.finite = before if finite.all() else finite
        elif before is None or before.shape != finite.shape or torch.cuda.is_current_stream_capturing():
            self.finite = finite
        else:  # without asking the device
            self.finite = torch.where(finite.all(), before, finite)

    def clear(self) -> None:
        """Forget the gradients."""
        if self.halves is not None:
            self.halves.clear()
        if self._clears_itself:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _all_finite(self, gradients: list[torch.Tensor]) -> bool:
        """Judge the gradients themselves where no norm is needed."""
        # A norm is a third of the work of a look at each value. What is not finite makes it so, too.
        if isfinite(sum(norm.item() for norm in torch._foreach_norm(_values(gradients)))):
            return True
        finite = _finite(gradients)
        if finite.all():  # numbers all the same, but too large to be squared
            return True
        if not self.look:
            self.finite = finite
        return False

    def _step_if(self, fine: bool) -> None:
        """On a CPU asking costs nothing."""
        self.skipped = self._no if fine else self._yes
        if fine:
            self._step()
        elif hasattr(self.optimizer, "_opt_called"):
            self.optimizer._opt_called = True  # torch's schedulers warn about a step without an update otherwise

    def _step(self) -> None:
        if self._on_host is None or not self._on_host.step():
            self.optimizer.step()

    def _step_unless(self, bad: torch.Tensor) -> None:
        """On a device the optimizer itself leaves its update out, where it can."""
        if self._skips_on_device:
            self.skipped = bad
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = self.skipped  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        else:
            self.optimizer.step()


def _any_bad(gradients: list[torch.Tensor], flag: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """One pass over the gradients that changes nothing; the flag becomes 1 where one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(_values(gradients), flag, one)
    return flag


def _finite(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([item.isfinite().all() for item in _values(gradients)])


def _values(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; of sparse ones what they hold."""
    return [item._values() if item.is_sparse else item for item in gradients]


def _found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The flag `unscale_` raised for bad gradients; still on the device."""
    flags = list(scaler._found_inf_per_device(optimizer).values())
    return flags[0] if flags else None
