"""Build the parts of a session, one function each: model, step, output, and what protects a run.

They are called in this order: the model is placed before its step is built, and the folder is opened only once
everything before it was accepted, so that a refused job leaves no folder behind.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.config.checks import workload_name
from frameworm.data.replay import users_parts
from frameworm.data.samples.held import Held, Walk
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.store import CheckpointStore, make_store
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.faults.bad_numbers import BadNumbers
from frameworm.engine.faults.out_of_memory import Explainer
from frameworm.engine.faults.spikes import SpikeWatch, make_spikes
from frameworm.engine.faults.split_on_oom import BatchSplitter, make_splitter
from frameworm.engine.faults.watchdog import make_watchdog
from frameworm.engine.job import Job
from frameworm.engine.memory.dry_run import DryRun
from frameworm.engine.memory.guard import MemoryGuard, make_guard
from frameworm.engine.model.activations import apply_checkpointing
from frameworm.engine.model.compilation import Compiler
from frameworm.engine.model.padding_free import ModelAttention
from frameworm.engine.model.precision import wants_channels_last
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.schedule import AnySchedule
from frameworm.engine.optim.schedule_free import make_averages
from frameworm.engine.optim.update import Update
from frameworm.engine.run_output import RunOutput
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.evaluation import NO_ACCURACY, why_unwatched
from frameworm.engine.step.flops import FlopWatch
from frameworm.engine.step.graphs import Recorder
from frameworm.engine.step.joint import JointDecisions
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.metrics import Metrics
from frameworm.engine.step.one_message import OneMessage
from frameworm.engine.step.recording import make_recorder, on_stream
from frameworm.engine.step.step import TrainStep
from frameworm.engine.summary import Tally, count_parameters, describe_device, measure_memory
from frameworm.errors import ConfigError
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.launch.process_group import (
    all_reduce_sums,
    broadcast_object,
    gather_objects,
    is_distributed,
    setup_ddp,
    shared_store,
)
from frameworm.launch.reports import RankReports
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.observe.clocks.communication import BucketRecorder, recorded
from frameworm.observe.clocks.device_clock import make_clock
from frameworm.observe.clocks.gradient_times import GradientWatch, ReplayedGradients, unseen_because
from frameworm.observe.clocks.phases import StepClock
from frameworm.observe.clocks.ranks import RankWatch
from frameworm.observe.clocks.windows import Windows
from frameworm.observe.flops.counter import FlopCount
from frameworm.observe.system.sampler import NoSampler, SystemSampler, make_sampler
from frameworm.parallel.strategy import Hook
from frameworm.records.events import Events
from frameworm.records.schema import RunRecord

_session_numbers = itertools.count()


@dataclass
class PreparedModel:
    """A model ready to train: placed, laid out, sharded, compiled.

    Attributes:
        wrapped: What the step calls: the model itself, or the strategy's wrapper around it.
        compiler: Compiles the model.
        recorder: Records steps as graphs; None if steps run eagerly.
        capture_note: Why steps are not captured as asked, for the summary.
        attention: Context to enter while the model trains.
    """

    wrapped: nn.Module
    compiler: Compiler
    recorder: Recorder | None
    capture_note: str | None
    attention: ModelAttention


def prepare_model(job: Job) -> PreparedModel:
    """Prepare a job's model and optimizer for training; both may be replaced or changed in place."""
    config, strategy = job.config, job.strategy
    handed = [type(item).__name__ for item in job.callbacks if Events([item]).wants_batches]
    if strategy.gradient_ranks > 1 and config.gpu.capture != "off":
        # Some callbacks may be given to one rank only, and ranks that record send their gradients in another way.
        handed = [name for names in broadcast_object(gather_objects(handed)) or [] for name in names]
    recorder, note = make_recorder(config.gpu.capture, strategy, handed)
    # Gradients are sent on the stream on which the sending hooks are created.
    with on_stream(None if recorder is None else recorder.stream):
        strategy.place_beside(job.beside)
        apply_checkpointing(job.model, config.memory)
        wrapped = strategy.place(job.model)
        strategy.scale_losses_by(job.precision.loss_scale)
        layout = False if strategy.shards_parameters else config.gpu.channels_last
        if wants_channels_last(layout, job.model, job.precision, strategy.device, compiled=config.gpu.compile_model):
            job.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        job.optimizer = strategy.shard_optimizer(job.optimizer)
    compiler = Compiler(config.gpu, captured=recorder is not None)
    compiler.apply(job.model)
    attention = ModelAttention(job.model, job.padding, captured=recorder is not None)
    return PreparedModel(wrapped, compiler, recorder, note, attention)


@dataclass
class StepParts:
    """The step of a training, its state, and the clocks that measure it."""

    step: TrainStep | CapturedStep
    update: Update
    loss_function: LossFunction
    state: TrainingState
    clock: StepClock
    windows: Windows
    ranks: RankWatch | None
    gradients: GradientWatch
    splitter: BatchSplitter | None
    halving_note: str | None
    watched: dict[str, str]
    flops: FlopWatch
    metrics: Metrics


def build_step(job: Job, prepared: PreparedModel) -> StepParts:
    """Build the step, eager or captured, with its update, schedule and clocks."""
    config, strategy, recorder = job.config, job.strategy, prepared.recorder
    total_steps = job.total_steps
    schedule = job.make_schedule(total_steps)
    loss_function = LossFunction(job.model, job.loss_fn, config.training.accuracy)
    loss_function.first_look = prepared.attention.check
    update = Update(
        [item for _, item in strategy.named_parameters(job.model)],
        job.optimizer,
        schedule,
        job.precision,
        config.training.clip_norm,
        strategy=strategy,
        check=config.training.max_bad_steps is not None,
    )
    averages = make_averages(job.config, job.model, job.optimizer, strategy)
    if averages is not None:
        update.average(averages)
        if job.averages is not None:
            averages.take_over(job.averages)
        job.averages = averages
    windows = Windows(config.observe, strategy.device, strategy.rank, total_steps)
    # A user's callback may rely on running before the next step begins. On a GPU it runs some steps late, but on all
    # ranks at the same step, since it may change what is trained.
    listens = bool(job.callbacks)
    clock = windows.around(make_clock(strategy.device, listens, in_step=listens and strategy.world_size > 1))
    ranks: RankWatch | None = None

    buckets: BucketRecorder | None = None

    def observed(hook: Hook) -> Hook:
        nonlocal buckets
        buckets = clock.record_buckets()
        if recorder is not None:
            recorder.buckets = buckets
        return recorded(hook, buckets)

    if strategy.wrap_hook(observed):
        ranks = RankWatch(strategy.rank, strategy.world_size, strategy.device, clock.max_steps_ahead - 1)
    step: TrainStep | CapturedStep
    step = eager = TrainStep(job.model, prepared.wrapped, loss_function, update, strategy, job.precision, clock)
    eager.uncompiled = prepared.compiler.uncompiled if prepared.compiler.enabled else None
    if recorder is not None and OneMessage.suits(strategy, job.model):
        eager.one_message = OneMessage(job.model.named_parameters(), strategy, buckets)
        prepared.compiler.keep_graphs_whole()
    sends_itself = prepared.wrapped is not job.model and eager.one_message is None
    if recorder is not None and not sends_itself and not strategy.shards_parameters:
        # Hooks that send gradients wait for those of the parameters themselves.
        update.half_weights = HalfWeights.of(job.model, job.precision.dtype)
        if prepared.wrapped is not job.model and update.find_one_pass() is None:
            update.half_weights = None
    unseen = unseen_because(recorder is not None, strategy.world_size, strategy.shards_parameters)
    gradients = GradientWatch(job.model, strategy.device, eager.marking, clock.mark, unseen)
    if recorder is not None:
        joint = JointDecisions()
        if strategy.gradient_ranks > 1:
            store = shared_store(f"capture{next(_session_numbers)}")
            joint = JointDecisions(store, strategy.rank, strategy.world_size)
        trial = config.gpu.capture == "auto"
        alone = strategy.world_size == 1 and prepared.wrapped is job.model and not strategy.shards_parameters
        times = ReplayedGradients(gradients) if alone and config.gpu.capture != "rehearse" else None
        alike = job.train.shapes_alike
        step = CapturedStep(eager, recorder, clock, trial=trial, joint=joint, alike=alike, gradients=times)
    eager.flops = flops = watch_flops(job, prepared, clock)
    drawing = Walk({"model": job.model, "loss_fn": job.loss_fn}).generators  # searched once, as models are large
    parts = users_parts(job.train.loader, "loader")
    for name, loader in job.validation.items():
        parts.update(users_parts(loader, f"validation.{name}" if name else "validation"))
    held = Held({**parts, **drawing})
    state = TrainingState(
        job.model,
        job.optimizer,
        schedule,
        job.precision,
        strategy,
        Progress(),
        config.seed,
        held,
        job.train.workers,
        job.train.place,
        update.averages,
    )
    job.state = state
    splitter, note = make_splitter(config.memory.on_oom, step, job.batch, state)
    watched = find_watched(job, schedule, loss_function)
    metrics = Metrics(job.metrics, strategy)
    return StepParts(
        step, update, loss_function, state, clock, windows, ranks, gradients, splitter, note, watched, flops, metrics
    )


def watch_flops(job: Job, prepared: PreparedModel, clock: StepClock) -> FlopWatch:
    """Create the FLOP counter, which observes operations as they run, or counts hidden ones in a dry run."""
    device, compiler = job.strategy.device, prepared.compiler

    def dry(micro: Any) -> FlopCount:
        try:
            run = DryRun(job.model, lambda _: micro, job.loss_fn, device=device.type, precision=job.precision.name)
            return run.count_flops()
        except Exception as error:  # the model may not support copies, or tensors without values
            return FlopCount(problem=str(error).partition("\n")[0])

    # The compiler may generate its own product kernels, and its recomputation looks like any other backward.
    recomputes = job.config.memory.activation_checkpointing != "off"
    hidden = compiler.enabled and ("max-autotune" in (compiler.mode or "") or recomputes)
    unseen = "strategy dp runs the model in several threads" if job.strategy.name == "dp" else None
    return FlopWatch(device, clock.mark, dry if hidden else None, unseen)


def find_watched(job: Job, schedule: AnySchedule, loss_function: LossFunction) -> dict[str, str]:
    """Return settings that need a validation metric, with its name.

    Raises:
        ConfigError: If there will be no such metric.
    """
    early_stop, checkpoint = job.config.training.early_stop, job.config.checkpoint
    metrics = {
        "early_stop": None if early_stop is None else early_stop.metric,
        "checkpoint.keep_best": checkpoint.metric if checkpoint.keep_best and job.saves else None,
        "the scheduler": schedule.metric,
    }
    watched = {setting: metric for setting, metric in metrics.items() if metric is not None and metric != "train_loss"}
    for setting, metric in watched.items():
        if not job.validation:
            raise ConfigError(
                f"{setting} watches {metric}, and there is no validation set; give one, or watch train_loss"
            )
        if metric == "val_accuracy" and not loss_function.may_score:
            raise ConfigError(f"{setting} watches {metric}, and {NO_ACCURACY}")
        # A metric may return several named numbers, which are known only after the first validation.
        begins = [f"val_{name}" for name in ("loss", "accuracy", *job.metrics)]
        begins += [f"val_{name}_" for name in job.validation if name]
        if not metric.startswith(tuple(begins)):
            raise ConfigError(why_unwatched(setting, metric, [f"val_{name}" for name in job.metrics]))
    return watched


@dataclass
class Output:
    """Where a run is written, its listeners, and the number that separates its messages from other sessions'."""

    run: RunOutput
    tally: Tally
    events: Events
    sampler: SystemSampler | NoSampler
    store: CheckpointStore | None
    number: int

    @property
    def path(self) -> Path | None:
        """The run folder, if there is one."""
        return None if self.run.folder is None else self.run.folder.path


def open_run(job: Job, parts: StepParts) -> Output:
    """Open the run folder with its writers, the listeners, the sampler and the store of checkpoints."""
    output = job.open_output()
    try:
        return _opened(job, parts, output)
    except BaseException:
        output.abandon()
        raise


def _opened(job: Job, parts: StepParts, output: RunOutput) -> Output:
    config, strategy, tally = job.config, job.strategy, Tally()
    listeners = output.listeners(
        strategy.rank, job.total_steps, parts.flops.mfu, lambda: measure_memory(strategy.device).peak_bytes
    )
    acting = [item for item in job.callbacks if not getattr(item, "must_not_break_training", False)]
    events = Events([tally, *listeners, *job.callbacks], acting)
    sampler = make_sampler(
        config.observe.system_interval_s,
        strategy.device,
        output.system_path(strategy.rank),
        whole_machine=not is_distributed() or setup_ddp().local_rank == 0,
        steps_done=lambda: parts.state.progress.step,
    )
    folder = output.folder
    parts.windows.write_to(None if folder is None else folder.path)
    number = next(_session_numbers)
    reports = RankReports(shared_store(f"checkpoints{number}"), strategy.rank, strategy.world_size)
    store = None
    if folder is not None:
        store = make_store(folder.checkpoints, config.checkpoint, reports, strategy.device)
    return Output(output, tally, events, sampler, store, number)


@dataclass
class Protection:
    """What stops a run in time and explains why it failed."""

    request: StopRequest
    agreement: StopAgreement
    watchdog: contextlib.AbstractContextManager[object]
    spikes: SpikeWatch | None
    guard: MemoryGuard
    explainer: Explainer
    bad_numbers: BadNumbers


def build_protection(job: Job, parts: StepParts, output: Output) -> Protection:
    """Build everything that protects a run."""
    config, strategy, state, number = job.config, job.strategy, parts.state, output.number
    rank, world_size = strategy.rank, strategy.world_size
    request = job.request
    store = shared_store(f"session{number}")
    agreement = StopAgreement(request, store, rank, world_size, lookahead=parts.clock.max_steps_ahead + 1)
    if isinstance(parts.step, CapturedStep):
        parts.step.agree_by(agreement)
    bad_numbers = BadNumbers(
        config.training.max_bad_steps,
        parts.update,
        strategy.named_parameters(job.model),
        job.train.sample_ids,
        rank=rank,
        world_size=world_size,
        store=shared_store(f"bad{number}"),
        folder=output.path,
        scaled=job.precision.scaler is not None,
    )
    return Protection(
        request,
        agreement,
        make_watchdog(config.parallel.watchdog_s, shared_store(f"watchdog{number}"), state, output.path, parts.step),
        make_spikes(
            config.training.on_spike, lambda values: all_reduce_sums(values, strategy.device), state, output.store
        ),
        make_guard(config, strategy, request, job.model, job.optimizer),
        Explainer(state, config, job.batch, job.advise, store),
        bad_numbers,
    )


def begin_record(job: Job, folder: Path | None) -> RunRecord:
    """Create the record of a run that has not begun; its status is `failed` until it ends otherwise."""
    device, precision = job.strategy.device, job.precision.name
    return RunRecord(
        name=job.config.name,
        status="failed",
        environment=environment_fingerprint(device),
        batch=job.batch,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        device=describe_device(device),
        strategy=job.strategy.name,
        precision={"off": "fp32"}.get(precision, precision),
        parameters=count_parameters(job.model),
        run_dir=None if folder is None else str(folder),
        workload=workload_name(job.config),
    )
