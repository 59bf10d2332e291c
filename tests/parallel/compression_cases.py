"""What the tests of the compression hook share: a bucket without DDP, a small model, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.parallel.compression.hook import CompressionHook

LOSSY = ("fp16", "bf16", "int8", "int4", "topk", "powersgd")


class FakeBucket:
    """As DDP hands one to a hook."""

    def __init__(self, values: Tensor, parameters: Sequence[Tensor], index: int = 0, last: bool = True) -> None:
        self._values, self._parameters, self._index, self._last = values, list(parameters), index, last

    def buffer(self) -> Tensor:
        return self._values

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


class Holder(nn.Module):
    """Parameters of given shapes and nothing else."""

    def __init__(self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in shapes])


def reduce(hook: CompressionHook, model: Holder, buckets: Sequence[Tensor]) -> list[Tensor]:
    """One step with a bucket per parameter."""
    parameters = list(model.parameters())
    futures = [
        hook(None, FakeBucket(values, [parameters[index]], index, index == len(buckets) - 1))
        for index, values in enumerate(buckets)
    ]
    return [future.wait() for future in futures]


class Net(nn.Module):
    """Layers of unequal sizes, one of them not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 65)
        self.second = nn.Linear(65, 130)
        self.spare = nn.Linear(130, 130)
        self.last = nn.Linear(130, 3, bias=False)

    def forward(self, inputs: Tensor, skip: bool = False) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        if not skip:
            hidden = hidden + torch.tanh(self.spare(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


def fingerprint(model: nn.Module) -> str:
    """Of all parameters, to the last bit."""
    digest = hashlib.sha256()
    for item in model.parameters():
        digest.update(item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Training:
    """A model, DDP and a hook, that take steps."""

    def __init__(self, method: str, *, rank: int, model: nn.Module | None = None, **settings: Any) -> None:
        ddp = {name: settings.pop(name) for name in ("find_unused_parameters", "static_graph") if name in settings}
        torch.manual_seed(0)
        self.model = Net() if model is None else model
        self.hook = CompressionHook(method, model=self.model, **settings)
        self.wrapped = DistributedDataParallel(
            self.model,
            bucket_cap_mb=0.03,
            gradient_as_bucket_view=True,
            **ddp,  # type: ignore[arg-type]
        )
        self.wrapped.register_comm_hook(None, self.hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self._rank = rank

    def step(self, number: int, *, skip: bool = False, micro_batches: int = 1) -> float:
        draw = torch.Generator().manual_seed(1000 * number + self._rank)
        total = 0.0
        for micro in range(micro_batches):
            inputs = torch.randn(8, 20, generator=draw)
            target = inputs[:, :3].sin()
            if micro < micro_batches - 1:
                with self.wrapped.no_sync():
                    (nn.functional.mse_loss(self.wrapped(inputs, skip), target) / micro_batches).backward()
                continue
            loss = nn.functional.mse_loss(self.wrapped(inputs, skip), target)
            (loss / micro_batches).backward()
            total = float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
