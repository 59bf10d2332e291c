"""Apply keyword settings of the Python API to a config.

`Trainer(model, optimizer, clip_norm=1.0, every_steps=100)` sets `training.clip_norm` and `checkpoint.every_steps`: a
keyword is the name of a config field, and a whole section (`gpu=GPUConfig(...)`) may be given as well.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from typing_extensions import TypedDict, get_type_hints

from frameworm import compat
from frameworm.config.checkpoint_section import CheckpointConfig, EarlyStopConfig, StorageConfig
from frameworm.config.keys import dotted
from frameworm.config.model_sections import PYTHON_WORKLOAD, PythonModelConfig
from frameworm.config.observe_section import (
    CsvConfig,
    MlflowConfig,
    ObserveConfig,
    TargetsConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)
from frameworm.config.problems import problems_of
from frameworm.config.schema import Config, GPUConfig, MemoryConfig, ParallelConfig, Section
from frameworm.config.training_section import TrainingConfig
from frameworm.engine.given import OWN_LOOP
from frameworm.errors import ConfigError
from frameworm.observe.loggers.protocol import Logger
from frameworm.torch_private.modules import without_compiler

SECTIONS = ("training", "gpu", "memory", "parallel", "checkpoint", "storage", "observe")
TOP_LEVEL = ("name", "seed")
OBJECTS = ("model", "optimizer", "loss_fn", "scheduler", "callbacks", "metrics", "loggers", "processing_class")
# Settings of a config that come with an object passed to `Trainer`.
_OF_OPTIMIZER = ("lr", "weight_decay", "betas", "eps", "momentum", "muon_momentum", "lr_scaling", "base_batch")
_OF_LOADER = ("batch_size", "micro_batch", "global_batch")

Off = Literal["off", False]
Call = TypeVar("Call", bound=Callable[..., Any])


class _CommonSettings(TypedDict, total=False):
    """Keywords of every trainer; docs/config.md describes each setting."""

    name: str
    seed: int
    # training
    training: TrainingConfig | Mapping[str, Any]
    epochs: int
    max_steps: int | Off | None
    accumulation: Literal["auto"] | int
    schedule: Literal["onecycle", "cosine", "linear", "constant", "wsd"]
    schedule_every: Literal["auto", "step", "epoch"]
    schedule_metric: str | Off | None
    warmup: float
    decay: float
    decay_shape: Literal["linear", "cosine", "sqrt"]
    clip_norm: float | Off | None
    ema: float | Off | None
    max_bad_steps: int | Off | None
    on_spike: Literal["off", "warn", "rollback", False]
    early_stop: EarlyStopConfig | Mapping[str, Any] | Off | None
    accuracy: Literal["auto"] | bool
    fused_loss: bool
    cpu_threads: Literal["auto"] | int
    cpu_interop_threads: Literal["auto"] | int
    cpu_affinity: bool
    cpu_onednn: Literal["except_linear"] | bool
    cpu_gelu: Literal["torch", "keep_slope"]
    # gpu
    gpu: GPUConfig | Mapping[str, Any]
    device: Literal["auto", "cpu", "cuda"]
    device_ids: Sequence[int] | Off | None
    memory_fraction: float
    mixed_precision: Literal["auto", "bf16", "fp16", "off"] | bool
    compile_model: bool
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"]
    compile_scope: Literal["model", "blocks"]
    combine_kernels: bool
    use_flash_attention: Literal["auto", "cudnn"] | bool
    benchmark: bool
    deterministic: bool
    capture: Literal["off", "step", "auto", "rehearse", False]
    padding_free: bool
    tf32: bool
    channels_last: Literal["auto"] | bool
    fused_optimizer: Literal["auto"] | bool
    # memory
    memory: MemoryConfig | Mapping[str, Any]
    activation_checkpointing: Literal["off", "full", "selective", False]
    checkpoint_modules: Sequence[str] | Off | None
    max_memory_percent: float
    gc_threshold: float
    monitoring_interval: float
    enable_automatic_gc: bool
    cache_size_limit: int
    on_oom: Literal["stop", "halve_micro_batch"]
    # parallel
    parallel: ParallelConfig | Mapping[str, Any]
    offload_optimizer: bool
    compression: Literal["off", "auto", "fp16", "bf16", "int8", "int4", "topk", "powersgd", False]
    allow_approximate: bool
    compression_ratio: float
    powersgd_rank: int
    rounding: Literal["nearest", "stochastic"]
    error_feedback: bool
    sync_every: int
    check_replicas: int | Off | None
    bucket_cap_mb: float
    first_bucket_mb: float
    gradient_as_bucket_view: bool
    static_graph: Literal["auto"] | bool
    timeout_s: float
    watchdog_s: float | Off | None
    # checkpoint
    checkpoint: CheckpointConfig | Mapping[str, Any]
    every_steps: int | Off | None
    every_minutes: float | Off | None
    keep: int
    keep_best: int
    metric: str
    better: Literal["auto", "lower", "higher"]
    mode: Literal["async", "sync"]
    when_busy: Literal["skip", "wait"]
    dir: str | Path | Off | None
    # storage
    storage: StorageConfig | Mapping[str, Any]
    url: str | Off | None
    records_every_s: float
    wait_s: float
    preempted_wait_s: float
    # observe
    observe: ObserveConfig | Mapping[str, Any]
    sinks: Sequence[Literal["jsonl", "tensorboard"]]
    log_interval_s: float
    log_close_s: float
    tensorboard: TensorBoardConfig | Mapping[str, Any]
    wandb: WandbConfig | Mapping[str, Any]
    mlflow: MlflowConfig | Mapping[str, Any]
    trackio: TrackioConfig | Mapping[str, Any]
    csv: CsvConfig | Mapping[str, Any]
    trace: Literal["off", "window", False]
    trace_wait: int
    trace_warmup: int
    trace_active: int
    trace_repeat: int
    trace_operators: int
    nvtx: bool
    system_interval_s: float | Off | None
    progress: Literal["auto"] | bool
    targets: TargetsConfig | Mapping[str, Any]


class Settings(_CommonSettings, total=False):
    """The settings that `Trainer` takes by keyword."""

    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "zero2", "zero3"]
    backend: Literal["auto", "nccl", "gloo"]
    find_unused_parameters: bool


class _Objects(_CommonSettings, total=False):
    loss_fn: Callable[..., Any] | None
    scheduler: Any
    config: Config | None
    callbacks: Sequence[object] | None
    metrics: Mapping[str, Any] | None
    loggers: Sequence[str | Logger] | None
    processing_class: Any
    run_dir: str | Path | None


class DistributedSettings(_Objects, total=False):
    """Keywords of `DistributedTrainer` in addition to its own parameters."""

    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "zero2", "zero3"]


class DDPSettings(_Objects, total=False):
    """Keywords of `DDPTrainer` in addition to its own parameters."""

    backend: Literal["auto", "nccl", "gloo"]
    use_amp: bool
    gradient_accumulation_steps: int
    find_unused_parameters: bool


def names_settings(kind: type) -> Callable[[Call], Call]:
    """Show the keys of a TypedDict in a function's signature instead of `**settings`.

    Type checkers and editors read them from `Unpack`; this is for run time: help() and notebooks.
    """

    def named(function: Call) -> Call:
        signature, config = inspect.signature(function), api_defaults()
        sections = [config, *(getattr(config, name) for name in reversed(SECTIONS))]
        usual = {name: value for section in sections for name, value in section if not isinstance(value, Section)}
        own = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual.get(name), annotation=annotation)
            for name, annotation in get_type_hints(kind).items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return named


def check_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a `Trainer`'s keyword settings as a dict, and whether an old spelling among them asks for mixed precision.

    Raises:
        ConfigError: If a setting comes with an object passed to the trainer, and so would have no effect.
    """
    for name in settings:
        if name in _OF_OPTIMIZER:
            raise ConfigError(
                f"{name} has no effect here: the optimizer brings it, such as AdamW(model.parameters(), lr=1e-3); "
                "schedule, warmup and clip_norm are settings"
            )
        if name in _OF_LOADER:
            raise ConfigError(
                f"{name} has no effect here: the loader brings it, such as DataLoader(data, batch_size=32), and "
                "accumulation=N takes N of its batches in a step"
            )
    given = dict(settings)
    return given, compat.take_mixed_precision(given)


def api_defaults() -> Config:
    """Defaults of the Python API: the user's model, optimizer and precision stay as they are."""
    config = Config()
    config.training.clip_norm = None
    config.training.accumulation = 1
    config.training.schedule = "constant"
    config.gpu.mixed_precision = "off"
    return config


def as_python_run(config: Config, model: nn.Module) -> Config:
    """Copy the config and record that the model comes from a script, not from a config file's workload."""
    kind = type(without_compiler(model))
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    described = PythonModelConfig(
        script=None if file is None else str(Path(file).absolute()), class_name=f"{kind.__module__}.{kind.__qualname__}"
    )
    data = config.data.model_copy(update={"dataset": PYTHON_WORKLOAD})
    return config.model_copy(update={"workload": PYTHON_WORKLOAD, "model": described, "data": data})


def apply_settings(config: Config, settings: dict[str, Any]) -> Config:
    """Return a copy of the config with keyword settings applied.

    Raises:
        ConfigError: If a keyword is unknown (the nearest is named) or its value does not fit.
    """
    config = config.model_copy(deep=True)
    # If two sections share a name, the first wins: `compression` means gradients; for checkpoints, give the section.
    places = {name: section for section in reversed(SECTIONS) for name in type(getattr(config, section)).model_fields}
    for name, value in compat.renamed_keywords(settings).items():
        target: Section
        if name in SECTIONS or name in TOP_LEVEL:
            target = config
        elif name in places:
            target = getattr(config, places[name])
        else:
            if callable(value) or _holds_optimizer(value):
                raise ConfigError(
                    f"unknown setting {name}: settings are values, and of functions and objects Trainer takes "
                    f"{', '.join(OBJECTS)}. {OWN_LOOP}"
                )
            known = [*places, *SECTIONS, *TOP_LEVEL, *OBJECTS, "config", "run_dir"]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {name}; the nearest is {near[0]}")
        try:
            setattr(target, name, type(target).as_yaml_would_give_it(name, value))
        except ValidationError as error:
            found = problems_of(error, type(target))
            lines = [f"{dotted((name, *problem.keys[0][1:]))}: {problem.text}" for problem in found]
            raise ConfigError("\n".join(lines)) from None
    return config


def _holds_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer or a collection containing one."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.optim.Optimizer) for item in items)
