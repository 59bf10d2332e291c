"""Rules on time spent on other things than computing: data, copies, host waits, checkpoints, output, compilation."""

from __future__ import annotations

import math

from frameworm.diagnose.rules.accounting import Facts, Option, mean_of
from frameworm.diagnose.rules.cost import SHARES, costed
from frameworm.diagnose.rules.device import sync_cost
from frameworm.diagnose.rules.machine import all_busy, crowded_by_workers
from frameworm.diagnose.rules.places import WRITING, place_text, places_of_work, work_share
from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.schema import Finding, Remedy

IO_WAIT = 0.1
MOST_OF_THE_CORES = 0.7
SHORTEST_OTHER_S = 2e-3
MOST_PLACES = 3
FEWEST_RECOMPILATIONS = 2  # the first one makes a shape dynamic, as torch intends


def input_bound(facts: Facts) -> Finding | None:
    """The loop waits for batches."""
    share = facts.phases.get("data_wait")
    if share is None or crowded_by_workers(facts):  # then the workers are the cause, and their own rule reports it
        return None
    system = facts.system
    busy = mean_of(system, system.cpu_busy) if system is not None else None
    io_wait = mean_of(system, system.io_wait) if system is not None else None
    evidence = {
        "data_wait_s": facts.seconds(share),
        "num_workers": facts.workers,
        "cores": facts.cores,
        "cpu_busy": busy.value if busy else None,
        "io_wait": io_wait.value if io_wait else None,
    }
    remedies = _input_remedies(facts, share, io_wait)
    workers = next((remedy.value for remedy in remedies if remedy.knob == "data.num_workers"), None)
    removable = 1.0 if workers is None else _removed_by(facts, share, workers)
    return costed("input_bound", facts, share, evidence, remedies, removable=removable)


def _input_remedies(facts: Facts, share: Estimate, io_wait: Estimate | None) -> list[Remedy]:
    found: list[Remedy] = []
    wanted = workers_wanted(facts, share)
    if io_wait is not None and io_wait.low > IO_WAIT:
        disk = "reading waits for the disk: keep the data set on a faster disk or in memory"
        found += facts.remedies(Option("", None, disk))
    if all_busy(facts, MOST_OF_THE_CORES) is not None and facts.on_gpu is False:
        cheaper = "all cores are busy: prepare samples once and store them, more loader processes would only compete"
        found += facts.remedies(Option("", None, cheaper))
    elif wanted is not None:
        found += facts.remedies(Option("data.num_workers", wanted, f"let {wanted} loader processes prepare batches"))
    else:
        cheaper = "make a sample cheaper: do once before training what the data set does on every access"
        found += facts.remedies(Option("", None, cheaper))
    if facts.on_gpu and facts.setting("data.batching") == "packed":
        found += facts.remedies(Option("data.resident", True, "keep the training set on the GPU"))
    return found


def workers_wanted(facts: Facts, share: Estimate) -> int | None:
    """Number of loader processes that would keep up with the rest of the step; None if more would not help."""
    waiting = clamp(share.value)
    rest = max(1.0 - waiting, 0.02)
    have = facts.workers
    # Without workers, a batch takes the time the loop waited; n workers deliver a batch per step, so each takes n
    # steps.
    needed = math.ceil(max(have, 1) / rest) if have else math.ceil(waiting / rest)
    most = None if facts.cores is None else max(1, int(facts.cores))
    wanted = needed if most is None else min(needed, most)
    wanted = max(wanted, 1)
    return wanted if have is None or wanted > have else None


def _removed_by(facts: Facts, share: Estimate, workers: int) -> float:
    """Fraction of the wait that goes away if this many processes prepare batches during the rest of the step."""
    waiting = clamp(share.value)
    each = facts.workers or waiting  # time of one process per batch, in steps
    left = max(each / workers - (1.0 - waiting), 0.0)
    return clamp(1.0 - left / waiting) if waiting > 0 else 1.0


def transfer_bound(facts: Facts) -> Finding | None:
    """The GPU waits for batches to be copied to it."""
    share = facts.phases.get("transfer")
    if share is None or facts.on_gpu is False:
        return None
    pageable = _pageable_share(facts)
    evidence = {
        "transfer_s": facts.seconds(share),
        "pin_memory": facts.setting("data.pin_memory"),
        "pageable_copies": pageable,
    }
    options = [Option("data.pin_memory", True, "page-locked batches, which are copied beside computing")]
    if facts.setting("data.batching") == "packed":
        options.append(Option("data.resident", True, "keep the training set on the GPU: nothing is left to copy"))
    return costed("transfer_bound", facts, share, evidence, facts.remedies(*options))


def _pageable_share(facts: Facts) -> float | None:
    """Fraction of the time of host-to-device copies that came from pageable memory, from the trace."""
    copies = [copy for copy in (facts.trace.copies if facts.trace else []) if copy.direction == "HtoD"]
    total = sum(copy.time_s for copy in copies)
    return sum(copy.time_s for copy in copies if copy.source == "Pageable") / total if total > 0 else None


def sync_stall(facts: Facts) -> Finding | None:
    """The host waits for the device in every step, and then the device waits for the host.

    A waiting host costs nothing by itself. What costs is the GPU's idle time afterwards, so the cost is the smaller of
    the two.
    """
    share = sync_cost(facts)
    if share is None or facts.idle is None:
        return None
    evidence = {
        "host_waits_s": facts.seconds(facts.metrics.get("sync_s")),
        "syncs_per_step": next((value for name, value in facts.counts.items() if "sync" in name), None),
        "gpu_busy": facts.gpu_busy.value if facts.gpu_busy else None,
        "gpu_idle_share": clamp(facts.idle.value),
    }
    text = (
        "ask for no values (.item(), .cpu(), print of a tensor) in each step: add losses up on the device, read rarely"
    )
    remedies = facts.remedies(Option("", None, "", "loss_filter"), Option("", None, text))
    return costed("sync_stall", facts, share, evidence, remedies)


def checkpoint_stall(facts: Facts) -> Finding | None:
    """Training stands still while its state is saved."""
    share = facts.phases.get("checkpoint")
    record = facts.record
    stall_s, wall_s = known(record.checkpoint.stall_s), known(record.wall_s)
    count = int(known(record.checkpoint.count) or 0)
    if share is None and stall_s is not None and wall_s and count:
        share = Estimate(stall_s / wall_s, stall_s / wall_s / (2 * math.sqrt(count)))
    if share is None:
        return None
    every = known(facts.setting("checkpoint.every_steps"))
    evidence = {
        "checkpoints": count or None,
        "stall_s": stall_s,
        "stall_each_s": stall_s / count if stall_s is not None and count else None,
        "every_steps": facts.setting("checkpoint.every_steps"),
        "mode": facts.setting("checkpoint.mode"),
    }
    options = [Option("checkpoint.mode", "async", "write beside training")]
    if every:
        rarer = _round_up(every * clamp(share.value) / SHARES["info"])
        options.append(Option("checkpoint.every_steps", rarer, f"save every {rarer} steps"))
    else:
        options.append(Option("checkpoint.every_steps", None, ""))
    return costed("checkpoint_stall", facts, share, evidence, facts.remedies(*options))


def _round_up(value: float) -> int:
    """Round up to a number with one non-zero digit."""
    size = int(10 ** math.floor(math.log10(max(value, 1))))
    return math.ceil(max(value, 1) / size) * size


def logging_stall(facts: Facts) -> Finding | None:
    """Output, or other work besides training, takes a noticeable part of the step: prints, sinks, callbacks."""
    share = facts.metrics.get("logging_s")
    if facts.attached:
        return _work_of_a_script(facts, share)
    name = "logging_s"
    if share is None:
        # The engine's own loop takes microseconds between steps; the rest is the time of listeners.
        share, name = facts.phases.get("other"), "between_steps_s"
        if (facts.seconds(share) or 0.0) < SHORTEST_OTHER_S:
            return None
    sinks = facts.setting("observe.sinks")
    ours = "callbacks run between steps: let them do their work every 50 steps or so"
    options = [Option("", None, ours)]
    if sinks and sinks != ["jsonl"]:
        options.insert(0, Option("observe.sinks", ["jsonl"], "leave out sinks that are slow"))
    evidence = {name: facts.seconds(share), "sinks": sinks}
    return costed("logging_stall", facts, share, evidence, facts.remedies(*options))


def _work_of_a_script(facts: Facts, printed: Estimate | None) -> Finding | None:
    """Prints and logging are timed wherever they are; other work is estimated from samples outside the phases."""
    work = work_share(facts.record, facts.phases)
    sampled = work is not None and (printed is None or work.value > printed.value)
    places = places_of_work(facts.record)
    if not sampled:
        places = [place for place in places if place.work == WRITING]
    first = places[0] if places else None
    evidence = {
        "between_steps_s": facts.seconds(work) if sampled else None,
        "logging_s": facts.seconds(printed),
        "place": place_text(first) if first is not None else None,
        "there_share": known(first.share) if first is not None else None,
        "work": first.work if first is not None else None,
        "other_places": [place_text(place) for place in places[1:MOST_PLACES]] or None,
    }
    option = Option("", None, "", "logging")
    if sampled and first is not None and first.work != WRITING:
        where = place_text(first)
        option = Option("", None, f"do what {where} does every 50 steps or so instead of in each, or in another thread")
    return costed("logging_stall", facts, work if sampled else printed, evidence, facts.remedies(option))


def recompilation(facts: Facts) -> Finding | None:
    """torch.compile recompiles repeatedly."""
    compilation = facts.record.compilation
    wall_s = known(facts.record.wall_s)
    if compilation is None or not wall_s:
        return None
    time_s, again = known(compilation.time_s), int(known(compilation.recompilations) or 0)
    if time_s is None or again < FEWEST_RECOMPILATIONS:
        return None
    graphs = max(int(known(compilation.graphs) or 0), again)
    part = clamp(time_s * again / graphs / wall_s)
    # How the time divides over compilations is not recorded, so they are assumed equally long, within a quarter.
    share = Estimate(part, part / 8)
    reasons = [str(reason).partition("#")[0].strip() for reason in compilation.reasons or []]
    evidence = {
        "recompilations": again,
        "compile_s": time_s,
        "wall_s": wall_s,
        "reason": reasons[0] if reasons else None,
    }
    options = []
    if not reasons or any("size" in reason or "stride" in reason or "shape" in reason for reason in reasons):
        options += [
            Option("data.pad_to", "max", "pad every batch to the same length"),
            Option("data.drop_last", True, "leave out the short last step"),
        ]
    else:
        constant = "keep constant from step to step what the reason names, or make it a tensor"
        options.append(Option("", None, constant))
    options.append(Option("gpu.compile_model", False, "do not compile"))
    return costed("recompilation", facts, share, evidence, facts.remedies(*options))
