"""The cost of compression alone: the stages of each method as the hook runs them, over a wire that takes no time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameworm.parallel.compression import exchange
from frameworm.parallel.compression.hook import CASTS, METHODS, OFF, WITH_FEEDBACK
from frameworm.parallel.compression.pipeline import Stages, Wire
from frameworm.parallel.compression.powersgd import PowerSGD
from frameworm.parallel.compression.quantize import Quantizer
from frameworm.parallel.compression.registry import make_codec
from frameworm.parallel.compression.residuals import Named
from frameworm.scaling.profile import Source

SQUARE = (1024, 1024)
MOST_VALUES = 2**22  # larger ones do not fit into a cache anyway
REPETITIONS = 5


class _Done:
    def wait(self) -> None:
        """Return at once: nothing was sent."""


class NoWire:
    """Collectives that send nothing; a rank receives its own data."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_reduce(self, values: Tensor) -> _Done:
        return _Done()

    def all_to_all(self, received: Tensor, sent: Tensor) -> _Done:
        received.copy_(sent)
        return _Done()

    def all_gather(self, received: Tensor, sent: Tensor) -> _Done:
        received.view(self.world_size, -1).copy_(sent.expand(self.world_size, -1))
        return _Done()


def codec_seconds_per_value(
    device: torch.device,
    shapes: Sequence[tuple[int, ...]] = (SQUARE,),
    world_size: int = 2,
    ratio: float = 0.01,
    powersgd_rank: int = 1,
) -> dict[str, float]:
    """Seconds per gradient value to encode and decode on this machine, by method.

    Args:
        device: The device of the gradients.
        shapes: Shapes of the parameters; the largest are used, as far as they make a fair sample.
        world_size: Ranks whose payloads are decoded.
        ratio: Fraction of the values that topk keeps.
        powersgd_rank: Columns of powersgd's matrices.
    """
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=device)) for shape in _sample(shapes))
    named = Named(model)
    names = tuple(named.parameters)
    count = sum(item.numel() for item in model)
    draw = torch.Generator().manual_seed(0)
    fresh = torch.randn(count, generator=draw).to(device)
    wire = cast("Wire", NoWire(world_size))
    costs = {}
    for method in METHODS:
        if method == OFF:
            continue
        scratch, values = exchange.Scratch(), torch.empty_like(fresh)
        residual = torch.zeros(count, device=device) if method in WITH_FEEDBACK else None
        stages = stages_of(method, named, wire, scratch, ratio, powersgd_rank)
        taken = []
        for _ in range(REPETITIONS + 1):
            values.copy_(fresh)
            parcel = exchange.Parcel(0, values, names, residual)
            taken.append(seconds_of(device, lambda run=stages, parcel=parcel: run_stages(run(parcel))))  # type: ignore[misc]
        costs[method] = median(taken[1:]) / count  # without the first, which allocates the buffers
    return costs


def _sample(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The largest shapes up to a limit of values in total; a single shape beyond the limit is cut."""
    chosen: list[tuple[int, ...]] = []
    total = 0
    for shape in sorted((shape for shape in shapes if math.prod(shape)), key=math.prod, reverse=True):
        size = math.prod(shape)
        if size > MOST_VALUES:
            shape = (max(1, MOST_VALUES * shape[0] // size), *shape[1:])
            size = math.prod(shape)
        if total + size > MOST_VALUES and chosen:
            break
        chosen.append(shape)
        total += size
    return chosen or [SQUARE]


def stages_of(
    method: str, named: Named, wire: Wire, scratch: exchange.Scratch, ratio: float, powersgd_rank: int
) -> Callable[[exchange.Parcel], Stages]:
    """The stages of a method, as the hook runs them."""
    if method in CASTS:
        return lambda parcel: exchange.cast(parcel, wire, scratch, CASTS[method])
    if method == "powersgd":
        power = PowerSGD(named, powersgd_rank, seed=0)
        return lambda parcel: power.stages(parcel, wire, scratch)
    codec = make_codec(method, ratio=ratio)
    if isinstance(codec, Quantizer):
        return lambda parcel: exchange.quantized(parcel, wire, scratch, codec)
    return lambda parcel: exchange.sparse(parcel, wire, scratch, codec)


def run_stages(stages: Stages) -> Any:
    """Run the stages of a bucket to the end and return its mean."""
    with torch.no_grad():
        try:
            while True:
                next(stages).wait()
        except StopIteration as ended:
            return ended.value


def seconds_of(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds that an action takes on a device."""
    _wait(device)
    begin = perf_counter()
    action()
    _wait(device)
    return perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def costs_here(source: Source, ratio: float, powersgd_rank: int) -> dict[str, float]:
    """Seconds per value to encode and decode, timed here if this machine has the kind of device that the run used."""
    if source.device is None:
        return {}
    if source.on_cpu:
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        return {}
    shapes = [gradient.shape for gradient in source.profile.gradients if gradient.shape] or [SQUARE]
    return codec_seconds_per_value(device, shapes, 2, ratio, powersgd_rank)
