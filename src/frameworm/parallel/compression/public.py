"""Compression for users' own training loops: on a DDP model, or on a model to be wrapped."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.config.schema import ParallelConfig
from frameworm.errors import ConfigError, EnvironmentSetupError, ModelError
from frameworm.parallel.compression import hook
from frameworm.parallel.compression.compressor import GradientCompressor
from frameworm.parallel.compression.control import CompressionControl
from frameworm.parallel.compression.registry import registered_codecs
from frameworm.records.observations import Compression

METHODS = ("auto", *(method for method in hook.METHODS if method != hook.OFF))


class EnabledCompression:
    """What `enable_gradient_compression` set up; store its `state_dict` in your checkpoints."""

    def __init__(self, control: CompressionControl) -> None:
        self._control = control
        self._begins = False

    @property
    def method(self) -> str:
        """The current method; with `auto` it may change in the first steps."""
        return self._control.hook.method

    def describe(self) -> Compression:
        """The method, the bytes, and what `auto` considered."""
        return self._control.describe()

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save, including the compression error of each parameter."""
        return {**self._control.state_dict(), "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a state from `state_dict`; returns notes for you."""
        return self._control.load_state_dict(state, int(state["world_size"]))

    def close(self) -> None:
        """Stop the sending thread; the model can no longer be trained."""
        self._control.close()

    def send(self, state: Any, bucket: Any) -> Any:
        """DDP's hook. A step counts as finished when the next one sends its first bucket."""
        if self._begins:
            self._begins = False
            self._control.after_step()
        if bucket.is_last():
            self._begins = True
        return self._control.hook(state, bucket)


def enable_gradient_compression(
    ddp_model: DistributedDataParallel,
    rank: int | None = None,
    method: str = "auto",
    *,
    compression_ratio: float = 0.01,
    powersgd_rank: int = 1,
    rounding: str = "nearest",
    error_feedback: bool = True,
    allow_approximate: bool = False,
) -> EnabledCompression:
    """Compress the gradients that a DDP model sends.

    Call it once, on all ranks, before the first backward pass. `Trainer` does this itself (`parallel.compression`).

    Args:
        ddp_model: Wrapped in DistributedDataParallel, without a communication hook.
        rank: This process's rank; None: ask the process group.
        method: One of auto, fp16, bf16, int8, int4, topk, powersgd.
        compression_ratio: Fraction of the values that topk sends.
        powersgd_rank: Rank of powersgd's matrices.
        rounding: nearest or stochastic, for int8 and int4.
        error_feedback: Add the error of this step to the next.
        allow_approximate: Let auto also choose topk and powersgd, which need more steps to reach the same loss.

    Returns:
        A handle with the method in use and the state for checkpoints.

    Raises:
        ModelError: The model is not a DDP model, or has a hook already.
        ConfigError: An unknown method, or a value out of range.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ModelError(
            "gradient compression hooks into DistributedDataParallel, and got a plain "
            f"{type(ddp_model).__name__}: wrap it first, or train with Trainer and parallel.compression"
        )
    methods = (*METHODS, *registered_codecs())
    if method not in methods:
        raise ConfigError(f"unknown compression method {method!r}; use one of {', '.join(methods)}")
    if rank is not None and rank != dist.get_rank():
        raise ConfigError(f"rank {rank} was given, but this process is rank {dist.get_rank()} of its group")
    settings = ParallelConfig.model_validate(
        {
            "compression": method if method in METHODS else "off",  # a registered codec cannot be named in a config
            "compression_ratio": compression_ratio,
            "powersgd_rank": powersgd_rank,
            "rounding": rounding,
            "error_feedback": error_feedback,
            "allow_approximate": allow_approximate,
        }
    )
    device = next(ddp_model.parameters()).device
    settings = settings.model_copy(update={"compression": method})
    control = CompressionControl(settings, device, dist.get_rank(), dist.get_world_size())
    control.begin(ddp_model.module)
    enabled = EnabledCompression(control)

    def send(state: Any, bucket: Any) -> Any:
        return enabled.send(state, bucket)

    send.__annotations__ = {}  # DDP compares annotations with classes; postponed ones are strings
    try:
        ddp_model.register_comm_hook(control.hook.early_shares(ddp_model), send)
    except RuntimeError as error:
        control.close()
        raise ModelError(f"DDP takes one communication hook, before its first backward pass: {error}") from None
    return enabled


class CompressedDDP(nn.Module):
    """A model in DDP whose gradients are compressed.

    Args:
        model: Already on its device.
        compression_ratio: Fraction of the values that topk sends.
        method: As in `enable_gradient_compression`.
        **settings: More arguments of `enable_gradient_compression`.

    Attributes:
        ddp: The DistributedDataParallel around the model.
        compression: Sends the gradients; store its `state_dict` in your checkpoints.
        compressor: A `GradientCompressor` of the same ratio, for single tensors.
    """

    def __init__(
        self, model: nn.Module, compression_ratio: float = 0.01, method: str = "topk", **settings: Any
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                "CompressedDDP needs a process group: start with torchrun, or call setup_ddp(rank, world_size) first"
            )
        device = next(model.parameters()).device
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self.compressor = GradientCompressor(compression_ratio)
        self.compression = enable_gradient_compression(
            self.ddp, None, method, compression_ratio=compression_ratio, **settings
        )

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return cast("nn.Module", self.ddp.module)

    @property
    def model(self) -> nn.Module:
        """The model itself, as `module`."""
        return self.module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass."""
        return self.ddp(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not synchronise gradients of backward passes in this context."""
        return cast("AbstractContextManager[None]", self.ddp.no_sync())

    def backward_with_compression(self, loss: torch.Tensor) -> None:
        """Run backward; when it returns, gradients are averaged over the ranks with compression."""
        loss.backward()
