"""Knobs of data loading and the host's processors."""

from __future__ import annotations

from typing import Any

from frameworm.data.batches.resident import fits_memory
from frameworm.guard.proof import NumericsEffect
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.context import Context

_RESIDENT_SHARE = 0.25
# A data set up to this fraction of what training keeps anyway (weights, gradients and two moments) costs almost
# nothing.
_HARDLY_ANY, _TRAINED = 0.1, 4
# Phases in which a step waits for its batch.
_INPUT = ("data_wait", "transfer")
_ON_THE_DEVICE = "batches are put together on the device"


def _batchings(context: Context) -> list[str]:
    present = context.config.data.batching
    found = []
    if context.workload.accepts_packed and present != "packed":
        found.append("packed")
    # Packed batches save no padding, but on a CPU their attention may cost more than the padding did.
    if context.workload.many_widths and (present == "padded" or (present == "packed" and not context.on_gpu)):
        found.append("bucketed")
    return found


def _batching_applies(context: Context) -> bool | str:
    if not (context.workload.accepts_packed or context.workload.many_widths):
        return "there is no padding: the samples have one length, or do not declare it"
    return context.config.data.shuffle or "data.shuffle is off, and steps would take other samples"


def _batching_effect(value: Any) -> NumericsEffect:
    # Bucketed steps take other samples than any other batching, so there is nothing to compare them with.
    return "rounding" if value == "packed" else "more"


def _resident_applies(context: Context) -> bool | str:
    packed = context.config.data.batching == "packed"
    if packed and not context.on_gpu:
        return "packed batches are put together on GPUs only"
    if not packed and context.workload.why_not_resident is not None:
        return context.workload.why_not_resident
    if not context.on_gpu and context.workload.assembles_batches:
        return "batches are put together without Python per sample"
    size, memory = context.workload.resident_bytes, context.machine.memory_bytes
    if size is None or memory is None:
        return True
    if packed and context.config.data.resident == "auto" and fits_memory(size, memory):
        return "already so by auto"
    if size > _RESIDENT_SHARE * memory:
        return f"the data set would take {size / memory:.0%} of the device's memory"
    return True


def _workers(context: Context) -> list[int]:
    most = max(0, context.machine.cpus_usable // max(1, context.world_size) - 1)
    found, count = [0], 1
    while count <= min(most, 16):
        found.append(count)
        count *= 2
    present = _present_workers(context)
    return [count for count in found if count != present]


def _present_workers(context: Context) -> float | None:
    chosen = context.config.data.num_workers
    if chosen == "auto":
        return context.workload.automatic_workers
    return chosen if isinstance(chosen, int) else None


def _resident_gain(context: Context) -> float:
    """Much shorter steps will wait for batches, and a set that takes hardly any memory may as well be resident."""
    size, parameters = context.workload.resident_bytes, context.workload.parameter_bytes
    if not context.on_gpu or size is None or parameters is None:
        return 0.05
    return 0.1 if size <= _HARDLY_ANY * _TRAINED * parameters else 0.05


def _widths_apply(context: Context) -> bool | str:
    if not context.workload.many_widths:
        return "batches do not differ in width"
    if not context.workload.masks_padding:
        return "no attention_mask says what padding is"
    if context.resolved.gpu.padding_free:
        return "padding is left out"
    return context.resolved.data.batching == "padded" or "batches are put together in another way"


def _workers_apply(context: Context) -> bool | str:
    if context.resolved.data.resident is True:
        return _ON_THE_DEVICE
    if context.workload.assembles_batches and context.config.data.num_workers in (0, "auto"):
        return "batches are put together without Python per sample"
    return True


def _has_workers(context: Context) -> bool | str:
    if context.resolved.data.resident is True:
        return _ON_THE_DEVICE
    if context.config.data.num_workers == 0:
        return "there are no loader processes"
    if context.config.data.num_workers == "auto" and context.workload.assembles_batches:
        return "there are no loader processes"
    return True


def _pinning_applies(context: Context) -> bool | str:
    if not context.on_gpu:
        return "needs a GPU"
    return context.resolved.data.resident is not True or _ON_THE_DEVICE


def _threads(context: Context) -> list[int]:
    cores = max(1, context.machine.cpus_usable // max(1, context.world_size))
    present = context.config.training.cpu_threads
    now = present if isinstance(present, int) else context.machine.torch_threads or cores
    wanted = {1, max(1, cores // 2), max(1, cores - 1), cores, max(1, now // 2)}
    return sorted(count for count in wanted if count != now)


def _threads_gain(context: Context) -> float:
    if not context.on_gpu:
        return 0.1
    return 0.0 if context.resolved.gpu.capture != "off" else 0.02  # a graph is launched by one thread


def _threads_codes(context: Context) -> tuple[str, ...]:
    # A host that launches kernels one by one uses a single thread for that.
    return ("cpu_oversubscribed",) if context.on_gpu else ("cpu_oversubscribed", "compute_bound", "host_bound")


def _onednn_applies(context: Context) -> bool | str:
    if context.on_gpu:
        return "matrix products are on the GPU"
    return context.resolved.gpu.mixed_precision == "off" or "half precision is faster with it"


def _gelu_applies(context: Context) -> bool | str:
    if context.on_gpu:
        return "the model computes on the GPU"
    if not context.workload.has_gelu:
        return "the model has no GELU layers"
    if context.resolved.gpu.compile_model:
        return "the compiler does that itself"
    return context.resolved.gpu.mixed_precision == "off" or "only in full precision"


DATA_KNOBS: tuple[Knob, ...] = (
    Knob(
        "batching",
        ("data.batching",),
        "Compute less padding: texts end to end, or passes of like length.",
        _batchings,
        _batching_applies,
        _batching_effect,
        ("padding_waste", "compute_bound", "recompilation"),
        expected_gain=0.4,
        partners=("capture", "compile"),
        reference={"data.batching": "padded", "data.balance": True},
    ),
    Knob(
        "widths",
        ("data.pad_to",),
        "Pad batches on to one of a few widths, so that steps can be captured.",
        lambda context: ["few"] if context.config.data.pad_to == "longest" else [],
        _widths_apply,
        "rounding",
        ("recompilation",),
        expected_gain=lambda context: 0.1 if context.on_gpu else 0.0,
        partners=("capture", "compile"),
    ),
    Knob(
        "resident",
        ("data.resident",),
        "Keep the training set on the device and put batches together there.",
        lambda context: [True],
        _resident_applies,
        "nothing",
        ("input_bound", "transfer_bound"),
        shortens=_INPUT,
        expected_gain=_resident_gain,
        partners=("batching", "capture"),
    ),
    Knob(
        "workers",
        ("data.num_workers",),
        "Loader processes.",
        _workers,
        _workers_apply,
        "nothing",
        ("input_bound", "cpu_oversubscribed"),
        shortens=_INPUT,
        expected_gain=0.03,
        ordered=True,
        present=_present_workers,
    ),
    Knob(
        "pinning",
        ("data.pin_memory",),
        "Page-locked batches, which the GPU can fetch by itself.",
        lambda context: [True] if context.resolved.data.pin_memory is False else [],
        _pinning_applies,
        "nothing",
        ("transfer_bound", "input_bound"),
        shortens=_INPUT,
        expected_gain=0.03,
    ),
    Knob(
        "prefetch",
        ("data.prefetch_factor",),
        "Batches each loader process prepares ahead.",
        lambda context: [4, 8],
        _has_workers,
        "nothing",
        ("input_bound",),
        shortens=_INPUT,
        expected_gain=0.01,
        ordered=True,
    ),
    Knob(
        "cpu_threads",
        ("training.cpu_threads",),
        "Threads that torch computes with on the host.",
        _threads,
        numerics_effect="rounding",
        suggested_by=_threads_codes,
        expected_gain=_threads_gain,
        ordered=True,
    ),
    Knob(
        "onednn",
        ("training.cpu_onednn",),
        "Matrix products by torch's own library instead of oneDNN: small ones then use all threads.",
        lambda context: ["except_linear", False],
        _onednn_applies,
        "rounding",
        ("compute_bound",),
        expected_gain=0.04,
    ),
    Knob(
        "gelu",
        ("training.cpu_gelu",),
        "Keep GELU's slope from forward for backward, instead of recomputing its tangent or error function.",
        lambda context: ["keep_slope"],
        _gelu_applies,
        "rounding",
        ("compute_bound",),
        expected_gain=0.04,
    ),
    Knob(
        "cpu_affinity",
        ("training.cpu_affinity",),
        "Bind each process to cores of its own.",
        lambda context: [True],
        lambda context: context.world_size > 1 or "there is one process",
        "nothing",
        ("cpu_oversubscribed", "straggler"),
        expected_gain=0.02,
    ),
)
