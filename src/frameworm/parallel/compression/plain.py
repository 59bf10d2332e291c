"""Gradients as they are."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist


def mean_of_gradients(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The hook that sends what DDP sends without one, to the last bit."""
    gradients: torch.Tensor = bucket.buffer()
    world_size = dist.get_world_size()
    if gradients.is_sparse:
        gradients.div_(world_size)
    else:
        gradients.mul_(1 / world_size)  # dividing rounds differently where the number is not a power of two
    future = dist.all_reduce(gradients, async_op=True).get_future()
    return cast("torch.futures.Future[torch.Tensor]", future.then(_first_value))


def _first_value(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
