"""The training loop: fetch, step, record, save, validate, until the epochs are done or a stop is requested."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter, time

import torch

from frameworm.config.schema import CheckpointConfig, EarlyStopConfig
from frameworm.data.steps import StepBatch, StepSource
from frameworm.engine.checkpoint.progress import among_best
from frameworm.engine.checkpoint.timed_saves import SaveTurns, TimedSaves
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.faults.bad_numbers import BadNumbers
from frameworm.engine.faults.spikes import SpikeWatch
from frameworm.engine.gate import Gate
from frameworm.engine.model.modes import TrainingMode
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.evaluation import Evaluation, recorded_metrics, why_unwatched
from frameworm.engine.step.loss import RETURNS
from frameworm.engine.step.step import TrainStep
from frameworm.errors import ConfigError, DataError, LossError
from frameworm.launch.stopping import StopAgreement
from frameworm.observe.clocks.phases import CHECKPOINT, DATA_WAIT, OTHER, VALIDATION, StepClock, Timed
from frameworm.observe.clocks.ranks import RankWatch
from frameworm.records.events import Events
from frameworm.records.schema import EpochRecord, StepRecord


@dataclass
class Limits:
    """When the loop ends and when it saves."""

    epochs: int
    max_steps: int | None = None
    save_every: int | None = None
    early_stop: EarlyStopConfig | None = None
    keep_best: CheckpointConfig | None = None
    watched: Mapping[str, str] = field(default_factory=dict)  # settings and the validation metrics that they need


@dataclass(frozen=True)
class BeforeStep:
    """What is consulted before every step.

    Attributes:
        agreement: Decides whether all ranks stop here.
        prepare: Called with the number of the step.
        gate: May make a step wait.
        timed_saves: Decides whether a timed checkpoint is due.
        save_turns: Decides whether storage is free for the next checkpoint; None if saves wait for it.
    """

    agreement: StopAgreement
    prepare: Callable[[int], None] | None = None
    gate: Gate | None = None
    timed_saves: TimedSaves | None = None
    save_turns: SaveTurns | None = None


@dataclass(frozen=True)
class AfterStep:
    """What receives a step once it is measured."""

    events: Events
    ranks: RankWatch | None = None
    bad_numbers: BadNumbers | None = None
    spikes: SpikeWatch | None = None
    batch_end: Callable[[], None] | None = None  # passes the step's batches to callbacks; None if none wants them


@dataclass(frozen=True)
class Requests:
    """What the loop requests from its session."""

    save: Callable[..., None]
    sum_over_ranks: Callable[[list[float]], list[float]]
    forget_steps: Callable[[], None]
    validate: Callable[[], Mapping[str, Evaluation]] | None = None
    wants_stop: Callable[[], bool] = lambda: False


class TrainingLoop:
    """Runs the steps of a training and delivers their records."""

    def __init__(
        self,
        step: TrainStep | CapturedStep,
        source: StepSource,
        clock: StepClock,
        state: TrainingState,
        limits: Limits,
        before: BeforeStep,
        after: AfterStep,
        requests: Requests,
    ) -> None:
        self._step = step
        self._source = source
        self._clock = clock
        self._state = state
        self._mode = TrainingMode(state.model)
        self.progress = state.progress
        self._limits = limits
        self._before = before
        self._events, self._ranks = after.events, after.ranks
        self._bad_numbers, self._spikes = after.bad_numbers, after.spikes
        self._batch_end, self._wants_stop = after.batch_end, requests.wants_stop
        self._save, self._validate = requests.save, requests.validate
        self._sum_over_ranks, self._forget_steps = requests.sum_over_ranks, requests.forget_steps

    def run(self) -> str:
        """Train to the end; return the status: completed, or why it stopped early."""
        if self._ranks is not None:
            self._ranks.start()
        try:
            return self._run()
        except BaseException:
            with contextlib.suppress(Exception):  # a listener's further failure adds nothing new
                self._deliver(self._clock.abandon())
                if self._ranks is not None:
                    self._tell(self._ranks.abandon())
            raise

    def _run(self) -> str:
        progress = self.progress
        stopped = False
        while not progress.finished and progress.epoch < self._limits.epochs:
            self._mode.enter()
            self._state.remember_epoch_start()
            self._start_clock()  # starting a loader and its workers counts as waiting for data
            steps = self._source.epoch(progress.epoch, progress.step_in_epoch, progress.epoch_samples)
            progress.reading = dataclasses.asdict(self._source.reading)
            self._state.continue_random_numbers()
            if progress.step_in_epoch:  # rereading after a resume belongs to no step
                self._start_clock()
            reason = self._run_steps(steps)
            self._drain()
            stopped = reason == "stopped"
            if reason is not None and not stopped:
                return reason
            if stopped and not progress.step_in_epoch:
                break
            if not progress.step_in_epoch and not self._out_of_steps():
                raise DataError(self._source.why_empty(progress.epoch))
            cut = (stopped or self._out_of_steps()) and progress.step_in_epoch != self._source.steps_in_epoch
            if stopped and cut:
                self._state.before_last_validation()
            if cut:
                self._state.cut_epoch()
            self._end_epoch(cut)
            self._state.forget_epoch_start()
            best = self._limits.keep_best
            if best is not None and among_best(progress.epochs, best.metric, best.keep_best, best.prefers_higher):
                # Saves now, waiting for storage if needed: one step later the model would differ.
                self._look(self._spikes)
                self._start_save(again=True)
            if self._any_wants_stop():
                progress.finished = True
                return "stopped"
        progress.finished = True
        return "stopped" if stopped else "completed"

    def _any_wants_stop(self) -> bool:
        """Whether a callback on any rank has asked to stop; called between epochs by all ranks."""
        return bool(self._sum_over_ranks([float(self._wants_stop())])[0])

    def _start_clock(self) -> None:
        copies = self._source.copies
        if copies is not None:
            copies.copied_s = 0.0
        self._clock.start()
        self._clock.mark(OTHER)  # as in every step, the time before the wait for data

    def _run_steps(self, steps: Iterator[StepBatch]) -> str | None:
        """Run the rest of an epoch; return the reason to stop, if any."""
        progress, clock, ranks = self.progress, self._clock, self._ranks
        mark, end_step, run = clock.mark, clock.end_step, self._step.run
        before, spikes = self._before, self._spikes
        stop_before, prepare = before.agreement.stop_before, before.prepare
        gate, timed, turns = before.gate, before.timed_saves, before.save_turns
        save_every, max_steps = self._limits.save_every, self._limits.max_steps
        update, batch_end = self._step.update, self._batch_end
        length, copies = self._source.steps_in_epoch, self._source.copies
        fresh = True
        while not self._out_of_steps():
            number = progress.step + 1
            if prepare is not None:
                prepare(number)
            reason = stop_before(number)
            if reason is not None:
                return reason
            if gate is not None and (passage := gate.enter(number)) != "go":
                if passage == "end":
                    return "completed"
                if passage == "reset":
                    self._drain()
                    self._forget_steps()
                if passage == "validate":
                    self._drain()
                    self._run_validation()
                    self._mode.enter()
                    gate.validated(progress.val_loss)
                self._start_clock()
                fresh = True
            owed = turns is not None and turns.due(number)
            if (timed is not None and timed.due(number) and (turns is None or turns.admit())) or owed:
                self._look(spikes)
                self._start_save(self._drain)
                mark(CHECKPOINT)
            last = progress.step_in_epoch + 1 == length or number == max_steps
            if last:
                clock.divide()  # validation follows as a separate phase
                if progress.epoch + 1 < self._limits.epochs and number != max_steps:
                    self._source.open_ahead(progress.epoch + 1)  # now, as the device would wait for it after validation
            if fresh:
                fresh = False
            else:
                mark(OTHER)  # time that listeners took for the last step is not a wait for data
            batch = next(steps, None)
            if copies is not None and copies.copied_s:
                clock.copied(copies.copied_s)
                copies.copied_s = 0.0
            mark(DATA_WAIT)
            if batch is None:
                break
            if gate is not None:
                gate.admit(batch)
            result = run(progress.step, batch)
            progress.step = number
            progress.step_in_epoch += 1
            progress.epoch_samples += batch.global_samples
            progress.validated = False
            if batch_end is not None:
                batch_end()
            if last:
                if progress.step_in_epoch != length:
                    self._state.before_last_validation()
                mark(OTHER)
                self._run_validation()
                mark(VALIDATION)
            count = result.count
            host_count, device_count = (None, count) if isinstance(count, torch.Tensor) else (count, None)
            # Numbers only: a batch kept until its step is read would hold device memory for many steps.
            sizes = (batch.local_samples, batch.tokens, batch.padded_tokens)
            payload = (number, progress.epoch + 1, update.lr, sizes, host_count)
            finished = end_step(payload, (result.loss, update.grad_norm, update.skipped, device_count))
            if finished:
                self._deliver(finished)
            if ranks is not None:
                self._tell(ranks.after_step(number))
            saves = save_every is not None and number % save_every == 0 and (turns is None or turns.admit())
            if spikes is not None and (saves or spikes.due(number)):
                self._look(spikes)
            if saves:
                self._start_save(self._drain)
                mark(CHECKPOINT)
        return None

    def _start_save(self, settle: Callable[[], None] = lambda: None, *, again: bool = False) -> None:
        self._save(settle, again=again)
        if self._before.save_turns is not None:
            self._before.save_turns.started()

    def _out_of_steps(self) -> bool:
        return self.progress.out_of_steps(self._limits.max_steps)

    def _run_validation(self) -> None:
        if self._validate is not None:
            results = self._validate()
            self.progress.validated = True
            first = next(iter(results.values()))
            self.progress.val_loss, self.progress.val_accuracy = first.loss, first.accuracy
            self.progress.val_metrics = recorded_metrics(results)
            for setting, metric in self._limits.watched.items():
                if self.progress.figure(metric) is None:
                    raise ConfigError(why_unwatched(setting, metric, self.progress.val_metrics))

    def _drain(self) -> None:
        """Wait for all measurements and deliver them."""
        self._deliver(self._clock.drain())
        if self._ranks is not None:
            self._tell(self._ranks.flush())

    def _look(self, spikes: SpikeWatch | None) -> None:
        """Check for spikes before a save, so that no checkpoint contains one's damage."""
        if spikes is not None:
            self._drain()
            spikes.look()

    def _tell(self, records: list[StepRecord]) -> None:
        for record in records:
            self._events.on_step(record)

    def _deliver(self, finished: list[Timed]) -> None:
        """Turn measured steps into records and deliver them to listeners."""
        progress, ranks = self.progress, self._ranks
        on_step, on_own_step = self._events.on_step, self._events.on_own_step
        bad_numbers, spikes = self._bad_numbers, self._spikes
        now = time()
        since = now - perf_counter()
        for timed in finished:
            number, epoch, lr, (samples, tokens, padded_tokens), count = timed.payload
            loss, grad_norm, skipped, device_count = timed.values
            if count is None:
                count = device_count
                if count is not None and count % 1:
                    raise LossError(f"loss_fn returned {count:g} as the count of step {number}; {RETURNS}")
            phases = timed.phases
            if loss is not None and count and not skipped:
                progress.loss_sum += loss * count
                progress.count_sum += count
            progress.epoch_s += timed.training_s
            record = StepRecord(
                number,
                epoch,
                now if timed.ended_at is None else since + timed.ended_at,
                timed.step_s,
                loss if count else None,
                float(lr),
                samples,
                count,
                tokens,
                padded_tokens,
                grad_norm,
                None if skipped is None else skipped != 0,
                phases,
                None if timed.communication is None else timed.communication.total_s,
            )
            if ranks is None:
                on_step(record)
            else:
                ranks.add(record, timed.communication)
            on_own_step(record)
            if spikes is not None:
                spikes.add(number, loss, count)
            if bad_numbers is not None:
                begun = number - 1 - (progress.step - progress.step_in_epoch)
                bad_numbers.see(number, begun, epoch, loss if count else None, bool(skipped), grad_norm)

    def _end_epoch(self, cut: bool) -> None:
        progress = self.progress
        if not progress.validated:  # it was not known that the last step was the last
            self._run_validation()
        loss_sum, count_sum = self._sum_over_ranks([progress.loss_sum, progress.count_sum])
        record = EpochRecord(
            epoch=progress.epoch + 1,
            epoch_time_s=progress.epoch_s,
            train_loss=loss_sum / count_sum if count_sum else None,
            val_loss=progress.val_loss,
            val_accuracy=progress.val_accuracy,
            samples_per_s=progress.epoch_samples / progress.epoch_s if progress.epoch_s else None,
            metrics=dict(progress.val_metrics),
        )
        progress.end_epoch(record)
        schedule = self._step.update.schedule
        usual = record.train_loss if record.val_loss is None else record.val_loss
        if not cut:  # a cut epoch may be finished by a later run, so its metric is not final
            schedule.after_epoch(usual if schedule.metric is None else record.figure(schedule.metric))
            progress.finished = progress.should_stop_early(self._limits.early_stop, record)
        self._events.on_epoch(record)
        progress.finished = progress.finished or self._out_of_steps()
