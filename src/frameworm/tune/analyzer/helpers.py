"""Small measurements on the same engine: one step, its memory, and a comparison of two settings."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.engine.settings import api_defaults, apply_settings
from frameworm.engine.summary import measure_memory
from frameworm.errors import ConfigError
from frameworm.records.statistics import statistics
from frameworm.report.kit.printed import Printed
from frameworm.report.tune.analysis import render_effectiveness, render_step, render_step_memory
from frameworm.tune.analyzer.analyzer import device_of
from frameworm.tune.analyzer.bench import Bench, mean_step_s, step_of
from frameworm.tune.analyzer.experiments import Measured, Variant, run_rounds
from frameworm.tune.analyzer.untouched import untouched
from frameworm.tune.batch_size.find import input_shape_of, sum_of_outputs

BEFORE, AFTER = "before", "after"


def benchmark_training_step(
    model: nn.Module,
    batch: Any,
    device: torch.device | str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    steps: int = 20,
    warmup: int = 3,
    config: Config | None = None,
    **settings: Any,
) -> Printed:
    """Time the training step on one batch, which must be on the model's device; all state is restored.

    Args:
        model: The model.
        batch: One batch, as the loader yields it. For a model that begins with a Linear layer, a number: that many
            random inputs, with the mean of the outputs as loss.
        device: The model's device.
        optimizer: The optimizer; None: a separate AdamW.
        loss_fn: As for `Trainer`.
        steps: Steps to measure.
        warmup: Steps before them.
        config: All settings; keywords override it.
        **settings: As for `Trainer`.

    Returns:
        `step_ms` {mean, std, min, max, p50, p95, p99}, `phases_ms` {name: mean}, `samples_per_s`, `steps`. It prints as
        text.
    """
    place = device_of(model, device)
    batch, loss_fn = _batch(model, batch, loss_fn, place)
    chosen = apply_settings(api_defaults() if config is None else config, settings)
    used = _optimizer(model, optimizer)
    with untouched(model, used, place):
        bench = Bench(model, used, loss_fn, place, chosen)
        step = step_of(batch, bench.strategy.world_size)
        timed = bench.block(lambda: step, steps, drop=warmup)
    spread = statistics(item.step_s for item in timed)
    assert spread is not None, "at least one step was measured"
    names = dict.fromkeys(name for item in timed for name in item.phases)
    data = {
        "step_ms": {name: getattr(spread, name) * 1e3 for name in ("mean", "std", "min", "max", "p50", "p95", "p99")},
        "phases_ms": {name: sum(item.phases.get(name, 0.0) for item in timed) / len(timed) * 1e3 for name in names},
        "samples_per_s": step.global_samples / mean_step_s(timed),
        "steps": len(timed),
    }
    return Printed(data, render_step)


def profile_memory_usage(
    model: nn.Module,
    batch: Any,
    device: torch.device | str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Printed:
    """Bytes that a training step needs; arguments as for `benchmark_training_step`.

    Returns:
        `parameters`, `gradients`, `optimizer` and `buffers`, the sizes of their tensors; `activations`, what forward
        keeps for backward in addition (the tensors saved by autograd); `step`, the sum of these; `peak` of the process
        so far, on a GPU by the allocator, and `total`. `efficiency` is the fraction of the peak that the step needs
        (the rest is working memory, memory kept by the allocator and, on a CPU, Python and its libraries), `usage` the
        peak as a fraction of the total. With `activation_checkpointing`, `checkpointing_saved_pct` is how much of the
        activations it saves. It prints as text.
    """
    place = device_of(model, device)
    batch, loss_fn = _batch(model, batch, loss_fn, place)
    chosen = apply_settings(api_defaults() if config is None else config, settings)
    used = _optimizer(model, optimizer)
    gc.collect()
    with untouched(model, used, place):
        needed = _step_bytes(model, batch, used, Bench(model, used, loss_fn, place, chosen))
        saved_pct = None
        if chosen.memory.activation_checkpointing != "off":
            plain = apply_settings(chosen, {"activation_checkpointing": "off"})
            whole = _step_bytes(model, batch, used, Bench(model, used, loss_fn, place, plain))["activations"]
            saved_pct = 100 * (1 - needed["activations"] / whole) if whole else None
    memory = measure_memory(place)
    step = sum(needed.values())
    data: dict[str, float | None] = {**needed, "step": step, "peak": memory.peak_bytes, "total": memory.total_bytes}
    data["efficiency"] = min(1.0, step / memory.peak_bytes) if memory.peak_bytes else None
    data["usage"] = memory.peak_bytes / memory.total_bytes if memory.peak_bytes and memory.total_bytes else None
    data["checkpointing_saved_pct"] = saved_pct
    return Printed(data, render_step_memory)


def _step_bytes(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, bench: Bench) -> dict[str, int]:
    """The bytes of all tensors that a step of the bench needs."""
    saved: dict[int, int] = {}
    own = {item.untyped_storage().data_ptr() for item in [*model.parameters(), *model.buffers()]}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    step = step_of(batch, bench.strategy.world_size)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        bench.block(lambda: step, 1)
    states = (item for values in optimizer.state.values() for item in values.values())
    return {
        "parameters": sum(map(_size, model.parameters())),
        "gradients": sum(_size(item) for item in model.parameters() if item.requires_grad),
        "optimizer": sum(_size(item) for item in states if isinstance(item, torch.Tensor)),
        "buffers": sum(map(_size, model.buffers())),
        "activations": sum(saved.values()),
    }


def measure_optimization_effectiveness(
    model: nn.Module,
    batch: Any,
    before: Config | dict[str, Any],
    after: Config | dict[str, Any],
    device: torch.device | str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    budget_s: float = 20.0,
) -> Printed:
    """Compare two settings of the step on one batch, in interleaved blocks; all state is restored.

    Args:
        model: The model.
        batch: One batch, as the loader yields it, on the model's device.
        before: A config, or some settings by name: `{}`.
        after: The same for the other side: `{"mixed_precision": "bf16"}`.
        device: The model's device.
        optimizer: The optimizer; None: a separate AdamW.
        loss_fn: As for `Trainer`.
        budget_s: Time for both.

    Returns:
        `before_ms` and `after_ms` per step, `speedup` {value, low, high} (95%), and `effective`: True if the whole
        interval is above 1, False if it is below, None if it contains 1. `memory` has `before_bytes` and `after_bytes`
        of a step (see `step` of `profile_memory_usage`) and `saved_pct`. It prints as text.
    """
    place = device_of(model, device)
    batch, loss_fn = _batch(model, batch, loss_fn, place)
    used = _optimizer(model, optimizer)
    measured = Measured()
    with untouched(model, used, place):
        sides = {BEFORE: _settings(before), AFTER: _settings(after)}
        if any(side.gpu.compile_model for side in sides.values()):
            # Compiling changes the model itself, so both sides would be compiled.
            raise ConfigError("compile_model changes the model itself: compare two runs instead (frameworm compare)")
        benches = {name: Bench(model, used, loss_fn, place, side) for name, side in sides.items()}
        step = step_of(batch, benches[BEFORE].strategy.world_size)
        needed = {name: sum(_step_bytes(model, batch, used, bench).values()) for name, bench in benches.items()}
        for bench in benches.values():
            bench.block(lambda: step, 3)
        variants = {name: Variant(lambda: step, bench=bench) for name, bench in benches.items()}
        run_rounds(benches[BEFORE], variants, measured, budget_s=budget_s, longest=BEFORE)
    before_s, after_s = measured.step_s(BEFORE), measured.step_s(AFTER)
    gain = measured.gain(BEFORE, AFTER)
    data = {
        "before_ms": None if before_s is None else before_s.value * 1e3,
        "after_ms": None if after_s is None else after_s.value * 1e3,
        "speedup": None if gain is None else {"value": gain.value, "low": gain.low, "high": gain.high},
        "effective": None if gain is None else True if gain.low > 1 else False if gain.high < 1 else None,
        "memory": {
            "before_bytes": needed[BEFORE],
            "after_bytes": needed[AFTER],
            "saved_pct": 100 * (1 - needed[AFTER] / needed[BEFORE]),
        },
    }
    return Printed(data, render_effectiveness)


def _settings(side: Config | dict[str, Any]) -> Config:
    return side if isinstance(side, Config) else apply_settings(api_defaults(), side)


def _batch(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None, device: torch.device
) -> tuple[Any, Callable[..., Any] | None]:
    """The batch; a number becomes that many random inputs if the model's input shape can be inferred."""
    if not isinstance(batch, int):
        return batch, loss_fn
    shape = input_shape_of(model)
    if batch < 1 or shape is None:
        raise ConfigError(
            f"batch: {batch} says how many samples but not what one looks like; give a batch as the loader yields it: "
            "next(iter(train_loader))"
        )
    return torch.randn(batch, *shape, device=device), loss_fn or sum_of_outputs


def _optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is not None:
        return optimizer
    return torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
