"""Rules on what the device computes, and on what it could compute instead."""

from __future__ import annotations

import re
from typing import Any

from frameworm.diagnose.rules.accounting import Facts, Option
from frameworm.diagnose.rules.cost import costed, severity_of
from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.schema import Finding

MEMORY_UNDERUSED = 0.5
MOSTLY = 0.5
WORTH_SHORTER = 0.02  # of the tokens, for padding beyond the longest sample of a batch
# Matrix products work in tiles of 64 rows or more: with fewer rows in a micro-batch, most of each tile is empty.
ROWS_OF_A_TILE = 64
# What half precision saves of an fp32 computation: half the bytes, and matrix units that fp32 does not use.
SAVED_FROM_FP32, SAVED_FROM_TF32 = 0.5, 0.35

CAPTURE = Option("gpu.capture", "auto", "replay the step as one CUDA graph: no launches are left")

_TENSOR_CORES = re.compile(
    r"\b(V100S?|T4|A\d+|L\d+S?|[HB]\d{3}|GH200|GB\d{3}|TITAN (V|RTX)|(QUADRO )?RTX( PRO)?( A)? ?\d{4})\b"
)
_WITHOUT_BF16 = re.compile(r"\b(V100S?|T4|TITAN (V|RTX)|RTX [2T]\d{3}|QUADRO RTX \d{4})\b")


def sync_cost(facts: Facts) -> Estimate | None:
    """Fraction of the step the GPU idles because the host waited for it; None on CPU or if unknown."""
    if facts.on_gpu is not True or facts.idle is None:
        return None
    device = facts.trace.device if facts.trace is not None else None
    if device is not None and device.wall_s > 0:
        share = device.waits_s.get("synchronisation", 0.0) / device.wall_s
        return Estimate(share, share * facts.idle.error / facts.idle.value if facts.idle.value > 0 else 0.0)
    waits = facts.metrics.get("sync_s")
    return None if waits is None else min(waits, facts.idle, key=lambda item: item.value)


def host_cost(facts: Facts) -> Estimate | None:
    """Fraction of the step the GPU idles because the host is slow to launch work; None on CPU or if unknown."""
    if facts.on_gpu is not True or facts.idle is None:
        return None
    # A host that has time to wait for the device is not slow, so that much of the idle time is due to its waits.
    return facts.idle.minus(sync_cost(facts))


def memory_share(facts: Facts) -> float | None:
    """Peak memory as a fraction of what this process may use."""
    memory = facts.record.memory
    peak, total = known(memory.peak_bytes), known(memory.total_bytes)
    if peak is None or not total or total <= 0:
        return None
    fraction = known(facts.setting("gpu.memory_fraction")) if facts.on_gpu else None
    return peak / (total * (fraction or 1.0))


def is_small_batch(facts: Facts) -> bool:
    """True if the micro-batch leaves most of the device empty although memory for a larger one is free.

    If a GPU idles most of the time because launches are slow, the amount of computation is not the bottleneck.
    """
    share = host_cost(facts)
    if share is not None and share.value > MOSTLY and severity_of(share) is not None:
        return False
    used = memory_share(facts)
    roomy = used is not None and used < MEMORY_UNDERUSED
    return facts.on_gpu is True and roomy and facts.rows is not None and 0 < facts.rows < ROWS_OF_A_TILE


def host_bound(facts: Facts) -> Finding | None:
    """The GPU waits for the host to launch its work."""
    share = host_cost(facts)
    if share is None or is_small_batch(facts):  # a small batch needs a different remedy
        return None
    evidence = _device_evidence(facts) | {"captured_steps": facts.record.captured_steps}
    if facts.trace is not None and facts.trace.kernels is not None:
        evidence["kernel_mean_s"] = facts.trace.kernels.mean_s
        evidence["tiny_kernels"] = facts.trace.kernels.tiny_count
    options = []
    if not facts.record.captured_steps:
        options.append(CAPTURE)
    compilation = facts.record.compilation
    if compilation is None or not known(compilation.graphs):
        options.append(Option("gpu.compile_model", True, "compile the model: fewer, larger kernels"))
    unfused = facts.record.framework.unfused_optimizer if facts.record.framework is not None else None
    if unfused is not None:
        options.append(Option("gpu.fused_optimizer", True, "", f"gpu.fused_optimizer:{unfused}"))
    used, micro = memory_share(facts), known(facts.record.batch.micro)
    if micro and used is not None and used < MEMORY_UNDERUSED:
        options.append(Option("training.micro_batch", int(2 * micro), "more work per launch"))
    elif micro is None:
        options.append(Option("training.micro_batch", None, ""))
    return costed("host_bound", facts, share, evidence, facts.remedies(*options))


def small_batch(facts: Facts) -> Finding | None:
    """The micro-batch is too small to fill the device, and memory for a larger one is free."""
    if not is_small_batch(facts):
        return None
    assert facts.rows is not None
    filled = facts.rows / ROWS_OF_A_TILE
    share = _empty_share(facts, filled)
    micro = known(facts.record.batch.micro)
    larger = None if not micro else int(micro * max(2, ROWS_OF_A_TILE // facts.rows))
    evidence = _device_evidence(facts) | {
        "rows_per_micro_batch": facts.rows,
        "micro_batch": micro,
        "memory_share": memory_share(facts),
    }
    words = f"micro-batches of {larger} samples" if larger else "a larger micro-batch"
    remedies = facts.remedies(Option("training.micro_batch", larger, words), CAPTURE)
    return costed("small_batch", facts, share, evidence, remedies)


def _empty_share(facts: Facts, filled: float) -> Estimate | None:
    """Fraction of the step lost: the GPU's idle time, plus the empty part of each tile in what it computes.

    The more of a step is idle, the less of it is computed, so errors in the two cancel in part. Hence the idle time
    enters once, scaled by the difference of both terms.
    """
    forward, backward, idle = facts.phases.get("forward"), facts.phases.get("backward"), facts.idle
    if forward is None or backward is None:
        return host_cost(facts)
    work = forward.plus(backward).scaled(1.0 - filled)
    return work if idle is None or idle.value <= 0 else work.plus(idle.scaled(filled)).minus(sync_cost(facts))


def compute_bound(facts: Facts) -> Finding | None:
    """The step is spent computing, as it should be."""
    compute = facts.compute
    if compute is None:
        return None
    compute = compute.plus(facts.phases.get("optimizer"))
    if compute.low <= MOSTLY:
        return None
    evidence = _device_evidence(facts) | {"mfu": known(facts.record.mfu)}
    found = costed("compute_bound", facts, compute, evidence, [], most="info")
    assert found is not None, "more than half of the step stands out"
    return found


def precision_unused(facts: Facts) -> Finding | None:
    """The model computes in fp32 on a GPU that is much faster in half precision."""
    compute = facts.compute
    name = device_name(facts)
    if facts.on_gpu is not True or compute is None or facts.record.precision != "fp32" or name is None:
        return None
    capability = (facts.record.environment or {}).get("compute_capability")
    version = known(capability) if not isinstance(capability, str) else _version(capability)
    if not (version >= 7 if version is not None else _TENSOR_CORES.search(name.upper())):
        return None
    bf16 = version >= 8 if version is not None else not _WITHOUT_BF16.search(name.upper())
    word = "bf16" if bf16 else "fp16"
    tf32 = facts.setting("gpu.tf32")
    saved = SAVED_FROM_FP32 if tf32 is False else SAVED_FROM_TF32
    evidence = _device_evidence(facts) | {"precision": facts.record.precision, "device": name, "tf32": tf32}
    remedies = facts.remedies(
        Option("gpu.mixed_precision", word, f"compute in {word}, keep weights in fp32"),
        Option("gpu.tf32", True, "TensorFloat-32 for matrix products"),
    )
    # If it is unknown whether the GPU computes or waits in these phases, the cause may be a slow host.
    most = "info" if facts.idle is None else "critical"
    return costed("precision_unused", facts, compute.scaled(saved), evidence, remedies, most=most)


def padding_waste(facts: Facts) -> Finding | None:
    """The device computes padding."""
    waste, compute = known(facts.record.padding_waste), facts.compute
    if waste is None or compute is None or not 0 < waste <= 1:
        return None
    batching = facts.setting("data.batching")
    # How much of the padding is beyond the longest sample of its batch; unknown for the engine's own loaders.
    padding, beyond = facts.counts.get("padding_tokens"), facts.counts.get("padding_beyond_longest", 0.0)
    beyond_share = waste * clamp(beyond / padding) if padding else None
    like = Option("data.batching", "bucketed", "let texts of like length share a batch")
    packed = Option("data.batching", "packed", "put texts end to end, without padding")
    shorter = Option("data.pad_to", "longest", "pad to the longest text of the batch only")
    # On a CPU, attention pads packed texts again: measured on the quickstart, packing gains nothing there.
    packable = facts.on_gpu is True and (facts.attached or facts.setting("workload") == "text_classifier")
    options = [like] if batching in (None, "padded") else []
    if packable:
        options = [*options, packed] if facts.attached else [packed, *options]
    if beyond_share is None:
        options.append(shorter)
    elif beyond_share > WORTH_SHORTER:
        options = [shorter, *options] if beyond_share > waste / 2 else [*options, shorter]
    evidence = {
        "padding_share": waste,
        "padding_beyond_longest_share": beyond_share,
        "compute_share": clamp(compute.value),
        "batching": batching,
    }
    return costed("padding_waste", facts, compute.scaled(waste), evidence, facts.remedies(*options))


def device_name(facts: Facts) -> str | None:
    """Return the device's name as CUDA reports it."""
    name = (facts.record.environment or {}).get("device") or facts.record.device
    return name if isinstance(name, str) else None


def _device_evidence(facts: Facts) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        f"{name}_share": clamp(facts.phases[name].value)
        for name in ("forward", "backward", "optimizer")
        if name in facts.phases
    }
    if facts.gpu_busy is not None:
        evidence["gpu_busy"] = facts.gpu_busy.value
    device = facts.trace.device if facts.trace is not None else None
    if device is not None and device.wall_s > 0:
        evidence["trace_gpu_busy"] = device.busy_s / device.wall_s
    if facts.idle is not None:
        evidence["gpu_idle_share"] = clamp(facts.idle.value)
    return evidence


def _version(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
