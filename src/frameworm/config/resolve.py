"""Turns a requested config into the config of one run: every `auto` that depends on the machine becomes a value.

These are pure functions: facts about the machine are arguments, so that a laptop can resolve a config for a cluster.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from frameworm.config.checks import check, key
from frameworm.config.problems import Problem, make_error
from frameworm.config.schema import Config, TrainingConfig
from frameworm.errors import ConfigError, DeviceError

DEFAULT_GLOBAL_BATCH = 32
SMALLEST_EVAL_BATCH = 256

GLOBAL_BATCH = key("training.global_batch")
OTHER_BATCH_KEYS = tuple(key(f"training.{name}") for name in ("micro_batch", "batch_size", "accumulation"))


class Batch(NamedTuple):
    """The batch sizes; `global_batch` = `micro_batch` x `accumulation` x world size."""

    global_batch: int
    micro_batch: int
    accumulation: int


def resolve(
    config: Config, *, world_size: int, device: Literal["cpu", "cuda"], bf16: bool, allow_uneven: bool = False
) -> Config:
    """Decide what depends on the machine and the number of processes.

    `data.num_workers` stays `auto` or `measure`, because the loader knows the machine it runs on. `training.batch_size`
    becomes `training.micro_batch`.

    Args:
        config: The requested config; it is not modified.
        world_size: Number of processes.
        device: The best device of the machine.
        bf16: Whether that device supports bfloat16.
        allow_uneven: After an elastic resize, keep the global batch even if it does not divide; the micro-batch is then
            the largest of any process and never grows.

    Returns:
        A copy in which batch sizes, device, precision, strategy and the like are concrete.

    Raises:
        ConfigError: Settings conflict with each other or with this number of processes.
        DeviceError: A GPU is requested and there is none.
    """
    assert world_size >= 1, world_size
    check(config)
    if config.gpu.device == "cuda" and device == "cpu":
        raise DeviceError("gpu.device: cuda is asked for and no GPU can be used here; set gpu.device: auto or cpu")
    if config.data.resident is True and config.data.batching == "packed" and device == "cpu":
        raise DeviceError(
            "data.resident: true puts packed batches together on a GPU, and none can be used here; use auto"
        )
    chosen = device if config.gpu.device == "auto" else config.gpu.device
    problems = list(_world_problems(config, world_size, chosen))
    batch: Batch | None = None
    try:
        batch = _halved(config, batch_of(config.training, world_size, allow_uneven))
    except BatchError as error:
        problems.insert(0, Problem((GLOBAL_BATCH,), str(error), at=OTHER_BATCH_KEYS))
    if problems or batch is None:
        raise make_error(problems, config._origins)
    return _copy(
        config,
        training={**batch._asdict(), "batch_size": None},
        gpu={
            "device": chosen,
            "mixed_precision": _precision(config.gpu.mixed_precision, chosen, bf16),
            "fused_optimizer": _unless_auto(config.gpu.fused_optimizer, True),
            "benchmark": config.gpu.benchmark and not config.gpu.deterministic,
            "tf32": config.gpu.tf32 and not config.gpu.deterministic,
            "capture": _capture(config, chosen),
        },
        parallel={
            "strategy": _unless_auto(config.parallel.strategy, "single" if world_size == 1 else "ddp"),
            "backend": _unless_auto(config.parallel.backend, "nccl" if chosen == "cuda" else "gloo"),
            "static_graph": _unless_auto(config.parallel.static_graph, False),
        },
        data={
            "pin_memory": _unless_auto(config.data.pin_memory, chosen == "cuda"),
            "persistent_workers": _unless_auto(config.data.persistent_workers, config.data.num_workers != 0),
            "balance": _unless_auto(config.data.balance, config.data.batching == "packed" and config.data.shuffle),
            "resident": _resident(config, chosen),
            "eval_batch": _unless_auto(config.data.eval_batch, _eval_batch(config.workload, batch.micro_batch)),
        },
    )


class BatchError(ValueError):
    """The batch sizes contradict each other."""


def batch_of(training: TrainingConfig, world_size: int, allow_uneven: bool = False) -> Batch:
    """Compute the batch sizes of a run.

    Args:
        training: The settings; any of the sizes may be missing.
        world_size: Number of processes.
        allow_uneven: See `resolve`.

    Raises:
        BatchError: The sizes do not divide; the message names the nearest sizes that do.
    """
    micro = training.batch_size if training.micro_batch == "auto" else training.micro_batch
    accumulation = None if training.accumulation == "auto" else training.accumulation
    total = training.global_batch
    if total is None:
        if micro is not None:
            steps = accumulation or 1
            return Batch(micro * steps * world_size, micro, steps)
        total = DEFAULT_GLOBAL_BATCH
    unit = world_size * (micro or 1) * (accumulation or 1)
    fits = total == unit if micro is not None and accumulation is not None else total % unit == 0
    if fits:
        steps = accumulation or (1 if micro is None else total // (micro * world_size))
        return Batch(total, total // (world_size * steps), steps)
    if allow_uneven and total >= world_size:
        # More passes rather than larger ones, so that what fitted in memory before still fits.
        steps = _divide_up(total, world_size * micro) if micro is not None else accumulation or 1
        steps = min(steps, _divide_up(total, world_size))
        return Batch(total, _divide_up(total, world_size * steps), steps)
    raise BatchError(_does_not_fit(total, unit, world_size, micro, accumulation))


def _halved(config: Config, batch: Batch) -> Batch:
    """One pass for each half of a bucketed step, whose lengths differ, unless the user has set the passes."""
    training = config.training
    chosen = training.batch_size is not None or training.micro_batch != "auto" or training.accumulation != "auto"
    if chosen or config.data.batching != "bucketed" or batch.micro_batch % 2:
        return batch
    return Batch(batch.global_batch, batch.micro_batch // 2, 2 * batch.accumulation)


def growing_batch_note(training: TrainingConfig, world_size: int) -> str | None:
    """Return a note if the batch was given per device, so that the global batch grows with the number of ranks."""
    per_device = training.batch_size if training.micro_batch == "auto" else training.micro_batch
    if world_size == 1 or training.global_batch is not None or per_device is None:
        return None
    key = "micro_batch" if training.batch_size is None else "batch_size"
    total = batch_of(training, world_size).global_batch
    return (
        f"the global batch is {total}: training.{key} is per device, and there are {world_size} ranks; to train as on "
        f"one device, set training.global_batch={total // world_size} instead"
    )


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)


def _does_not_fit(total: int, unit: int, world_size: int, micro: int | None, accumulation: int | None) -> str:
    parts = [f"world size {world_size}"]
    parts += [f"micro_batch {micro}"] if micro is not None else []
    parts += [f"accumulation {accumulation}"] if accumulation is not None else []
    if micro is not None and accumulation is not None:
        return f"global_batch {total} is not {' x '.join(parts)} = {unit}; set {unit}, or leave accumulation out"
    sizes = [size for size in (total // unit * unit, (total // unit + 1) * unit) if size]
    close = " or ".join(str(size) for size in sizes)
    return f"global_batch {total} does not divide by {' x '.join(parts)}; nearest that does: {close}"


def _world_problems(config: Config, world_size: int, device: str) -> list[Problem]:
    """Conflicts with the number of processes and the device."""
    strategy, backend = config.parallel.strategy, config.parallel.backend
    found = []
    if strategy in ("single", "dp") and world_size > 1:
        text = f"{strategy} is one process and there are {world_size}; use ddp or auto"
        found.append(Problem((key("parallel.strategy"),), text))
    elif strategy == "dp" and device == "cpu":
        text = "dp spreads one process over GPUs and no GPU can be used here; use single or ddp"
        found.append(Problem((key("parallel.strategy"),), text))
    if config.gpu.capture == "step" and device == "cpu":
        text = "step records CUDA graphs and no GPU can be used here; use off or auto"
        found.append(Problem((key("gpu.capture"),), text))
    if backend == "nccl" and device == "cpu":
        text = "nccl talks between GPUs and no GPU can be used here; use gloo or auto"
        found.append(Problem((key("parallel.backend"),), text))
    return found


def _precision(asked: str, device: str, bf16: bool) -> str:
    if asked != "auto":
        return asked
    if device == "cpu":
        return "off"
    return "bf16" if bf16 else "fp16"


def _eval_batch(workload: str, micro_batch: int) -> int:
    """Without backward a larger batch fits; what a custom model can take is unknown."""
    return max(micro_batch, SMALLEST_EVAL_BATCH) if workload == "text_classifier" else micro_batch


def _capture(config: Config, device: str) -> str:
    """Resolve auto: only on a GPU, and not for deterministic runs, because auto decides by measured time."""
    if config.gpu.capture == "auto" and (device == "cpu" or config.gpu.deterministic):
        return "off"
    return config.gpu.capture


def _resident(config: Config, device: str) -> Any:
    """Resolve auto: only for packed batches on a GPU, where the loader decides by the size of the data set."""
    if config.data.batching == "packed":
        return config.data.resident if device == "cuda" else False
    return config.data.resident is True


def _unless_auto(value: Any, decided: Any) -> Any:
    return decided if value == "auto" else value


def _copy(config: Config, **changes: dict[str, Any]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def effective_lr(config: Config) -> float:
    """Return the peak learning rate after `training.lr_scaling`.

    Args:
        config: A resolved config.

    Raises:
        ConfigError: The rate depends on a global batch that is not resolved yet.
    """
    training = config.training
    if training.lr_scaling == "none":
        return training.lr
    assert training.base_batch is not None
    if training.global_batch is None:
        raise ConfigError("training.global_batch: lr_scaling needs it; resolve the config first")
    growth = training.global_batch / training.base_batch
    return training.lr * (growth if training.lr_scaling == "linear" else math.sqrt(growth))
