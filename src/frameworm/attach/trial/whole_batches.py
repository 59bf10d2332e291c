"""Index a whole batch of samples at once, instead of fetching them one by one and stacking them.

Only for data sets known to allow it: torch's `TensorDataset`, and a `Subset` of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate


def at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loader's fetch for batches that can be indexed at once; others are fetched as before."""

    @functools.wraps(original)
    def fetch(self: Any, places: Any) -> Any:
        if not (self.auto_collation and can_be_indexed(self.dataset, self.collate_fn)):
            return original(self, places)
        dataset: Any = self.dataset
        chosen = places
        while isinstance(dataset, Subset):
            dataset, chosen = dataset.dataset, [dataset.indices[place] for place in chosen]
        index = torch.tensor(chosen)
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in dataset.tensors]

    return fetch


def can_be_indexed(dataset: Any, collate: Any) -> bool:
    """Whether a loader only stacks rows of tensors."""
    while type(dataset) is Subset and isinstance(dataset.indices, Sequence):
        dataset = dataset.dataset
    return (
        type(dataset) is TensorDataset
        and collate is default_collate
        and all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in dataset.tensors)
    )
