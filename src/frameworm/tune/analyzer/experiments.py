"""Short controlled experiments with the engine's own step: the same step with one thing changed.

Variants are interleaved block by block, so that a machine that slows down affects all of them; gains are computed
within a round and reported as the median over rounds with a bootstrap 95% interval.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.prefetch import tensors_in
from frameworm.data.steps import StepBatch
from frameworm.launch.process_group import all_reduce_sums
from frameworm.observe.clocks.phases import Timed
from frameworm.records.estimate import Interval
from frameworm.tune.analyzer.bench import Bench, Feed, mean_step_s

AS_IS, SAME_BATCH, NO_SYNC, AUTOCAST = "as_is", "same_batch", "no_sync", "autocast"
SLOWEST = "no_sync_slowest_rank"  # the same on the rank that computes longest
WAIT = "wait_for_slowest_rank"  # how much longer that rank takes than the others
HALF_BATCH, DOUBLE_BATCH, WORKERS = "half_batch", "double_batch", "other_workers"
ALL_VARIANTS = (AS_IS, SAME_BATCH, NO_SYNC, AUTOCAST, HALF_BATCH, DOUBLE_BATCH)  # WORKERS is added if data is slow

RESAMPLES = 2_000
WARM_UP_STEPS = 3
FEWEST_BLOCK_STEPS, MOST_BLOCK_STEPS = 4, 40
FIRST_LOOK_STEPS = 2
HOPELESS = 5.0  # a variant this many times slower is dropped; twice the batch takes twice the time
MORE_LOOKS, LONGEST_PAUSE_S = 3, 0.5
FEWEST_ROUNDS, ROUNDS = 3, 7
MOST_OF_A_STEP = 0.95  # upper bound for the fraction of a step spent waiting for another rank


def median_interval(values: Sequence[float], resamples: int = RESAMPLES) -> Interval[float] | None:
    """The median with a percentile bootstrap interval from a fixed seed; None for fewer than three values."""
    if len(values) < 3:
        return None
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    cut = round(0.025 * resamples)
    return Interval(statistics.median(values), medians[cut], medians[resamples - 1 - cut])


@dataclass
class Measured:
    """Mean step time of each variant in each round, and what could not be tried."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    as_is: list[Timed] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    slowest_rank: int | None = None
    loader_samples_per_s: float | None = None  # over all ranks, without a model to wait for
    communication_s: float | None = None  # seconds of sending per step, by the clock of the model's own DDP

    def step_s(self, variant: str) -> Interval[float] | None:
        """Step time of a variant."""
        return median_interval([item[variant] for item in self.rounds if variant in item])

    def gain(self, before: str, after: str) -> Interval[float] | None:
        """The speedup of the second variant over the first, round by round."""
        both = [item for item in self.rounds if before in item and after in item]
        return median_interval([item[before] / item[after] for item in both])

    def gain_without_waiting(self) -> Interval[float] | None:
        """The speedup if the slowest rank computed as fast as the others."""
        rounds = [item for item in self.rounds if SAME_BATCH in item and SLOWEST in item]
        return median_interval([item[SAME_BATCH] / (item[SAME_BATCH] - item[WAIT]) for item in rounds])

    def compare_ranks(self, bench: Bench) -> None:
        """Find the rank that computes longest: what the others lose to it is waiting, not communication."""
        rank, world_size = bench.strategy.rank, bench.strategy.world_size
        rounds = [item for item in self.rounds if NO_SYNC in item and SAME_BATCH in item]
        if world_size < 2 or not rounds:
            return
        own = [[item[NO_SYNC] if number == rank else 0.0 for number in range(world_size)] for item in rounds]
        by_rank = [all_reduce_sums(values, bench.device) for values in own]
        totals = [sum(values) for values in zip(*by_rank)]
        slowest = self.slowest_rank = totals.index(max(totals))
        for item, values in zip(rounds, by_rank):
            others = statistics.median(value for number, value in enumerate(values) if number != slowest)
            item[SLOWEST] = values[slowest]
            item[WAIT] = min(max(0.0, values[slowest] - others), MOST_OF_A_STEP * item[SAME_BATCH])


def resized(step: StepBatch, factor: float) -> StepBatch | None:
    """The same step with half or twice the samples per micro-batch; None if a batch cannot be resized."""
    batches = []
    for batch in step.batches:
        size = batch_size_of(batch)
        if size is None or size < 2 or any(item.dim() == 0 or len(item) != size for item in tensors_in(batch)):
            return None
        changed = _resized(batch, size // 2 if factor < 1 else None)
        if changed is None:
            return None
        batches.append(changed)
    samples = [batch_size_of(batch) or 0 for batch in batches]
    scale = sum(samples) / max(step.local_samples, 1)
    return StepBatch(batches, samples, round(step.global_samples * scale))


def _resized(value: Any, keep: int | None) -> Any:
    """Keep the first `keep` samples, or duplicate all of them."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value]) if keep is None else value[:keep].clone()
    if isinstance(value, Mapping) and type(value) is dict:
        items = {name: _resized(item, keep) for name, item in value.items()}
        return None if any(item is None for item in items.values()) else items
    if type(value) in (tuple, list):
        parts = [_resized(item, keep) for item in value]
        return None if any(item is None for item in parts) else type(value)(parts)
    return None


@dataclass
class Variant:
    """A step with one thing changed."""

    next_batch: Callable[[], StepBatch]
    drop: int = 1  # the first step after another variant runs with cold caches
    sync: bool = True
    other_precision: bool = False
    bench: Bench | None = None  # for variants that differ in more than one step can express

    def run(self, bench: Bench, steps: int) -> list[Timed]:
        """Run one block."""
        return (self.bench or bench).block(
            self.next_batch, steps, drop=self.drop, sync=self.sync, other_precision=self.other_precision
        )


def standard_variants(
    bench: Bench, feed: Feed, first: StepBatch, measured: Measured, *, compiled: bool = False
) -> dict[str, Variant]:
    """The variants tried on every model; those that cannot be tried are noted in `measured.skipped`."""
    found = {AS_IS: Variant(feed, drop=feed.ahead + 1), SAME_BATCH: Variant(lambda: first)}
    if bench.strategy.world_size > 1:
        found[NO_SYNC] = Variant(lambda: first, sync=False)
    if compiled:
        for name in (AUTOCAST, HALF_BATCH, DOUBLE_BATCH):
            measured.skipped[name] = "the model is compiled, and would have to be recompiled for it"
        return found
    if bench.other_precision.scaler is None:
        found[AUTOCAST] = Variant(lambda: first, other_precision=True)
    else:
        measured.skipped[AUTOCAST] = "fp16 needs a loss scale that takes many steps to settle"
    for name, factor in ((HALF_BATCH, 0.5), (DOUBLE_BATCH, 2.0)):
        if bench.strategy.world_size > 1:
            measured.skipped[name] = "with several ranks one that runs out of memory would leave the others waiting"
            continue
        changed = resized(first, factor)
        if changed is None:
            measured.skipped[name] = "the batches are of a kind that cannot be cut or doubled"
        else:
            found[name] = Variant(lambda changed=changed: changed)  # type: ignore[misc]
    return found


def run_rounds(
    bench: Bench,
    variants: dict[str, Variant],
    measured: Measured,
    *,
    budget_s: float,
    more: Callable[[dict[str, float]], Mapping[str, Variant]] = lambda first_round: {},
    longest: str = AS_IS,
) -> None:
    """Interleave the variants until the time is up.

    Args:
        bench: The bench to run them on.
        variants: The variants; hopeless ones are removed, further ones added.
        measured: Receives the results.
        budget_s: Time for everything from now on.
        more: Given the first round's step times, returns further variants to try.
        longest: The variant whose step time is an upper bound of theirs.
    """
    began = perf_counter()
    steps = dict.fromkeys(variants, 0)
    for number in range(ROUNDS + 1):
        round_began = perf_counter()
        times: dict[str, float] = {}
        names = list(variants)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            count = steps.get(name) or FIRST_LOOK_STEPS
            try:
                timed = variants[name].run(bench, count)
            except torch.OutOfMemoryError:
                measured.skipped[name] = "it does not fit into memory"
                del variants[name]
                torch.cuda.empty_cache()
                continue
            times[name] = mean_step_s(timed)
            if name == AS_IS and number:
                measured.as_is += timed
        if number == 0:  # shows how long a step takes, and so how many fit into a block
            _drop_hopeless(bench, variants, times, longest, measured)
            variants.update(more(times))
            share_s = 0.9 * budget_s / (ROUNDS + 1) / len(variants)
            for name, variant in variants.items():
                step_s = bench.agreed(times.get(name, times[longest]))
                fitting = int(share_s / step_s) - variant.drop if step_s > 0 else MOST_BLOCK_STEPS
                steps[name] = min(max(fitting, FEWEST_BLOCK_STEPS), MOST_BLOCK_STEPS)
        else:
            measured.rounds.append(times)
        spent_s = bench.agreed(perf_counter() - began)
        if number >= FEWEST_ROUNDS and spent_s + bench.agreed(perf_counter() - round_began) > budget_s:
            break


def loader_rate(bench: Bench, feed: Feed, budget_s: float) -> float:
    """Samples per second of a loader that waits for nothing, over all ranks."""
    for _ in range(feed.ahead):  # these may have been prefetched
        feed()
    began = perf_counter()
    samples = feed().global_samples
    seconds = bench.agreed(perf_counter() - began)
    count = min(max(int(budget_s / seconds) if seconds > 0 else MOST_BLOCK_STEPS, feed.ahead, 2), MOST_BLOCK_STEPS)
    samples += sum(feed().global_samples for _ in range(count))
    return samples / bench.agreed(perf_counter() - began)


def _drop_hopeless(
    bench: Bench, variants: dict[str, Variant], times: Mapping[str, float], longest: str, measured: Measured
) -> None:
    """Drop variants that are many times slower, since they would use up the time of the others.

    A pause of a busy host can make a short step look that slow, so such variants are measured again first.
    """
    for name in [name for name in variants if name in times and name not in (longest, SAME_BATCH)]:
        own_s, longest_s = times[name], times[longest]
        for _ in range(MORE_LOOKS):
            if bench.agreed(own_s / longest_s) <= HOPELESS or bench.agreed(own_s) > LONGEST_PAUSE_S:
                break
            longest_s = max(longest_s, mean_step_s(variants[longest].run(bench, FIRST_LOOK_STEPS)))
            own_s = min(own_s, mean_step_s(variants[name].run(bench, FIRST_LOOK_STEPS)))
        slower = bench.agreed(own_s / longest_s)
        if slower > HOPELESS:
            measured.skipped[name] = f"its step takes {slower:.0f} times as long at the first look"
            del variants[name]
