"""Knobs of memory and of multi-device training."""

from __future__ import annotations

from typing import Any

from frameworm.config.checks import NO_BUCKETS
from frameworm.guard.proof import NumericsEffect
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.context import Context

_MOST_BUCKETS_MB = (5.0, 50.0, 100.0)
_ROUNDING_CODECS = ("bf16", "fp16")


def _micro_batches(context: Context) -> list[dict[str, Any]]:
    """The current micro-batch halved, and multiplied by powers of two, at the same global batch."""
    share = context.global_batch // context.world_size
    present = context.micro_batch
    sizes = {present * 2, present * 4, present * 8, present // 2, share}
    fitting = sorted(size for size in sizes if 0 < size <= share and share % size == 0 and size != present)
    # The other batch settings are pinned, or another micro-batch might change the global one.
    return [
        {
            "training.micro_batch": size,
            "training.accumulation": "auto",
            "training.batch_size": None,
            "training.global_batch": context.global_batch,
        }
        for size in fitting
    ]


def _may_be_larger(context: Context) -> bool:
    return context.micro_batch * context.world_size < context.global_batch


def _micro_batch_codes(context: Context) -> tuple[str, ...]:
    if not _may_be_larger(context):
        return ("memory_pressure",)  # smaller passes mean more launches
    codes = ("small_batch", "memory_underused", "host_bound", "memory_pressure")
    return (*codes, "compute_bound") if context.on_gpu else codes


def _micro_batch_gain(context: Context) -> float:
    if not context.on_gpu:
        return 0.05  # smaller passes may fit into caches
    return 0.1 if _may_be_larger(context) else 0.0


def _checkpointing(context: Context) -> list[str]:
    order = ("off", "selective", "full")
    return [word for word in order if word != context.resolved.memory.activation_checkpointing]


def _checkpointing_applies(context: Context) -> bool | str:
    if not context.workload.can_checkpoint and context.resolved.memory.activation_checkpointing == "off":
        return "the model does not say which layers to recompute; set memory.checkpoint_modules"
    return True


def _several(context: Context) -> bool | str:
    return context.world_size > 1 or "there is one process"


def _strategies(context: Context) -> list[str]:
    return [name for name in ("ddp", "zero1", "zero2") if name != context.resolved.parallel.strategy]


def _buckets_apply(context: Context) -> bool | str:
    told = _several(context)
    if told is not True:
        return told
    strategy = context.resolved.parallel.strategy
    return strategy not in NO_BUCKETS or f"strategy {strategy} has no buckets"


def _codecs(context: Context) -> list[str]:
    return ["bf16", "int8", "powersgd"] if context.machine.bf16 else ["fp16", "int8", "powersgd"]


def _codec_effect(value: Any) -> NumericsEffect:
    return "rounding" if value in _ROUNDING_CODECS else "more"


RANK_KNOBS: tuple[Knob, ...] = (
    Knob(
        "micro_batch",
        ("training.micro_batch", "training.accumulation", "training.batch_size", "training.global_batch"),
        "Larger or smaller passes at the same global batch.",
        _micro_batches,
        lambda context: context.global_batch > context.world_size or "one sample per device cannot be divided",
        "rounding",
        _micro_batch_codes,
        expected_gain=_micro_batch_gain,
        ordered=True,
        partners=("activation_checkpointing",),
    ),
    Knob(
        "activation_checkpointing",
        ("memory.activation_checkpointing",),
        "Recompute activations in backward, or keep them.",
        _checkpointing,
        _checkpointing_applies,
        "rounding",
        ("memory_pressure",),
        # Recomputing costs time; to stop recomputing saves it.
        expected_gain=lambda context: 0.0 if context.resolved.memory.activation_checkpointing == "off" else 0.2,
        partners=("micro_batch",),
    ),
    Knob(
        "strategy",
        ("parallel.strategy",),
        "What each process keeps of the model and of the optimizer's state.",
        _strategies,
        _several,
        "rounding",
        ("communication_bound", "memory_pressure", "negative_scaling"),
        expected_gain=0.03,
    ),
    Knob(
        "bucket_size",
        ("parallel.bucket_cap_mb",),
        "Size of the buckets in which gradients travel.",
        lambda context: list(_MOST_BUCKETS_MB),
        _buckets_apply,
        "rounding",
        ("communication_bound",),
        expected_gain=0.02,
        ordered=True,
    ),
    Knob(
        "compression",
        ("parallel.compression",),
        "Compress gradients on the wire.",
        _codecs,
        _several,
        _codec_effect,
        ("communication_bound", "negative_scaling"),
        expected_gain=0.05,
    ),
)
