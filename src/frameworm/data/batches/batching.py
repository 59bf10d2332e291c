"""How samples of unequal length are batched: what `data.batching` means for a data set and its sample order."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch.utils.data import Subset

from frameworm.data.batches.arrange import MOST_WIDTHS, balanced, bucketed, widths
from frameworm.data.batches.counts import token_lengths
from frameworm.data.batches.equal_samples import Collate, UnfitError
from frameworm.data.batches.found_lengths import lengths_of
from frameworm.data.batches.packed import packable
from frameworm.data.samples.sampling import Arrange, Order
from frameworm.data.samples.workers import base_of
from frameworm.errors import ConfigError

Batching = Literal["padded", "bucketed", "packed"]


def batching_of(
    dataset: Any,
    batching: Batching,
    *,
    balance: bool,
    shuffle: bool,
    own_sampler: bool,
    collate: Collate | None = None,
) -> Batching:
    """The batching actually used; full blocks have nothing to pad, so they are simply stacked.

    Args:
        dataset: Map-style; a stream has no known lengths.
        batching: The batching asked for.
        balance: Whether steps of equal token counts were asked for.
        shuffle: Whether the order may be changed.
        own_sampler: Whether the user's own sampler decides the order.
        collate: Makes a batch of samples; reveals their lengths if the data set does not declare them.

    Raises:
        ConfigError: The data set or its order does not allow it.
    """
    if batching == "padded" and not balance:
        return batching
    if getattr(base_of(dataset), "blocks_are_full", False):
        return "padded"
    name = type(base_of(dataset)).__name__
    asked = "balance" if batching == "padded" else f"batching {batching}"
    if own_sampler:
        raise ConfigError(
            f"{asked}: a sampler of your own decides the order of the samples; leave it out, or use batching padded "
            "without balance"
        )
    if batching == "packed" and not packable(dataset):
        raise ConfigError(
            f"batching packed: {name} does not say how its samples lie end to end (it has no method packing()); use "
            f"{'bucketed or padded' if token_lengths(dataset) is not None else 'padded'}"
        )
    if not shuffle and (balance or batching == "bucketed"):
        raise ConfigError(
            f"{asked}: it puts the samples in an order of its own, and shuffle is off; turn shuffle on, or use "
            "batching padded without balance"
        )
    try:
        lengths_of(dataset, collate)
    except UnfitError as error:
        raise ConfigError(
            f"{asked}: {name} does not declare the lengths of its samples, and it {error}; give it an attribute "
            "token_lengths, or use batching padded without balance"
        ) from error
    return batching


def arrangement(
    dataset: Any,
    batching: Batching,
    balance: bool,
    global_batch: int,
    seed: int,
    *,
    mixed_lengths: bool = False,
    ranks: int = 1,
    collate: Collate | None = None,
) -> Arrange | None:
    """The function that rearranges an epoch's random order; None if the order stays as it is."""
    if (not balance and batching != "bucketed") or getattr(base_of(dataset), "blocks_are_full", False):
        return None
    lengths = lengths_of(dataset, collate)
    function = balanced if balance else functools.partial(bucketed, mixed=mixed_lengths, ranks=ranks)
    return functools.partial(_arranged, function, lengths, global_batch, seed)


def narrowed(dataset: Any, batching: Batching, most_widths: int | None) -> Any:
    """The data set restricted to batches of few different widths, if it supports that.

    Args:
        dataset: One with `with_widths` and `with_width_step`, such as `TextDataset`, or subsets of it.
        batching: How its samples are batched.
        most_widths: Most different widths; None: no limit if padded, `MOST_WIDTHS` if bucketed.
    """
    base = base_of(dataset)
    if batching == "packed" or (batching == "padded" and most_widths is None) or not hasattr(base, "with_widths"):
        return dataset
    if batching == "bucketed":
        lengths = token_lengths(base)
        assert lengths is not None
        return _on_base(dataset, base.with_widths(widths(lengths, most_widths or MOST_WIDTHS)))
    assert most_widths is not None
    return _on_base(dataset, base.with_width_step(-(-base.max_seq_len // most_widths)))


def _on_base(dataset: Any, base: Any) -> Any:
    """Apply the same nested subsets to another data set."""
    return Subset(_on_base(dataset.dataset, base), dataset.indices) if isinstance(dataset, Subset) else base


def _arranged(function: Any, lengths: Any, global_batch: int, seed: int, order: Order, epoch: int) -> Order:
    arranged: Order = function(order, lengths, global_batch, seed=seed, epoch=epoch)
    return arranged
