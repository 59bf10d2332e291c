"""Rules on several ranks: what they send, which rank they wait for, and whether more of them help."""

from __future__ import annotations

import math
import statistics
from typing import Any

from frameworm.diagnose.rules.accounting import CORRELATION, Facts, Option
from frameworm.diagnose.rules.cost import costed
from frameworm.diagnose.rules.wording import SHARDED
from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.observations import Compression, RankSummary
from frameworm.records.schema import Finding, RunRecord

BUCKETS_TO_OVERLAP = 4
SMALLEST_BUCKET_MB = 1.0
APPROXIMATE = ("topk", "powersgd")
NOT_COMPRESSED = ("dp", "zero2", "zero3")  # strategies that refuse compression
BEFORE_BACKWARD = ("data_wait", "transfer", "forward")


def communication_bound(facts: Facts) -> Finding | None:
    """Communication of gradients takes longer than backward can hide."""
    exposed = facts.phases.get("communication_exposed")
    if exposed is None or facts.world_size < 2:
        return None
    share = exposed.minus(_own_wait(facts))
    communication = facts.record.communication
    total_s, sent = known(communication.total_s), known(communication.bytes_per_step)
    exposed_s = known(communication.exposed_s)
    evidence = {
        "exposed_s": facts.seconds(share),
        "total_s": total_s,
        "hidden_share": clamp(1 - exposed_s / total_s) if total_s and exposed_s is not None else None,
        "sent_bytes_per_step": communication.bytes_per_step,
        "sent_bytes_per_s": sent / total_s if sent and total_s else None,
        "buckets": len(communication.buckets or []) or None,
        "world_size": facts.world_size,
    }
    strategy = facts.record.strategy
    # A script may send anything, for instance activations, and only its author knows what could be reduced.
    gradients = not facts.attached or strategy == "ddp" or strategy in SHARDED
    compressible = gradients and facts.setting("parallel.strategy") not in NOT_COMPRESSED
    options = _fewer_bytes(communication.compression) if compressible else []
    if facts.attached and strategy in SHARDED:
        options.append(Option("parallel.strategy", "zero2", ""))
    whole = known(facts.record.batch.global_)
    if whole and gradients:
        twice = "twice the work per synchronisation, with lr to match"
        options.append(Option("training.global_batch", int(2 * whole), twice))
    if sent and 0 < len(communication.buckets or []) < BUCKETS_TO_OVERLAP:
        size = max(round(sent / 2**20 / (2 * BUCKETS_TO_OVERLAP), 1), SMALLEST_BUCKET_MB)
        if size * 2**20 < sent:
            smaller = "smaller buckets, so that sending begins earlier in backward"
            options.append(Option("parallel.bucket_cap_mb", size, smaller))
    return costed("communication_bound", facts, share, evidence, facts.remedies(*options))


def _fewer_bytes(now: Compression | None) -> list[Option]:
    """Options that would send less than is sent now."""
    if now is None:
        text = "compressed gradients, by the method that is fastest between these ranks"
        return [Option("parallel.compression", "auto", text)]
    if now.method in APPROXIMATE:
        return []
    if now.chosen_by == "auto":
        text = "methods that send next to nothing may race too; they need more steps to learn the same"
        return [Option("parallel.allow_approximate", True, text)]
    return [Option("parallel.compression", "auto", "the method that is fastest between these ranks")]


def straggler(facts: Facts) -> Finding | None:
    """The other ranks wait for one that arrives late."""
    if facts.world_size < 2:
        return None
    slowest = facts.record.communication.slowest_rank
    share = _cost_of_waiting(facts, slowest)
    if share is None:
        share, slowest = _late_before_backward(facts)
    late = next((rank for rank in facts.ranks if rank.rank == slowest), None) if slowest is not None else None
    evidence: dict[str, Any] = {
        "slowest_rank": slowest if slowest is not None else "changes",
        "host": late.host if late is not None else None,
        "rank_wait_s": facts.seconds(share),
        **_where_it_is_late(facts, late),
    }
    text = "look at that rank's machine: other work on it, its clocks, its disk, its share of the data"
    # If ranks wait for each other in turn, that is jitter of the machines, and no rank is to blame.
    most = "info" if slowest is None else "critical"
    return costed("straggler", facts, share, evidence, facts.remedies(Option("", None, text)), most=most)


def negative_scaling(facts: Facts) -> Finding | None:
    """More ranks train slower than fewer did."""
    baseline = facts.baseline
    if baseline is None or facts.world_size <= int(known(baseline.batch.world_size) or 1):
        return None
    now, before = _speed(facts.record), _speed(baseline)
    if now is None or before is None or before.value <= 0:
        return None
    speedup = now.value / before.value
    error = speedup * math.hypot(now.error / now.value, before.error / before.value) if now.value > 0 else 0.0
    evidence = {
        "speedup": speedup,
        "samples_per_s": now.value,
        "baseline_samples_per_s": before.value,
        "world_size": facts.world_size,
        "baseline_world_size": baseline.batch.world_size,
        "communication_exposed_share": _value(facts.phases.get("communication_exposed")),
        "micro_batch": facts.record.batch.micro,
    }
    whole = known(facts.record.batch.global_)
    options = []
    if whole:
        grown = int(whole * facts.world_size)
        larger = "a batch that grows with the ranks, with lr to match"
        options.append(Option("training.global_batch", grown, larger, "training.global_batch:grown"))
    fewer = f"train on fewer ranks ({baseline.batch.world_size}): that was faster"
    options.append(Option("", None, fewer))
    return costed("negative_scaling", facts, Estimate(1 - speedup, error), evidence, facts.remedies(*options))


def _own_wait(facts: Facts) -> Estimate | None:
    """Fraction of the step the measured rank waited for later ones."""
    if facts.rank_waits:
        return facts.rank_waits[min(facts.rank_waits)]
    return _as_share(facts, facts.record.communication.rank_wait_s)


def _cost_of_waiting(facts: Facts, slowest: int | None) -> Estimate | None:
    """Median wait of the ranks other than the slowest."""
    waits = {rank: wait for rank, wait in facts.rank_waits.items() if rank != slowest}
    for rank in facts.ranks:
        wait = _as_share(facts, rank.rank_wait_s)
        if rank.rank != slowest and rank.rank not in waits and wait is not None:
            waits[rank.rank] = wait
    if not waits and slowest != 0:
        return _as_share(facts, facts.record.communication.rank_wait_s)
    ordered = sorted(waits.values(), key=lambda item: item.value)
    return ordered[len(ordered) // 2] if ordered else None


def _late_before_backward(facts: Facts) -> tuple[Estimate | None, int | None]:
    """Cost where no wait was measured: ranks wait for each other in backward, so for the one that reaches it last."""
    arrival: dict[int, float] = {}
    for rank in facts.ranks:
        seconds = [known((rank.phases or {}).get(name)) for name in BEFORE_BACKWARD]
        if known((rank.phases or {}).get("forward")) is not None:
            arrival[rank.rank] = sum(item for item in seconds if item is not None)
    if len(arrival) < 2:
        return None, None
    slowest = max(arrival, key=lambda rank: arrival[rank])
    others = [seconds for rank, seconds in arrival.items() if rank != slowest]
    return _as_share(facts, arrival[slowest] - statistics.median(others)), slowest


def _as_share(facts: Facts, seconds: float | None) -> Estimate | None:
    """Convert a mean time per step to a fraction of it, with an error from the noise of the steps."""
    value, step = known(seconds), facts.step_s
    if value is None or step is None or step.value <= 0:
        return None
    share = clamp(value / step.value)
    return Estimate(share, max(share, 1 - share) * step.error / step.value, step.freedom)


def _where_it_is_late(facts: Facts, late: RankSummary | None) -> dict[str, Any]:
    """The phase in which the slowest rank loses most, compared with the median of the others."""
    if late is None:
        return {}
    extra: dict[str, float] = {}
    for name, seconds in (late.phases or {}).items():
        others = [known((rank.phases or {}).get(name)) for rank in facts.ranks if rank is not late]
        usual = [item for item in others if item is not None]
        mine = known(seconds)
        if usual and mine is not None and name != "communication_exposed":
            extra[name] = mine - statistics.median(usual)
    if not extra:
        return {}
    worst = max(extra, key=lambda name: extra[name])
    return {"late_phase": worst, "late_by_s": extra[worst]} if extra[worst] > 0 else {}


def _speed(record: RunRecord) -> Estimate | None:
    value = known(record.throughput.samples_per_s)
    spread, steps = record.throughput.step_s, known(record.steps)
    if value is None or spread is None or not steps:
        return None
    mean, std = known(spread.mean), known(spread.std)
    if not mean or std is None:
        return None
    return Estimate(value, value * CORRELATION * std / (mean * math.sqrt(steps)))


def _value(share: Estimate | None) -> float | None:
    return None if share is None else clamp(share.value)
