"""All public names for distributed work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.trainer_of_ranks import DDPTrainer, DistributedTrainer
from frameworm.launch.process_group import cleanup, setup_ddp
from frameworm.observe.monitor import PerformanceMonitor
from frameworm.observe.profiler import PerformanceProfiler
from frameworm.parallel.compression.benchmark import benchmark_compression
from frameworm.parallel.compression.compressor import GradientCompressor
from frameworm.parallel.compression.public import CompressedDDP, enable_gradient_compression
from frameworm.scaling.memory import calculate_zero_savings
from frameworm.tune.analyzer.analyzer import BottleneckAnalyzer
from frameworm.tune.analyzer.helpers import (
    benchmark_training_step,
    measure_optimization_effectiveness,
    profile_memory_usage,
)
from frameworm.tune.analyzer.present_checklist import print_optimization_checklist
from frameworm.tune.batch_size.find import find_optimal_batch_size

if TYPE_CHECKING:
    from frameworm.engine.ray_reports import RayReports
    from frameworm.parallel.zero_optimizer import ZeROStage1Optimizer

__all__ = [
    "BottleneckAnalyzer",
    "CompressedDDP",
    "CudaDataLoader",
    "DDPTrainer",
    "DistributedTrainer",
    "GradientCompressor",
    "OptimizedDataLoader",
    "PerformanceMonitor",
    "PerformanceProfiler",
    "RayReports",
    "ZeROStage1Optimizer",
    "benchmark_compression",
    "benchmark_training_step",
    "calculate_zero_savings",
    "cleanup",
    "enable_gradient_compression",
    "find_optimal_batch_size",
    "measure_optimization_effectiveness",
    "print_optimization_checklist",
    "profile_memory_usage",
    "setup_ddp",
]

# Imported on first access, because the torch modules behind them are slow to import.
_HOMES = {
    "RayReports": "frameworm.engine.ray_reports",
    "ZeROStage1Optimizer": "frameworm.parallel.zero_optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'frameworm.distributed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
