"""Trainers for several processes: `Trainer` with the strategy chosen by the environment, or fixed to DDP."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import Unpack

from frameworm.engine.job import backend_of
from frameworm.engine.settings import DDPSettings, DistributedSettings, names_settings
from frameworm.engine.trainer import Trainer
from frameworm.launch.process_group import cleanup, setup_ddp


class DistributedTrainer(Trainer):
    """`Trainer` with the strategy chosen from the environment; with one process it is a plain trainer.

    Args:
        backend: `nccl`, `gloo`, or auto by device.
        use_amp: Whether to use mixed precision, like `enable_mixed_precision()`.
        gradient_accumulation_steps: Micro-batches per step.
        find_unused_parameters: Whether DDP searches for parameters that a step did not use.
        **more: As for `Trainer`.
    """

    @names_settings(DistributedSettings)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        backend: Literal["auto", "nccl", "gloo"] = "auto",
        use_amp: bool = False,
        gradient_accumulation_steps: int = 1,
        find_unused_parameters: bool = False,
        **more: Unpack[DistributedSettings],
    ) -> None:
        named: dict[str, Any] = {}  # arguments left at their default are up to the config
        if backend != "auto":
            named["backend"] = backend
        if gradient_accumulation_steps != 1:
            named["accumulation"] = gradient_accumulation_steps
        if find_unused_parameters:
            named["find_unused_parameters"] = True
        super().__init__(model, optimizer, **named, **more)
        if use_amp:
            self.enable_mixed_precision()

    def cleanup(self) -> None:
        """Leave the process group."""
        cleanup()


class DDPTrainer(DistributedTrainer):
    """`Trainer` fixed to DDP, for processes that know their rank, such as those of torch.multiprocessing.spawn.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        **more: As for `DistributedTrainer`.
    """

    @names_settings(DDPSettings)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int,
        world_size: int,
        **more: Unpack[DDPSettings],
    ) -> None:
        super().__init__(model, optimizer, strategy="ddp", **more)
        setup_ddp(rank, world_size, backend=backend_of(self._config), timeout_s=self._config.parallel.timeout_s)
