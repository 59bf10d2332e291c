"""Clipping and AdamW in three kernels: sum the squares, compute the step's scalars, update everything.

torch's fused AdamW splits tensors into chunks of 65,536 elements, which leaves most of a large GPU idle on a small
model, and norm and clipping take five more kernels. Here the norm is one pass over the gradients. The update is one
pass over everything, including half-precision weights (half_weights), in blocks small enough to fill the device. The
optimizer remains torch's: its state is used in place, so torch can save, load or step it at any time.

During CUDA graph capture, gradients get addresses that are not known beforehand, and tables can no longer be copied to
the device. Kernel arguments are recorded by value, though: the first kernel receives the addresses as arguments and
stores them in a table for the last one. The other tables come from an ordinary call before the capture.

`GatherGradients` uses the same means to copy all gradients into one tensor, which several ranks exchange.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.errors import ModelError, StateError
from frameworm.torch_private.optimizers import hooks_of, hooks_of_all, mark_stepped

_DEVICE_TYPES = ("cuda",)  # tests add "cpu", which triton can interpret
_NORM_BLOCK = 8192  # elements per program; larger than below, as each program searches the arguments for its gradient
_GATHER_BLOCK = 4096
_UPDATE_BLOCK = 2048
_TENSORS_PER_LAUNCH = 128  # kernel arguments are limited to 4 KiB
_PLANS_KEPT = 8
_SMALLEST_EPS = 1e-18  # the kernel's square root of a number below fp32's normal range is 0


class FusedUpdate:
    """Clips the gradients and applies AdamW, in place of `clip_grad_norm_` and the `step` of a torch optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], halves: HalfWeights | None = None
    ) -> None:
        parameters = list(parameters)
        self.optimizer = optimizer
        self._half_weights = halves
        self._device = parameters[0].device
        self._plans: dict[tuple[int, ...], _Plan] = {}
        objection = _objection(optimizer, parameters, self._device)
        if objection is not None:
            raise ModelError(f"the one-pass update cannot be used: {objection}; step the optimizer itself instead")

    @staticmethod
    def supports(
        optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> str | None:
        """Return why the one-pass update cannot replace clipping and `optimizer.step()`, or None if it can.

        Args:
            optimizer: The optimizer whose step would be replaced.
            parameters: All parameters that the gradient norm covers.
            device: Where they are. A small update is tried there; the first call compiles the kernels.
        """
        if device.type in _DEVICE_TYPES:
            device = torch.empty(0, device=device).device  # resolves "cuda" to an indexed device
        return _objection(optimizer, list(parameters), device) or _trial(device)

    def __call__(
        self, clip_norm: float | None, skip_bad: bool, factor: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Take one optimizer step with the current gradients, which keep their values; the host does not wait.

        Before a CUDA graph is captured, one such call must be made with the same arguments and parameters. A replay
        reads the learning rate again if it is a tensor on the device; if it is a plain number, call `refresh_rates`
        first.

        Args:
            clip_norm: Largest total norm of the gradients; None for no norm and no clipping.
            skip_bad: Change nothing when the norm is not finite. Has no effect without `clip_norm`.
            factor: Multiplies the gradients first (one element, on the device); None for 1.

        Returns:
            The norm before clipping and whether the step was skipped (1.0 or 0.0), on the device; None if not computed.
        """
        from frameworm.engine.optim import adamw_triton as kernels

        with_norm = clip_norm is not None
        skip = with_norm and skip_bad
        mark_stepped(self.optimizer)
        plan, gradients = self._prepare()
        if plan is None:
            zero = torch.zeros((), device=self._device)
            return zero if with_norm else None, zero.clone() if skip else None
        outcome = torch.empty(3, dtype=torch.float32, device=self._device)  # norm, skipped, coefficient
        places = [_code(gradient) for gradient in gradients]
        shared: dict[str, Any] = {"FACTOR": factor is not None, "num_warps": 8, "enable_fp_fusion": True}
        with _current(self._device):
            for first in range(0, len(places), _TENSORS_PER_LAUNCH):
                chunk = tuple(places[first : first + _TENSORS_PER_LAUNCH])
                start, end = plan.norm_starts[first], plan.norm_starts[first + len(chunk)]
                if not with_norm:
                    kernels.note_addresses[(1,)](
                        chunk, plan.addresses, first, COUNT=len(chunk), num_warps=1, enable_fp_fusion=True
                    )  # fmt: skip
                elif end > start:
                    kernels.sum_squares[(end - start,)](
                        chunk, plan.rows, plan.norm_owners, plan.addresses, plan.partials, factor, first, start,
                        COUNT=len(chunk), BLOCK=_NORM_BLOCK, **shared,
                    )  # fmt: skip
            kernels.settle[(1,)](
                plan.partials, plan.rows, plan.constants, plan.scalars, outcome, float(clip_norm or 0.0),
                plan.norm_starts[-1], len(places), NORM=with_norm, SKIP=skip, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
            if plan.update_blocks > 0:
                kernels.update[(plan.update_blocks,)](
                    plan.rows, plan.update_owners, plan.addresses, plan.scalars, outcome, factor,
                    NORM=with_norm, SKIP=skip, BLOCK=_UPDATE_BLOCK, **shared,
                )  # fmt: skip
        return outcome[0] if with_norm else None, outcome[1] if skip else None

    def refresh_rates(self) -> None:
        """Copy learning rates that are plain numbers to the device, where CUDA graph replays read them."""
        for plan in self._plans.values():
            plan.write_rates(self.optimizer.param_groups)

    def _prepare(self) -> tuple[_Plan | None, list[Tensor]]:
        """Return the up-to-date tables for the tensors that have gradients, and those gradients."""
        capturing = _capturing(self._device)
        groups = self.optimizer.param_groups
        tensors: list[tuple[Tensor, ...]] = []
        members: list[int] = []
        gradients: list[Tensor] = []
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                half = None if self._half_weights is None else self._half_weights.beside(parameter)
                gradient = half.grad if parameter.grad is None and half is not None else parameter.grad
                if gradient is not None:
                    gradients.append(_like(gradient, parameter, torch.bfloat16))
                    tensors.append((parameter, *self._state(parameter, capturing), parameter if half is None else half))
                    members.append(index)
        if not tensors:
            return None, []
        rates = [_address_of_rate(group["lr"], self._device) for group in groups]
        key = (
            *rates,
            *(item.data_ptr() for entry in tensors for item in entry),
            *(entry[0].numel() for entry in tensors),
        )
        plan = self._plans.get(key)
        settings = [(*group["betas"], group["eps"], group["weight_decay"]) for group in groups]
        if capturing and (plan is None or plan.settings != settings):
            raise StateError(
                "the one-pass update met new tensors or settings in the capture of a CUDA graph; run one step with the "
                "same parameters and settings outside of the capture first"
            )
        if plan is None:
            plan = self._keep(key, _Plan(tensors, members, rates, self._device))
        if plan.settings != settings:
            plan.write_constants(settings)
        plan.in_graph = plan.in_graph or capturing
        plan.write_rates(groups, capturing)
        return plan, gradients

    def _keep(self, key: tuple[int, ...], plan: _Plan) -> _Plan:
        """Store a plan. Plans used in CUDA graphs are kept; of the others, the oldest are dropped."""
        idle = [old for old, known in self._plans.items() if not known.in_graph]
        for old in idle[: max(len(idle) - _PLANS_KEPT + 1, 0)]:
            del self._plans[old]
        self._plans[key] = plan
        return plan

    def _state(self, parameter: nn.Parameter, capturing: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return a parameter's optimizer state, initialized as torch would if there is none."""
        state = self.optimizer.state[parameter]
        if not state:
            if capturing:
                raise StateError(
                    "a parameter has its first step in the capture of a CUDA graph; run one step outside of it first"
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        elif state["step"].device != self._device or state["step"].dtype != torch.float32:
            # Left by an optimizer that counted steps on the host.
            state["step"] = state["step"].to(self._device, torch.float32)
        average, average_square = state["exp_avg"], state["exp_avg_sq"]
        if not _same_layout(average, parameter) or not _same_layout(average_square, parameter):
            state["exp_avg"] = average = _like(average, parameter)
            state["exp_avg_sq"] = average_square = _like(average_square, parameter)
        return average, average_square, state["step"]


class GatherGradients:
    """Copies gradients to their places in one tensor, in one kernel where torch takes several.

    Args:
        places: Where each gradient belongs: fp32, on one GPU, each in one piece of memory.
    """

    def __init__(self, places: list[Tensor]) -> None:
        self._places = places
        self._device = places[0].device
        rows: list[list[int]] = []
        owners: list[int] = []
        for index, place in enumerate(places):
            rows.append([place.data_ptr(), place.numel(), len(owners)])
            owners.extend([index] * math.ceil(place.numel() / _GATHER_BLOCK))
        self._starts = [*(row[2] for row in rows), len(owners)]
        self._rows = _send(rows, torch.int64, self._device)
        self._owners = _send(owners, torch.int32, self._device)

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Whether the kernel runs on this device. The first call compiles kernels."""
        return device.type in _DEVICE_TYPES and _trial(device) is None

    def __call__(self, gradients: list[Tensor], share: float) -> bool:
        """Copy the gradients multiplied by `share`; returns False, with nothing copied, if one cannot be copied so."""
        from frameworm.engine.optim import adamw_triton as kernels

        dtypes = (torch.float32, torch.bfloat16)
        if not all(_same_layout(item, place, dtypes) for item, place in zip(gradients, self._places)):
            return False
        codes = [_code(gradient) for gradient in gradients]
        with _current(self._device):
            for first in range(0, len(codes), _TENSORS_PER_LAUNCH):
                chunk = tuple(codes[first : first + _TENSORS_PER_LAUNCH])
                start, end = self._starts[first], self._starts[first + len(chunk)]
                if end > start:
                    kernels.gather[(end - start,)](
                        chunk, self._rows, self._owners, share, first, start,
                        COUNT=len(chunk), BLOCK=_GATHER_BLOCK, num_warps=8,
                    )  # fmt: skip
        return True


class _Plan:
    """The device tables for one set of tensors."""

    def __init__(
        self, tensors: list[tuple[Tensor, ...]], members: list[int], rates: list[int], device: torch.device
    ) -> None:
        self._members = members
        self._rates = torch.zeros(len(rates), dtype=torch.float32, device=device)
        self._written: list[float | None] = [None] * len(rates)
        rows: list[list[int]] = []
        owners: tuple[list[int], list[int]] = ([], [])
        for index, (entry, group) in enumerate(zip(tensors, members)):
            elements = entry[0].numel()
            rate = rates[group] or self._rates[group].data_ptr()
            *places, half = (item.data_ptr() for item in entry)
            if half == places[0]:
                half = 0
            rows.append([*places, rate, elements, len(owners[0]), len(owners[1]), half])
            for owner, block in zip(owners, (_NORM_BLOCK, _UPDATE_BLOCK)):
                owner.extend([index] * math.ceil(elements / block))
        self.rows = _send(rows, torch.int64, device)
        self.norm_owners = _send(owners[0], torch.int32, device)
        self.update_owners = _send(owners[1], torch.int32, device)
        self.norm_starts = [*(row[6] for row in rows), len(owners[0])]
        self.update_blocks = len(owners[1])
        self.partials = torch.empty(len(owners[0]), dtype=torch.float32, device=device)
        self.addresses = torch.empty(len(rows), dtype=torch.int64, device=device)
        self.constants = torch.empty((len(rows), 6), dtype=torch.float64, device=device)
        self.scalars = torch.empty((len(rows), 8), dtype=torch.float32, device=device)
        self.settings: list[tuple[float, ...]] = []
        self.in_graph = False

    def write_constants(self, settings: list[tuple[float, ...]]) -> None:
        """Write each tensor's constants, derived from its group's (beta1, beta2, eps, weight_decay)."""
        values = [
            (*(math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)), 1 - beta1, 1 - beta2, eps, decay)
            for beta1, beta2, eps, decay in settings
        ]
        self.constants.copy_(_send([values[group] for group in self._members], torch.float64, self.constants.device))
        self.settings = settings

    def write_rates(self, groups: list[dict[str, Any]], capturing: bool = False) -> None:
        """Write the learning rates that the kernels cannot read in place."""
        for index, rate in enumerate(group["lr"] for group in groups):
            if isinstance(rate, Tensor) and rate.device == self._rates.device:
                if rate.dtype != torch.float32:
                    self._rates[index].copy_(rate.reshape(()))
            elif not capturing and self._written[index] != float(rate):
                self._written[index] = float(rate)
                self._rates[index].fill_(float(rate))


def _objection(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], device: torch.device) -> str | None:
    """Return why the one-pass update does not apply, judging by the objects alone; None if nothing rules it out."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"the optimizer is {type(optimizer).__name__}, not torch's AdamW itself"
    if device.type not in _DEVICE_TYPES:
        return f"the device is {device.type}, not a GPU"
    for group in optimizer.param_groups:
        if not (group["fused"] or group["capturable"]):
            return "AdamW counts its steps on the host (use fused=True or capturable=True)"
        for name in ("amsgrad", "maximize", "differentiable"):
            if group[name]:
                return f"AdamW was made with {name}=True"
        if not group.get("decoupled_weight_decay", True):
            return "the weight decay is not decoupled"
        if any(isinstance(value, Tensor) for value in (*group["betas"], group["eps"], group["weight_decay"])):
            return "a setting other than the learning rate is a tensor"
        if group["eps"] < _SMALLEST_EPS:
            return f"eps is {group['eps']:g}, less than {_SMALLEST_EPS:g}"
    if hooks_of(optimizer) or hooks_of_all():
        return "hooks are registered that run with each step of the optimizer"
    held = [item for group in optimizer.param_groups for item in group["params"] if item.requires_grad]
    if {id(item) for item in held} != {id(item) for item in parameters if item.requires_grad}:
        return "the optimizer does not hold the same parameters as the model"
    for item in held:
        if type(item) is not nn.Parameter and type(item) is not Tensor:
            return f"a parameter is a {type(item).__name__}, not a plain tensor"
        if item.device != device or item.dtype != torch.float32:
            return f"a parameter is {item.dtype} on {item.device}, not torch.float32 on {device}"
        if not is_dense(item):
            return f"a parameter of shape {tuple(item.shape)} does not lie in one piece of memory"
    return None if held else "there is no parameter to train"


@functools.cache
def _trial(device: torch.device) -> str | None:
    """Return why the kernels cannot be compiled and launched (triton needs a C compiler and a GPU it supports)."""
    try:
        parameter = nn.Parameter(torch.ones(3, device=device))
        parameter.grad = torch.ones_like(parameter)
        FusedUpdate(torch.optim.AdamW([parameter], fused=True), [parameter])(1.0, True)
    except ImportError:
        return "triton is not installed (pip install triton)"
    except Exception as error:
        return f"triton cannot run here: {error}"
    return None


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one contiguous block of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return tensor.layout == torch.strided


def _same_layout(tensor: Tensor, parameter: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    return tensor.stride() == parameter.stride() and tensor.dtype in dtypes and tensor.layout == torch.strided


def _like(tensor: Tensor, parameter: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Return the tensor with the parameter's memory layout, in fp32 or one of `dtypes`; a copy only if needed."""
    if tensor.layout != torch.strided:
        raise ModelError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which AdamW does not accept; "
            "use an embedding with sparse=False or another optimizer"
        )
    if _same_layout(tensor, parameter, (torch.float32, *dtypes)):
        return tensor
    return torch.empty_like(parameter, memory_format=torch.preserve_format, requires_grad=False).copy_(tensor)


def _code(gradient: Tensor) -> int:
    """Encode a gradient as a kernel argument: its address + 1, negated for bf16."""
    place = (gradient.data_ptr() or 1 << 40) + 1  # an empty tensor has no address, and nothing is read there
    return -place if gradient.dtype == torch.bfloat16 else place


def _send(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy a table to the device without waiting for work that runs there."""
    table = torch.tensor(values, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _address_of_rate(rate: float | Tensor, device: torch.device) -> int:
    """Address at which kernels can read a learning rate; 0 if it must be written to a table for them."""
    if isinstance(rate, Tensor) and rate.device == device and rate.dtype == torch.float32:
        return rate.data_ptr()
    return 0


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current, as kernels launch on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
