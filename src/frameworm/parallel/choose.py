"""Choose a strategy from the config."""

from __future__ import annotations

import torch

from frameworm.config.schema import ParallelConfig
from frameworm.errors import ConfigError
from frameworm.parallel.averaging import AveragingStrategy
from frameworm.parallel.replicated import DataParallelStrategy, DDPStrategy
from frameworm.parallel.strategy import Strategy


def choose_strategy(
    settings: ParallelConfig,
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    device_ids: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Strategy:
    """Build the strategy that the settings name; `auto` is `single` with one process and `ddp` with several.

    Args:
        settings: The section `parallel`.
        device: This rank's device.
        rank: This process.
        world_size: Number of processes.
        device_ids: GPUs for `dp`; None: all.
        dtype: Compute dtype of the model under mixed precision.

    Raises:
        ConfigError: The strategy does not fit the number of processes.
    """
    name = settings.strategy
    if name == "auto":
        name = "ddp" if world_size > 1 else "single"
    if name in ("single", "dp") and world_size > 1:
        raise ConfigError(f"parallel.strategy: {name} is one process, but {world_size} were started; use ddp")
    if name == "single":
        return Strategy(device)
    if name == "dp":
        return DataParallelStrategy(device, device_ids)
    if name == "ddp" and settings.sync_every > 1 and world_size > 1:
        return AveragingStrategy(device, rank, world_size, settings.sync_every, settings.check_replicas)
    if name == "ddp":
        return DDPStrategy(device, rank, world_size, settings)
    # Importing torch's sharding takes a second, which other strategies need not spend.
    from frameworm.parallel.sharded import ShardedStrategy, ZeRO1Strategy

    if name == "zero1":
        return ZeRO1Strategy(device, rank, world_size, settings)
    return ShardedStrategy(device, rank, world_size, settings, dtype)
