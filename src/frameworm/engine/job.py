"""What a session is given: a training's live objects in addition to its config, and how they are created."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frameworm.config.schema import Config
from frameworm.data.adopt import adopt_loader
from frameworm.data.batches.real_tokens import FewWidths, PaddingPlanner
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.steps import StepSource
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.experiment import describe_experiment
from frameworm.engine.faults.out_of_memory import Advise
from frameworm.engine.gate import Gate
from frameworm.engine.model.loss_parts import find_beside, untrained_note
from frameworm.engine.model.padding_free import widest_input
from frameworm.engine.model.precision import Precision, apply_backend_flags
from frameworm.engine.model.processors import apply_processors
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import AnySchedule
from frameworm.engine.run_output import RunOutput, open_output
from frameworm.engine.step.metrics import higher_is_better
from frameworm.errors import ConfigError, DataError
from frameworm.hardware.devices import choose_device
from frameworm.launch.environment import ProcessInfo, detect
from frameworm.launch.process_group import all_reduce_max, all_reduce_sums, setup_ddp
from frameworm.launch.stopping import StopRequest
from frameworm.numerics.randomness import seed_everything
from frameworm.observe.loggers.protocol import Logger
from frameworm.parallel.beside import Beside
from frameworm.parallel.choose import choose_strategy
from frameworm.parallel.strategy import Strategy
from frameworm.records.events import Listener
from frameworm.records.schema import Batch
from frameworm.report.run.progress import somebody_watches

log = logging.getLogger("frameworm")
GROUP_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")  # these use a process group, even with one process


@dataclass
class Job:
    """What to train and how: the live objects in addition to the config's values."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_schedule: Callable[[int | None], AnySchedule]  # from the total number of steps
    loss_fn: Callable[..., Any] | None
    strategy: Strategy
    precision: Precision
    batch: Batch
    train: StepSource
    validation: Mapping[str, Any]  # loaders by the name of their set; a single one has the name ""
    open_output: Callable[[], RunOutput]  # called last, so that a refused job leaves no folder behind
    saves: bool = True  # whether there will be a run folder
    callbacks: Sequence[Listener] = ()
    notes: list[str] = field(default_factory=list)
    advise: Advise | None = None  # finds settings that would fit after memory has run out
    gate: Gate | None = None  # called before every step
    beside: Beside = field(default_factory=Beside)  # what trains beside the model: parameters of the loss
    padding: PaddingPlanner | None = None  # finds every batch's padding tokens, to leave them out
    widths: FewWidths | None = None  # pads batches further, to few widths
    averages: AveragedWeights | None = None  # averaged weights; initially those of an earlier train()
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the user's, computed in validation
    request: StopRequest = field(default_factory=StopRequest)
    trainer: Any = None  # passed to callbacks
    processing_class: Any = None  # stored with the model's own files
    state: TrainingState | None = None  # set by the session: what was trained

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None if the data has no length."""
        training, per_epoch = self.config.training, self.train.steps_per_epoch
        total = None if per_epoch is None else per_epoch * training.epochs
        if training.max_steps is not None:
            total = training.max_steps if total is None else min(total, training.max_steps)
        return total


class Running:
    """Passed to callbacks in a run that has no `Trainer`."""

    def __init__(self, job: Job) -> None:
        self.model, self.optimizer, self.config = job.model, job.optimizer, job.config
        self._request = job.request

    def stop(self) -> None:
        """Stop the training, like `Trainer.stop`."""
        self._request.ask("stopped")


@dataclass
class Ingredients:
    """What a caller brings to a training in addition to its config.

    Attributes:
        make_schedule: Creates the schedule from the total number of steps.
        train_loader: Read once per epoch; split over the ranks if it is not yet.
        run_dir: A folder, `auto` for runs/<name>-<time>, or None for none.
        resume: A run to resume, or `auto`.
        advise: Finds settings that fit when memory runs out; None to skip the search.
        gate: Called before every step.
        seed: Seeds all generators; None to leave them as they are.
        sets_backend: Whether to set torch's global switches by the config.
        script: The script that was started, for runs without a name; None for this process's script.
        notes: Logged at the start and repeated in the summary.
        metrics: The metrics, from `check_metrics`.
        trainer: Passed to callbacks; None for a `Running`.
        loggers: Trackers in addition to those that the config names.
        processing_class: The tokenizer or processor that the model goes with.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Any] | None
    make_schedule: Callable[[int | None], AnySchedule]
    train_loader: Any
    val_loader: Any = None
    callbacks: Sequence[Listener] = ()
    run_dir: str | Path | None = None
    resume: str | Path | None = None
    advise: Advise | None = None
    gate: Gate | None = None
    seed: int | None = None
    sets_backend: bool = True
    script: str | None = None
    notes: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    trainer: Any = None
    loggers: Sequence[Logger] = ()
    processing_class: Any = None


def build_job(config: Config, given: Ingredients) -> Job:
    """Join the process group, if there is one, and create what a session needs, without training yet.

    Args:
        config: Checked, with `auto` left only where the engine decides itself.
        given: The caller's objects.
    """
    config = settle_better(config, given.metrics)
    beside = find_beside(given.model, given.loss_fn, given.optimizer)
    untrained = untrained_note(given.model, beside, given.optimizer)
    process = join_group(config)
    if untrained and process.rank == 0:
        log.info("%s", untrained)
    training, seed = config.training, config.seed
    experiment = None
    if given.run_dir is not None and config.name == Config.model_fields["name"].default:
        experiment = describe_experiment(given.model, given.train_loader, given.script)
    device = device_of(config, process)
    apply_processors(training, process.local_rank, process.local_world_size)
    if given.sets_backend:
        set_backend(config, device)
    if given.seed is not None:
        seed_everything(given.seed, process.rank)
    precision = Precision(config.gpu.mixed_precision, device)
    strategy = choose_strategy(
        config.parallel,
        device,
        rank=process.rank,
        world_size=process.world_size,
        device_ids=config.gpu.device_ids,
        dtype=precision.dtype,
    )
    strategy.check_optimizer(given.optimizer)
    accumulation = training.accumulation if isinstance(training.accumulation, int) else 1
    loader, note = adopt(given.train_loader, process, accumulation, seed, evaluation=False)
    validation: dict[str, Any] = {}
    val_notes: list[str | None] = []
    sets = given.val_loader if isinstance(given.val_loader, Mapping) else {"": given.val_loader}
    for name, item in sets.items() if given.val_loader is not None else ():
        adopted, val_note = adopt(item, process, 1, seed, evaluation=True)
        validation[name] = CudaDataLoader(adopted, device)
        val_notes.append(val_note)
    micro = getattr(loader, "batch_size", None)
    global_batch = training.global_batch
    notes = list(given.notes)
    if global_batch is None and micro is not None:
        global_batch = micro * accumulation * process.world_size
        if process.world_size > 1:
            notes.append(
                f"the global batch is {global_batch}: the loader's batch_size {micro} is per rank, and there are "
                f"{process.world_size}; to train as on one device, divide it by {process.world_size}"
            )
    notes += _alone_notes(config, process)
    if process.rank == 0:
        for text in notes:
            log.info("%s", text)
    show = config.observe.progress
    padding, widths = None, None
    if config.data.pad_to == "few" and not config.gpu.padding_free:
        widths = FewWidths(widest_input(given.model), pin=device.type == "cuda")
    if config.gpu.padding_free:
        few = config.gpu.capture != "off" or config.gpu.compile_model
        padding = PaddingPlanner(widen=few, widest=widest_input(given.model), pin=device.type == "cuda")
    job = Job(
        config=config,
        model=given.model,
        optimizer=given.optimizer,
        make_schedule=given.make_schedule,
        loss_fn=given.loss_fn,
        strategy=strategy,
        precision=precision,
        batch=Batch(micro, accumulation, process.world_size, global_batch),
        train=StepSource(
            CudaDataLoader(loader, device, padding or widths),
            accumulation=accumulation,
            rank=process.rank,
            world_size=process.world_size,
            sum_over_ranks=lambda value: all_reduce_sums([value], device)[0],
            max_over_ranks=lambda value: all_reduce_max(value, device),
            # A run that leaves no checkpoint cannot be resumed.
            warn=None if given.run_dir is None else (log.warning if process.rank == 0 else log.debug),
        ),
        validation=validation,
        open_output=lambda: open_output(
            config,
            run_dir=given.run_dir,
            resume=given.resume,
            show_progress=somebody_watches() if show == "auto" else show,
            rank=process.rank,
            world_size=process.world_size,
            experiment=experiment,
            loggers=given.loggers,
        ),
        saves=given.run_dir is not None or given.resume is not None,
        callbacks=given.callbacks,
        notes=[*notes, *(text for text in (note, *dict.fromkeys(val_notes), untrained) if text)],
        advise=given.advise,
        gate=given.gate,
        beside=beside,
        padding=padding,
        widths=widths,
        metrics=given.metrics,
        processing_class=given.processing_class,
    )
    job.trainer = given.trainer or Running(job)
    return job


def settle_better(config: Config, metrics: Mapping[str, Any]) -> Config:
    """Copy the config and settle for every watched user metric which values are better.

    Raises:
        ConfigError: If neither the config nor the metric says so.
    """
    config = config.model_copy(deep=True)
    checkpoint, early_stop = config.checkpoint, config.training.early_stop
    sections = {"checkpoint": checkpoint if checkpoint.keep_best else None, "early_stop": early_stop}
    for place, section in sections.items():
        if section is None or section.better != "auto" or section.metric.endswith(("loss", "accuracy")):
            continue
        known = [higher_is_better(item) for name, item in metrics.items() if section.metric.endswith(f"_{name}")]
        higher = next((item for item in known if item is not None), None)
        if higher is None:
            raise ConfigError(
                f"{place} watches {section.metric}, and it is unknown whether higher is better: set {place}.better "
                f"to higher or lower{_known_metrics(metrics)}"
            )
        section.better = "higher" if higher else "lower"
    return config


def _known_metrics(metrics: Mapping[str, Any]) -> str:
    """End a sentence with the recorded names of the metrics, since a name may be misspelt."""
    return f" (the metrics are recorded as {', '.join(f'val_{name}' for name in metrics)})" if metrics else ""


def join_group(config: Config) -> ProcessInfo:
    """Join the process group that the environment describes, if any."""
    timeout_s = config.parallel.timeout_s
    if dist.is_initialized():
        return setup_ddp(timeout_s=timeout_s)
    process = detect()
    if process.world_size > 1 or config.parallel.strategy in GROUP_STRATEGIES:
        return setup_ddp(backend=backend_of(config), timeout_s=timeout_s)
    return process


def _alone_notes(config: Config, process: ProcessInfo) -> list[str]:
    """Return notes on settings that have no effect with a single process."""
    if process.world_size > 1:
        return []
    notes = []
    settings = config.parallel
    if settings.strategy.startswith("zero") and not settings.offload_optimizer:
        notes.append(f"strategy {settings.strategy} divides nothing on one process; it saves memory from two on")
    on_gpu = config.gpu.device != "cpu" and torch.cuda.is_available()
    if settings.backend == "nccl" and not on_gpu and not dist.is_initialized():
        notes.append("backend nccl is not used: one process has no other to talk to (on CPUs it would be gloo)")
    return notes


def backend_of(config: Config) -> str:
    """Return the backend to request; `auto` depends on the device, which a config may set."""
    if config.parallel.backend == "auto" and config.gpu.device == "cpu":
        return "gloo"
    return config.parallel.backend


def device_of(config: Config, process: ProcessInfo) -> torch.device:
    """Return this process's device; a GPU becomes the current one."""
    gpu = config.gpu
    device = choose_device(gpu.device, process.device_index(torch.cuda.device_count()), gpu.device_ids)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def set_backend(config: Config, device: torch.device) -> None:
    """Set torch's global switches as the config says."""
    gpu = config.gpu
    apply_backend_flags(
        tf32=gpu.tf32, benchmark=gpu.benchmark, deterministic=gpu.deterministic, flash_attention=gpu.use_flash_attention
    )
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(gpu.memory_fraction, device)


def adopt(
    loader: Any, process: ProcessInfo, accumulation: int, seed: int, *, evaluation: bool
) -> tuple[Any, str | None]:
    """Adapt a loader for this rank; return it with a note on what was changed, which is logged once."""
    if isinstance(loader, Iterator):
        raise DataError(
            "the loader is an iterator, which can be read only once; give something that can be read in every epoch, "
            "such as a DataLoader, a list, or a function that returns an iterator"
        )
    adopted, note = adopt_loader(
        loader,
        rank=process.rank,
        world_size=process.world_size,
        accumulation=accumulation,
        seed=seed,
        fill_empty=not evaluation,
        local_world_size=process.local_world_size,
    )
    if note and process.rank == 0:
        log.info("%s", note)
    return adopted, note
