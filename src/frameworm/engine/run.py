"""A run from a config: the one way in for the command line, trials and sweeps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from frameworm.config.load import load_config
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.checkpoint.load import check_same_model, load_newest
from frameworm.engine.export import Exported, export_compiled
from frameworm.engine.faults.out_of_memory import Advise, planned_advice
from frameworm.engine.gate import Gate
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.engine.optim.schedule import AnySchedule, Schedule
from frameworm.engine.step.evaluation import Evaluation, evaluate
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.trainer import Trainer
from frameworm.errors import CheckpointError, ConfigError, DataError
from frameworm.hardware.devices import choose_device, supports_bf16
from frameworm.launch.environment import detect, reported_by_launcher
from frameworm.launch.process_group import setup_ddp
from frameworm.models.workloads import Workload, build_workload
from frameworm.parallel.shards import loaded
from frameworm.parallel.strategy import Strategy
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")

CAPTURED_WIDTHS = 16
EAGER_WIDTHS = 64  # on a CPU new shapes cost little, and what is padded for less of them costs more


class Machine(NamedTuple):
    """What `resolve` needs to know about the machine."""

    device: Literal["cpu", "cuda"]
    bf16: bool
    device_count: int


class TokenisingNotice:
    """Says that texts are being tokenised, and now and then how far that is; a cached data set says nothing."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Called by the data floor as it goes."""
        now = monotonic()
        if now >= self._next and done < total:
            once = " (once: the result is cached)" if self._next == 0.0 else ""
            log.info("tokenising: %d of %d%s", done, total, once)
            self._next = now + self._every_s


def look_at_machine(config: Config) -> Machine:
    """The kind of device this config will run on here.

    Raises:
        DeviceError: The config asks for a GPU and there is none.
    """
    device = choose_device(config.gpu.device, 0, None)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Machine(kind, supports_bf16(device), torch.cuda.device_count() if device.type == "cuda" else 0)


def resolve_here(config: Config, world_size: int, *, resized: bool = False) -> Config:
    """The config with every `auto` decided for this machine and that many processes.

    Args:
        resized: The run may go on with another number of processes than it began with; the global batch then stays,
            and ranks take unequal shares if it does not divide.
    """
    machine = look_at_machine(config)
    return resolve(config, world_size=world_size, device=machine.device, bf16=machine.bf16, allow_uneven=resized)


def run(
    config: Config,
    *,
    out: str | Path | None = "auto",
    resume: str | Path | None = None,
    callbacks: Sequence[Listener] = (),
) -> RunRecord:
    """Train what a config describes, alone or as one of several processes (the environment tells).

    Args:
        config: The config; its `auto` values are decided here.
        out: The run folder; `auto` for runs/<name>-<time>, None for none.
        resume: As for `Trainer.train`.
        callbacks: Listeners beside those the config asks for.
    """
    process = setup_ddp() if dist.is_initialized() else detect()
    # A launcher of ours has checked the batch already, as strictly as it is to be.
    config = resolve_here(config, process.world_size, resized=resume is not None or reported_by_launcher())
    advise = functools.partial(planned_advice, config, process.world_size, look_at_machine(config).device)
    workload = build_workload(config, TokenisingNotice())
    return train_workload(config, workload, out=out, resume=resume, callbacks=callbacks, advise=advise)


def train_workload(
    config: Config,
    workload: Workload,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence[Listener] = (),
    advise: Advise | None = None,
    gate: Gate | None = None,
) -> RunRecord:
    """Train a workload by a resolved config; the rest as for `run`.

    Args:
        advise: Finds settings that fit when memory runs out; None: no time is spent on that.
        gate: Stands before every step.
    """
    optimizer = build_optimizer(workload.model, config)
    training = config.training

    def make_schedule(total_steps: int | None) -> AnySchedule:
        return Schedule(optimizer, training.schedule, total_steps, training.warmup)

    trainer = Trainer(
        workload.model,
        optimizer,
        workload.loss_fn,
        make_schedule,
        config=config,
        callbacks=callbacks,
        run_dir=out,
    )
    trainer.advise = advise
    trainer.gate = gate
    return trainer.train(
        build_loader(config, workload, workload.train_data, evaluation=False),
        None if workload.val_data is None else build_loader(config, workload, workload.val_data, evaluation=True),
        resume=resume,
    )


def build_loader(config: Config, workload: Workload, data: Any, *, evaluation: bool) -> Any:
    """The loader of a resolved config over a workload's training or validation data."""
    settings, training = config.data, config.training
    assert isinstance(training.micro_batch, int)
    assert isinstance(settings.eval_batch, int)
    return OptimizedDataLoader.create(
        data,
        settings.eval_batch if evaluation else training.micro_batch,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        prefetch_factor=settings.prefetch_factor,
        persistent_workers=settings.persistent_workers,
        drop_last=settings.drop_last and not evaluation,
        shuffle=settings.shuffle and not evaluation,
        seed=config.seed,
        global_batch=None if evaluation else training.global_batch,
        collate_fn=workload.collate_fn,
        batching="padded" if evaluation else settings.batching,
        balance=False if evaluation else settings.balance,
        resident=False if evaluation else settings.resident,
        epochs=training.epochs,
        on_error=settings.on_error,
        most_widths=None if evaluation else _most_widths(config),
    )


def _most_widths(config: Config) -> int | None:
    """How many widths batches may have: a graph is captured for each, and a compiler sees each as something new."""
    gpu = config.gpu
    if config.data.batching == "bucketed":
        return EAGER_WIDTHS if gpu.device == "cpu" and not gpu.compile_model else None
    return None if gpu.capture == "off" else CAPTURED_WIDTHS


def check_trusted(config: Config, folder: RunFolder, overrides: Sequence[str]) -> None:
    """Refuse to run code that only a run folder names: a folder is data, and may come from anywhere.

    Raises:
        ConfigError: The workload is a function of somebody's own and the user has not named it.
    """
    named = any(item.partition("=")[0].strip() == "workload" for item in overrides)
    if ":" in config.workload and not named:
        raise ConfigError(
            f"{folder.config} names code to run: workload {config.workload}. If you trust it, say so: --set "
            f"workload={config.workload}"
        )


def _for_inference(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """A run's config without what makes training fast: it is not needed to score, and may not be there."""
    plain = ("parallel.strategy=single", "gpu.capture=off", "gpu.compile_model=false", "data.batching=padded")
    config = load_config(folder.config, [*plain, *overrides])
    check_trusted(config, folder, overrides)
    config = config.model_copy(deep=True)
    config.training.accumulation = "auto"
    config.training.micro_batch = "auto"
    return resolve_here(config, 1)


def export_run_compiled(
    path: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    which: str = "latest",
    metric: str = "val_loss",
) -> Exported:
    """`export.export_compiled` for a run of the command line, whose config says what the model and its data are.

    Raises:
        DataError: The workload has no data to take an example from.
        ConfigError: Its config names code that the user has not.
    """
    config = _for_inference(RunFolder.open(path), overrides)
    workload = build_workload(config)
    data = workload.train_data if workload.val_data is None else workload.val_data
    batch = next(iter(build_loader(config, workload, data, evaluation=True)), None)
    if batch is None:
        raise DataError(f"{path}: this workload has no data to take an example of its shapes from")
    return export_compiled(path, out, workload, batch, which=which, metric=metric, device=config.gpu.device)


def evaluate_run(path: str | Path, overrides: Sequence[str] = ()) -> tuple[int, Evaluation]:
    """Score the newest checkpoint of a run on its validation data.

    Returns:
        The checkpoint's step and the result.

    Raises:
        RunFolderError: There is no such run.
        CheckpointError: It has no checkpoint that can be read.
        ConfigError: Its config names code that the user has not.
    """
    folder = RunFolder.open(path)
    config = _for_inference(folder, overrides)
    workload = build_workload(config)
    if workload.val_data is None:
        raise DataError(f"{folder.path}: this workload has no validation data to score on")
    newest = load_newest(folder.checkpoints, log.warning)
    if newest is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet")
    stored, state = newest
    check_same_model(state.shared["model"], workload.model, str(stored.path))
    workload.model.load_state_dict(loaded(state.shared["model"]))
    device = choose_device(config.gpu.device, 0, config.gpu.device_ids)
    strategy = Strategy(device)
    model: nn.Module = strategy.place(workload.model)
    loader = CudaDataLoader(build_loader(config, workload, workload.val_data, evaluation=True), device)
    precision = Precision(config.gpu.mixed_precision, device)
    return stored.step, evaluate(model, loader, LossFunction(model, workload.loss_fn), precision, strategy)
