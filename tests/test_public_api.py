"""The front doors: what they offer, in order, documented, and nothing by accident."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import frameworm
import frameworm.api
import frameworm.distributed

CONTRACT = {
    frameworm: {"FramewormError", "Trainer", "GPUConfig", "MemoryConfig"},
    frameworm.api: {"compare", "diagnose", "plan_memory", "predict", "profile", "tune"},
    frameworm.distributed: {
        "DistributedTrainer",
        "DDPTrainer",
        "setup_ddp",
        "cleanup",
        "OptimizedDataLoader",
        "CudaDataLoader",
        "PerformanceMonitor",
        "PerformanceProfiler",
        "BottleneckAnalyzer",
        "GradientCompressor",
        "CompressedDDP",
        "enable_gradient_compression",
        "benchmark_compression",
        "benchmark_training_step",
        "profile_memory_usage",
        "measure_optimization_effectiveness",
        "find_optimal_batch_size",
        "print_optimization_checklist",
    },
}


def test_all_is_sorted_and_complete() -> None:
    for module, names in CONTRACT.items():
        assert list(module.__all__) == sorted(module.__all__)
        assert names <= set(module.__all__)


def test_every_name_exists_and_is_documented() -> None:
    for module in CONTRACT:
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name} has no docstring"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        frameworm.no_such_name  # noqa: B018


def test_modules_are_reachable_and_named_in_dir() -> None:
    code = (
        "import frameworm as f; assert 'torch' not in __import__('sys').modules; print(f.errors, f.api, f.distributed)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert all(f"frameworm.{name}" in found for name in ("errors", "api", "distributed"))
    assert dir(frameworm) == sorted([*frameworm.__all__, "__version__", "api", "distributed", "errors"])


def test_every_error_is_a_frameworm_error() -> None:
    for name, kind in vars(frameworm.errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception):
            assert issubclass(kind, frameworm.FramewormError), name
            assert inspect.getdoc(kind)


def test_contract_signatures() -> None:
    distributed = inspect.signature(frameworm.distributed.DistributedTrainer)
    expected = ["model", "optimizer", "backend", "use_amp", "gradient_accumulation_steps", "find_unused_parameters"]
    assert list(distributed.parameters)[:6] == expected
    assert list(inspect.signature(frameworm.distributed.DDPTrainer).parameters)[:4] == [
        "model",
        "optimizer",
        "rank",
        "world_size",
    ]
    assert list(inspect.signature(frameworm.distributed.setup_ddp).parameters)[:2] == ["rank", "world_size"]
    create = inspect.signature(frameworm.distributed.OptimizedDataLoader.create)
    names = ["dataset", "batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers"]
    assert list(create.parameters)[:6] == names
    assert frameworm.distributed.OptimizedDataLoader.create_dataloader is not None


def test_older_spellings_of_the_sections() -> None:
    gpu = frameworm.GPUConfig(
        device_ids=[0, 1],
        memory_fraction=0.9,
        mixed_precision=True,
        compile_model=True,
        use_flash_attention=True,
        benchmark=True,
        deterministic=False,
    )
    assert gpu.mixed_precision == "auto"
    memory = frameworm.MemoryConfig(
        max_memory_percent=85.0,
        gc_threshold=70.0,
        monitoring_interval=30.0,
        enable_automatic_gc=True,
        cache_size_limit=2**30,
    )
    assert memory.cache_size_limit == 2**30
