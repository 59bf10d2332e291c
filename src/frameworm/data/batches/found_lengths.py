"""Lengths of samples that do not declare them: the width of each sample when collated as a batch of one.

A collate function pads if a batch of two samples is as wide as the wider one. If it joins samples end to end, as for
graphs, the batch is as wide as both together; batching by length would then save nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from frameworm.data.batches.counts import token_lengths
from frameworm.data.batches.equal_samples import Collate, Draws, UnfitError, batch_maker, fetcher, stack_alike
from frameworm.data.batches.sizes import MAX_DEPTH, fields_of

LONGEST_S = 30.0  # most time to collate every sample once
_PROBED = 16
_KEPT = 4

Place = tuple[str, int]  # path of a tensor in the batch, and one of its dimensions
Lengths = NDArray[np.int64]


class Padding(NamedTuple):
    """The dimensions in which batches are padded to their longest sample, and the time to collate one sample."""

    places: list[Place]
    per_sample_s: float


_found: OrderedDict[tuple[int, int], tuple[Any, Any, Lengths]] = OrderedDict()


def lengths_of(dataset: Any, collate: Collate | None) -> NDArray[Any]:
    """The lengths that a data set declares, or else those that its collate function reveals, cached.

    Raises:
        UnfitError: It reveals none; the message says why, as a clause about the data set.
    """
    declared = token_lengths(dataset)
    if declared is not None:
        return declared
    key = (id(dataset), id(collate))
    if key not in _found:
        lengths = _find(dataset, collate)
        while len(_found) >= _KEPT:
            _found.popitem(last=False)
        _found[key] = (dataset, collate, lengths)  # keeping the objects keeps their ids valid
    return _found[key][2]


def look_at_padding(dataset: Any, collate: Collate | None) -> Padding:
    """Collate a few samples, alone and in pairs, to see where batches are padded.

    Raises:
        UnfitError: Batches are not padded, or collating every sample would take too long.
    """
    count = len(dataset)
    if batch_maker(dataset, collate) is stack_alike:
        raise UnfitError("has no collate function of its own that pads")
    fetch = fetcher(dataset, collate)
    probed = np.unique(np.linspace(0, count - 1, min(_PROBED, count)).astype(np.int64)).tolist()
    watch = Draws(dataset, collate)
    try:
        began = time.perf_counter()
        alone = [dict(_sizes(fetch([index]))) for index in probed]
        per_sample_s = (time.perf_counter() - began) / len(probed)
        again = [dict(_sizes(fetch([index]))) for index in probed]
        pairs = [
            (one, other, dict(_sizes(fetch([probed[one], probed[other]]))))
            for one, other in itertools.pairwise([*range(len(probed)), 0])
        ]
    except Exception as error:  # the user's code
        raise UnfitError(f"cannot be collated one by one ({type(error).__name__}: {error})") from error
    finally:
        watch.restore()
    if any(sizes.keys() != alone[0].keys() for sizes in [*alone, *(sizes for *_, sizes in pairs)]):
        raise UnfitError("has batches that differ in more than their width")
    if again != alone:
        raise UnfitError("gives samples of another length when they are read again")
    varying = [place for place in alone[0] if len({sizes[place] for sizes in alone}) > 1]
    if not varying:
        raise UnfitError("has samples of one length")
    for one, other, sizes in pairs:
        for place in varying:
            if sizes[place] != max(alone[one][place], alone[other][place]):
                raise UnfitError("has batches that join their samples instead of padding them")
    if per_sample_s * count > LONGEST_S:
        raise UnfitError(f"takes about {per_sample_s * count:.0f} s to collate sample by sample")
    # Token ids and their mask have the same widths; count them once.
    widths = {tuple(sizes[place] for sizes in alone): place for place in reversed(varying)}
    return Padding(list(widths.values()), per_sample_s)


def _find(dataset: Any, collate: Collate | None) -> Lengths:
    """The width of each sample collated alone; the sum if several dimensions are padded."""
    places = look_at_padding(dataset, collate).places
    fetch = fetcher(dataset, collate)
    lengths = np.empty(len(dataset), dtype=np.int64)
    watch = Draws(dataset, collate)
    ends = time.perf_counter() + 2 * LONGEST_S  # samples may be slower than the probed ones suggested
    try:
        for index in range(len(lengths)):
            sizes = dict(_sizes(fetch([index])))
            lengths[index] = sum(sizes[place] for place in places)
            if time.perf_counter() > ends:
                raise UnfitError(f"takes more than {2 * LONGEST_S:.0f} s to collate sample by sample")
    except UnfitError:
        raise
    except Exception as error:  # the user's code
        raise UnfitError(f"cannot be collated one by one (sample {index}: {type(error).__name__}: {error})") from error
    finally:
        watch.restore()
    return lengths


def _sizes(batch: Any, path: str = "", depth: int = 0) -> Iterator[tuple[Place, int]]:
    """The size of each dimension of each tensor in a batch."""
    if isinstance(batch, Tensor):
        yield from (((path, dim), size) for dim, size in enumerate(batch.shape))
    elif depth <= MAX_DEPTH:
        named = batch if isinstance(batch, Mapping) else fields_of(batch)
        items = named.items() if named else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
        for key, value in items:
            yield from _sizes(value, f"{path}[{key!r}]", depth + 1)
