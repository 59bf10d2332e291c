"""Local SGD: each rank trains its own copy, and the copies are averaged every few steps.

Nothing is sent between two averagings. The result differs from training with one large batch: each rank follows its own
gradients, clips by its own norm, and its optimizer keeps its own moments.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from frameworm.errors import EnvironmentSetupError
from frameworm.parallel.beside import Beside, send_values
from frameworm.parallel.replicas import check_replicas
from frameworm.parallel.shards import HeldState
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private.tensors import foreach_copy_


class AveragingStrategy(Strategy):
    """`ddp` with `sync_every` above 1.

    Args:
        device: This rank's device.
        rank: This process.
        world_size: Number of processes.
        sync_every: Steps between two averagings.
        check_every: Steps between two comparisons of the copies, a multiple of `sync_every`; None: never.
    """

    name = "ddp"
    acts_after_steps = True
    keeps_own_copy = True

    def __init__(
        self, device: torch.device, rank: int, world_size: int, sync_every: int, check_every: int | None = None
    ) -> None:
        super().__init__(device, rank, world_size)
        if not dist.is_initialized():
            raise EnvironmentSetupError(
                "sync_every needs a process group: start with `frameworm train --distributed` or torchrun, "
                "or call setup_ddp(rank, world_size) first"
            )
        self.sync_every = sync_every
        self._check_every = check_every

    @property
    def note(self) -> str | None:
        return (
            f"models are averaged every {self.sync_every} steps (parallel.sync_every): each rank clips and updates by "
            "itself in between, which is not what one large batch gives"
        )

    @property
    def gradient_ranks(self) -> int:
        return 1

    def place_beside(self, beside: Beside) -> None:
        super().place_beside(beside)
        send_values([*beside.replicas(self.device).values(), *beside.buffers_on(self.device)])

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        send_values([*model.parameters(), *model.buffers()])
        return model

    def after_step(self, model: nn.Module, step: int) -> bool:
        if step % self.sync_every:
            return False
        self.average(model)
        if self._check_every is not None and step % self._check_every == 0:
            check_replicas(model, step, beside=self.beside.replicas(self.device))
        return True

    def average(self, model: nn.Module) -> None:
        """Replace every rank's parameters by the mean of all copies."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in (*model.parameters(), *self.beside.replicas(self.device).values()):
            by_dtype.setdefault(parameter.dtype, []).append(parameter.detach())  # not .data: who keeps casts sees it
        for parameters in by_dtype.values():
            # torch's own averager turns the parameters into views of its send buffer; here they keep their memory.
            flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
            flat.mul_(1 / self.world_size)
            dist.all_reduce(flat)
            parts = flat.split([parameter.numel() for parameter in parameters])
            foreach_copy_(parameters, [part.view_as(to) for part, to in zip(parts, parameters, strict=True)])

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        dist.all_reduce(value)

    def sync_buffers(self, model: nn.Module) -> None:
        """Give validation and checkpoints one model: the mean of all copies, with rank 0's buffers."""
        self.average(model)
        send_values([*model.buffers(), *self.beside.buffers_on(self.device)])

    def held_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> HeldState:
        """After an averaging all ranks hold the same model; their optimizers differ, and rank 0's is saved."""
        held = super().held_state(model, optimizer).replicated
        optimizers = {"optimizer": held["optimizer"]} if self.rank == 0 else {}
        return HeldState({"model": held["model"]}, optimizers)

    def communicated_bytes(self, model: nn.Module) -> int | None:
        if self.world_size == 1:
            return 0
        size_bytes = sum(item.numel() * item.element_size() for item in model.parameters())
        return round(size_bytes / self.sync_every)
