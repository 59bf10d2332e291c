"""Checklist items that matter with several processes."""

from __future__ import annotations

from frameworm.config.checks import NO_BUCKETS, NO_COMPRESSION
from frameworm.config.schema import Config
from frameworm.diagnose.checklist.known_gains import compression_gain, unmeasured
from frameworm.diagnose.checklist.subject import Subject
from frameworm.diagnose.rules.ranks import BUCKETS_TO_OVERLAP, SMALLEST_BUCKET_MB
from frameworm.records.machine import ChecklistItem, Intent, KnownGain, MachineFacts, PlanFacts

# Tokens per pass and rank. On four GPUs the small AG News model (1,024) ran at 0.46 times one GPU's speed, IMDB's
# (4,096) at 3.49 times. The threshold lies between them, until a run and `frameworm predict` tell more.
FEW_TOKENS = 4096
ALONE = "there is one process"
_MIB = 2**20


def rank_items(subject: Subject) -> list[ChecklistItem]:
    """Return the items on work per rank, strategy, buckets, compression and unused parameters."""
    resolved, facts, intent, plan = subject.resolved, subject.facts, subject.intent, subject.plan
    names = (WORK, STRATEGY, BUCKETS, COMPRESSION, UNUSED)
    if intent.world_size < 2:
        return [ChecklistItem(name, "does not apply", ALONE) for name in names]
    return [
        _work(resolved, intent),
        _strategy(resolved, plan),
        _buckets(resolved, plan),
        _compression(resolved, facts, intent),
        _unused(resolved),
    ]


WORK = "enough work per rank"
STRATEGY = "no more divided than needed"
BUCKETS = "buckets that overlap with backward"
COMPRESSION = "compressed gradients"
UNUSED = "no search for unused parameters"


def _work(resolved: Config, intent: Intent) -> ChecklistItem:
    training = resolved.training
    assert isinstance(training.micro_batch, int)
    longest = getattr(resolved.model, "max_seq_len", None)
    rows = training.micro_batch * (longest or 1)
    per_rank = f"{training.micro_batch} samples" + (f" of up to {longest} tokens" if longest else "") + " per pass"
    if longest is None or rows >= FEW_TOKENS:
        return ChecklistItem(WORK, "done", f"{per_rank} and rank", finding="negative_scaling")
    whole = training.global_batch or 0
    reason = f"{per_rank} and rank: gradients of the whole model are sent for little computing"
    text = "not known before a run on one device: frameworm predict RUN says from where more ranks pay"
    gain = KnownGain(text, "unknown", "docs/findings.md#negative_scaling")
    settings = (f"training.global_batch={whole * intent.world_size}",) if whole else ()
    return ChecklistItem(
        WORK, "not done", f"{reason} (a larger global batch needs another lr)", settings, gain, None, "negative_scaling"
    )


def _strategy(resolved: Config, plan: PlanFacts | None) -> ChecklistItem:
    strategy = resolved.parallel.strategy
    if not strategy.startswith("zero"):
        return ChecklistItem(STRATEGY, "done", f"strategy {strategy} sends gradients only")
    if plan is None or plan.ddp_fits is None:
        return ChecklistItem(STRATEGY, "done", f"strategy {strategy}; whether ddp would fit is not known here")
    if not plan.ddp_fits:
        return ChecklistItem(STRATEGY, "done", f"strategy {strategy}, and ddp does not fit")
    sent = {"zero1": 1.5, "zero2": 1.0, "zero3": 1.5}[strategy]
    text = f"ddp sends {1 / sent:.0%} of the bytes of {strategy}" if sent > 1 else "as many bytes, better hidden"
    gain = KnownGain(text, "modelled", "docs/memory.md#strategies-zero1-zero2-and-zero3")
    reason = f"{strategy} divides what would fit whole"
    return ChecklistItem(
        STRATEGY, "not done", reason, ("parallel.strategy=ddp",), gain, "strategy", "communication_bound"
    )


def _buckets(resolved: Config, plan: PlanFacts | None) -> ChecklistItem:
    parallel = resolved.parallel
    if parallel.strategy in NO_BUCKETS:
        return ChecklistItem(BUCKETS, "does not apply", f"strategy {parallel.strategy} has no buckets")
    if plan is None or plan.parameter_bytes is None:
        return ChecklistItem(BUCKETS, "done", f"{parallel.bucket_cap_mb:g} MB; the model's size is not known here")
    total_mb = plan.parameter_bytes / _MIB
    count = total_mb / parallel.bucket_cap_mb
    if count >= BUCKETS_TO_OVERLAP or total_mb <= 2 * SMALLEST_BUCKET_MB:
        return ChecklistItem(
            BUCKETS, "done", f"{total_mb:,.1f} MiB of gradients in buckets of {parallel.bucket_cap_mb:g}"
        )
    better = max(round(total_mb / (2 * BUCKETS_TO_OVERLAP), 1), SMALLEST_BUCKET_MB)
    if better >= parallel.bucket_cap_mb:
        return ChecklistItem(
            BUCKETS, "done", f"{total_mb:,.1f} MiB of gradients in buckets of {parallel.bucket_cap_mb:g}"
        )
    buckets = "1 bucket" if count < 1.5 else f"{round(count)} buckets"
    reason = f"{total_mb:,.1f} MiB of gradients in {buckets}: most is sent after backward"
    settings = (f"parallel.bucket_cap_mb={better:g}",)
    return ChecklistItem(
        BUCKETS, "not done", reason, settings, unmeasured("bucket_size"), "bucket_size", "communication_bound"
    )


def _compression(resolved: Config, facts: MachineFacts, intent: Intent) -> ChecklistItem:
    parallel = resolved.parallel
    if parallel.strategy in NO_COMPRESSION:
        return ChecklistItem(COMPRESSION, "does not apply", f"strategy {parallel.strategy} refuses it")
    if parallel.sync_every > 1:
        return ChecklistItem(COMPRESSION, "does not apply", "models are averaged, no gradients are sent (sync_every)")
    if parallel.compression != "off":
        return ChecklistItem(COMPRESSION, "done", f"parallel.compression: {parallel.compression}")
    linked = bool(facts.gpus) and all(gpu.nvlinks for gpu in facts.gpus)
    if intent.nodes == 1 and linked and resolved.gpu.device == "cuda":
        return ChecklistItem(COMPRESSION, "does not apply", "gradients travel over NVLink inside one machine")
    reason = "gradients travel whole; auto measures the network and compresses only where that is faster"
    return ChecklistItem(
        COMPRESSION,
        "not done",
        reason,
        ("parallel.compression=auto",),
        compression_gain(),
        "compression",
        "communication_bound",
    )


def _unused(resolved: Config) -> ChecklistItem:
    if not resolved.parallel.find_unused_parameters:
        return ChecklistItem(UNUSED, "done", "parallel.find_unused_parameters is off")
    reason = "DDP walks the graph of every step; needed only where steps leave parameters out"
    settings = ("parallel.find_unused_parameters=false",)
    return ChecklistItem(UNUSED, "not done", reason, settings, unmeasured(None), None, "host_bound")
