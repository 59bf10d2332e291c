"""Orders of an epoch that keep padding small: pure functions of a permutation, the token lengths, a seed and the epoch.

Each order holds every sample exactly once and does not depend on ranks or micro-batches, so that a step holds the same
samples on any number of processes. A short last step stays last and is not biased towards certain lengths; every sample
is equally likely to be in any step.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[Any]

# The permutation is drawn from [seed, epoch]; draws in this module must not repeat that stream.
_STREAM = 1
# Chosen so that at most 5% of a bucketed epoch is padding at batch sizes 32 and 128: benchmarks/input_pipeline.py.
WINDOW_STEPS = 512
MOST_WIDTHS = 16
_MOST_CANDIDATES = 512


def balanced(order: Order, lengths: npt.NDArray[Any], global_batch: int, *, seed: int, epoch: int) -> Order:
    """Arrange steps, and contiguous parts of each step, to have nearly the same number of tokens.

    The samples, sorted by length, are cut into `global_batch` strata, and each step gets one sample from each stratum:
    widest stratum first, its shortest sample to the step with the most tokens so far. Token sums of two steps differ
    by less than the longest sample. Inside a step, samples of similar length go to different halves, and so on within
    each half, so that ranks and micro-batches are balanced however the step is cut.

    Args:
        order: A random permutation of all or some of the samples.
        lengths: Tokens of every sample of the data set.
        global_batch: Samples per step.
        seed: Seed of the random choices made here.
        epoch: Makes these choices differ between epochs.
    """
    random = np.random.default_rng(np.random.SeedSequence([seed, epoch, _STREAM]))
    # A stable sort keeps samples of equal length in random order.
    ranked = order[np.argsort(lengths[order], kind="stable")]
    steps, rest = divmod(len(ranked), global_batch)
    short = ranked[:0]
    if rest:
        # Every n-th of the sorted samples from a random start: each sample is equally likely, and the token sum of the
        # short step is near the mean, so that a nearly full step needs no larger capacity than a full one.
        places = ((np.arange(rest) + random.random()) * (len(ranked) / rest)).astype(np.int64)
        places = np.minimum(places, len(ranked) - 1)
        short = ranked[places]
        ranked = np.delete(ranked, places)
    parts = []
    if steps:
        dealt = _deal(lengths[ranked].reshape(global_batch, steps).astype(np.int64), random)
        parts.append(ranked[_alternate(dealt, lengths[ranked].astype(np.int64), random)].reshape(-1))
    if rest:
        parts.append(_alternate(short[None], lengths, random)[0])
    return np.concatenate(parts) if parts else order


def bucketed(
    order: Order,
    lengths: npt.NDArray[Any],
    global_batch: int,
    *,
    seed: int,
    epoch: int,
    mixed: bool = False,
    ranks: int = 1,
    window_steps: int = WINDOW_STEPS,
) -> Order:
    """Arrange steps with little padding: windows of the permutation are sorted, cut into steps and shuffled.

    Steps of similar lengths have biased gradients, and training on them ends worse than on random steps
    (benchmarks/batching_quality.py). A mixed step has two halves of similar lengths: one from the shorter half of the
    samples and one from the longer half, paired at random. Run as separate forward passes they need as little padding.

    Args:
        order: A random permutation of all or some of the samples.
        lengths: Tokens of every sample of the data set.
        global_batch: Samples per step.
        seed: Seed of the random choices made here.
        epoch: Makes these choices differ between epochs.
        mixed: Give each step a shorter and a longer half.
        ranks: Cut a mixed step into this many equal parts, each with its shorter samples first. If they do not divide
            evenly, the step as a whole has its shorter half first. The samples of a step do not depend on this.
        window_steps: About how many steps are sorted together.
    """
    random = np.random.default_rng(np.random.SeedSequence([seed, epoch, _STREAM]))
    steps, rest = divmod(len(order), global_batch)
    short, body = order[:rest], order[rest:]
    rows = []
    windows = max(1, round(steps / window_steps))
    # Windows of equal size: a small last window would hold steps with a wider spread of lengths.
    borders = [steps * window // windows * global_batch for window in range(windows + 1)]
    halves = (global_batch - global_batch // 2, global_batch // 2) if mixed else (global_batch, 0)
    for start, stop in itertools.pairwise(borders):
        window = body[start:stop]
        window = window[np.argsort(lengths[window], kind="stable")]
        count = len(window) // global_batch
        low, high = (part.reshape(count, half) for part, half in zip(np.split(window, [count * halves[0]]), halves))
        rows.append(np.concatenate([low, high[random.permutation(count)]], axis=1) if mixed else low)
    table = np.concatenate(rows)
    table = table[random.permutation(len(table))]
    # Shuffled inside each step too, since ranks and micro-batches are slices of it.
    parts = [random.permuted(part, axis=1) for part in np.split(table, [halves[0]], axis=1)]
    table = np.concatenate(parts, axis=1)
    if mixed and global_batch % (2 * ranks) == 0:
        table = table.reshape(len(table), 2, ranks, global_batch // (2 * ranks)).swapaxes(1, 2)
    return np.concatenate([table.reshape(-1), short])


def widths(lengths: npt.NDArray[Any], count: int = MOST_WIDTHS) -> npt.NDArray[np.int64]:
    """Choose at most `count` widths that minimise padding when each length is padded to the next width.

    Args:
        lengths: The lengths to be padded.
        count: Most widths to use.

    Returns:
        The widths in ascending order; the last is the longest length.
    """
    assert count >= 1
    longest = int(np.max(lengths))
    unit = -(-longest // _MOST_CANDIDATES)
    candidates, counts = np.unique(np.minimum(-(-np.asarray(lengths) // unit) * unit, longest), return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    # padded[i, j]: tokens if all lengths above candidate i - 1 and up to candidate j are padded to candidate j.
    padded = (below[None, 1:] - below[:-1, None]) * candidates[None, :].astype(np.float64)
    padded[np.tril_indices(len(candidates), -1)] = np.inf
    best = padded[0]
    chosen_from = [np.zeros(len(candidates), dtype=np.int64)]
    for _ in range(min(count, len(candidates)) - 1):
        # Add one width: the optimum up to candidate i - 1, and everything from i to j padded to j.
        table = np.concatenate([[0.0], best[:-1]])[:, None] + padded
        first = np.argmin(table, axis=0)
        chosen_from.append(first)
        best = table[first, np.arange(len(candidates))]
    found = []
    end = len(candidates) - 1
    for first in reversed(chosen_from):
        found.append(int(candidates[end]))
        end = int(first[end]) - 1
        if end < 0:
            break
    return np.array(found[::-1], dtype=np.int64)


def _deal(strata: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Turn lengths [stratum, sample], sorted throughout, into a table [step, stratum] of flat positions."""
    batch, steps = strata.shape
    table = np.empty((batch, steps), dtype=np.int64)
    # A random fraction of a token breaks ties, so that no step is favoured.
    totals = np.asarray(random.random(steps))
    for stratum in np.argsort(strata[:, 0] - strata[:, -1], kind="stable").tolist():
        heaviest_first = np.argsort(-totals)
        table[stratum, heaviest_first] = np.arange(stratum * steps, (stratum + 1) * steps)
        totals[heaviest_first] += strata[stratum]
    return table.T


def _alternate(
    rows: npt.NDArray[np.int64], lengths: npt.NDArray[Any], random: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Reorder rows of samples sorted by length so that both halves of a row weigh the same, recursively.

    For evenly spaced lengths this is the bit-reversal order; pairs are swapped to even out what remains.
    """
    count, size = rows.shape
    if size < 2:
        return rows
    pairs = size // 2
    middle = rows[:, pairs : pairs + 1] if size % 2 else rows[:, :0]
    low = np.concatenate([rows[:, :pairs], rows[:, size - pairs :]], axis=1).reshape(count, pairs, 2)
    low, high = low[..., 0], low[..., 1]
    gaps = lengths[high] - lengths[low]
    lead = np.zeros(count)
    turned = np.empty((count, pairs), dtype=bool)
    for pair in np.argsort(-gaps.sum(axis=0), kind="stable").tolist():
        turn = lead + random.random(count) - 0.5 < 0  # a coin toss if both halves weigh the same
        turned[:, pair] = turn
        lead += np.where(turn, gaps[:, pair], -gaps[:, pair])
    first, second = np.where(turned, high, low), np.where(turned, low, high)
    if not size % 2:
        both = _alternate(np.concatenate([first, second]), lengths, random)
        return np.concatenate([both[:count], both[count:]], axis=1)
    # The middle sample goes to the first half, which is the larger one wherever a step is cut unevenly.
    place = pairs // 2
    first = np.concatenate([first[:, :place], middle, first[:, place:]], axis=1)
    return np.concatenate([_alternate(first, lengths, random), _alternate(second, lengths, random)], axis=1)
