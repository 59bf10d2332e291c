"""Checks the optimisation checklist of a config: what is done, what is not, and what does not apply, with reasons.

Pure functions of the resolved config, the machine's facts and the memory plan; nothing is run.
"""

from __future__ import annotations

from frameworm.diagnose.checklist.data import data_items
from frameworm.diagnose.checklist.device import device_items
from frameworm.diagnose.checklist.known_gains import RESULTS, unmeasured
from frameworm.diagnose.checklist.ranks import rank_items
from frameworm.diagnose.checklist.subject import Subject, no_matter
from frameworm.diagnose.machine.judge import size
from frameworm.records.machine import ChecklistItem, KnownGain

__all__ = ["Subject", "check_config"]


def check_config(subject: Subject) -> list[ChecklistItem]:
    """Return all items, in the order in which to work on them."""
    return [
        *(item(subject) for item in (_deterministic, _debugging)),
        *data_items(subject),
        *device_items(subject),
        *(item(subject) for item in (_micro_batch, _recompute)),
        *rank_items(subject),
        *(item(subject) for item in (_checkpoint, _threads, _collector)),
    ]


def _deterministic(subject: Subject) -> ChecklistItem:
    name = "deterministic mode off"
    if not subject.resolved.gpu.deterministic:
        return ChecklistItem(name, "done", "gpu.deterministic is off")
    reason = "gpu.deterministic wins over TF32, timed algorithms and capture; keep it only where bits must repeat"
    return ChecklistItem(name, "not done", reason, ("gpu.deterministic=false",), unmeasured(None))


def _debugging(subject: Subject) -> ChecklistItem:
    name, resolved = "nothing left from debugging", subject.resolved
    left = []
    if resolved.observe.trace != "off":
        left.append("observe.trace=off")
    if resolved.observe.nvtx:
        left.append("observe.nvtx=false")
    if resolved.parallel.check_replicas is not None:
        left.append("parallel.check_replicas=off")
    if resolved.training.max_steps is None and resolved.data.limit is not None:
        left.append("data.limit=off")
    if not left:
        return ChecklistItem(name, "done", "no trace, ranges, replica checks or cut data set")
    reason = "set for debugging, not for training: " + ", ".join(text.partition("=")[0] for text in left)
    return ChecklistItem(name, "not done", reason, tuple(left), unmeasured(None))


def _micro_batch(subject: Subject) -> ChecklistItem:
    name, training, plan = "micro-batch against the memory plan", subject.resolved.training, subject.plan
    micro, accumulation = training.micro_batch, training.accumulation
    assert isinstance(micro, int)
    assert isinstance(accumulation, int)
    if plan is None or plan.fits is None:
        return no_matter(name, "no plan: no GPU is here to plan for, or the model cannot be run dry")
    if not plan.fits:
        reason = f"{size(plan.total_bytes)} do not fit in {size(plan.memory_bytes)}; frameworm memory shows what would"
        gain = KnownGain("it trains at all", "modelled", "docs/memory.md#planning-frameworm-memory")
        return ChecklistItem(name, "not done", reason, (), gain, "micro_batch", "memory_pressure")
    largest = plan.largest.get(subject.resolved.memory.activation_checkpointing, micro)
    taken = f"{size(plan.total_bytes)} of {size(plan.memory_bytes)}"
    if accumulation == 1:
        return ChecklistItem(name, "done", f"one pass of {micro} samples, {taken}")
    better = max(
        (passes for passes in range(1, accumulation + 1) if accumulation % passes == 0 and micro * passes <= largest),
        default=1,
    )
    if better == 1:
        return ChecklistItem(name, "done", f"{accumulation} passes of {micro}, {taken}; {largest} would fit")
    reason = f"{accumulation} passes of {micro} samples take {taken}, and {largest} samples would fit"
    settings = (f"training.micro_batch={micro * better}", "training.accumulation=auto")
    return ChecklistItem(
        name, "not done", reason, settings, unmeasured("micro_batch"), "micro_batch", "memory_underused"
    )


def _recompute(subject: Subject) -> ChecklistItem:
    name, plan = "no needless recomputing", subject.plan
    mode = subject.resolved.memory.activation_checkpointing
    if mode == "off":
        return ChecklistItem(name, "done", "memory.activation_checkpointing is off")
    micro = subject.resolved.training.micro_batch
    assert isinstance(micro, int)
    if plan is None or "off" not in plan.largest:
        return ChecklistItem(name, "done", f"{mode}; whether it is needed is not known here")
    if plan.largest["off"] < micro:
        return ChecklistItem(name, "done", f"{mode}, and without it only {plan.largest['off']} samples fit")
    reason = f"{mode} recomputes layers, and {plan.largest['off']} samples fit without it"
    settings = ("memory.activation_checkpointing=off",)
    gain = unmeasured("activation_checkpointing")
    if mode == "full":
        text = "up to 1.33x: full recomputing is one more forward pass in three passes' work"
        gain = KnownGain(text, "modelled", "docs/memory.md#planning-frameworm-memory", 4 / 3)
    return ChecklistItem(name, "not done", reason, settings, gain, "activation_checkpointing", "compute_bound")


def _checkpoint(subject: Subject) -> ChecklistItem:
    name, checkpoint = "checkpoints beside training", subject.resolved.checkpoint
    if checkpoint.mode == "async":
        return ChecklistItem(name, "done", "checkpoint.mode: async", finding="checkpoint_stall")
    plan, storage = subject.plan, subject.facts.storage
    gain = KnownGain(
        "the time of each write; checkpoint.stall_s in summary.json", "unknown", "docs/findings.md#checkpoint_stall"
    )
    if plan and plan.checkpoint_bytes and storage and storage.write_bytes_per_s:
        stall_s = plan.checkpoint_bytes / storage.write_bytes_per_s
        text = f"about {stall_s:.2g} s per checkpoint: {size(plan.checkpoint_bytes)} at the rate measured just now"
        gain = KnownGain(text, "modelled", "docs/findings.md#checkpoint_stall")
    reason = "training stops for each one"
    return ChecklistItem(name, "not done", reason, ("checkpoint.mode=async",), gain, None, "checkpoint_stall")


def _threads(subject: Subject) -> ChecklistItem:
    name, threads = "as many threads as cores", subject.resolved.training.cpu_threads
    usable, processes = subject.facts.cpus_usable, subject.intent.processes
    if usable is None:
        return no_matter(name, "the number of cores is not known")
    share = max(1, usable // processes)
    if threads == "auto":
        present = subject.facts.torch_threads
        if processes == 1 and present is not None and present > usable:
            reason, settings = f"torch takes {present} threads on {usable} cores", (f"training.cpu_threads={share}",)
        else:
            return ChecklistItem(
                name,
                "done",
                f"auto, {usable} cores and {processes} ranks" if processes > 1 else f"auto, {usable} cores",
            )
    elif threads > share:
        reason = f"{threads} threads for each of {processes} ranks on {usable} cores"
        settings = (f"training.cpu_threads={share}",)
    else:
        return ChecklistItem(name, "done", f"{threads} threads for each of {processes} ranks on {usable} cores")
    return ChecklistItem(
        name, "not done", reason, settings, unmeasured("cpu_threads"), "cpu_threads", "cpu_oversubscribed"
    )


def _collector(subject: Subject) -> ChecklistItem:
    name = "garbage collected between steps"
    if subject.resolved.memory.enable_automatic_gc:
        return ChecklistItem(name, "done", "memory.enable_automatic_gc, on all ranks before the same step")
    text = "the longest step, where much is kept: 280 ms in Python's own way, 60 ms with this; short where nothing is"
    gain = KnownGain(text, "measured", f"{RESULTS}/gc_jitter-cpu.json")
    settings = ("memory.enable_automatic_gc=true",)
    return ChecklistItem(name, "not done", "Python collects at random moments", settings, gain, None, "straggler")
