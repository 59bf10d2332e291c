"""Rules on the machine: memory, cores and clocks."""

from __future__ import annotations

from typing import Any

from frameworm.diagnose.rules.accounting import Facts, Option, mean_of
from frameworm.diagnose.rules.cost import costed
from frameworm.diagnose.rules.device import MEMORY_UNDERUSED, is_small_batch, memory_share
from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.schema import Finding, Remedy, Statistics

PRESSURE_WARNING, PRESSURE_CRITICAL = 0.93, 0.98
BUSY_ENOUGH = 0.85
ALL_BUSY = 0.9
# Threads that outnumber the cores wait for each other at the end of each operation, so cores are idle meanwhile.
MOSTLY_BUSY = 0.7
# Allocators and caches in a healthy run grow less than this.
LEAST_GROWTH, LEAST_GROWTH_BYTES = 0.05, 32 * 2**20
# In its first minute a process grows anyway: caches, workers, lazily loaded code. Only much larger growth counts then.
SETTLED_S, LEAST_FLOOD = 60.0, 0.5
SOON_S = 3600.0
CROWDED = 1.5  # threads ready to compute per core
WORKERS_CROWD = 2.0  # loader processes per core: they pause while their batches wait
LOCKED_BELOW = 0.7  # of the highest clock; no load lowers it this far unless the driver reports a reason
LEAST_OTHERS = 0.1  # of the cores: every machine has some other work to do
OFTEN_HELD_UP = 0.2  # of the time: below this, what others cost does not determine the verdict
OWN_SHARE = 0.4  # of the cores, so that the run itself keeps them busy and not only other programs


def memory_pressure(facts: Facts) -> Finding | None:
    """Memory is nearly full: the next longer batch may not fit, and the allocator has to reorganise."""
    used = memory_share(facts)
    limit = (known(facts.setting("memory.max_memory_percent")) or 85.0) / 100
    if used is None or used <= limit:
        return None
    severity = "critical" if used > PRESSURE_CRITICAL else "warning" if used > PRESSURE_WARNING else "info"
    memory = facts.record.memory
    micro = known(facts.record.batch.micro)
    half = int(micro // 2) if micro and micro >= 2 else None
    recompute = "recompute cheap layers in backward instead of keeping them"
    options = [Option("memory.activation_checkpointing", "selective", recompute)]
    if half:
        accumulate = "accumulate twice as often: the same step in half the activations"
        options.append(Option("training.micro_batch", half, accumulate, "training.micro_batch:smaller"))
    return _without_cost(
        "memory_pressure",
        severity,
        {
            "memory_share": min(used, 1.0),
            "peak_bytes": memory.peak_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "total_bytes": memory.total_bytes,
        },
        facts.remedies(*options),
    )


def memory_underused(facts: Facts) -> Finding | None:
    """Most of the GPU's memory is unused and the GPU is not busy: a larger batch would use both."""
    used = memory_share(facts)
    if facts.on_gpu is not True or used is None or used >= MEMORY_UNDERUSED:
        return None
    if facts.gpu_busy is None or facts.gpu_busy.value >= BUSY_ENOUGH or is_small_batch(facts):
        return None
    micro = known(facts.record.batch.micro)
    wanted = int(2 * micro) if micro else None
    remedies = facts.remedies(Option("training.micro_batch", wanted, "larger micro-batches, with lr to match"))
    evidence = {"memory_share": used, "gpu_busy": facts.gpu_busy.value, "micro_batch": micro}
    return _without_cost("memory_underused", "info", evidence, remedies)


def memory_growth(facts: Facts) -> Finding | None:
    """Memory grows from step to step: something is kept that should not be."""
    system = facts.system
    if system is None:
        return None
    gpu_total = known(system.gpu_memory_total_bytes) or known(facts.record.memory.total_bytes)
    host_total = facts.fact("memory_bytes")
    for where, spread, slope, total in (
        ("gpu", system.gpu_memory_bytes, known(system.gpu_memory_growth_bytes_per_s), gpu_total),
        ("host", system.rss_bytes, known(system.rss_growth_bytes_per_s), host_total),
    ):
        watched_s = (known(system.interval_s) or 0.0) * (known(system.samples) or 0.0)
        if spread is None or slope is None or slope <= 0 or watched_s <= 0:
            continue
        grown = slope * watched_s
        peak, middle = known(spread.max), known(spread.p50)
        if peak is None or middle is None or middle <= 0:
            continue
        # After a steady climb, the peak exceeds the median by half of the growth; after a jump at the start it does
        # not.
        steady = peak - middle >= 0.35 * grown
        least = LEAST_GROWTH if watched_s >= SETTLED_S else LEAST_FLOOD
        if not steady or grown < max(least * middle, LEAST_GROWTH_BYTES):
            continue
        full_s = max(total - peak, 0.0) / slope if total else None
        return _growth_finding(facts, where, slope, grown, spread, full_s)
    return None


def _growth_finding(
    facts: Facts, where: str, slope: float, grown: float, spread: Statistics, full_s: float | None
) -> Finding:
    step_s = facts.step_s.value if facts.step_s is not None else None
    evidence = {
        "memory": where,
        "growth_bytes_per_s": slope,
        "growth_bytes_per_step": slope * step_s if step_s else None,
        "grown_bytes": grown,
        "peak_bytes": spread.max,
        "full_in_s": full_s,
    }
    text = (
        "look for lists that keep tensors: losses or outputs with their graph (append loss.detach() or a number), "
        "caches in the data set, callbacks that store steps"
    )
    severity = "critical" if full_s is not None and full_s < SOON_S else "warning"
    return _without_cost("memory_growth", severity, evidence, facts.remedies(Option("", None, text)))


def demand(facts: Facts) -> float | None:
    """Number of threads per core that want to compute at once, from the settings; None if unknown."""
    cores = facts.fact("cpus_usable")
    threads = facts.fact("torch_threads")
    if cores is None or cores < 1 or threads is None:
        return None
    computing = threads if facts.on_gpu is False else 1.0  # with a GPU, the host only launches work
    return facts.local_processes * computing / cores


def crowded_by_workers(facts: Facts) -> bool:
    """True if loader processes alone outnumber the cores, and all cores are busy."""
    cores, workers = facts.cores, facts.workers
    return cores is not None and workers is not None and workers > WORKERS_CROWD * cores and all_busy(facts) is not None


def cpu_oversubscribed(facts: Facts) -> Finding | None:
    """More threads want to compute than there are cores, because of this run or of other programs."""
    return _crowded_by_itself(facts) or _crowded_by_others(facts)


def _crowded_by_itself(facts: Facts) -> Finding | None:
    wanted = demand(facts)
    workers_crowd = crowded_by_workers(facts)
    threads_crowd = wanted is not None and wanted > CROWDED
    busy = all_busy(facts, least=MOSTLY_BUSY if threads_crowd else ALL_BUSY)
    if busy is None or not (workers_crowd or threads_crowd):
        return None
    cores = facts.cores
    assert cores is not None, "without cores there is no demand"
    system = facts.system
    own = mean_of(system, system.cpu_process) if system is not None else None
    evidence = {
        "cores": facts.fact("cpus_usable"),
        "cores_used": own.value if own is not None else None,
        "processes": facts.local_processes,
        "torch_threads": facts.fact("torch_threads"),
        "num_workers": facts.workers,
        "threads_per_core": wanted,
        "threads_max": system.threads_max if system is not None else None,
        "cpu_busy": busy,
    }
    fitting = max(1, int(cores))
    threads = f"OMP_NUM_THREADS={fitting}: as many threads per process as it has cores"
    options = []
    workers = facts.workers or 0
    if workers >= cores:
        fewer = max(int(cores) - 1, 0)
        options.append(Option("data.num_workers", fewer, "fewer loader processes"))
    if (facts.fact("torch_threads") or 0) > cores:
        options.append(Option("", None, threads))
    remedies = facts.remedies(*options)
    waiting = facts.phases.get("data_wait")
    if workers_crowd and waiting is not None:
        found = costed("cpu_oversubscribed", facts, waiting, evidence, remedies)
        if found is not None and found.severity != "info":
            return found
    return _without_cost("cpu_oversubscribed", "warning", evidence, remedies)


def _crowded_by_others(facts: Facts) -> Finding | None:
    """The run was ready to compute but did not get its cores, because other processes or machines had them."""
    system, cores = facts.system, facts.fact("cpus_usable")
    if system is None or cores is None or cores < 1:
        return None
    waiting = mean_of(system, system.cpu_waiting) or Estimate(0.0, 0.0)
    stolen = mean_of(system, system.cpu_stolen) or Estimate(0.0, 0.0)
    busy, own = mean_of(system, system.cpu_busy), mean_of(system, system.cpu_process)
    if busy is None or own is None:
        return None
    # All local processes belong to the run, and time taken by the hypervisor counts as busy.
    own_share = own.value * facts.local_processes / cores
    others = clamp(busy.value * (1 - stolen.value) - own_share)
    if max(others, stolen.value) < LEAST_OTHERS:
        return None
    # The run cannot wait for others longer than they compute. A run with more work than cores also waits for itself:
    # without the others it would get the time they used.
    waited, most_waiting = waiting.value, others * cores
    if _wants_more_than_all(facts):
        most_waiting = min(most_waiting, others / max(others + own_share, LEAST_OTHERS))
    if waiting.value > most_waiting:
        waiting = waiting.scaled(most_waiting / waiting.value)
    # Waiting and stealing at once: what is left is the time that neither took.
    lost = waiting.plus(stolen).minus(Estimate(waiting.value * stolen.value, 0.0))
    if facts.on_gpu is not False:
        # Waiting on the host costs nothing as long as the GPU has work.
        if facts.idle is None:
            return None
        lost = min(lost, facts.idle, key=lambda share: share.value)
    evidence = {
        "cores": cores,
        "cores_used": own.value,
        "cores_of_others": others * cores,
        "cpu_waiting": waited,
        "cpu_stolen": stolen.value or None,
        "torch_threads": facts.fact("torch_threads"),
    }
    if stolen.value > others:
        text = "the hypervisor gives this machine's cores to other machines: take one whose cores are not shared"
    else:
        text = f"other processes keep {others * cores:.1f} of {cores:g} cores busy: end them, or train elsewhere"
    options = [Option("", None, text)]
    if facts.on_gpu is False and (facts.fact("torch_threads") or 1) > 1:
        fewer = (
            "until then OMP_NUM_THREADS=1: threads that spin while they wait for each other keep each other from a core"
        )
        options.append(Option("", None, fewer))
    most = "critical" if lost.low > OFTEN_HELD_UP else "info"
    return costed("cpu_oversubscribed", facts, lost, evidence, facts.remedies(*options), most=most)


def _wants_more_than_all(facts: Facts) -> bool:
    """True if the run's own threads and loader processes together outnumber the cores."""
    wanted, cores = demand(facts), facts.cores
    return wanted is not None and cores is not None and wanted + (facts.workers or 0) / cores > 1


def all_busy(facts: Facts, own_share: float = OWN_SHARE, least: float = ALL_BUSY) -> float | None:
    """How busy the cores are, if that is more than `least` and mostly due to this run."""
    system = facts.system
    if system is None:
        return None
    busy, own, cores = mean_of(system, system.cpu_busy), mean_of(system, system.cpu_process), facts.cores
    if own is not None and cores is not None and own.value < own_share * cores:
        return None
    return busy.value if busy is not None and busy.value > least else None


def throttled(facts: Facts) -> Finding | None:
    """The GPU runs below its clock because of heat or power, or because its clock was locked."""
    system = facts.system
    throttled_share = known(system.throttled_share) if system is not None else None
    if system is None or facts.on_gpu is not True or throttled_share is None:
        return None
    clock = mean_of(system, system.gpu_clock_share)
    if throttled_share <= 0:
        return _locked(facts, clock)
    reasons = [str(reason) for reason in system.throttle_reasons or []]
    evidence = {
        "throttled_share": throttled_share,
        "clock_share": clock.value if clock is not None else None,
        "reasons": reasons or None,
    }
    text = "check cooling and power limit (nvidia-smi -q -d PERFORMANCE,POWER); no setting of the training helps"
    remedies = facts.remedies(Option("", None, text))
    # Cards run at their power limit under full load by design; heat and hardware slowdowns are faults.
    most = "info" if reasons and all("power" in reason.lower() for reason in reasons) else "critical"
    if clock is None:
        severe = throttled_share > 0.5 and most != "info"
        return _without_cost("throttled", "warning" if severe else "info", evidence, remedies)
    lost = Estimate(max(1.0 - clock.value, 0.0) * throttled_share, clock.error * throttled_share, clock.freedom)
    return costed("throttled", facts, lost, evidence, remedies, most=most)


def _locked(facts: Facts, clock: Estimate | None) -> Finding | None:
    """A busy GPU far below its clock without a reason from the driver: the clock was set by hand."""
    if clock is None or facts.gpu_busy is None or facts.gpu_busy.value < MOSTLY_BUSY or clock.high > LOCKED_BELOW:
        return None
    lock = "the clock is set low by hand: nvidia-smi -rgc and -rac take locks and application clocks away"
    evidence = {"throttled_share": 0.0, "clock_share": clock.value, "gpu_busy": facts.gpu_busy.value}
    lost = Estimate(1.0 - clock.value, clock.error, clock.freedom)
    return costed("throttled", facts, lost, evidence, facts.remedies(Option("", None, lock)))


def _without_cost(code: str, severity: str, evidence: dict[str, Any], remedies: list[Remedy]) -> Finding:
    """Build a finding about a risk: its cost is unknown and not invented."""
    return Finding(code, severity, None, {name: item for name, item in evidence.items() if item is not None}, remedies)
