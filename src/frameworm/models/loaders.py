"""Build the loaders of a workload as a resolved config asks."""

from __future__ import annotations

from typing import Any

from frameworm.config.schema import Config
from frameworm.data.loader import OptimizedDataLoader
from frameworm.models.workloads import Workload

CAPTURED_WIDTHS = 16
CAPTURED_HALVES = 10  # for the two passes of a bucketed step: at most 5 x 6 pairs of widths, each a graph
EAGER_WIDTHS = 64  # on a CPU new shapes cost little, and padding to fewer widths costs more


def build_loader(config: Config, workload: Workload, data: Any, *, evaluation: bool) -> Any:
    """Build the loader of a resolved config over a workload's training or validation data."""
    settings, training = config.data, config.training
    assert isinstance(training.micro_batch, int)
    assert isinstance(settings.eval_batch, int)
    return OptimizedDataLoader.create(
        data,
        settings.eval_batch if evaluation else training.micro_batch,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        prefetch_factor=settings.prefetch_factor,
        persistent_workers=settings.persistent_workers,
        drop_last=settings.drop_last and not evaluation,
        shuffle=settings.shuffle and not evaluation,
        seed=config.seed,
        global_batch=None if evaluation else training.global_batch,
        collate_fn=workload.collate_fn,
        batching="padded" if evaluation else settings.batching,
        mixed_lengths=not evaluation,
        balance=False if evaluation else settings.balance,
        resident=False if evaluation else settings.resident,
        epochs=training.epochs,
        on_error=settings.on_error,
        most_widths=None if evaluation else _most_widths(config),
        same_widths=not evaluation and config.gpu.capture != "off",
    )


def _most_widths(config: Config) -> int | None:
    """How many widths batches may have, as each needs its own graph or compilation."""
    gpu = config.gpu
    if config.data.batching == "bucketed":
        if gpu.capture != "off":
            return CAPTURED_HALVES
        return EAGER_WIDTHS if gpu.device == "cpu" and not gpu.compile_model else None
    return None if gpu.capture == "off" else CAPTURED_WIDTHS
