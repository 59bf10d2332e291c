"""`print_optimization_checklist`: doctor's checklist for a live model, loader and settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.config.load import load_config
from frameworm.config.model_sections import CustomModelConfig
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.diagnose.checklist.checklist import Subject, check_config
from frameworm.engine.memory.fitness import judge_fit
from frameworm.engine.settings import api_defaults, apply_settings
from frameworm.engine.summary import count_parameters
from frameworm.hardware.inspect import inspect_machine
from frameworm.launch.around import find_launcher
from frameworm.launch.process_group import is_distributed, setup_ddp
from frameworm.records.machine import Intent, MachineFacts, PlanFacts
from frameworm.report.checks.doctor import render_checklist
from frameworm.report.kit.printed import Printed
from frameworm.torch_private.modules import compiled_call, is_wrapped_by_compiler, without_compiler
from frameworm.tune.analyzer.bench import has_hook, without_compression
from frameworm.tune.analyzer.loader_copy import workers_of

_ADAM_BYTES = 8  # optimizer state per parameter
_BF16_FROM = 8.0  # compute capability
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def print_optimization_checklist(
    model: nn.Module | None = None,
    train_loader: Any = None,
    config: Config | str | Path | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    show: bool = True,
    **settings: Any,
) -> Printed:
    """Check which optimizations are done, not done (with the settings and expected gain), or not applicable.

    Nothing is trained. With only a config file this is the checklist of `frameworm doctor --config F`.

    Args:
        model: The model, which may be compiled or in DDP; None: that of the config.
        train_loader: Its loader: batch size, workers and pinning are read from it.
        config: The settings, or a config file; None: the defaults of `Trainer(model, optimizer)`.
        optimizer: The optimizer, to see whether it is fused.
        show: Print the list.
        **settings: Fields of the config by name, as for `Trainer`; they override it.

    Returns:
        `subject`, `items` [{name, state, reason, settings, gain, knob, finding}] and `notes`; it prints as text.
    """
    base = load_config(Path(config)) if isinstance(config, (str, Path)) else config
    chosen = apply_settings(api_defaults() if base is None else base, settings)
    facts, intent = _here()
    in_hand = model is not None or train_loader is not None or base is None
    if in_hand:
        subject = _present(model, train_loader, optimizer, chosen, facts, intent)
        notes: tuple[str, ...] = ()
        if model is None:
            notes = ("no model was given: what depends on it is not checked",)
        words = "no model" if model is None else type(_plain(model)).__name__
    else:
        fitness = judge_fit(chosen, facts, intent)
        subject = Subject(chosen, fitness.resolved, facts, fitness.intent, fitness.plan)
        notes, words = fitness.notes, chosen.name
    ranks = subject.intent.world_size
    data = {
        "subject": f"{words} · {'1 process' if ranks == 1 else f'{ranks} processes'} · {subject.resolved.gpu.device}",
        "in_python": in_hand,
        "items": [item.to_dict() for item in check_config(subject)],
        "notes": list(notes),
    }
    result = Printed(data, render_checklist)
    if show:
        result.print_summary()
    return result


def _here() -> tuple[MachineFacts, Intent]:
    around = find_launcher()
    facts = inspect_machine(
        Path("runs"),
        around.port,
        master_address=around.master_address,
        port_asked=around.port_asked,
        probe_bytes=0,
    )
    intent = Intent(around.processes, around.nodes)
    if is_distributed():
        process = setup_ddp()
        intent = replace(intent, processes=process.local_world_size, nodes=process.num_nodes)
    return facts, intent


def _present(
    model: nn.Module | None,
    loader: Any,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    facts: MachineFacts,
    intent: Intent,
) -> Subject:
    """The settings, as the live objects actually have them."""
    parameters = [] if model is None else list(model.parameters())
    device: Literal["cpu", "cuda"] = "cuda" if facts.gpus else "cpu"
    asked = _with_loader(config, loader)
    asked = asked.model_copy(
        update={
            "workload": "your.module:function",
            "model": CustomModelConfig(),
            "gpu": asked.gpu.model_copy(update=_gpu(model, parameters, optimizer, asked)),
        }
    )
    bf16 = not facts.gpus or (facts.gpus[0].capability or _BF16_FROM) >= _BF16_FROM
    resolved = resolve(asked, world_size=intent.world_size, device=device, bf16=bf16)
    ddp = None if model is None else without_compression(model)
    if isinstance(ddp, DistributedDataParallel):
        update: dict[str, Any] = {
            "strategy": "ddp",
            "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
            "find_unused_parameters": ddp.find_unused_parameters,
        }
        if has_hook(ddp):
            update["compression"] = "a communication hook"
        resolved = resolved.model_copy(update={"parallel": resolved.parallel.model_copy(update=update)})
    plan = None
    if model is not None:
        count = count_parameters(model)
        size = sum(item.numel() * item.element_size() for item in parameters)
        plan = PlanFacts(parameters=count, parameter_bytes=size, checkpoint_bytes=size + count * _ADAM_BYTES)
    intent = replace(intent, on_gpu=resolved.gpu.device == "cuda", compiles=resolved.gpu.compile_model)
    return Subject(asked, resolved, facts, intent, plan)


def _with_loader(config: Config, loader: Any) -> Config:
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    workers = workers_of(inner)
    data: dict[str, Any] = {} if workers is None else {"num_workers": workers}
    pinned = inner.settings.pin_memory if isinstance(inner, OptimizedDataLoader) else getattr(inner, "pin_memory", None)
    if pinned is not None:
        data["pin_memory"] = pinned
    training: dict[str, Any] = {}
    size = getattr(inner, "batch_size", None)
    if isinstance(size, int):
        training = {"micro_batch": size, "batch_size": None, "global_batch": None}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "training": config.training.model_copy(update=training),
        }
    )


def _gpu(
    model: nn.Module | None,
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    config: Config,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "compile_model": config.gpu.compile_model or (model is not None and _is_compiled(model)),
        "deterministic": config.gpu.deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    half = next((_HALVES[item.dtype] for item in parameters if item.dtype in _HALVES), None)
    if half is not None:
        found["mixed_precision"] = half
    if optimizer is not None and optimizer.defaults.get("fused") is not None:
        found["fused_optimizer"] = bool(optimizer.defaults["fused"])
    return found


def _is_compiled(model: nn.Module) -> bool:
    return any(is_wrapped_by_compiler(module) or compiled_call(module) is not None for module in model.modules())


def _plain(model: nn.Module) -> nn.Module:
    """The model without DDP and the compiler."""
    model = without_compression(model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return without_compiler(inner)
