"""Everything the rules need, gathered once from the records of a run. None means unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from frameworm.config.checks import NOT_YET
from frameworm.diagnose.rules.places import work_share
from frameworm.diagnose.rules.wording import say
from frameworm.records.account import RARE, StepAccount
from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.observations import RankSummary, SystemSummary
from frameworm.records.schema import Remedy, RunRecord, Statistics, StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.records.trace import TraceSummary
from frameworm.records.writer import StepReader

StepsOfRanks = StepAccount | Iterable[StepRecord] | Mapping[int, StepAccount | Iterable[StepRecord]]

FEWEST_SAMPLES = 3
# Without the steps, the error of a mean is estimated from their spread; this factor allows for correlated neighbours.
CORRELATION = 2.0
# The profiler slows the host down, so its fractions are inexact however many steps it saw.
TRACE_ERROR = 0.1


class Option(NamedTuple):
    """Something to try.

    Attributes:
        knob: The setting; empty for advice that applies anywhere.
        value: The value to set.
        ours: The sentence for a config; empty if a config needs none.
        key: Key of the wording for a script, if it is not the knob.
    """

    knob: str
    value: Any
    ours: str
    key: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known about a run.

    Attributes:
        measured_steps: Number of steps behind the metrics, without the warm-up.
        step_s: Mean step without checkpoints and validation.
        phases: Fraction of all step time in each phase, with its error.
        metrics: Fractions for metrics within the phases: `sync_s`, `logging_s` and what a script records itself.
        counts: Mean per step of metrics that are not in seconds.
        drift: How much slower steps became over the run.
        rank_waits: Fraction of the time each rank waited for later ones.
        gpu_busy: Fraction of the time in which a kernel ran.
        idle: Fraction of the time the GPU had nothing to do although data was ready, or None.
        settings: The resolved config by section; empty if not available.
    """

    record: RunRecord
    measured_steps: int = 0
    step_s: Estimate | None = None
    phases: dict[str, Estimate] = field(default_factory=dict)
    metrics: dict[str, Estimate] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    drift: Estimate | None = None
    rank_waits: dict[int, Estimate] = field(default_factory=dict)
    ranks: list[RankSummary] = field(default_factory=list)
    system: SystemSummary | None = None
    trace: TraceSummary | None = None
    baseline: RunRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool | None = None
    gpu_busy: Estimate | None = None
    idle: Estimate | None = None
    rows: float | None = None  # per micro-batch: tokens, or samples if tokens are not counted

    @property
    def noise(self) -> float | None:
        """Relative standard error of the mean step."""
        return self.step_s.error / self.step_s.value if self.step_s is not None and self.step_s.value > 0 else None

    @property
    def attached(self) -> bool:
        """True if the run was a user's own script, which has no frameworm config."""
        return self.record.source != "engine"

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(known(self.record.batch.world_size) or 1)

    @property
    def compute(self) -> Estimate | None:
        """Fraction of forward and backward, or of the graph that contains them, minus the GPU's idle time in them."""
        forward, backward = self.phases.get("forward"), self.phases.get("backward")
        replay = self.phases.get("graph_replay")
        if replay is not None:
            both = replay.plus(forward).plus(backward)
        elif forward is None or backward is None:
            return None
        else:
            both = forward.plus(backward)
        return both.minus(self.idle) if self.idle is not None and self.idle.value > 0 else both

    @property
    def cores(self) -> float | None:
        """Cores per process, if all processes of its host share them."""
        cores = self.fact("cpus_usable")
        return None if cores is None or cores < 1 else cores / self.local_processes

    @property
    def local_processes(self) -> int:
        """Number of processes on the host of rank 0; 1 if unknown."""
        hosts = [rank.host for rank in self.ranks]
        return max(1, hosts.count(hosts[0])) if hosts and hosts[0] is not None else 1

    @property
    def workers(self) -> int | None:
        """Number of loader processes per rank."""
        found = known(self.setting("data.num_workers"))
        found = self.fact("num_workers") if found is None else found
        return None if found is None else int(found)

    def fact(self, name: str) -> float | None:
        """Return a number from the environment's fingerprint."""
        return known((self.record.environment or {}).get(name))

    def setting(self, knob: str) -> Any:
        """Return a config value by its dotted name; None if there is no config or no such key."""
        value: Any = self.settings
        for part in knob.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def seconds(self, share: Estimate | None) -> float | None:
        """Convert a fraction of the step to seconds of the mean step."""
        if share is None or self.step_s is None:
            return None
        training = 1.0 - sum(self.phases[name].value for name in ("checkpoint", "validation") if name in self.phases)
        return share.value * self.step_s.value / training if training > 0 else None

    def remedies(self, *options: Option) -> list[Remedy]:
        """Return the remedies that would change something here, worded for the config or the script."""
        found = []
        for option in options:
            text = self._words(option)
            if text and not self._useless(option.knob, option.value):
                found.append(Remedy(option.knob, option.value, text))
        return found

    def _words(self, option: Option) -> str:
        key = option.key or option.knob
        if not self.attached or not key:
            return option.ours
        record = self.record
        return say(record.framework, key, option.value, record.strategy, int(_accumulation(record)))

    def _useless(self, knob: str, value: Any) -> bool:
        later = NOT_YET.get(knob)
        if later is not None and value in later.values and not self.attached:
            return True
        return bool(knob) and value is not None and self.setting(knob) == value


def gather(
    record: RunRecord,
    *,
    steps: StepsOfRanks | None = None,
    system: SystemSummary | None = None,
    config: Any = None,
    trace: TraceSummary | None = None,
    baseline: RunRecord | None = None,
) -> Facts:
    """Collect the facts; the arguments are those of `rules.judge`."""
    accounts = _accounts(steps, record)
    system = system if system is not None else record.system
    on_gpu = _on_gpu(record)
    settings = _settings(config)
    sums = accounts[min(accounts)].sums() if accounts else None
    if sums is not None and sums.steps:
        measured, step_s, phases = sums.steps, sums.step_s(), sums.phases()
        if sums.share < 1:
            phases |= _exact(phases, record)
        metrics, counts, drift = sums.metrics(), sums.counts(), sums.drift()
        rows_per_step = counts.get("rows") or sums.rows_per_step
    else:
        measured, step_s, phases = _from_record(record)
        metrics, counts, drift = {}, {}, None
        rows_per_step = known(record.batch.micro)
        rows_per_step = None if rows_per_step is None else rows_per_step * _accumulation(record)
    waits = {rank: wait for rank, account in accounts.items() if (wait := account.sums().rank_wait()) is not None}
    busy = _gpu_busy(system) if on_gpu else None
    return Facts(
        record=record,
        measured_steps=measured,
        step_s=step_s,
        phases=phases,
        metrics=metrics,
        counts=counts,
        drift=drift,
        rank_waits=waits,
        ranks=[rank for rank in record.ranks or [] if rank is not None],
        system=system,
        trace=trace,
        baseline=baseline,
        settings=settings,
        on_gpu=on_gpu,
        gpu_busy=busy,
        idle=_idle(record, phases, metrics, busy, trace, settings) if on_gpu else None,
        rows=None if rows_per_step is None else rows_per_step / _accumulation(record),
    )


def _accumulation(record: RunRecord) -> float:
    return max(known(record.batch.accumulation) or 1.0, 1.0)


def _accounts(steps: StepsOfRanks | None, record: RunRecord) -> dict[int, StepAccount]:
    if steps is None:
        return {}
    if isinstance(steps, Mapping):
        return {int(rank): _account(items, record) for rank, items in steps.items()}
    return {0: _account(steps, record)}


def _account(steps: StepAccount | Iterable[StepRecord], record: RunRecord) -> StepAccount:
    if isinstance(steps, StepAccount):
        return steps
    share = steps.share if isinstance(steps, StepReader) else 1.0
    if share == 1 or not record.phases:
        return StepAccount(share=share).extend(steps)
    rare = {name: known(record.phases[name].share) or 0.0 for name in RARE if record.phases.get(name) is not None}
    return StepAccount(share=share, rare=rare).extend(steps)


def _exact(sampled: Mapping[str, Estimate], record: RunRecord) -> dict[str, Estimate]:
    """Fractions from the summary (of all steps) with errors from the sample; a missed phase has an error of 100%."""
    found = {}
    for name, phase in (record.phases or {}).items():
        share = None if phase is None else known(phase.share)
        if share is not None and (name in sampled or name in RARE):
            of_sample = sampled.get(name, Estimate(0.0, share))
            found[name] = Estimate(share, of_sample.error, of_sample.freedom)
    return found


def _settings(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    dumped = config.model_dump()
    assert isinstance(dumped, dict)
    return dumped


def _on_gpu(record: RunRecord) -> bool | None:
    name = (record.environment or {}).get("device") or record.device
    return None if not isinstance(name, str) or not name else name.lower() != "cpu"


def _from_record(record: RunRecord) -> tuple[int, Estimate | None, dict[str, Estimate]]:
    """Metrics of a summary without its steps: the errors are bounds derived from the spread of steps."""
    spread = record.throughput.step_s if record.throughput is not None else None
    mean = known(spread.mean) if spread is not None else None
    std = known(spread.std) if spread is not None else None
    steps = int(known(record.steps) or 0)
    measured = max(steps - min(DEFAULT_WARMUP, steps // 2), 0)
    if mean is None or std is None or mean <= 0 or measured < 1:
        return measured, None, {}
    relative = CORRELATION * std / (mean * math.sqrt(measured))
    shares = {name: known(phase.share) for name, phase in (record.phases or {}).items() if phase is not None}
    phases = {
        name: Estimate(clamp(share), max(clamp(share), 1 - clamp(share)) * relative)
        for name, share in shares.items()
        if share is not None
    }
    rare = sum(phases[name].value for name in ("checkpoint", "validation") if name in phases)
    return measured, Estimate(mean * max(1 - rare, 0.0), mean * relative), phases


def mean_of(system: SystemSummary, spread: Statistics | None) -> Estimate | None:
    """Return the median of a sampled metric; unlike the mean, it ignores the start and the end of a run."""
    samples = int(known(system.samples) or 0)
    value = known(spread.p50) if spread is not None else None
    std = known(spread.std) if spread is not None else None
    if value is None or std is None or samples < FEWEST_SAMPLES:
        return None
    # The standard error of the median of a normal sample is 1.25 times that of its mean.
    return Estimate(value, 1.25 * std / math.sqrt(samples), samples - 1)


def _gpu_busy(system: SystemSummary | None) -> Estimate | None:
    return None if system is None else mean_of(system, system.gpu_busy)


def _idle(
    record: RunRecord,
    phases: dict[str, Estimate],
    metrics: dict[str, Estimate],
    busy: Estimate | None,
    trace: TraceSummary | None,
    settings: Mapping[str, Any],
) -> Estimate | None:
    """The GPU's idle time that neither data nor copies nor other ranks explain."""
    device = trace.device if trace is not None else None
    if device is not None and device.wall_s > 0:
        waits = device.waits_s
        share = (waits.get("host", 0.0) + waits.get("synchronisation", 0.0)) / device.wall_s
        return Estimate(share, share * TRACE_ERROR).minus(work_share(record, phases))
    if busy is None or not phases:
        return None
    idle = Estimate(1.0 - busy.value, busy.error, busy.freedom)
    explained = ["data_wait", "transfer", "checkpoint"]
    parallel = settings.get("parallel")
    backend = parallel.get("backend") if isinstance(parallel, Mapping) else None
    if backend != "nccl":  # NCCL's kernels count as busy; gloo has none
        explained.append("communication_exposed")
    if record.source == "engine":
        explained.append("other")  # time of listeners between two steps
    for name in explained:
        idle = idle.minus(phases.get(name))
    if record.source == "engine":
        return idle
    costs = [share for share in (metrics.get("logging_s"), work_share(record, phases)) if share is not None]
    return idle.minus(max(costs, key=lambda share: share.value, default=None))
