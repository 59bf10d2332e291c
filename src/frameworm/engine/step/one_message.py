"""Send a step's gradients as one message after backward, where DDP's buckets could hide next to nothing.

DDP copies every gradient into a bucket with a separate kernel. In a step replayed as one graph that is noticeable: on
one H200 the copies took 68 of the 327 microseconds of a small classifier. Here one kernel copies this rank's share of
all gradients into one tensor, one collective sums it over the ranks, and the update reads the gradients from it. They
may also be gradients of half-precision weights (half_weights), which DDP does not support. Each value is rounded as DDP
rounds it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from frameworm.engine.optim.adamw_kernel import GatherGradients, is_dense
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.errors import ModelError
from frameworm.observe.clocks.communication import BucketRecorder
from frameworm.parallel.compression.plain import take_share
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private import tensors

_ALIGNED = 128  # elements; each gradient is aligned like a separate tensor
# Beside the message there are the gradients that backward computes and DDP's buckets, which stay allocated.
_MOST_BYTES = 2**28


class OneMessage:
    """Sends all gradients at once.

    Args:
        named: The model's parameters by name; the trained ones must be fp32.
        strategy: Sums over the ranks.
        buckets: Records when the message is sent; None if not needed.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], strategy: Strategy, buckets: BucketRecorder | None
    ) -> None:
        self._strategy = strategy
        self._buckets = buckets
        self._named = [(name, item) for name, item in named if item.requires_grad]
        begins = [0]
        for _, item in self._named:
            begins.append(begins[-1] + -(-item.numel() // _ALIGNED) * _ALIGNED)
        self._message = torch.zeros(begins[-1], device=strategy.device)
        self._places: list[Tensor] = [
            self._message.as_strided(item.shape, item.stride(), begin) for begin, (_, item) in zip(begins, self._named)
        ]
        self._gather = GatherGradients(self._places) if GatherGradients.supports(self._message.device) else None

    @staticmethod
    def suits(strategy: Strategy, model: nn.Module) -> bool:
        """Whether this applies to the model's gradients and DDP would hardly be faster; the same on all ranks."""
        trained = [item for item in model.parameters() if item.requires_grad]
        small = sum(item.numel() * item.element_size() for item in trained) <= _MOST_BYTES
        plain = all(item.dtype == torch.float32 and is_dense(item) for item in trained)
        return strategy.hides_little and small and plain

    @torch.no_grad()
    def send(self, halves: HalfWeights | None) -> None:
        """Replace the gradients of all parameters by their mean over the ranks.

        Args:
            halves: Half-precision weights, whose gradients count as those of their parameters; None if there are none.

        Raises:
            ModelError: If a parameter has no gradient.
        """
        gradients: list[Tensor] = []
        for name, parameter in self._named:
            half = None if halves is None else halves.beside(parameter)
            gradient = parameter.grad
            if half is not None and half.grad is not None:
                gradient = half.grad if gradient is None else gradient.add_(half.grad)
                half.grad = None
            if gradient is None:
                raise ModelError(
                    f"a step did not use parameter {name}, which DDP refuses; set parallel.find_unused_parameters=true "
                    "(or find_unused_parameters=True), or remove it"
                )
            gradients.append(gradient if gradient.layout == torch.strided else gradient.to_dense())
        if self._gather is None or not self._gather(gradients, 1 / self._strategy.world_size):
            self._copy(gradients)
            take_share(self._message, self._strategy.world_size)
        sent = None if self._buckets is None else self._buckets.ready_at_once(self._message)
        self._strategy.sum_over_ranks(self._message)
        if self._buckets is not None and sent is not None:
            self._buckets.ended(sent)
        for (_, parameter), place in zip(self._named, self._places):
            parameter.grad = place

    def _copy(self, gradients: list[Tensor]) -> None:
        """Copy all gradients to their places, those of one dtype at a time."""
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, gradient in zip(self._places, gradients):
            targets, sources = by_dtype.setdefault(gradient.dtype, ([], []))
            targets.append(place)
            sources.append(gradient)
        for targets, sources in by_dtype.values():
            tensors.foreach_copy_(targets, sources)
