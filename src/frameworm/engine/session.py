"""One training from beginning to end: put the parts together, run the loop, leave a run folder behind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from datetime import datetime, timezone
from time import perf_counter

import torch

from frameworm.config.load import dump_config
from frameworm.data.samples.skipping import describe
from frameworm.data.steps import close_loader
from frameworm.engine.checkpoint.load import load_newest
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.store import make_store
from frameworm.engine.checkpoint.timed_saves import make_timed_saves
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.faults.bad_numbers import make_bad_numbers
from frameworm.engine.faults.out_of_memory import Explainer
from frameworm.engine.faults.spikes import make_spikes
from frameworm.engine.faults.split_on_oom import make_halving
from frameworm.engine.faults.watchdog import make_watchdog
from frameworm.engine.job import Job
from frameworm.engine.loop import Limits, TrainingLoop
from frameworm.engine.memory.guard import make_guard
from frameworm.engine.model.activations import apply_checkpointing
from frameworm.engine.model.compilation import Compiler
from frameworm.engine.model.precision import wants_channels_last
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.update import Update
from frameworm.engine.step.capture import CapturedStep, make_recorder, on_stream
from frameworm.engine.step.evaluation import Evaluation, evaluate
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.step import TrainStep
from frameworm.engine.summary import (
    Tally,
    count_parameters,
    describe_device,
    fill_record,
    flatten_notes,
    judge_run,
    stop_error,
    summarise_rank,
)
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.launch.process_group import (
    all_reduce_sums,
    gather_objects,
    is_distributed,
    setup_ddp,
    shared_store,
)
from frameworm.launch.reports import RankReports
from frameworm.launch.stopping import StopAgreement, StopRequest
from frameworm.observe.clocks.communication import recorded
from frameworm.observe.clocks.device_clock import make_clock
from frameworm.observe.clocks.gradient_times import GradientWatch, unseen_because, watched
from frameworm.observe.clocks.ranks import RankWatch
from frameworm.observe.clocks.windows import Windows
from frameworm.observe.system.sampler import make_sampler
from frameworm.records.atomic import not_world_writable
from frameworm.records.events import Events
from frameworm.records.schema import CheckpointStatistics, RunRecord

log = logging.getLogger("frameworm")
_session_numbers = itertools.count()


class TrainingSession:
    """Runs a job once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began = perf_counter()
        self._rank = job.strategy.rank
        self._world_size = job.strategy.world_size
        config = job.config
        apply_checkpointing(job.model, config.memory)
        wrapped = job.strategy.place(job.model)
        job.strategy.scale_losses_by(job.precision.loss_scale)
        recorder, capture_note = make_recorder(config.gpu.capture, job.strategy)
        layout = False if job.strategy.shards_parameters else config.gpu.channels_last
        if wants_channels_last(layout, job.model, job.precision, job.strategy.device):
            job.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        job.optimizer = job.strategy.shard_optimizer(job.optimizer)
        self._compiler = Compiler(config.gpu, captured=recorder is not None)
        self._compiler.apply(job.model)
        training = config.training
        per_epoch = job.train.steps_per_epoch
        total = None if per_epoch is None else per_epoch * training.epochs
        if training.max_steps is not None:
            total = training.max_steps if total is None else min(total, training.max_steps)
        self.total_steps = total
        schedule = job.make_schedule(total)
        self._loss_function = LossFunction(job.model, job.loss_fn)
        update = Update(
            job.model.parameters(),
            job.optimizer,
            schedule,
            job.precision,
            training.clip_norm,
            strategy=job.strategy,
            check=training.max_bad_steps is not None,
        )
        self._windows = Windows(config.observe, job.strategy.device, self._rank, total)
        # Somebody else's listener may count on hearing of a step before the next one begins.
        self._clock = clock = self._windows.around(make_clock(job.strategy.device, at_once=bool(job.callbacks)))
        self._ranks: RankWatch | None = None
        if job.strategy.wrap_hook(lambda hook: recorded(hook, clock.record_buckets())):
            self._ranks = RankWatch(self._rank, self._world_size, job.strategy.device, clock.max_steps_ahead - 1)
        step: TrainStep | CapturedStep
        step = eager = TrainStep(job.model, wrapped, self._loss_function, update, job.strategy, job.precision, clock)
        if recorder is not None:
            update.halves = HalfWeights.of(job.model, job.precision.dtype)
        unseen = unseen_because(recorder is not None, self._world_size, job.strategy.shards_parameters)
        self._gradients = GradientWatch(job.model, job.strategy.device, eager.marking, clock.mark, unseen)
        self._captured: CapturedStep | None = None
        self._stream: torch.cuda.Stream | None = None
        if recorder is not None:
            step = self._captured = CapturedStep(eager, recorder, clock, trial=config.gpu.capture == "auto")
            self._stream = recorder.stream
        self._state = TrainingState(
            job.model, job.optimizer, schedule, job.precision, job.strategy, Progress(), config.seed
        )
        self._halving, halving_note = make_halving(config.memory.on_oom, step, job.batch, self._state)
        self._tally = Tally()
        self._output = job.open_output()
        try:
            listeners = self._output.listeners(self._rank, total)
        except BaseException:
            self._output.abandon()
            raise
        self._events = Events([self._tally, *listeners, *job.callbacks])
        self._sampler = make_sampler(
            config.observe.system_interval_s,
            job.strategy.device,
            self._output.system_path(self._rank),
            whole_machine=not is_distributed() or setup_ddp().local_rank == 0,
            steps_done=lambda: self._state.progress.step,
        )
        folder = self._output.folder
        self._windows.write_to(None if folder is None else folder.path)
        number = next(_session_numbers)
        reports = RankReports(shared_store(f"checkpoints{number}"), self._rank, self._world_size)
        self._store = (
            None if folder is None else make_store(folder.checkpoints, config.checkpoint, reports, job.strategy.device)
        )
        self._saved_step: int | None = None
        self._request = StopRequest()
        store = shared_store(f"session{number}")
        self._agreement = StopAgreement(
            self._request, store, self._rank, self._world_size, lookahead=clock.max_steps_ahead + 1
        )
        place = None if folder is None else folder.path
        self._watchdog = make_watchdog(
            config.parallel.watchdog_s, shared_store(f"watchdog{number}"), self._state, place
        )
        self._spikes = make_spikes(training.on_spike, self._sum_over_ranks, self._state, self._store)
        self._guard = make_guard(config, job.strategy, self._request, job.model, job.optimizer)
        self._explainer = Explainer(self._state, config, job.batch, job.advise, store)
        self._loop = TrainingLoop(
            step=step,
            source=job.train,
            clock=clock,
            events=self._events,
            agreement=self._agreement,
            state=self._state,
            limits=Limits(
                training.epochs,
                training.max_steps,
                config.checkpoint.every_steps if self._store is not None else None,
                training.early_stop,
                config.checkpoint if config.checkpoint.keep_best and self._store is not None else None,
            ),
            timed=None if self._store is None else make_timed_saves(config.checkpoint, self._agreement),
            save=self._save,
            validate=None if job.validation is None else self._validate,
            sum_over_ranks=self._sum_over_ranks,
            ranks=self._ranks,
            before_step=watched(self._gradients, self._guard.before_step),
            gate=job.gate,
            bad_numbers=make_bad_numbers(job, update, shared_store(f"bad{number}"), place),
            spikes=self._spikes,
        )
        self._notes = [*job.notes, update.note, capture_note, job.strategy.note, halving_note]
        self.record = RunRecord(
            name=config.name,
            status="failed",
            environment=environment_fingerprint(job.strategy.device),
            batch=job.batch,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=describe_device(job.strategy.device),
            strategy=job.strategy.name,
            precision={"off": "fp32"}.get(job.precision.name, job.precision.name),
            parameters=count_parameters(job.model),
            run_dir=None if folder is None else str(folder.path),
        )

    def run(self) -> RunRecord:
        """Train to the end.

        Raises:
            TrainingInterruptedError: Ctrl-C, after the state was saved.
            TrainingPreemptedError: SIGTERM, after the state was saved.
        """
        # Signals are caught to the end: who stops a run that is writing its results down must not take them from it.
        with not_world_writable(), self._watchdog, self._request:
            return self._run()

    def _run(self) -> RunRecord:
        output = self._output
        if output.resumed:
            try:
                self._resume()
            except BaseException:
                output.close()
                raise
        output.write_config(dump_config(self._job.config))
        status = "failed"
        try:
            with self._guard, self._explainer():
                self._sampler.start()
                every, total = self._job.config.checkpoint.every_steps, self.total_steps
                if self._store is not None and every is not None and (total is None or every < total):
                    self._store.get_ready()
                self._events.on_run_start(self.record)
                with on_stream(self._stream):
                    self.record.stop_reason = reason = self._loop.run()
                    status = "preempted" if reason == "memory" else reason
                    self._save(last=True)
                    if self._job.strategy.keeps_own_copy:
                        self._job.strategy.sync_buffers(self._job.model)  # what was trained is the mean of all
        except KeyboardInterrupt:
            self._finish("interrupted", whole=False)
            raise
        except BaseException as error:
            self._notes.append(f"failed in step {self._state.progress.step + 1}: {type(error).__name__}: {error}")
            self._finish("failed", whole=False)
            raise
        finally:
            close_loader(self._job.train.loader)
            close_loader(self._job.validation)
            self._job.strategy.close()
        self._finish(status, whole=True)
        if status != "completed":
            raise stop_error(self.record)
        return self.record

    def _validate(self) -> Evaluation:
        job = self._job
        assert job.validation is not None
        with self._compiler.uncompiled(), self._guard.at_leisure():
            return evaluate(job.model, job.validation, self._loss_function, job.precision, job.strategy)

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        return all_reduce_sums(values, self._job.strategy.device)

    def _save(self, settle: Callable[[], None] = lambda: None, *, again: bool = False, last: bool = False) -> None:
        step = self._state.progress.step
        if self._store is None or (step == self._saved_step and not again):
            return
        self._saved_step = step
        self._store.save(step, self._state.capture, settle, self._output.flush_steps, last=last)
        if self._rank == 0:
            self._events.on_checkpoint(str(self._store.folder / f"step-{step:08d}"), step)

    def _resume(self) -> None:
        """Continue from the newest checkpoint that is whole."""
        folder = self._output.folder
        assert folder is not None
        newest = load_newest(folder.checkpoints, log.warning)
        if newest is None:
            log.info("%s holds no checkpoint yet: starting from the first step", folder.path)
            self._output.forget_steps_after(self._rank, 0)
            return
        self._notes += self._state.restore(newest[1], str(newest[0].path))
        progress = self._state.progress
        limits = self._job.config.training
        more_steps = limits.max_steps is None or progress.step < limits.max_steps
        if progress.finished and progress.epoch < limits.epochs and more_steps and limits.early_stop is None:
            progress.finished = False
        self._output.forget_steps_after(self._rank, progress.step)
        for step in self._output.earlier_steps(self._rank):
            self._tally.on_step(step)
        log.info(
            "resumed %s after step %d (epoch %d, step %d of it)",
            folder.path,
            progress.step,
            progress.epoch + 1,
            progress.step_in_epoch,
        )
        if progress.finished:
            log.info("that run had come to its end; raise training.epochs to train on")

    def _finish(self, status: str, *, whole: bool) -> None:
        """Fill in the record and write the run folder; `whole` says that all ranks are here to add up figures."""
        if self._store is not None:
            # Before the ranks meet: rank 0, whose store they all ask, does not leave while another still waits.
            self._store.close() if whole else self._store.abandon()
        self.record.system = self._sampler.stop()
        aggregate = self._tally.aggregate
        workers = self._job.train.num_workers if aggregate.steps else None
        if workers is not None:
            self.record.environment["num_workers"] = workers
        self.record.slow_steps = aggregate.slow_steps()
        sums = None
        own = summarise_rank(self._rank, aggregate)
        skipped = [self._job.train.skipped_samples]
        self.record.ranks = [own]
        if whole:
            gathered = gather_objects((own, skipped[0])) or [(own, skipped[0])]
            self.record.ranks, skipped = [item[0] for item in gathered], [item[1] for item in gathered]
            sums = self._sum_over_ranks([float(aggregate.measured_samples), float(aggregate.measured_tokens or 0)])
        store = self._store
        fill_record(
            self.record,
            status=status,
            progress=self._state.progress,
            aggregate=aggregate,
            world_sums=sums,
            communicated_bytes=self._job.strategy.communicated_bytes(self._job.model),
            device=self._job.strategy.device,
            checkpoint=CheckpointStatistics() if store is None else store.statistics(),
            wall_s=perf_counter() - self._began,
            ranks=self._ranks,
        )
        self.record.communication.compression = self._job.strategy.describe_compression()
        if self._job.strategy.gradient_ranks == 1:
            self.record.unseen = []  # between their meetings the ranks send nothing
        self._notes += [*self._sampler.notes, *self._guard.notes, *self._agreement.details]
        self._notes += [] if self._halving is None else self._halving.notes
        self._notes += [] if self._spikes is None else self._spikes.notes
        self.record.skipped_samples, unread = describe(skipped)
        self._notes.append(unread)
        writer_notes = self._output.close()
        self.record.compilation = self._compiler.record()
        if self._captured is not None:
            self.record.captured_steps = self._captured.captured_steps
            self._notes.append(self._captured.note)
        self._notes += self._windows.close()
        saving = [] if store is None else store.all_notes()
        self.record.notes = flatten_notes(self._notes, [self._clock.note], self._events.notes, writer_notes, saving)
        if self._rank == 0:
            self._output.write_gradients(self._gradients.result())
            judge_run(self.record, self._tally, self._job.config)
            self._output.write_results(self.record, aggregate.series(), dump_config(self._job.config))
        self._events.on_run_end(self.record)
