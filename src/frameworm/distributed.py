"""The names for distributed work, in one place."""

from __future__ import annotations

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.trainer import DDPTrainer, DistributedTrainer
from frameworm.launch.process_group import cleanup, setup_ddp
from frameworm.observe.monitor import PerformanceMonitor
from frameworm.observe.profiler import PerformanceProfiler
from frameworm.parallel.compression.compressor import GradientCompressor
from frameworm.parallel.compression.public import CompressedDDP, enable_gradient_compression
from frameworm.scaling.memory import calculate_zero_savings
from frameworm.tune.analyzer import BottleneckAnalyzer
from frameworm.tune.helpers import (
    benchmark_training_step,
    measure_optimization_effectiveness,
    profile_memory_usage,
)

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
    "benchmark_training_step",
    "calculate_zero_savings",
    "cleanup",
    "enable_gradient_compression",
    "measure_optimization_effectiveness",
    "profile_memory_usage",
    "setup_ddp",
]
