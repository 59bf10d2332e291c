"""Mixed precision of the forward pass, gradient scaling and torch's backend flags."""

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
from frameworm.torch_private.execution import attention_order, set_attention_order
from frameworm.torch_private.optimizers import loss_scale

_ATTENTION_ORDER = tuple(attention_order())
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`off` (fp32), `bf16`, or `fp16` with a dynamic loss scale."""

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
            # One object serves every step: creating one takes as long as a small kernel.
            self.autocast = torch.autocast(device.type, dtype=_DTYPES[name])
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)

    def loss_scale(self) -> torch.Tensor | None:
        """Return the loss scale, on the device; None if there is none (yet)."""
        return None if self.scaler is None else loss_scale(self.scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty if there is none."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def wants_channels_last(
    asked: bool | str, model: nn.Module, precision: Precision, device: torch.device, *, compiled: bool
) -> bool:
    """Whether images should be channels-last, the layout that half-precision convolutions on GPUs are made for.

    Changing the weights is enough; cuDNN's results follow them. The compiler chooses a layout by itself, and imposing
    one on it may be slower.
    """
    if asked != "auto":
        return bool(asked)
    if device.type != "cuda" or precision.name == "off" or compiled:
        return False
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def apply_backend_flags(*, tf32: bool, benchmark: bool, deterministic: bool, flash_attention: bool | str) -> None:
    """Set torch's global switches for a run; deterministic mode overrides the faster choices."""
    if deterministic:
        ask_for_deterministic_cublas()
    if deterministic or torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
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
    """Restore torch's global switches on exit, so that a run's settings end with it."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    switches = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    matmul, flash = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    try:
        yield
    finally:
        if deterministic[0] != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = switches
            torch.set_float32_matmul_precision(matmul)
        torch.backends.cuda.enable_flash_sdp(flash)


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 matrix products inside the context."""
    with backend_flags_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
        yield


def prefer_cudnn_attention(preferred: bool) -> None:
    """Give cuDNN the highest priority among attention kernels, above our own, or restore torch's order.

    cuDNN takes some tenths of a second to plan each new shape, so it is not the default. torch's public API is a
    context manager, which would not cover every place where a run's model is traced or called.
    """
    cudnn = int(SDPBackend.CUDNN_ATTENTION)  # type: ignore[call-overload]
    preferring = [cudnn, *(backend for backend in _ATTENTION_ORDER if backend != cudnn)]
    set_attention_order(preferring if preferred else _ATTENTION_ORDER)
    ask_for_others(preferred)
