"""The data of a trial: the longest samples first and last, typical ones in between."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Subset

from frameworm.config.schema import Config
from frameworm.data.batches.counts import token_lengths
from frameworm.data.samples.streams import is_stream
from frameworm.models.workloads import Workload
from frameworm.torch_private.tensors import tree_leaves

_LOOKED_AT = 1024
_LOOKING_S = 3.0


def sample_count(data: Any) -> int | None:
    """Number of samples of a data set; None for a stream or a ready-made loader."""
    return None if is_stream(data) or not hasattr(data, "__len__") else len(data)


def rehearsal(config: Config, workload: Workload, steps: int, world_size: int) -> tuple[Config, Workload]:
    """A workload that shows within a few steps what training will meet in many, and the config to run it.

    The first and last third of the steps take the longest samples of the data set, the others typical ones, so that
    widths change as they do in training. Validation takes one batch per rank of the longest.

    Args:
        config: Resolved; its `max_steps` limits the run.
        workload: Its data may be a stream, which is used as it is.
        steps: Steps to provide data for.
        world_size: Ranks that share them.
    """
    training, data = config.training, config.data
    assert training.global_batch is not None
    assert isinstance(data.eval_batch, int)
    wanted = steps * training.global_batch
    samples = sample_count(workload.train_data)
    train, validation, epochs, shuffle = workload.train_data, workload.val_data, steps, data.shuffle
    if samples:
        epochs = -(-wanted // samples)
        # Packed batches all have the size of the fullest in the first epochs, which requires all samples.
        if data.batching != "packed":
            longest = longest_first(train)
            edge = steps // 3 * training.global_batch
            mixed = np.random.default_rng(config.seed).permutation(samples)
            places = [longest[: training.global_batch], mixed, longest[: training.global_batch]]
            counts = (edge, wanted - 2 * edge, edge)
            train = Subset(train, np.concatenate([np.resize(*part) for part in zip(places, counts)]).tolist())
            epochs = 1
            shuffle = data.shuffle and (data.batching != "padded" or data.balance is True)
    if sample_count(validation):
        validation = Subset(validation, longest_first(validation)[: data.eval_batch * world_size].tolist())
    config = config.model_copy(
        update={
            "training": training.model_copy(update={"epochs": max(epochs, training.epochs)}),
            "data": data.model_copy(update={"shuffle": shuffle}),
        }
    )
    changed = Workload(workload.model, train, validation, workload.loss_fn, workload.collate_fn)
    return config, changed


def longest_first(data: Any) -> npt.NDArray[Any]:
    """Indices of the samples, longest first; equal lengths in the order of the data set."""
    lengths = token_lengths(data)
    if lengths is None:
        lengths = _sizes(data)
    return np.argsort(-lengths, kind="stable")


def _sizes(data: Any) -> npt.NDArray[Any]:
    """Elements per sample of a data set without declared lengths; samples that were not read count as 0."""
    count = len(data)
    sizes = np.zeros(count, dtype=np.int64)
    until = monotonic() + _LOOKING_S
    for place in np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int)):
        sizes[place] = sum(_elements(item) for item in tree_leaves(data[int(place)]))
        if monotonic() > until:
            break
    return sizes


def _elements(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel()
    if isinstance(item, np.ndarray):
        return int(item.size)
    return len(item) if isinstance(item, str) else 1
