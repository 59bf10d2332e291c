"""Gradients sent uncompressed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.torch_private.tensors import foreach_mul_

LARGE = 2**16  # values; for smaller gradients a Python call costs more than another pass over memory
SAME_TOGETHER = (torch.float32, torch.float64)  # for shorter types foreach_mul_ rounds differently


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients of a model."""
    return sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)


def mean_of_gradients(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook that is bitwise equal to DDP without one; its state may be `EarlyShares`."""
    return first_of(dist.all_reduce(weighted_part(state, bucket, dist.get_world_size()), async_op=True))


def weighted_part(state: Any, bucket: Any, world_size: int) -> Tensor:
    """Turn a bucket into this rank's part of the mean, in place."""
    if isinstance(state, EarlyShares):
        return state.complete(bucket)
    return take_share(bucket.buffer(), world_size)


def take_share(gradients: Tensor, world_size: int) -> Tensor:
    """Divide gradients by the world size in place, rounding as DDP does."""
    if gradients.is_sparse:
        return gradients.div_(world_size)
    return gradients.mul_(1 / world_size)  # dividing rounds differently if the number is not a power of two


def first_of(work: Any) -> torch.futures.Future[Tensor]:
    """The future of the tensor passed to a collective."""
    return cast("torch.futures.Future[Tensor]", work.get_future().then(_first_value))


def _first_value(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


@dataclass
class _Buffer:
    """The memory of a bucket, and what is known about it."""

    address: int
    learned: bool = False
    large: frozenset[int] = frozenset()  # ids of the parameters whose gradients can be scaled early
    small: list[Tensor] = field(default_factory=list)  # the other gradients


class EarlyShares:
    """Scales each gradient by 1 / world size while it is put into its bucket, as DDP does without a hook.

    With a hook DDP only copies, and the hook's own pass over a full bucket, which has left the cache by then, costs a
    CPU time. So a large gradient is multiplied into its place in the bucket as soon as it exists; DDP finds it in place
    and copies nothing. The hook scales the rest: small gradients, those of the first steps, and all gradients if they
    are not views of buckets, on a GPU, and with a static graph, in which a gradient may come in parts.

    It is passed to DDP as the state of the hook, lives as long as the DDP model, and needs the model to be called as
    `ddp(...)`.

    Args:
        ddp: The model that sends its gradients through the hook, before its first backward pass.
        wanted: Returns whether the coming backward pass sends uncompressed gradients.
    """

    def __init__(self, ddp: DistributedDataParallel, wanted: Callable[[], bool] | None = None) -> None:
        self._world_size: int = dist.get_world_size(ddp.process_group)
        self._wanted = wanted
        self._expecting = False  # whether DDP will put the next gradients into its buckets
        self._places: dict[int, Tensor] = {}  # by the id of the parameter
        self._buffers: dict[int, _Buffer] = {}  # by the index of the bucket
        self._taken: set[int] = set()  # ids of the parameters whose gradients were scaled in this backward pass
        if self._world_size == 1 or not ddp.gradient_as_bucket_view or ddp.mixed_precision is not None:
            return
        accumulated = _weakly(weakref.ref(self))
        handles = [
            item.register_post_accumulate_grad_hook(accumulated)
            for item in ddp.parameters()
            if item.requires_grad and item.numel() >= LARGE and item.device.type == "cpu"
        ]
        if handles:
            # The model may outlive its DDP wrapper and be wrapped again.
            weakref.finalize(self, _remove, handles).atexit = False
            ddp.register_forward_hook(self._after_forward)

    def complete(self, bucket: Any) -> Tensor:
        """Turn a full bucket into this rank's part of the mean, in place."""
        values: Tensor = bucket.buffer()
        known = self._buffers.get(bucket.index())
        if known is not None and known.large and known.large <= self._taken and known.address == values.data_ptr():
            self._take(known.small)
            self._end_step(bucket)
            return values
        taken, rest = self._parts(bucket)
        if taken:
            self._take(rest)
        else:
            take_share(values, self._world_size)
        self._end_bucket(bucket, values)
        return values

    def undo(self, bucket: Any) -> None:
        """Undo the early scaling in a full bucket."""
        taken, _ = self._parts(bucket)
        if taken:
            foreach_mul_(taken, self._world_size)
        self._end_bucket(bucket, bucket.buffer())

    def _parts(self, bucket: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Split a bucket's gradients into scaled and unscaled ones; two empty lists if none was scaled."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        known = [id(item) in self._taken for item in bucket.parameters()] if self._taken else []
        if any(known):
            for part, is_taken in zip(bucket.gradients(), known):
                parts[not is_taken].append(part)
        return parts

    def _take(self, parts: list[Tensor]) -> None:
        if parts and parts[0].dtype in SAME_TOGETHER:
            foreach_mul_(parts, 1 / self._world_size)
            return
        for part in parts:
            take_share(part, self._world_size)

    def _end_bucket(self, bucket: Any, values: Tensor) -> None:
        if not values.is_sparse and values.device.type == "cpu":
            self._learn(bucket, values)
        self._end_step(bucket)

    def _end_step(self, bucket: Any) -> None:
        if bucket.is_last():
            self._expecting = False
            self._taken.clear()

    def _learn(self, bucket: Any, values: Tensor) -> None:
        """Remember where gradients lie once a bucket was seen twice: DDP reallocates them after a first step."""
        index, address = bucket.index(), values.data_ptr()
        known = self._buffers.get(index)
        if known is None or known.address != address:
            self._buffers[index] = _Buffer(address)
            for item in bucket.parameters():
                self._places.pop(id(item), None)
        elif not known.learned:
            known.learned = True
            large = set()
            for item, part in zip(bucket.parameters(), bucket.gradients()):
                # DDP lays out a gradient like its parameter, which these views do not follow.
                if item.numel() >= LARGE and item.is_contiguous():
                    self._places[id(item)] = part
                    large.add(id(item))
                else:
                    known.small.append(part)
            known.large = frozenset(large)

    def _after_forward(self, ddp: Any, inputs: Any, output: Any) -> None:
        """Expect gradients if DDP does."""
        if not torch.is_grad_enabled() or not ddp.require_backward_grad_sync:
            return
        self._taken.clear()  # left over from a backward pass that failed
        self._expecting = not ddp.static_graph and (self._wanted is None or self._wanted())

    def accumulated(self, parameter: Tensor) -> None:
        """Called when a gradient is complete, before DDP sees it."""
        place = self._places.get(id(parameter)) if self._expecting else None
        gradient = parameter.grad
        if place is None or gradient is None:
            return
        if gradient.is_sparse or gradient.requires_grad or gradient.dtype != place.dtype:
            return
        if gradient.data_ptr() == place.data_ptr():
            gradient.div_(self._world_size)  # DDP divides here, and multiplies below
        else:
            torch.mul(gradient, 1 / self._world_size, out=place)
            parameter.grad = place.detach()
        self._taken.add(id(parameter))


def _weakly(shares: weakref.ref[EarlyShares]) -> Callable[[Tensor], None]:
    """A hook that does not keep the `EarlyShares` alive."""

    def accumulated(parameter: Tensor) -> None:
        alive = shares()
        if alive is not None:
            alive.accumulated(parameter)

    return accumulated


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
