"""The names for distributed work, in one place."""

from __future__ import annotations

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.trainer import DDPTrainer, DistributedTrainer
from frameworm.launch.process_group import cleanup, setup_ddp

__all__ = [
    "CudaDataLoader",
    "DDPTrainer",
    "DistributedTrainer",
    "OptimizedDataLoader",
    "cleanup",
    "setup_ddp",
]
