"""One rank of prediction_error.py: models that compute or sleep, and the tasks that its parent hands out."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.observe.clocks.gradient_times import LAST_STEP, GradientWatch
from frameworm.observe.clocks.phases import BACKWARD, FORWARD

# Width and number of layers, and the batch of one that computes or the seconds of a micro-batch of one that sleeps.
KINDS: dict[str, dict[str, Any]] = {
    "computing-large": {"width": 724, "layers": 8, "batch": 64},
    "computing-small": {"width": 256, "layers": 4, "batch": 128},
    "sleeping-large": {"width": 724, "layers": 8, "forward_s": 0.1, "backward_s": 0.2},
    "sleeping-small": {"width": 256, "layers": 4, "forward_s": 0.012, "backward_s": 0.024},
    # As short as a captured step: what is left of it is sending.
    "sleeping-captured": {"width": 256, "layers": 2, "forward_s": 0.0001, "backward_s": 0.0002},
}
PROFILED_STEPS = LAST_STEP + 4


class _Sleep(torch.autograd.Function):
    """Takes its time in forward and in backward, and has a gradient ready that cost nothing."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, gradient: Tensor, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.gradient, ctx.backward_s = gradient, backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return gradients[0], ctx.gradient, None, None, None


class SleepingLayer(nn.Module):
    """A layer with parameters that sleeps instead of computing: any number of ranks share the cores of one machine."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self._gradient = torch.full((width, width), 1e-3)
        self._times = (forward_s, backward_s)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(value, self.weight, self._gradient, *self._times)
        return found


def build(kind: str) -> tuple[nn.Module, Tensor]:
    """A model and its input."""
    shape = KINDS[kind]
    width, layers = shape["width"], shape["layers"]
    torch.manual_seed(0)
    if "batch" not in shape:
        parts: list[nn.Module] = [
            SleepingLayer(width, shape["forward_s"] / layers, shape["backward_s"] / layers) for _ in range(layers)
        ]
        return nn.Sequential(*parts), torch.zeros(1, requires_grad=True)
    chain: list[nn.Module] = []
    for _ in range(layers):
        chain += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*chain), torch.randn(shape["batch"], width)


class Training:
    """A model that trains, alone or with the other ranks."""

    def __init__(self, kind: str, setting: dict[str, Any] | None) -> None:
        self.model, self._input = build(kind)
        self._wrapped: nn.Module = self.model
        self._enabled: Any = None
        self._accumulation = 1
        self.mark: Callable[[str], None] = lambda name: None
        if setting is not None:
            self._accumulation = setting["accumulation"]
            # Where nobody names a size the first bucket is smaller, as in every training that does not name one.
            named = {} if setting["bucket_mb"] == 25 else {"bucket_cap_mb": setting["bucket_mb"]}
            ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, **named)
            self._wrapped = ddp
            if setting["method"] != "off":
                from frameworm.distributed import enable_gradient_compression

                self._enabled = enable_gradient_compression(ddp, dist.get_rank(), setting["method"])
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    @contextlib.contextmanager
    def marking(self, mark: Callable[[str], None]) -> Iterator[None]:
        """Tell the phases to `mark`."""
        self.mark = mark
        yield
        self.mark = lambda name: None

    def step(self) -> None:
        """One optimizer step."""
        for number in range(self._accumulation):
            last = number == self._accumulation - 1
            with contextlib.nullcontext() if last else self._wrapped.no_sync():  # type: ignore[operator]
                loss = self._wrapped(self._input).square().mean()
                self.mark(FORWARD)
                loss.backward()
                self.mark(BACKWARD)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """End what it started."""
        if self._enabled is not None:
            self._enabled.close()


def profile(kind: str) -> dict[str, Any]:
    """Steps of one device, on every host at the same time: what a run on one of these hosts would record."""
    training = Training(kind, None)
    marks: list[tuple[str, float]] = []
    watch = GradientWatch(
        training.model, torch.device("cpu"), training.marking, lambda name: marks.append((name, perf_counter()))
    )
    for _ in range(3):
        training.step()
    dist.barrier()
    times, forwards, backwards = [], [], []
    for number in range(1, PROFILED_STEPS + 1):
        if not watch.over:
            watch.before_step(number)
        marks.clear()
        begin = perf_counter()
        training.step()
        times.append(perf_counter() - begin)
        if len(marks) == 2:
            forwards.append(marks[0][1] - begin)
            backwards.append(marks[1][1] - marks[0][1])
    found = watch.result()
    assert found.measured, found.note
    return {"gradients": asdict(found), "times": times, "forwards": forwards, "backwards": backwards}


def timed(training: Training) -> float:
    """Seconds of a step that all begin together, on the slowest rank."""
    dist.barrier()
    begin = perf_counter()
    training.step()
    took = torch.tensor([perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(kind: str, setting: dict[str, Any], limit_s: float, most: int) -> list[float]:
    """Step times of a setting, as many as fit; the first ones, in which DDP arranges its buckets, do not count."""
    training = Training(kind, setting)
    try:
        for _ in range(2):
            timed(training)
        began, times = perf_counter(), []
        while len(times) < most:
            times.append(timed(training))
            enough = torch.tensor([float(len(times) >= 3 and perf_counter() - began > limit_s)])
            dist.all_reduce(enough, op=dist.ReduceOp.MAX)
            if enough > 0:
                break
        return times
    finally:
        training.close()
        del training
        gc.collect()


def probe(budget_s: float) -> dict[str, Any]:
    """The network between the ranks."""
    from frameworm.parallel.network.probe import probe_network

    sizes = tuple(256 * 4**power for power in range(10))
    kinds = ("all_reduce", "all_gather", "all_to_all")
    return probe_network(sizes=sizes, collectives=kinds, budget_s=budget_s).to_dict()


def codecs(kind: str) -> dict[str, float]:
    """Seconds per value of coding and decoding the gradients of a model, by method; all hosts at the same time."""
    from frameworm.parallel.compression.codec_cost import codec_seconds_per_value

    shapes = [tuple(item.shape) for item in build(kind)[0].parameters()]
    dist.barrier()
    return codec_seconds_per_value(torch.device("cpu"), shapes, dist.get_world_size())


def main() -> int:
    """Answer tasks until there are none."""
    torch.set_num_threads(1)
    from frameworm.launch.process_group import cleanup, setup_ddp

    setup_ddp(backend="gloo", timeout_s=300)
    tasks: dict[str, Callable[..., Any]] = {"profile": profile, "measure": measure, "probe": probe, "codecs": codecs}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "end":
            break
        print(json.dumps(tasks[name](*arguments)), flush=True)
    cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
