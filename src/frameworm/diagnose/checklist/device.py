"""Checklist items for the device: precision, kernels, graphs."""

from __future__ import annotations

from frameworm.config.checks import SHARDED
from frameworm.config.schema import CustomModelConfig, GPTModelConfig
from frameworm.diagnose.checklist.known_gains import capture_gain, gpt_gain, precision_gain, unmeasured
from frameworm.diagnose.checklist.subject import Subject, no_matter
from frameworm.records.machine import ChecklistItem

FUSED_LOSS_WORDS = 8192  # model.fused_loss: auto is on from this vocabulary size
HOPPER = 9.0
OWN_WIDTHS, OWN_LENGTHS = (32, 64), 128  # head widths and context lengths for which gpt has its own attention kernels


def device_items(subject: Subject) -> list[ChecklistItem]:
    """Return the items on precision, kernels, compilation and capture."""
    items = (_precision, _tf32, _attention, _fused_loss, _residual, _compile, _capture, _fused_optimizer)
    return [item(subject) for item in items]


def _precision(subject: Subject) -> ChecklistItem:
    name, gpu = "mixed precision", subject.resolved.gpu
    if gpu.mixed_precision != "off":
        return ChecklistItem(name, "done", gpu.mixed_precision, finding="precision_unused")
    if not subject.on_gpu:
        return no_matter(name, "fp32 on a CPU, unless the processor has bf16 and tune shows that it is faster")
    settings, gain = ("gpu.mixed_precision=auto",), precision_gain(gpu.tf32)
    return ChecklistItem(
        name, "not done", "matrix products run in fp32", settings, gain, "precision", "precision_unused"
    )


def _tf32(subject: Subject) -> ChecklistItem:
    name, gpu = "TF32 for what is left in fp32", subject.resolved.gpu
    if not subject.on_gpu:
        return no_matter(name, "only GPUs have it")
    if subject.capability is not None and subject.capability < 8:
        return no_matter(name, f"compute capability {subject.capability:g} has no TF32")
    if gpu.tf32:
        return ChecklistItem(name, "done", "gpu.tf32 is on")
    if gpu.deterministic:
        return no_matter(name, "gpu.deterministic wins over it")
    return ChecklistItem(
        name, "not done", "switched off", ("gpu.tf32=true",), unmeasured("tf32"), "tf32", "precision_unused"
    )


def _attention(subject: Subject) -> ChecklistItem:
    name, choice = "attention kernels", subject.resolved.gpu.use_flash_attention
    if not subject.on_gpu:
        return no_matter(name, "the choice is between kernels of a GPU")
    if isinstance(subject.resolved.model, CustomModelConfig) and choice is not False:
        return ChecklistItem(name, "done", "flash kernels where the model calls scaled_dot_product_attention")
    if choice is False:
        reason, value = "flash kernels are switched off", "auto"
        gain = unmeasured("flash_attention")
    elif choice == "cudnn" or not isinstance(subject.resolved.model, GPTModelConfig):
        return ChecklistItem(name, "done", f"gpu.use_flash_attention: {str(choice).lower()}")
    elif _has_own_attention(subject.resolved.model):
        return ChecklistItem(name, "done", "kernels of our own")
    elif subject.capability is not None and subject.capability < HOPPER:
        return ChecklistItem(name, "done", f"flash; cuDNN's are faster from compute capability {HOPPER:g} on")
    else:
        reason, value = "batches have one shape: cuDNN's kernels are faster there on Hopper GPUs", "cudnn"
        gain = gpt_gain()
    settings = (f"gpu.use_flash_attention={value}",)
    return ChecklistItem(name, "not done", reason, settings, gain, "flash_attention", "compute_bound")


def _has_own_attention(model: GPTModelConfig) -> bool:
    return model.d_model // model.n_heads in OWN_WIDTHS and model.max_seq_len % OWN_LENGTHS == 0


def _fused_loss(subject: Subject) -> ChecklistItem:
    name, model = "fused loss", subject.resolved.model
    if not isinstance(model, GPTModelConfig):
        return no_matter(name, "only gpt has logits large enough to matter")
    if not subject.on_gpu and model.fused_loss is not True:
        return no_matter(name, "it pays on a GPU")
    words = model.vocab_size if isinstance(model.vocab_size, int) else None
    if model.fused_loss is True or (model.fused_loss == "auto" and (words is None or words >= FUSED_LOSS_WORDS)):
        return ChecklistItem(name, "done", f"model.fused_loss: {str(model.fused_loss).lower()}")
    if model.fused_loss == "auto":
        return no_matter(name, f"{words} words: below {FUSED_LOSS_WORDS} the logits are small")
    settings = ("model.fused_loss=auto",)
    return ChecklistItem(
        name, "not done", "all logits are held at once", settings, gpt_gain(), "fused_loss", "memory_pressure"
    )


def _residual(subject: Subject) -> ChecklistItem:
    name, model = "half-precision residual stream", subject.resolved.model
    if not isinstance(model, GPTModelConfig):
        return no_matter(name, "a setting of gpt")
    if subject.resolved.gpu.mixed_precision == "off":
        return no_matter(name, "there is no half precision")
    if model.residual == "half":
        return ChecklistItem(name, "done", "model.residual: half")
    reason = "every layer norm reads and writes fp32; half rounds at every layer"
    return ChecklistItem(name, "not done", reason, ("model.residual=half",), gpt_gain(), "residual", "compute_bound")


def _compile(subject: Subject) -> ChecklistItem:
    name, resolved = "compiled model", subject.resolved
    if resolved.gpu.compile_model:
        return ChecklistItem(name, "done", f"mode {resolved.gpu.compile_mode}")
    if resolved.parallel.strategy in SHARDED:
        return no_matter(name, f"strategy {resolved.parallel.strategy} refuses compiled models")
    gain = unmeasured("compile", "a short run may not pay back the start, which takes a quarter of a minute or more")
    finding = "host_bound" if subject.on_gpu else "compute_bound"
    return ChecklistItem(name, "not done", "many small kernels", ("gpu.compile_model=true",), gain, "compile", finding)


def _capture(subject: Subject) -> ChecklistItem:
    name, resolved = "whole step as one CUDA graph", subject.resolved
    if not subject.on_gpu:
        return no_matter(name, "there is no GPU")
    if subject.intent.world_size > 1 or resolved.parallel.strategy != "single":
        return no_matter(name, "a graph does not hold what travels between processes")
    if resolved.gpu.capture != "off":
        return ChecklistItem(name, "done", f"gpu.capture: {resolved.gpu.capture}", finding="host_bound")
    if resolved.gpu.deterministic:
        return no_matter(name, "auto decides by the clock, which deterministic runs must not")
    gain = gpt_gain()
    if not isinstance(resolved.model, GPTModelConfig):
        gain = capture_gain(resolved.data.dataset, getattr(resolved.model, "d_model", None))
    reason = "each kernel is launched by the host"
    return ChecklistItem(name, "not done", reason, ("gpu.capture=auto",), gain, "capture", "host_bound")


def _fused_optimizer(subject: Subject) -> ChecklistItem:
    name = "fused optimizer"
    if subject.resolved.gpu.fused_optimizer:
        return ChecklistItem(name, "done", "one kernel for the whole update")
    settings = ("gpu.fused_optimizer=auto",)
    return ChecklistItem(
        name, "not done", "switched off", settings, unmeasured("fused_optimizer"), "fused_optimizer", "host_bound"
    )
