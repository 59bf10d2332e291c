"""From a config to a memory report: dry runs where needed, arithmetic for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

import torch

from frameworm.config.resolve import SMALLEST_EVAL_BATCH, resolve
from frameworm.config.schema import Config
from frameworm.engine.memory.dry_run import DryRun, shapes_of
from frameworm.engine.memory.dry_workload import dry_workload
from frameworm.engine.model.activations import find_layers
from frameworm.errors import ConfigError
from frameworm.hardware.host import memory_total_bytes
from frameworm.scaling.memory import Change, MemoryReport, largest_micro_batch, ways_to_fit
from frameworm.scaling.memory_model import (
    CHECKPOINTING,
    ActivationProfile,
    CheckpointingName,
    MemoryPlan,
    Setting,
    StrategyName,
    plan_step,
)

# How often a straight-line estimate of the largest micro-batch is refined by a dry run.
_REFINEMENTS = 3
_NO_RESIDUALS = ("off", "fp16", "bf16")

Tell = Callable[[str], None]
_Kind = tuple[CheckpointingName, bool]  # kind of dry run: checkpointing, and whether layers are in half precision


class MemoryPlanner:
    """Plans the memory of a config's steps for a kind of device, which need not be present.

    Args:
        config: The training to plan. `gpu.device` auto means a GPU.
        world_size: Number of devices.
        tokens_per_sample: Mean length of the samples, for packed batches.
        tell: Receives progress messages.
        validation: Whether to plan validation too.

    Raises:
        ConfigError: If settings do not fit together or do not fit the number of devices.
    """

    def __init__(
        self,
        config: Config,
        world_size: int = 1,
        tokens_per_sample: float | None = None,
        tell: Tell | None = None,
        *,
        validation: bool = True,
    ) -> None:
        self.device: Literal["cpu", "cuda"] = "cpu" if config.gpu.device == "cpu" else "cuda"
        self.config = resolve(config, world_size=world_size, device=self.device, bf16=True)
        if self.config.parallel.strategy == "dp":
            raise ConfigError("parallel.strategy: dp is not planned; it is one process over several GPUs, use ddp")
        self._asked_eval_batch = config.data.eval_batch
        self._tell = tell or _silent
        self._workload = dry_workload(self.config, tokens_per_sample)
        if not validation:
            self._workload.make_validation = None
        self.shapes = shapes_of(self._workload.model)
        self.notes = list(self._workload.notes)
        if self.config.gpu.compile_model:
            self.notes.append("compiled models are estimated: the compiler decides what it keeps")
        if self.config.gpu.capture != "off":
            self.notes.append("a captured step keeps its memory: what is free in between cannot be used otherwise")
        self._runs: dict[_Kind, DryRun] = {}
        self._profiles: dict[_Kind, ActivationProfile] = {}
        self.setting = self._setting(world_size)

    @property
    def checkpointing(self) -> tuple[CheckpointingName, ...]:
        """Checkpointing modes that the model supports."""
        try:
            find_layers(self._workload.model, self.config.memory.checkpoint_modules)
        except ConfigError:
            return ("off",)
        return CHECKPOINTING

    def plan(self, setting: Setting | None = None) -> MemoryPlan:
        """Plan a setting from a dry run with its exact micro-batch."""
        setting = setting or self.setting
        self._run_at(_kind(setting), setting.micro_batch)
        return self.estimate(setting)

    def estimate(self, setting: Setting) -> MemoryPlan:
        """Plan a setting from the dry runs made so far."""
        return plan_step(self.shapes, setting, self.profile(setting).at(setting.micro_batch))

    def profile(self, setting: Setting) -> ActivationProfile:
        """Profile activations with dry runs of the config's micro-batch and one twice as large."""
        kind = _kind(setting)
        known = self._profiles.get(kind)
        if known is None or len(known.points) < 2:
            size = self.setting.micro_batch
            for micro_batch in (size, 2 * size):
                self._run_at(kind, micro_batch)
        return self._profiles[kind]

    def largest(
        self, setting: Setting, memory_bytes: int, memory_fraction: float, refinements: int = _REFINEMENTS
    ) -> int:
        """Find the largest micro-batch that fits; 0 if none does."""
        size = largest_micro_batch(setting, memory_bytes, memory_fraction, self.estimate)
        for _ in range(refinements):
            tried = max(size, 1)
            self._run_at(_kind(setting), tried)
            size = largest_micro_batch(setting, memory_bytes, memory_fraction, self.estimate)
            if size in (0, tried):
                break
        return size

    def report(self, memory_bytes: int | None = None, device_name: str | None = None) -> MemoryReport:
        """Report everything for one device size.

        Args:
            memory_bytes: The device's memory; None for this machine's device, if it is of that kind.
            device_name: Name of the device.
        """
        if memory_bytes is None:
            memory_bytes, device_name = detect_memory(self.device)
        setting, fraction = self.setting, self.memory_fraction
        plan = self.plan()
        largest, changes = None, []
        largest_by: dict[str, int] = {}
        if memory_bytes is not None:
            for mode in self.checkpointing:
                kind = replace(setting, checkpointing=mode)
                refinements = _REFINEMENTS if kind == setting else 1
                largest_by[mode] = self.largest(kind, memory_bytes, fraction, refinements)
            largest = largest_by[setting.checkpointing]
            if not plan.fits(memory_bytes, fraction):
                changes = self.changes(memory_bytes)
        totals = {mode: self.plan(replace(setting, checkpointing=mode)).total for mode in self.checkpointing}
        profile = self.profile(setting)
        return MemoryReport(
            name=self.config.name,
            parameters=self.shapes.parameters,
            plan=plan,
            strategies=tuple(self.estimate(replace(setting, strategy=name)) for name in self._strategies()),
            memory_fraction=fraction,
            per_sample_bytes=profile.per_sample_bytes,
            fixed_bytes=profile.fixed_bytes,
            memory_bytes=memory_bytes,
            device_name=device_name,
            largest=largest,
            largest_by=largest_by,
            saved_by={mode: 1 - total / totals["off"] for mode, total in totals.items() if mode != "off"},
            changes=tuple(changes),
            notes=tuple(self.notes),
        )

    def changes(self, memory_bytes: int, most: int = 3) -> list[Change]:
        """Find the cheapest changes that make the config fit, confirming straight-line estimates by a dry run."""
        fraction = self.memory_fraction

        def plan_for(setting: Setting) -> MemoryPlan:
            self._run_at(_kind(setting), 1)  # the other end of the line
            plan = self.estimate(setting)
            return self.plan(setting) if plan.fits(memory_bytes, fraction) else plan

        return ways_to_fit(self.setting, memory_bytes, fraction, plan_for, most, self.checkpointing)

    @property
    def memory_fraction(self) -> float:
        """Fraction of the device's memory that torch may take; limited on GPUs only."""
        return self.config.gpu.memory_fraction if self.device == "cuda" else 1.0

    def _strategies(self) -> tuple[StrategyName, ...]:
        return ("single",) if self.setting.world_size == 1 else ("ddp", "zero1", "zero2", "zero3")

    def _run_at(self, kind: _Kind, micro_batch: int) -> None:
        profile = self._profiles.setdefault(kind, ActivationProfile(()))
        if any(point.micro_batch == micro_batch for point in profile.points):
            return
        layers = ", layers in half precision" if kind[1] else ""
        self._tell(f"dry run: micro-batch {micro_batch}, checkpointing {kind[0]}{layers}")
        step = self._dry_run(kind).step(micro_batch, self._validation_batch(micro_batch))
        self._profiles[kind] = profile.with_point(step)

    def _dry_run(self, kind: _Kind) -> DryRun:
        if kind not in self._runs:
            gpu, work = self.config.gpu, self._workload
            self._runs[kind] = DryRun(
                work.model,
                work.make_batch,
                work.loss_fn,
                make_validation=work.make_validation,
                device=self.device,
                precision=gpu.mixed_precision,
                checkpointing=kind[0],
                half_layers=kind[1],
                checkpoint_modules=self.config.memory.checkpoint_modules,
                compiled=gpu.compile_model,
                flash_attention=gpu.use_flash_attention is not False,
                fused_loss=self.config.training.fused_loss,
            )
        return self._runs[kind]

    def _validation_batch(self, micro_batch: int) -> int | None:
        """Return the validation batch that `resolve` would choose for a micro-batch."""
        if self._workload.make_validation is None:
            return None
        eval_batch = self.config.data.eval_batch
        assert isinstance(eval_batch, int)
        if self._asked_eval_batch != "auto":
            return eval_batch
        return max(micro_batch, SMALLEST_EVAL_BATCH) if self.config.workload == "text_classifier" else micro_batch

    def _setting(self, world_size: int) -> Setting:
        config = self.config
        training, parallel = config.training, config.parallel
        assert isinstance(training.micro_batch, int)
        assert isinstance(training.accumulation, int)
        return Setting(
            strategy=cast("StrategyName", parallel.strategy),
            world_size=world_size,
            micro_batch=training.micro_batch,
            accumulation=training.accumulation,
            precision=config.gpu.mixed_precision,
            optimizer=training.optimizer,
            momentum=training.momentum,
            fused=config.gpu.fused_optimizer is not False,
            checkpointing=config.memory.activation_checkpointing,
            bucket_views=parallel.gradient_as_bucket_view,
            residuals=parallel.compression not in _NO_RESIDUALS and parallel.error_feedback,
            offload_optimizer=bool(getattr(parallel, "offload_optimizer", False)),
            averages=training.ema is not None,
            device=self.device,
        )


def detect_memory(device: str) -> tuple[int | None, str | None]:
    """Return memory and name of this machine's device of that kind; None if there is none."""
    if device == "cpu":
        return memory_total_bytes(), "this machine's memory"
    if not torch.cuda.is_available():
        return None, None
    properties = torch.cuda.get_device_properties(0)
    return int(properties.total_memory), str(properties.name)


def _kind(setting: Setting) -> _Kind:
    return setting.checkpointing, setting.half_layers


def _silent(_text: str) -> None:
    pass
