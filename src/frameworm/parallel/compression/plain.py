"""Gradients as they are."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of one gradient of the whole model."""
    return sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)


def mean_of_gradients(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """The hook that sends what DDP sends without one, to the last bit."""
    gradients = take_share(bucket.buffer(), dist.get_world_size())
    return first_of(dist.all_reduce(gradients, async_op=True))


def take_share(gradients: Tensor, world_size: int) -> Tensor:
    """This rank's part of the mean, in place and rounded as DDP rounds it."""
    if gradients.is_sparse:
        return gradients.div_(world_size)
    return gradients.mul_(1 / world_size)  # dividing rounds differently where the number is not a power of two


def first_of(work: Any) -> torch.futures.Future[Tensor]:
    """The future of the tensor that a collective was given."""
    return cast("torch.futures.Future[Tensor]", work.get_future().then(_first_value))


def _first_value(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
