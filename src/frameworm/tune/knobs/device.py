"""Knobs of the device: precision, kernels, graphs."""

from __future__ import annotations

from typing import Any

from frameworm.config.schema import GPTModelConfig, TextClassifierModelConfig
from frameworm.models.causal_attention import fits_causal_kernels
from frameworm.models.gpt import FUSED_FROM
from frameworm.tune.knobs.base import ATTENTION, Knob
from frameworm.tune.knobs.context import Context

# Only one block is compiled, however many there are (benchmarks/compile_scope.py, on a GPU).
_COMPILE_S, _BLOCK_SETUP_S = 15.0, 10.0
_LITTLE_PADDING = 0.05


def _gpu_only(context: Context) -> bool | str:
    return context.on_gpu or "needs a GPU"


def _not_deterministic(context: Context) -> bool | str:
    return not context.resolved.gpu.deterministic or "gpu.deterministic wins over it"


def _gpu_free(context: Context) -> bool | str:
    told = _gpu_only(context)
    return _not_deterministic(context) if told is True else told


def _is_half(context: Context) -> bool:
    return context.resolved.gpu.mixed_precision != "off"


def _precisions(context: Context) -> list[str]:
    if _is_half(context):
        return ["off"]
    if context.on_gpu:
        return ["bf16"] if context.machine.bf16 else ["fp16"]
    return ["bf16"] if context.machine.bf16 else []


def _precision_applies(context: Context) -> bool | str:
    gpu = context.resolved.gpu
    if gpu.mixed_precision != "off":
        # Every cast is a separate launch, so if launches are the limit fp32 may be faster.
        casts = context.on_gpu and gpu.capture == "off" and context.config.gpu.mixed_precision == "auto"
        return casts or f"already {gpu.mixed_precision}"
    if not context.on_gpu and not context.machine.bf16:
        return "this processor has no bf16"
    return True


def _tf32_applies(context: Context) -> bool | str:
    told = _gpu_free(context)
    if told is not True:
        return told
    if context.machine.capability is not None and context.machine.capability < 8:
        return f"compute capability {context.machine.capability} has no TF32"
    return context.resolved.gpu.mixed_precision == "off" or "matrix products are in half precision already"


def _compile_values(context: Context) -> list[dict[str, Any]]:
    if context.resolved.gpu.compile_model:
        return []
    scopes = ["blocks", "model"] if context.workload.repeats_blocks else ["model"]
    return [{"gpu.compile_model": True, "gpu.compile_scope": scope} for scope in scopes]


def _of_few_shapes(context: Context) -> bool:
    """Whether some setting ensures that batches come in few shapes."""
    data = context.resolved.data
    return data.batching != "padded" or data.pad_to != "longest" or context.resolved.gpu.padding_free


def _of_many_widths(context: Context) -> bool:
    return context.workload.many_widths and not _of_few_shapes(context)


def _of_many_shapes(context: Context) -> bool:
    return context.workload.many_shapes and not _of_few_shapes(context)


def _compile_applies(context: Context) -> bool | str:
    if context.resolved.gpu.capture != "off" and _of_many_widths(context):
        return "each width of a batch would be compiled and captured"
    return True


def _compile_modes(context: Context) -> list[str]:
    if context.resolved.gpu.compile_mode != "default":
        return []
    # If the step as a whole is not captured, its compiled parts may be.
    if context.resolved.gpu.capture == "off" and not (_of_many_widths(context) or _of_many_shapes(context)):
        return ["reduce-overhead", "max-autotune"]
    return ["max-autotune"]


def _compiled(context: Context) -> bool | str:
    if not context.resolved.gpu.compile_model:
        return "gpu.compile_model is off"
    return _gpu_only(context)


def _combine_codes(context: Context) -> tuple[str, ...]:
    # A captured step that only computes may consist of many small kernels.
    captured = context.resolved.gpu.capture != "off"
    return ("host_bound", "small_batch", "compute_bound") if captured else ("host_bound", "small_batch")


def _capture_applies(context: Context) -> bool | str:
    told = _gpu_free(context)
    if told is not True:
        return told
    if context.resolved.gpu.compile_model and _of_many_widths(context):
        return "each width of a batch would be compiled and captured"
    if _of_many_shapes(context):
        return "hardly two batches have the same shape, and a graph is for one"
    parallel = context.resolved.parallel
    if parallel.strategy == "dp":
        return "not with strategy dp"
    if parallel.find_unused_parameters or parallel.offload_optimizer:
        return "DDP or the update asks the GPU in every step (find_unused_parameters, offload_optimizer)"
    return parallel.backend != "gloo" or "gloo works on the host"


def _flash_values(context: Context) -> list[Any]:
    capability, model = context.machine.capability, context.resolved.model
    found: list[Any] = ["cudnn"] if capability is None or capability >= 9 else []
    if isinstance(model, GPTModelConfig) and fits_causal_kernels(model.d_model // model.n_heads, model.max_seq_len):
        found = []  # this model has its own kernels
    if context.config.data.batching == "packed":
        found = []  # cuDNN does not support packed sequences
    return [*found, "auto"] if context.resolved.gpu.use_flash_attention is False else found


def _padding_applies(context: Context) -> bool | str:
    share = context.workload.padding_share
    if share is None:
        return "no Hugging Face model with an attention_mask in its batches"
    if context.resolved.parallel.strategy == "dp":
        return "not with strategy dp"
    return share > _LITTLE_PADDING or "there is hardly any padding"


def _padding_gain(context: Context) -> float:
    """Skipped padding is not computed, except in embeddings and the head."""
    share = context.workload.padding_share or 0.0
    return 0.8 * share / max(1 - share, 0.1)


def _channels_last(context: Context) -> bool:
    """Whether images currently have their channels last; see `engine.model.precision`."""
    gpu = context.resolved.gpu
    if gpu.channels_last != "auto":
        return bool(gpu.channels_last)
    return context.on_gpu and gpu.mixed_precision != "off" and not gpu.compile_model


def _channels_applies(context: Context) -> bool | str:
    if not context.workload.has_convolutions:
        return "the model has no convolutions"
    if _channels_last(context) and not context.resolved.gpu.compile_model:
        return "already so" if context.config.gpu.channels_last is True else "already so by auto"
    return True


def _channels_gain(context: Context) -> float:
    # The compiler's own layout is mostly as good.
    return 0.05 if _channels_last(context) or context.resolved.gpu.compile_model else 0.15


def _is_gpt(context: Context) -> bool | str:
    return isinstance(context.config.model, GPTModelConfig) or "only gpt has it"


def _fuses_loss(context: Context) -> bool:
    """Whether the loss is currently computed in parts."""
    model = context.config.model
    if not isinstance(model, GPTModelConfig):
        return context.config.training.fused_loss
    if model.fused_loss != "auto":
        return bool(model.fused_loss)
    return context.on_gpu and (model.vocab_size == "auto" or model.vocab_size >= FUSED_FROM)


def _fused_losses(context: Context) -> list[dict[str, bool]]:
    section = "model" if _is_gpt(context) is True else "training"
    return [{f"{section}.fused_loss": not _fuses_loss(context)}]


def _fused_loss_applies(context: Context) -> bool | str:
    if _is_gpt(context) is True or context.workload.has_wide_head:
        return True
    return "the model has no wide linear layer that could score words"


def _fused_loss_gain(context: Context) -> float:
    if _fuses_loss(context):
        return 0.01
    # It also leaves less to compile.
    return 0.1 if context.on_gpu and context.workload.has_wide_head else 0.03


def _residual_applies(context: Context) -> bool | str:
    if not isinstance(context.config.model, (GPTModelConfig, TextClassifierModelConfig)):
        return "only the built-in models have it"
    return context.resolved.gpu.mixed_precision != "off" or "there is no half precision to keep the residual stream in"


DEVICE_KNOBS: tuple[Knob, ...] = (
    Knob(
        "precision",
        ("gpu.mixed_precision",),
        "Compute in half precision, keep weights in fp32; or in fp32 where launches are the limit.",
        _precisions,
        _precision_applies,
        "rounding",
        lambda context: (
            ("host_bound",) if _is_half(context) else ("precision_unused", "compute_bound", "memory_pressure")
        ),
        expected_gain=lambda context: 0.0 if _is_half(context) else 0.3,
    ),
    Knob(
        "tf32",
        ("gpu.tf32",),
        "TensorFloat-32 for fp32 matrix products.",
        lambda context: [True],
        _tf32_applies,
        "rounding",
        ("precision_unused", "compute_bound"),
        expected_gain=0.2,
    ),
    Knob(
        "compile",
        ("gpu.compile_model", "gpu.compile_scope"),
        "Compile the model, or each block that it repeats: fewer, larger kernels.",
        _compile_values,
        _compile_applies,
        "rounding",
        suggested_by=("host_bound", "compute_bound"),
        expected_gain=0.25,
        setup_s=_COMPILE_S,
        value_setup_s=lambda value: _BLOCK_SETUP_S if value["gpu.compile_scope"] == "blocks" else None,
        partners=("capture", "batching"),
    ),
    Knob(
        "compile_mode",
        ("gpu.compile_mode",),
        "Let the compiler time several kernels for each product, or capture the parts that it compiles.",
        _compile_modes,
        _compiled,
        "rounding",
        lambda context: ("host_bound",) if "reduce-overhead" in _compile_modes(context) else (),
        expected_gain=0.02,
        setup_s=120.0,  # small text classifiers took more than 97 s on an H200 with slow processors
        value_setup_s=lambda value: _COMPILE_S if value == "reduce-overhead" else None,
    ),
    Knob(
        "combine_kernels",
        ("gpu.combine_kernels",),
        "Let the compiler put small kernels into one launch.",
        lambda context: [True],
        _compiled,
        "rounding",
        _combine_codes,
        expected_gain=0.03,
        setup_s=15.0,
    ),
    Knob(
        "capture",
        ("gpu.capture",),
        "Replay the whole step as one CUDA graph: no launches are left.",
        lambda context: ["step"],
        _capture_applies,
        "rounding",
        ("host_bound", "small_batch", "sync_stall"),
        expected_gain=0.5,
        partners=("compile", "batching", "padding_free"),
    ),
    Knob(
        "fused_optimizer",
        ("gpu.fused_optimizer",),
        "One kernel for the whole update.",
        lambda context: [True] if context.resolved.gpu.fused_optimizer is False else [],
        numerics_effect="rounding",
        suggested_by=("host_bound", "compute_bound"),
        expected_gain=0.05,
    ),
    Knob(
        "flash_attention",
        ("gpu.use_flash_attention",),
        "Which kernels compute attention.",
        _flash_values,
        _gpu_free,
        "rounding",
        lambda context: () if context.workload.has_convolutions else ("compute_bound", "memory_pressure"),
        # Hardly any model has both attention and convolutions.
        expected_gain=lambda context: 0.0 if context.workload.has_convolutions else 0.03,
        shortens=(ATTENTION,),
        partners=("batching",),
    ),
    Knob(
        "padding_free",
        ("gpu.padding_free",),
        "Leave padding out between the first and the last block of the model.",
        lambda context: [True],
        _padding_applies,
        "rounding",
        ("padding_waste", "compute_bound"),
        expected_gain=_padding_gain,
        partners=("capture", "compile"),
    ),
    Knob(
        "cudnn_benchmark",
        ("gpu.benchmark",),
        "Let cuDNN time its algorithms.",
        lambda context: [True],
        lambda context: _gpu_free(context) if context.workload.has_convolutions else "the model has no convolutions",
        "rounding",
        ("compute_bound",),
        expected_gain=0.05,
    ),
    Knob(
        "memory_format",
        ("gpu.channels_last",),
        "Images with their channels last.",
        lambda context: [not _channels_last(context)],
        _channels_applies,
        "rounding",
        ("compute_bound",),
        expected_gain=_channels_gain,
        partners=("precision",),
    ),
    Knob(
        "fused_loss",
        ("model.fused_loss", "training.fused_loss"),
        "Compute the loss a part of the tokens at a time.",
        _fused_losses,
        _fused_loss_applies,
        "rounding",
        lambda context: () if _fuses_loss(context) else ("compute_bound", "memory_pressure"),
        expected_gain=_fused_loss_gain,
    ),
    Knob(
        "residual",
        ("model.residual",),
        "Keep the residual stream in half precision.",
        lambda context: ["half"],
        _residual_applies,
        "rounding",
        lambda context: ("compute_bound", "memory_pressure") if _is_gpt(context) is True else ("memory_pressure",),
        # The shipped sizes of classifiers were not faster with it.
        expected_gain=lambda context: 0.05 if _is_gpt(context) is True else 0.01,
    ),
)
