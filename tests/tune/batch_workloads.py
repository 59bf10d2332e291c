"""Workloads for the batch-size finder: a model that takes 128 MiB per sample, and ways to go wrong.

What it takes is never touched: it fills the address space, which is limited, and no memory.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config

SAMPLE_BYTES = 2**27
SAMPLES = 128
HOG_BYTES = 2**31
_kept: list[Any] = []


class Keep(torch.autograd.Function):
    """Keeps a tensor of `SAMPLE_BYTES` per sample from forward to backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, samples: int) -> Tensor:
        """The value."""
        ctx.save_for_backward(torch.empty(samples, SAMPLE_BYTES // 4))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient."""
        assert len(ctx.saved_tensors) == 1
        return gradient, None


class Eater(nn.Module):
    """Needs `SAMPLE_BYTES` per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        """A scalar: the loss."""
        kept: Tensor = Keep.apply(self.scale, len(batch))
        return kept.mean()


class Killed(Eater):
    """The first process to come by is killed."""

    def forward(self, batch: Tensor) -> Tensor:
        """As above."""
        if type(batch) is Tensor and once("killed"):  # not in the planner's dry run
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


class Stuck(Eater):
    """Rank 1 does not come to its first collective, once; the other rank waits for it."""

    def forward(self, batch: Tensor) -> Tensor:
        """As above."""
        if os.environ.get("RANK") == "1" and once("stuck"):
            time.sleep(600)
        return super().forward(batch)


class Broken(Eater):
    """Cannot be run."""

    def forward(self, batch: Tensor) -> Tensor:
        """Raises."""
        raise ValueError("this model is broken")


def once(name: str) -> bool:
    """True for the first to ask, whatever the process."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def data() -> list[Tensor]:
    """Samples that say nothing."""
    return [torch.zeros(1) for _ in range(SAMPLES)]


def eater(config: Config) -> Any:
    """The model with validation data."""
    return Eater(), data(), data()[:8]


def hog_on_rank_1(config: Config) -> Any:
    """The same, with half of the memory gone on one rank."""
    if os.environ.get("RANK") == "1":
        _kept.append(torch.empty(HOG_BYTES, dtype=torch.uint8))
    return eater(config)


def killed(config: Config) -> Any:
    """See `Killed`."""
    return Killed(), data(), None


def stuck(config: Config) -> Any:
    """See `Stuck`."""
    return Stuck(), data(), None


def broken(config: Config) -> Any:
    """See `Broken`."""
    return Broken(), data(), None


def config_of(workload: str, **training: Any) -> Config:
    """A config for one of the functions above."""
    values = {
        "name": workload,
        "workload": f"batch_workloads:{workload}",
        "data": {"num_workers": 0},
        "gpu": {"device": "cpu"},
        "training": {"epochs": 1, "schedule": "constant", **training},
    }
    return load_config_from_mapping(values, environ={})


def train_an_epoch(micro_batch: int, limit_bytes: int) -> None:
    """Body of a process: a whole epoch with that micro-batch, under the limit of the trials; memory short: code 7."""
    from frameworm.engine.run import run
    from frameworm.hardware.host import address_space_bytes
    from frameworm.tune.processes.batch_trial import map_libraries, out_of

    map_libraries()
    mapped = address_space_bytes()[0] or 0
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limit_bytes,) * 2)
    try:
        record = run(config_of("eater", micro_batch=micro_batch, global_batch=micro_batch), out=None)
    except Exception as error:
        os._exit(7 if out_of(error) == "host_oom" else 1)
    os._exit(0 if record.steps == -(-SAMPLES // micro_batch) else 2)
