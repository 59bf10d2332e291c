"""One training from start to finish: assemble the parts, run the loop, write the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from frameworm.config.load import dump_config
from frameworm.data.samples.skipping import describe
from frameworm.data.steps import close_loader
from frameworm.engine.builders import begin_record, build_protection, build_step, open_run, prepare_model
from frameworm.engine.checkpoint.load import load_newest
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.timed_saves import make_save_turns, make_timed_saves
from frameworm.engine.gate import Session
from frameworm.engine.job import Job
from frameworm.engine.loop import AfterStep, BeforeStep, Limits, Requests, TrainingLoop
from frameworm.engine.model.fused_head import HeadUse, fused_heads, head_notes
from frameworm.engine.model.modes import TrainingMode
from frameworm.engine.model.processors import host_layers, quick_turns
from frameworm.engine.optim.schedule import Schedule
from frameworm.engine.pretrained import keep_shape
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.evaluation import Evaluation, evaluate
from frameworm.engine.step.recording import on_stream
from frameworm.engine.step.step import SeenBatch, TrainStep
from frameworm.engine.summary import count_per_epoch, fill_record, flatten_notes, judge_run, stop_error, summarise_rank
from frameworm.errors import RunFolderError
from frameworm.hardware.products import achievable_flops
from frameworm.launch.process_group import all_reduce_sums, gather_objects
from frameworm.observe.clocks.gradient_times import watched
from frameworm.records.atomic import not_world_writable
from frameworm.records.schema import CheckpointStatistics, Communication, RunRecord

log = logging.getLogger("frameworm")
_AFTER_FAILURE_S = 15.0  # for uploads: a launcher ends the other ranks 20 s after one has failed


def run_job(job: Job) -> RunRecord:
    """Train what a job describes; see `TrainingSession.run`."""
    training = job.config.training
    fused = fused_heads(job.model, training.fused_loss, compiled=job.config.gpu.compile_model)
    with fused as heads, host_layers(job.model, training), quick_turns():
        return TrainingSession(job, heads).run()


class TrainingSession:
    """Runs a job once."""

    def __init__(self, job: Job, heads: Sequence[HeadUse] = ()) -> None:
        self._job = job
        self._heads = heads
        self._began = perf_counter()
        mode_note = TrainingMode.note(job.model)
        self._rank = job.strategy.rank
        self.total_steps = job.total_steps
        self._model = prepare_model(job)
        self._parts = build_step(job, self._model)
        if job.saves:
            self._parts.state.check_savable()
        self._steps_to_check = 1 if job.saves else 0
        self._output = open_run(job, self._parts)
        self._protection = build_protection(job, self._parts, self._output)
        self._state, self._store = self._parts.state, self._output.store
        self._saved_step: int | None = None
        self._whole = False
        self._loop = self._make_loop()
        scheduled, averages = self._parts.update.schedule.note, self._parts.update.averages
        averaged = None if averages is None or job.validation is None else averages.note
        notes = (self._parts.update.note, self._model.capture_note, job.strategy.note, self._parts.halving_note)
        self._notes = [*job.notes, mode_note, scheduled, averaged, *notes]
        for text in (scheduled, averaged):
            if text is not None and self._rank == 0:
                log.info("%s", text)
        self.record = begin_record(job, self._output.path)

    def _make_loop(self) -> TrainingLoop:
        job, parts, protection = self._job, self._parts, self._protection
        training, checkpoint, store = job.config.training, job.config.checkpoint, self._store
        saves = store is not None
        return TrainingLoop(
            parts.step,
            job.train,
            parts.clock,
            self._state,
            Limits(
                training.epochs,
                training.max_steps,
                checkpoint.every_steps if saves else None,
                training.early_stop,
                checkpoint if checkpoint.keep_best and saves else None,
                parts.watched,
            ),
            BeforeStep(
                protection.agreement,
                watched(parts.gradients, self._before_step),
                job.gate,
                make_timed_saves(checkpoint, protection.agreement) if saves else None,
                None if store is None else make_save_turns(checkpoint, store, protection.agreement),
            ),
            AfterStep(self._output.events, parts.ranks, protection.bad_numbers, protection.spikes, self._handing_out()),
            Requests(
                self._save,
                self._sum_over_ranks,
                self._output.tally.reset,
                self._validate if job.validation else None,
                lambda: job.request.reason == "stopped",
            ),
        )

    def _handing_out(self) -> Callable[[], None] | None:
        """Return a function that passes a step's batches to callbacks; None if no callback wants them."""
        events, step, trainer = self._output.events, self._parts.step, self._job.trainer
        if not events.wants_batches:
            return None
        assert isinstance(step, TrainStep), "a captured step hands nothing out"
        seen: list[SeenBatch] = []
        step.seen = seen

        def hand_out() -> None:
            for batch in seen:
                events.on_batch_end(trainer, *batch)
            seen.clear()

        return hand_out

    def _before_step(self, number: int) -> None:
        if self._steps_to_check >= 0:
            if self._steps_to_check == 0 and self._job.saves:
                self._state.check_savable()  # now including the optimizer's state after its first step
            self._steps_to_check -= 1
        self._protection.guard.before_step(number)

    def run(self) -> RunRecord:
        """Train to the end.

        If every attempt to save the state failed, the record's status is `failed`; the trained model is in memory, and
        the caller may still save it.

        Raises:
            TrainingInterruptedError: On Ctrl-C, after the state was saved.
            TrainingPreemptedError: On SIGTERM, after the state was saved.
        """
        # Signals are handled to the end, so that stopping a run while it writes its results does not lose them.
        protection, model = self._protection, self._model
        with contextlib.ExitStack() as around:
            for part in (not_world_writable(), protection.request, self._uploaded_at_the_end(), protection.watchdog):
                around.enter_context(part)
            around.enter_context(model.compiler.eager_if_it_fails())
            around.enter_context(model.attention)
            return self._run()

    @contextlib.contextmanager
    def _uploaded_at_the_end(self) -> Iterator[None]:
        """Wait for uploads after the run, however it ended; from then on, Ctrl-C ends the wait."""
        try:
            yield
        finally:
            output, request = self._output.run, self._protection.request
            before = min(request.interrupts, 1)  # a second Ctrl-C ends the wait
            storage = self._job.config.storage
            limit_s = storage.wait_s
            if self.record.status == "preempted":
                limit_s = max(0.0, storage.preempted_wait_s - request.asked_s_ago)
            if not self._whole:
                limit_s = min(limit_s, _AFTER_FAILURE_S)
            with contextlib.suppress(KeyboardInterrupt):
                output.uploads.finish(self.record, output.rewrite_summary, lambda: request.interrupts > before, limit_s)

    def _run(self) -> RunRecord:
        output, events = self._output.run, self._output.events
        if output.resumed:
            try:
                self._resume()
            except BaseException:
                output.close()
                output.close_log()
                raise
        output.write_config(dump_config(self._job.config))
        if self._rank == 0 and output.folder is not None:
            with contextlib.suppress(RunFolderError):  # later writes report a failing disk
                keep_shape(output.folder.path, self._job.model, self._job.processing_class)
        self._write_begun()
        self._parts.flops.counted = self._write_begun
        status = "failed"
        try:
            with self._protection.guard, self._protection.explainer():
                self._output.sampler.start()
                every, total = self._job.config.checkpoint.every_steps, self.total_steps
                if self._store is not None and every is not None and (total is None or every < total):
                    self._store.get_ready()
                if self._store is not None:
                    self._store.begin(self._state.progress.step)
                events.on_run_start(self.record)
                recorder = self._model.recorder
                if self._job.gate is not None:
                    inside = Session(self._parts.step, self._model.compiler, self._job.precision, self._job.loss_fn)
                    self._job.gate.begin(inside)
                with on_stream(None if recorder is None else recorder.stream):
                    self.record.stop_reason = reason = self._loop.run()
                    status = {"memory": "preempted", "stopped": "completed"}.get(reason, reason)
                    early = self._state.progress.why_early(self._job.config.training)
                    if reason == "stopped":
                        reason, early = "completed", f"stopped after step {self._state.progress.step} by trainer.stop()"
                    if early is not None and reason == "completed":
                        self.record.stop_reason = "early_stop"
                        self._notes.append(early)
                    self._save(last=True)
                    if self._job.strategy.keeps_own_copy:
                        self._job.strategy.sync_buffers(self._job.model)  # the result is the mean over all ranks
        except KeyboardInterrupt:
            self._finish("interrupted", whole=False)
            raise
        except BaseException as error:
            self._notes.append(f"failed in step {self._state.progress.step + 1}: {type(error).__name__}: {error}")
            self._finish("failed", whole=False)
            raise
        finally:
            if self._job.gate is not None:
                self._job.gate.end()
            close_loader(self._job.train.loader)
            for loader in self._job.validation.values():
                close_loader(loader)
            if isinstance(self._parts.step, CapturedStep):
                self._parts.step.close()
            self._job.strategy.close()
        self._finish(status, whole=True)
        if status != "completed":
            raise stop_error(self.record)
        return self.record

    def _write_begun(self) -> None:
        """Write what is known before the end, as a killed run has no summary."""
        strategy = self._job.strategy
        sent = Communication(bytes_per_step=strategy.communicated_bytes(self._job.model))
        flops = self._parts.flops.expected(strategy.world_size)
        record = dataclasses.replace(self.record, status="running", flops=flops, communication=sent)
        self._output.run.write_begun(record)

    def _validate(self) -> dict[str, Evaluation]:
        job, parts = self._job, self._parts
        averages = parts.update.averages
        averaged = contextlib.nullcontext() if averages is None else averages.in_place()
        found = {}
        with self._model.compiler.uncompiled(), self._protection.guard.at_leisure(), averaged:
            for name, loader in job.validation.items():
                result = evaluate(job.model, loader, parts.loss_function, job.precision, job.strategy, parts.metrics)
                if result.note is not None and result.note not in self._notes:
                    self._notes.append(result.note)
                    if self._rank == 0:
                        log.warning("%s", result.note)
                found[name] = result
        return found

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        return all_reduce_sums(values, self._job.strategy.device)

    def _save(self, settle: Callable[[], None] = lambda: None, *, again: bool = False, last: bool = False) -> None:
        step = self._state.progress.step
        if self._store is None or (step == self._saved_step and not again):
            return
        self._saved_step = step
        self._store.save(step, self._state.capture, settle, self._output.run.flush_steps, last=last)
        if self._rank == 0:
            self._output.events.on_checkpoint(str(self._store.folder / f"step-{step:08d}"), step)

    def _resume(self) -> None:
        """Continue from the newest complete checkpoint."""
        output = self._output.run
        folder = output.folder
        assert folder is not None
        newest = load_newest(folder.checkpoints, log.warning)
        if newest is None:
            log.info("%s holds no checkpoint yet: starting from the first step", folder.path)
            output.forget_steps_after(self._rank, 0)
            return
        progress, limits, source = self._state.progress, self._job.config.training, self._job.train
        saved = Progress.from_state(newest[1].shared["progress"])
        saved.go_on(limits.epochs, limits.max_steps, limits.early_stop)
        in_epoch = saved.step_in_epoch > 0 and not saved.finished
        if in_epoch and source.continue_reading(saved.reading):
            text = f"resumed with another batch: the epoch continues after its first {saved.epoch_samples} samples"
            self._notes.append(text)
            log.info("%s", text)
        self._notes += self._state.restore(newest[1], str(newest[0].path))
        progress.go_on(limits.epochs, limits.max_steps, limits.early_stop)
        self._fit_schedule()
        output.forget_steps_after(self._rank, progress.step)
        for step in output.earlier_steps(self._rank):
            self._output.tally.on_step(step)
        log.info(
            "resumed %s after step %d (epoch %d, step %d of it)",
            folder.path,
            progress.step,
            progress.epoch + 1,
            progress.step_in_epoch,
        )
        if progress.finished:
            stopped_early = progress.epoch < limits.epochs and not progress.out_of_steps(limits.max_steps)
            limit = "training.early_stop.patience" if stopped_early else "training.epochs or training.max_steps"
            log.info("that run had come to its end; raise %s to train on", limit)

    def _fit_schedule(self) -> None:
        """Shift the schedule so that it ends with the training if steps of another size have been taken."""
        schedule, progress, limits = self._state.schedule, self._state.progress, self._job.config.training
        per_epoch = self._job.train.steps_per_epoch
        if per_epoch is None or not isinstance(schedule, Schedule):
            return
        done = progress.step_in_epoch
        if self._job.train.reading.mixed and self._job.batch.global_:
            done = progress.epoch_samples // self._job.batch.global_
        planned = per_epoch * limits.epochs
        total = progress.step + planned - per_epoch * progress.epoch - done
        if limits.max_steps is None or total < limits.max_steps:
            schedule.shift(planned - total)

    def _finish(self, status: str, *, whole: bool) -> None:
        """Fill in the record and write the run folder; if `whole`, all ranks are present to sum metrics."""
        self._whole = whole
        if self._store is not None:
            # Before the ranks communicate: rank 0 hosts their store and must not leave while another still waits.
            self._store.close() if whole else self._store.abandon()
            if status == "completed" and self._store.failed_wholly:
                status = "failed"
        output, parts, protection = self._output, self._parts, self._protection
        self.record.system = output.sampler.stop()
        aggregate = output.tally.aggregate
        workers = self._job.train.num_workers if aggregate.steps else None
        if workers is not None:
            self.record.environment["num_workers"] = workers
        self.record.slow_steps = aggregate.slow_steps()
        sums = None
        own = summarise_rank(self._rank, aggregate)
        skipped = [self._job.train.skipped_samples]
        self.record.ranks = [own]
        own_flops = parts.flops.own_flops(aggregate)
        if whole:
            gathered = gather_objects((own, skipped[0])) or [(own, skipped[0])]
            self.record.ranks, skipped = [item[0] for item in gathered], [item[1] for item in gathered]
            counted = math.nan if own_flops is None else own_flops
            held = [float(aggregate.measured_samples), float(aggregate.measured_tokens or 0), counted]
            sums = self._sum_over_ranks(held)
        store = self._store
        fill_record(
            self.record,
            status=status,
            progress=self._state.progress,
            aggregate=aggregate,
            world_sums=sums,
            communicated_bytes=self._job.strategy.communicated_bytes(self._job.model),
            device=self._job.strategy.device,
            checkpoint=CheckpointStatistics() if store is None else store.statistics(self._state.progress.step),
            wall_s=perf_counter() - self._began,
            ranks=parts.ranks,
        )
        communication, settings = self.record.communication, self._job.config.parallel
        communication.compression = self._job.strategy.describe_compression()
        count_per_epoch(
            communication, self._job.train.steps_per_epoch, self._job.strategy.world_size, settings.sync_every
        )
        world_size = self.record.batch.world_size
        flops = (own_flops or math.nan) * world_size if sums is None else sums[2]
        if math.isfinite(flops):
            self.record.flops = parts.flops.result(aggregate, flops, world_size)
            self.record.mfu = None if self.record.flops is None else self.record.flops.mfu
        if self.record.flops is not None and self._job.config.observe.trace == "window" and self._rank == 0:
            achievable = achievable_flops(self.record.flops.products, self._job.strategy.device)
            self.record.flops.achievable_per_s = None if achievable is None else achievable * world_size
        if self._job.strategy.gradient_ranks == 1:
            self.record.unseen = []  # the ranks send nothing between synchronizations
        self._notes += [*output.sampler.notes, *protection.guard.notes, *protection.agreement.details]
        self._notes += [*self._job.train.notes, *parts.loss_function.notes, *parts.flops.notes]
        self._notes += head_notes(self._heads) if aggregate.steps else []
        self._notes += [] if parts.splitter is None else parts.splitter.notes
        self._notes += [] if protection.spikes is None else protection.spikes.notes
        self.record.skipped_samples, unread = describe(skipped)
        self._notes.append(unread)
        writer_notes = output.run.close()
        self.record.compilation = self._model.compiler.record()
        widths = self._job.widths
        self._notes += [self._model.compiler.note, self._model.attention.note, widths.note if widths else None]
        if isinstance(parts.step, CapturedStep):
            self.record.captured_steps = parts.step.captured_steps
            self._notes.append(parts.step.note)
        self._notes += parts.windows.close()
        saving = [] if store is None else store.all_notes()
        self.record.notes = flatten_notes(self._notes, [parts.clock.note], output.events.notes, writer_notes, saving)
        if self._rank == 0:
            output.run.write_gradients(parts.gradients.result())
            judge_run(self.record, output.tally, self._job.config)
            output.run.write_results(self.record, aggregate.series(), dump_config(self._job.config))
        output.events.on_run_end(self.record)
        output.run.close_log()
