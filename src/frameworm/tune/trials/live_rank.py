"""One rank of a live run: the engine's own run of a config, which pauses between windows until it is its turn."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NamedTuple

import torch

from frameworm.config.schema import Config
from frameworm.data.prefetch import tensors_in
from frameworm.data.steps import StepBatch
from frameworm.engine.gate import Gate, Passage
from frameworm.engine.lockstep import FollowingGate, LeadingGate, Plan
from frameworm.engine.run import train_workload
from frameworm.errors import ConfigError, DeviceError, MissingPackageError
from frameworm.guard.quality import CURVE
from frameworm.hardware.resolve import resolve_here
from frameworm.launch.environment import added_to_environment
from frameworm.launch.process_group import cleanup
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import build_workload
from frameworm.numerics.sample_hash import add_hashes, batch_hash
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord, StepRecord
from frameworm.torch_private.execution import cuda_lost_in_fork
from frameworm.tune.processes.batch_data import sample_count
from frameworm.tune.processes.batch_trial import RankJob, describe_failure, few_threads, rank_variables, settle_rank
from frameworm.tune.processes.forkserver import BAD_FORK
from frameworm.tune.trials.warmth import StepNote

FIRST_STEPS = 1  # before the first pause
_ENDLESS_EPOCHS = 1_000_000
_MOST_HASHED = 500_000
_REFUSALS = (ConfigError, DeviceError, MissingPackageError)


class Go(NamedTuple):
    """The parent's command: steps to run untimed, then timed steps, each reported if watched."""

    lead_in: int
    steps: int
    watched: bool = False


@dataclass(frozen=True)
class Lockstep:
    """One side of a comparison from the same states."""

    plan: Plan
    leads: bool


@dataclass(frozen=True)
class LiveJob:
    """What a live run should do.

    Attributes:
        rank_job: Config, folder, ranks, port and memory limit.
        learn_steps: Only train for this many steps and report; None: pause and continue on command.
        lockstep: Lead or follow another run through the same states instead.
        compiled: Folder for compiled code. Not the user's, because a process killed while writing leaves broken files.
        whole_epoch: Steps may hold other samples: report the samples of an epoch instead of those of each step.
        seeds: Train with validation for `learn_steps` from each of these seeds instead, and report the results.
    """

    rank_job: RankJob
    learn_steps: int | None = None
    lockstep: Lockstep | None = None
    compiled: str | None = None
    whole_epoch: bool = False
    seeds: tuple[int, ...] = ()


def run_live(job: LiveJob, rank: int, link: Connection) -> None:
    """Body of the process, which always ends here."""
    if cuda_lost_in_fork():
        os._exit(BAD_FORK)
    code = 0
    born = perf_counter()  # not earlier: the server that forks may have been importing
    try:
        settle_rank(job.rank_job, rank)
        apart = {} if job.compiled is None else {"TORCHINDUCTOR_CACHE_DIR": job.compiled}
        with added_to_environment({**rank_variables(job.rank_job, rank), **apart}):
            few_threads(job.rank_job)
            told: Any
            if job.lockstep is not None:
                told = _compare(job.rank_job, job.lockstep)
            elif job.learn_steps is None:
                told = _train(job.rank_job, link, born)
            elif job.seeds:
                told = [_train_longer(job.rank_job, job.learn_steps, seed) for seed in job.seeds]
            else:
                told = _learn(job.rank_job, job.learn_steps)
                if job.whole_epoch:
                    samples, tokens = _epoch(job.rank_job)
                    told["samples"] = [samples] * len(told["samples"])
                    told["real_tokens"] = [tokens] * len(told["real_tokens"])
            link.send(("done", told))
            cleanup()
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with suppress(OSError):
            refused = isinstance(error, _REFUSALS)
            link.send(("failed", {**describe_failure(error), "refused": refused}))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the regular shutdown: threads of a collective that is never answered would block it.
    os._exit(code)


class LiveGate(Gate):
    """Pauses after the first steps and after every window, and reports how long the window took.

    Steps are watched while the run warms up: their time on the host, and how often their shapes had been seen before.
    Measured steps are not, because inspecting a batch takes microseconds and the shortest steps only a few hundred.
    """

    def __init__(self, link: Connection, device: torch.device, born: float) -> None:
        self._link = link
        self._born = born
        self._stood_s = 0.0
        self._device = device
        self._start_at = -1
        self._stop_at = FIRST_STEPS
        self._begun: float | None = None
        self._samples = 0
        self._watched = True
        self._visits: Counter[Hashable] = Counter()
        self._admitted: tuple[float, int] | None = None
        self._notes: list[StepNote] = []

    def enter(self, step: int) -> Passage:
        """Begin or end a window if one begins or ends here."""
        done = step - 1
        passage: Passage = "go"
        if self._admitted is not None:
            since, visits = self._admitted
            self._notes.append(StepNote(perf_counter() - since, visits))
            self._admitted = None
        if done == self._stop_at:
            ahead_since = perf_counter()
            now = self._now()
            told = {
                "seconds": None if self._begun is None else now - self._begun,
                "samples": self._samples,
                "done": done,
                "age_s": now - self._born - self._stood_s,
                "ahead_s": now - ahead_since,
                "notes": self._notes,
            }
            self._link.send(("stand", told))
            word = self._receive()
            self._stood_s += perf_counter() - now
            if word is None:
                return "end"
            self._start_at, self._stop_at = done + word.lead_in, done + word.lead_in + word.steps
            self._watched = word.watched
            # Watched windows are warm-up, so statistics of the run start after them.
            passage = "reset" if word.watched else "waited"
        if done == self._start_at:
            self._samples = 0
            self._notes = []
            self._begun = self._now()
        return passage

    def admit(self, batch: StepBatch) -> None:
        """Count the samples, and inspect the batch while the run warms up."""
        self._samples += batch.global_samples
        if self._watched:
            shapes = tuple([tensor.shape for micro in batch.batches for tensor in tensors_in(micro)])
            visits = self._visits[shapes]
            self._visits[shapes] = visits + 1
            self._admitted = (perf_counter(), visits)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _receive(self) -> Go | None:
        try:
            word: Go | None = self._link.recv()
        except EOFError:
            os._exit(1)  # the parent is gone
        return word


def _train(job: RankJob, link: Connection, born: float) -> dict[str, Any]:
    endless = {"epochs": _ENDLESS_EPOCHS, "max_steps": None, "early_stop": None}
    config = resolve_here(_quiet(job.config, endless), job.world_size)
    # Without validation, which costs every config the same.
    workload = replace(build_workload(config), val_data=None)
    device = torch.device(config.gpu.device if config.gpu.device != "auto" else "cpu")
    return _summary(train_workload(config, workload, gate=LiveGate(link, device, born)))


def _quiet(config: Config, training: dict[str, Any]) -> Config:
    """The training config without anything that lasts (logs, traces) or recovers by itself."""
    config = config.model_copy(deep=True)
    config.training = config.training.model_copy(update=training)
    config.observe = config.observe.model_copy(update={"sinks": [], "loggers": [], "progress": False, "trace": "off"})
    config.memory = config.memory.model_copy(update={"on_oom": "stop"})
    return config


def _summary(record: RunRecord) -> dict[str, Any]:
    plain = record.to_dict()
    return {
        "verdict": record.verdict,
        "findings": plain["findings"],
        "phases": plain["phases"],
        "attention_share": None if record.flops is None else record.flops.attention_share,
        "peak_bytes": record.memory.peak_bytes,
        "padding_waste": record.padding_waste,
        "captured_steps": record.captured_steps,
        "compilation": plain["compilation"],
        "notes": record.notes,
    }


class LearnGate(Gate):
    """Records the samples of each step, and ends the run after a number of steps."""

    def __init__(self, steps: int, inner: Gate | None = None) -> None:
        self._steps = steps
        self._inner = inner or Gate()
        self.begin, self.end = self._inner.begin, self._inner.end  # type: ignore[method-assign]
        self.samples: list[int | None] = []
        self.real_tokens: list[int | None] = []

    def enter(self, step: int) -> Passage:
        """End the run when there are enough steps."""
        return "end" if step > self._steps else self._inner.enter(step)

    def admit(self, batch: StepBatch) -> None:
        """Hash the samples, without fillers."""
        self._inner.admit(batch)
        there = [item for item, count in zip(batch.batches, batch.samples) if count]
        self.samples.append(add_hashes([batch_hash(item) for item in there]))
        self.real_tokens.append(batch.tokens)


class _Losses(Listener):
    """Keeps the loss of every step, and the number of samples or tokens it is the mean of."""

    def __init__(self) -> None:
        self.seen: list[tuple[float | None, float | None]] = []

    def on_step(self, step: StepRecord) -> None:
        """Record the loss of one finished step."""
        self.seen.append((step.loss, step.count))


def _learn(job: RankJob, steps: int) -> dict[str, Any]:
    """Train for some steps; report the samples, the losses and which parameters changed."""
    config = resolve_here(_quiet(job.config, {"early_stop": None, **_soon(job.config, steps)}), job.world_size)
    workload = replace(build_workload(config), val_data=None)
    # All parameters, so that frozen ones do not disappear from the comparison.
    before = {name: parameter.detach().clone() for name, parameter in workload.model.named_parameters()}
    gate, losses = LearnGate(steps), _Losses()
    train_workload(config, workload, gate=gate, callbacks=[losses])
    after = dict(workload.model.named_parameters())
    whole = all(name in after and after[name].shape == value.shape for name, value in before.items())
    moved = {name for name, value in before.items() if not torch.equal(after[name].detach().cpu(), value.cpu())}
    return {**_noted(gate, losses), "moved": sorted(moved) if whole else None}


def _compare(job: RankJob, lockstep: Lockstep) -> dict[str, Any]:
    """Lead or follow another run through the same states; report the samples, the losses and the comparison."""
    plan = lockstep.plan
    limits = {"early_stop": None, "epochs": _ENDLESS_EPOCHS, **_soon(job.config, plan.steps[-1])}
    config = resolve_here(_quiet(job.config, limits), job.world_size)
    workload = replace(build_workload(config), val_data=None)
    gate: LeadingGate | FollowingGate = LeadingGate(plan) if lockstep.leads else FollowingGate(plan)
    noting, losses = LearnGate(plan.steps[-1], gate), _Losses()
    train_workload(config, workload, gate=noting, callbacks=[losses])
    told = _noted(noting, losses)
    if isinstance(gate, LeadingGate):
        return {**told, "random": gate.random}
    return {**told, "agreement": gate.agreement().to_json()}


def _noted(gate: LearnGate, losses: _Losses) -> dict[str, Any]:
    return {"losses": losses.seen, "samples": gate.samples, "real_tokens": gate.real_tokens}


def _soon(config: Config, steps: int) -> dict[str, Any]:
    """Limits for a run in which the learning rate peaks halfway: at the start of a long warm-up nothing is learned."""
    training = config.training
    most = 2 * steps
    if 0 < training.warmup < 1 and training.schedule != "onecycle":  # onecycle starts high enough
        most = max(most, math.ceil(steps / 2 / training.warmup))
    most = most if training.max_steps is None else max(min(most, training.max_steps), steps)
    # A warm-up given in steps does not shrink with the run, so it is shortened here.
    shorter = {"warmup": min(training.warmup, max(1.0, steps // 2))} if training.warmup >= 1 else {}
    return {"max_steps": most, **shorter}


class _CurveGate(Gate):
    """Counts the samples of a run, and validates at points of a curve."""

    def __init__(self, steps: int) -> None:
        self._validate_before = {math.ceil(fraction * steps) + 1 for fraction in CURVE if fraction < 1}
        self.samples = 0
        self.curve: list[tuple[int, float]] = []

    def enter(self, step: int) -> Passage:
        """Validate once after each point of the curve: the first step of an epoch enters twice."""
        if step not in self._validate_before:
            return "go"
        self._validate_before.remove(step)
        return "validate"

    def validated(self, loss: float | None) -> None:
        """Record the loss."""
        self.curve.append((self.samples, math.nan if loss is None else loss))

    def admit(self, batch: StepBatch) -> None:
        """Count the samples over all ranks."""
        self.samples += batch.global_samples


def _train_longer(job: RankJob, steps: int, seed: int) -> dict[str, Any]:
    """A whole short run with its own schedule: another seed for weights, order and dropout, but the same data."""
    config = resolve_here(_quiet(job.config, {"early_stop": None, "max_steps": steps}), job.world_size)
    workload = build_workload(config, weights_seed=seed)
    gate, losses = _CurveGate(steps), _Losses()
    record = train_workload(config.model_copy(update={"seed": seed}), workload, gate=gate, callbacks=[losses])
    first = next((loss for loss, _ in losses.seen if loss is not None), math.nan)
    last = record.epochs[-1]
    gate.validated(last.val_loss)
    return {
        "start_loss": first,
        "loss": gate.curve[-1][1],
        "accuracy": last.val_accuracy,
        "samples": gate.samples,
        "curve": gate.curve,
    }


def _epoch(job: RankJob) -> tuple[int | None, int | None]:
    """Hash and token count of the first epoch's samples; None if unknown, or if it would take too long."""
    config = resolve_here(_quiet(job.config, {}), job.world_size)
    workload = build_workload(config)
    count = sample_count(workload.train_data)
    if job.world_size > 1 or count is None or count > _MOST_HASHED:
        return None, None
    loader = build_loader(config, workload, workload.train_data, evaluation=False)
    loader.set_epoch(0)
    tokens = [loader.step_shape(step).tokens for step in range(loader.steps_per_epoch)]
    samples = add_hashes([batch_hash(batch) for batch in loader])
    loader.close()
    return samples, None if None in tokens else sum(tokens)
