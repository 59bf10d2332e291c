"""The whole model on every device: `ddp` (one process per device) and `dp` (one process, many GPUs)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from frameworm.config.schema import ParallelConfig
from frameworm.errors import DeviceError, EnvironmentSetupError, ModelError
from frameworm.parallel.strategy import Hook, Strategy

_MANY = 5


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")


def mean_of_gradients(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The hook that sends what DDP sends without one, to the last bit."""
    gradients: torch.Tensor = bucket.buffer()
    world_size = dist.get_world_size()
    if gradients.is_sparse:
        gradients.div_(world_size)
    else:
        gradients.mul_(1 / world_size)  # dividing rounds differently where the number is not a power of two
    future = dist.all_reduce(gradients, async_op=True).get_future()
    return cast("torch.futures.Future[torch.Tensor]", future.then(_first_value))


def _first_value(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


class DDPStrategy(Strategy):
    """Gradients are averaged over the ranks while backward goes on."""

    name = "ddp"

    def __init__(self, device: torch.device, rank: int, world_size: int, settings: ParallelConfig) -> None:
        super().__init__(device, rank, world_size)
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                "strategy ddp needs a process group: start with `frameworm train --distributed` or torchrun, "
                "or call setup_ddp(rank, world_size) first"
            )
        self._settings = settings
        self._wrapped: DistributedDataParallel | None = None

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        settings = self._settings
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            static_graph=settings.static_graph is True,
            gradient_as_bucket_view=True,
        )
        return self._wrapped

    def wrap_hook(self, wrap: Callable[[Hook], Hook]) -> bool:
        if self.world_size == 1:
            return False
        assert self._wrapped is not None
        self._wrapped.register_comm_hook(None, wrap(mean_of_gradients))
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        assert self._wrapped is not None
        return cast("AbstractContextManager[None]", self._wrapped.no_sync())

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        dist.all_reduce(value)

    def sync_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def explain(self, error: RuntimeError) -> Exception:
        text = str(error)
        if "Expected to have finished reduction in the prior iteration" in text:
            return ModelError(
                "a step did not use all parameters of the model, so their gradients were never synchronised; set "
                "parallel.find_unused_parameters=true (or find_unused_parameters=True), or remove the unused ones"
            )
        if "marked as ready twice" in text or "Expected to mark a variable ready only once" in text:
            return ModelError(
                "a parameter received its gradient twice in one backward pass (a module called repeatedly under "
                "reentrant checkpointing?); use non-reentrant checkpointing or set parallel.static_graph=true"
            )
        return error

    def check_gradients(self, model: nn.Module) -> None:
        if self._settings.find_unused_parameters or self._settings.static_graph is True:
            return
        unused = [name for name, item in model.named_parameters() if item.requires_grad and item.grad is None]
        if unused:
            raise ModelError(
                f"the first step did not use these parameters: {_some(unused)}; set "
                "parallel.find_unused_parameters=true (or find_unused_parameters=True) to train the model as it is"
            )

    def communicated_bytes(self, model: nn.Module) -> int | None:
        if self.world_size == 1:
            return 0
        return sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)


class DataParallelStrategy(Strategy):
    """One process drives several GPUs; kept for older scripts, ddp is faster."""

    name = "dp"

    def __init__(self, device: torch.device, device_ids: list[int] | None) -> None:
        super().__init__(device)
        available = torch.cuda.device_count()
        self._device_ids = list(range(available)) if device_ids is None else list(device_ids)
        missing = [index for index in self._device_ids if index >= available or index < 0]
        if device.type != "cuda" or not self._device_ids or missing:
            wanted = ", ".join(map(str, missing or self._device_ids)) or "any"
            raise DeviceError(
                f"data parallel asks for GPU {wanted}, but torch sees {available} here, numbered from 0"
                if available
                else "data parallel needs GPUs, and torch sees none here; use strategy single, or ddp for several "
                "CPU processes"
            )

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        return cast("nn.Module", DataParallel(model, device_ids=self._device_ids))
