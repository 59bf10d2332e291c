"""frameworm trains PyTorch models as fast as the hardware allows and shows where every millisecond goes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frameworm import api as api
    from frameworm import distributed as distributed
    from frameworm import errors as errors
    from frameworm.config.load import load_config
    from frameworm.config.schema import Config, GPUConfig, MemoryConfig
    from frameworm.engine.run import run
    from frameworm.engine.trainer import Trainer
    from frameworm.errors import FramewormError
    from frameworm.models.workloads import Workload
    from frameworm.observe.loggers.protocol import Logger
    from frameworm.observe.monitor import PerformanceMonitor
    from frameworm.observe.profiler import PerformanceProfiler
    from frameworm.records.events import Listener as Callback
    from frameworm.records.schema import RunRecord

__all__ = [
    "Callback",
    "Config",
    "FramewormError",
    "GPUConfig",
    "Logger",
    "MemoryConfig",
    "PerformanceMonitor",
    "PerformanceProfiler",
    "RunRecord",
    "Trainer",
    "Workload",
    "load_config",
    "run",
]
__version__ = "0.1.0"

# Loaded when first asked for: the command line must not wait for torch to print its help.
_HOMES = {
    "Callback": ("frameworm.records.events", "Listener"),
    "Config": ("frameworm.config.schema", "Config"),
    "FramewormError": ("frameworm.errors", "FramewormError"),
    "GPUConfig": ("frameworm.config.schema", "GPUConfig"),
    "Logger": ("frameworm.observe.loggers.protocol", "Logger"),
    "MemoryConfig": ("frameworm.config.schema", "MemoryConfig"),
    "PerformanceMonitor": ("frameworm.observe.monitor", "PerformanceMonitor"),
    "PerformanceProfiler": ("frameworm.observe.profiler", "PerformanceProfiler"),
    "RunRecord": ("frameworm.records.schema", "RunRecord"),
    "Trainer": ("frameworm.engine.trainer", "Trainer"),
    "Workload": ("frameworm.models.workloads", "Workload"),
    "load_config": ("frameworm.config.load", "load_config"),
    "run": ("frameworm.engine.run", "run"),
}


# Modules that `import frameworm` alone makes reachable.
_MODULES = ("api", "distributed", "errors")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"frameworm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'frameworm' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
