"""In which numbers the forward pass computes, and whether gradients need scaling."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from frameworm.errors import DeviceError
from frameworm.hardware.devices import supports_bf16
from frameworm.launch.environment import ask_for_deterministic_cublas
from frameworm.models.causal_attention import ask_for_others

_ATTENTION_ORDER = tuple(torch._C._get_sdp_priority_order())
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`off` (fp32), `bf16`, or `fp16` with a loss scale that adapts."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == "auto":
            name = "off" if device.type == "cpu" else ("bf16" if supports_bf16(device) else "fp16")
        if name == "bf16" and not supports_bf16(device):
            raise DeviceError(f"{device} has no bf16; set gpu.mixed_precision=fp16 or auto")
        self.name = name
        self.dtype = _DTYPES.get(name)
        self.autocast: AbstractContextManager[Any] = contextlib.nullcontext()
        self.scaler: torch.amp.GradScaler | None = None
        if name != "off":
            # One object serves every step: making one anew costs as much as a small kernel.
            self.autocast = torch.autocast(device.type, dtype=_DTYPES[name])
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)

    def loss_scale(self) -> torch.Tensor | None:
        """What losses are multiplied with, on the device; None where they are not, or not yet."""
        return None if self.scaler is None else self.scaler._scale

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale; empty when there is none."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def wants_channels_last(
    asked: bool | str, model: nn.Module, precision: Precision, device: torch.device, *, compiled: bool
) -> bool:
    """Whether images should lie with their channels last: the half-precision convolutions of GPUs are made for that.

    It is enough to change the weights; cuDNN's results follow them. The compiler chooses a layout by itself
    and would have to keep to the one it is given, which may be the slower one.
    """
    if asked != "auto":
        return bool(asked)
    if device.type != "cuda" or precision.name == "off" or compiled:
        return False
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def apply_backend_flags(*, tf32: bool, benchmark: bool, deterministic: bool, flash_attention: bool | str) -> None:
    """Set torch's global switches for a run; deterministic mode wins over the faster choices."""
    if deterministic:
        ask_for_deterministic_cublas()
    if deterministic or torch.are_deterministic_algorithms_enabled():  # it loads the compiler to tell it, too
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark and not deterministic
    with warnings.catch_warnings():
        # torch recommends a newer spelling; this one works in every version we support.
        warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
        torch.set_float32_matmul_precision("high" if tf32 and not deterministic else "highest")
        torch.backends.cudnn.allow_tf32 = tf32 and not deterministic
    torch.backends.cuda.enable_flash_sdp(flash_attention is not False)
    prefer_cudnn_attention(flash_attention == "cudnn" and not deterministic)


@contextlib.contextmanager
def backend_flags_kept() -> Iterator[None]:
    """Put torch's global switches back afterwards: what a run asks for ends with it."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    switches = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    matmul, flash = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    try:
        yield
    finally:
        if deterministic[0] != torch.are_deterministic_algorithms_enabled():  # it loads the compiler to tell it, too
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = switches
            torch.set_float32_matmul_precision(matmul)
        torch.backends.cuda.enable_flash_sdp(flash)


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Inside it products of fp32 numbers may be computed in TF32, or may not."""
    with backend_flags_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
        yield


def prefer_cudnn_attention(preferred: bool) -> None:
    """Put cuDNN first among the kernels for attention, before our own, or back where torch has it.

    cuDNN plans each new shape for some tenths of a second, which is why it is not first by itself. torch's public way
    is a context manager, and a run's kernels are chosen wherever the model is traced or called.
    """
    cudnn = int(SDPBackend.CUDNN_ATTENTION)  # type: ignore[call-overload]
    preferring = [cudnn, *(backend for backend in _ATTENTION_ORDER if backend != cudnn)]
    torch._C._set_sdp_priority_order(preferring if preferred else list(_ATTENTION_ORDER))
    ask_for_others(preferred)
