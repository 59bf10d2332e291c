"""Facts that knobs need about this machine and a config's workload, collected once before a search."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from frameworm.config.schema import Config
from frameworm.data.batches.counts import token_lengths
from frameworm.data.batches.equal_samples import Collate, UnfitError, look_at_samples
from frameworm.data.batches.found_lengths import look_at_padding
from frameworm.data.batches.packed import packable, packing_of
from frameworm.data.batches.real_tokens import MASK, why_unsuitable
from frameworm.data.batches.resident import resident_bytes
from frameworm.data.prefetch import tensors_in
from frameworm.data.samples.streams import is_stream
from frameworm.data.samples.workers import automatic_workers, base_of
from frameworm.engine.memory.planner import MemoryPlanner
from frameworm.engine.model.activations import find_layers
from frameworm.engine.model.fused_head import find_heads
from frameworm.engine.model.padding_free import switchable
from frameworm.errors import ConfigError
from frameworm.hardware.devices import choose_device
from frameworm.hardware.host import memory_total_bytes, usable_cpus
from frameworm.hardware.resolve import resolve_here, resolve_machine
from frameworm.models.blocks import find_repeated_blocks
from frameworm.models.workloads import TokenisingNotice, Workload, build_workload
from frameworm.torch_private.names import GPU_COMPILER
from frameworm.tune.knobs.context import Context, Planner, TrialMachine, WorkloadFacts
from frameworm.tune.processes.batch_data import sample_count
from frameworm.tune.processes.forkserver import libraries_since, warm_up

log = logging.getLogger("frameworm")

# Plans are mostly accurate to a few percent; an excess below this factor is tried.
_SURELY_TOO_LARGE = 1.15
# Batches sampled for their shapes: at least, the time limit for more, and at most.
_FEW_BATCHES, _LOOK_S, _MOST_BATCHES = 4, 1.0, 24
_BF16_FLAGS = {"bf16", "avx512_bf16", "amx_bf16"}

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def tuning_context(config: Config, world_size: int = 1) -> Context:
    """The context of a search that starts from a config on this machine; builds the workload once.

    Raises:
        ConfigError: The config is inconsistent, or does not fit this number of processes.
        DeviceError: It requires a GPU and there is none.
        DataError: Its data is missing.
    """
    resolved = resolve_here(config, world_size)
    known = set(sys.modules)
    workload = build_workload(resolved, TokenisingNotice())
    machine = machine_facts(config)
    compiler = [GPU_COMPILER] if machine.device == "cuda" else []
    warm_up(["frameworm.tune.trials.live_rank"], [*libraries_since(known), *compiler])
    planner = make_planner(config, machine, world_size)
    return Context(config, machine, workload_facts(resolved, workload, world_size), world_size, planner)


def machine_facts(config: Config) -> TrialMachine:
    """Facts about the machine for this config."""
    found = resolve_machine(config)
    cpus, threads = usable_cpus(), torch.get_num_threads()
    if found.device == "cpu":
        return TrialMachine("cpu", _processor_has_bf16(), None, 0, cpus, threads, memory_total_bytes())
    device = choose_device("cuda", 0, config.gpu.device_ids)
    major, minor = torch.cuda.get_device_capability(device)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return TrialMachine("cuda", found.bf16, major + minor / 10, found.device_count, cpus, threads, memory_bytes)


def _processor_has_bf16() -> bool:
    """Whether the processor supports bf16; torch can emulate it, but much slower than fp32."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not _BF16_FLAGS.isdisjoint(words)


def workload_facts(config: Config, workload: Workload, world_size: int = 1) -> WorkloadFacts:
    """Facts about the workload of a resolved config, with `world_size` processes on this machine."""
    model, data = workload.model, workload.train_data
    packs = packable(data)
    size, why_not_resident = _equal_samples_bytes(workload)
    batch = _masked_batch(config, workload)
    return WorkloadFacts(
        accepts_packed=packs and bool(getattr(model, "accepts_packed", False)),
        many_widths=_has_many_widths(data, workload.collate_fn),
        many_shapes=size is None and _has_many_shapes(config, workload),
        masks_padding=batch is not None,
        assembles_batches=bool(getattr(data, "assembles_batches", False)),
        resident_bytes=resident_bytes(packing_of(data)) if packs else size,
        why_not_resident=why_not_resident,
        samples_per_epoch=_samples_per_epoch(config, data),
        has_convolutions=any(isinstance(module, _CONVOLUTIONS) for module in model.modules()),
        has_gelu=any(type(module) is nn.GELU for module in model.modules()),
        has_wide_head=bool(find_heads(model)),
        can_checkpoint=_can_checkpoint(config, model),
        repeats_blocks=bool(find_repeated_blocks(model)),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        has_validation=workload.val_data is not None,
        validation_samples=None if workload.val_data is None else sample_count(workload.val_data),
        padding_share=_padding_share(workload.model, batch),
        automatic_workers=automatic_workers(data, world_size),
    )


def _masked_batch(config: Config, workload: Workload) -> Mapping[str, Any] | None:
    """A batch of the first samples, if it has a token mask."""
    data = workload.train_data
    if sample_count(data) is None:
        return None
    try:
        rows = [data[place] for place in range(min(_micro_batch(config), len(data)))]
        batch = (workload.collate_fn or default_collate)(rows)
    except Exception as error:  # a ready-made loader, or samples that only the loader of a run can read
        log.debug("no batch to look for padding in: %s", error)
        return None
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    return batch if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _padding_share(model: nn.Module, batch: Mapping[str, Any] | None) -> float | None:
    """Fraction of padding in a batch; None if there is no mask, or the model needs the padding."""
    if batch is None or not switchable(model) or not find_repeated_blocks(model) or why_unsuitable(batch) is not None:
        return None
    return float((batch[MASK] == 0).double().mean())


def _equal_samples_bytes(workload: Workload) -> tuple[int | None, str | None]:
    """Memory that the samples would take on a device, or why they cannot be kept there unless they are packed."""
    data = workload.train_data
    if is_stream(data) or not sample_count(data):
        return None, "the training data cannot be read by index"
    try:
        return look_at_samples(data, workload.collate_fn).total_bytes, None
    except UnfitError as problem:
        return None, f"the data set {problem}"


def _has_many_widths(data: Any, collate: Collate | None) -> bool:
    lengths, base = token_lengths(data), base_of(data)
    if lengths is None and not is_stream(data) and sample_count(data):
        try:
            return bool(look_at_padding(data, collate).places)
        except UnfitError:
            return False
    if lengths is None or not len(lengths) or not hasattr(base, "padded_length"):
        return False
    shortest, longest = (base.padded_length(end(lengths, keepdims=True)) for end in (np.min, np.max))
    return bool(shortest != longest)


def _has_many_shapes(config: Config, workload: Workload) -> bool:
    """Whether most batches have different shapes, judging by a second of sampling."""
    data, collate = workload.train_data, workload.collate_fn or default_collate
    count = None if is_stream(data) else sample_count(data)
    micro = config.training.micro_batch
    if count is None or not isinstance(micro, int) or count < micro:
        return False
    random = np.random.default_rng(0)
    shapes: Counter[Any] = Counter()
    ends = time.monotonic() + _LOOK_S
    try:
        while shapes.total() < _FEW_BATCHES or (shapes.total() < _MOST_BATCHES and time.monotonic() < ends):
            rows = [data[int(place)] for place in random.choice(count, micro, replace=False)]
            shapes[tuple(tensor.shape for tensor in tensors_in(collate(rows)))] += 1
    except Exception as error:  # a ready-made loader, or samples that only the loader of a run can read
        log.debug("no batches to compare the shapes of: %s", error)
        return False
    return 2 * len(shapes) > shapes.total()


def _samples_per_epoch(config: Config, data: Any) -> int | None:
    count = sample_count(data)
    batch = config.training.global_batch
    if count is None or batch is None or not config.data.drop_last:
        return count
    return count // batch * batch


def _can_checkpoint(config: Config, model: nn.Module) -> bool:
    try:
        return bool(find_layers(model, config.memory.checkpoint_modules))
    except ConfigError:
        return False


def make_planner(start: Config, machine: TrialMachine, world_size: int) -> Planner | None:
    """A function that says which larger steps cannot fit on a GPU, from dry runs; None without a GPU.

    A dry run takes a second or two, so only configs that need more memory than the initial one are planned.
    """
    room_bytes = machine.memory_bytes
    if machine.device != "cuda" or room_bytes is None:
        return None
    first = resolve_here(start, world_size)
    known: dict[tuple[Any, ...], str | None] = {}

    def plan(config: Config) -> str | None:
        resolved = resolve_here(config, world_size)
        if _micro_batch(resolved) <= _micro_batch(first) and _keeps(resolved) <= _keeps(first):
            return None
        kind = (
            *(_micro_batch(resolved), _keeps(resolved), resolved.data.batching, resolved.gpu.mixed_precision),
            *(resolved.parallel.strategy, resolved.parallel.compression, resolved.gpu.fused_optimizer),
            *(resolved.gpu.use_flash_attention, resolved.training.fused_loss, resolved.model.model_dump_json()),
        )
        if kind not in known:
            known[kind] = _too_large(config, world_size, room_bytes)
        return known[kind]

    return plan


def _micro_batch(config: Config) -> int:
    assert isinstance(config.training.micro_batch, int)
    return config.training.micro_batch


def _keeps(config: Config) -> int:
    """The rank of the checkpointing mode by how many activations it keeps."""
    return ("full", "selective", "off").index(config.memory.activation_checkpointing)


def _too_large(config: Config, world_size: int, room_bytes: int) -> str | None:
    try:
        need_bytes = MemoryPlanner(config, world_size, validation=False).plan().total
    except Exception as error:  # if a dry run fails, the real trial decides
        log.debug("no plan of the memory: %s", error)
        return None
    if need_bytes <= _SURELY_TOO_LARGE * room_bytes:
        return None
    return f"would take about {need_bytes / 2**30:.0f} GiB of {room_bytes / 2**30:.0f} GiB"
