"""Measure the network between the actual ranks: collectives of many sizes, within a time budget.

A repetition is a barrier and one collective, and counts the slowest rank's time. Sizes and collectives are interleaved,
so that a disturbance affects all of them alike, and medians are taken. All ranks must do the same, so decisions that
depend on the clock use rank 0's.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from frameworm.errors import EnvironmentSetupError, NetworkModelError
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.scaling.network import COLLECTIVES, NetworkModel, NetworkPoint

SIZES = tuple(256 * 4**power for power in range(10))  # 256 bytes to 64 MiB
BUDGET_S = 10.0
REPETITIONS = 25

QUICK_SIZES = (1024, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
QUICK_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
QUICK_BUDGET_S = 0.3
QUICK_REPETITIONS = 5

# A size is measured if this many repetitions should fit into the time left; the first two always are.
FEWEST_REPETITIONS = 3
_FEWEST_SIZES = 2

# Measurements that take less than this fraction of the budget are repeated in every round, the rest in every third:
# short times vary most and cost least.
_SHORT_SHARE = 1e-3
_SECOND_LOOK_SHARE = 0.3
_LONG_EVERY = 3

_FLOAT_BYTES = 4

Trial = tuple[str, int]  # a collective and a size in bytes


def probe_network(
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] = SIZES,
    collectives: Sequence[str] = COLLECTIVES,
    budget_s: float = BUDGET_S,
    repetitions: int = REPETITIONS,
    fewest_repetitions: int = FEWEST_REPETITIONS,
    device: torch.device | None = None,
    tell: Callable[[float], None] | None = None,
) -> NetworkModel:
    """Measure collectives between the ranks of a group. Every rank must call it with the same arguments.

    Args:
        group: The ranks; None: all.
        sizes: In bytes, as `scaling.network` counts them; rounded up so that they divide evenly among the ranks.
        collectives: Some of all_reduce (float32), all_gather, all_to_all and broadcast (bytes).
        budget_s: About how long it may take. Sizes that would not fit are skipped, except the two smallest.
        repetitions: Most repetitions of each size and collective.
        fewest_repetitions: Skip a size unless this many repetitions should fit into the time left.
        device: Where the tensors are; None: the current GPU for nccl and the CPU for gloo.
        tell: Called with the fraction of the budget that is spent.

    Returns:
        The measured network; times and points are the same on every rank.

    Raises:
        EnvironmentSetupError: There is no group, or it has only one rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
        raise EnvironmentSetupError(
            "a network is between two ranks or more: start them with `frameworm network --nproc-per-node 2`, "
            "torchrun or srun"
        )
    ranks = _Ranks(group, device)
    sizes = sorted({ranks.shareable(size) for size in sizes})
    if not sizes or not collectives or repetitions < 1:
        raise NetworkModelError("a probe needs a size, a collective and a repetition at least")
    begin = perf_counter()
    times: dict[Trial, list[float]] = {}
    processor_times: dict[Trial, list[float]] = {}

    def measure(trials: Sequence[Trial]) -> float:
        """Measure each trial once; returns the time left on rank 0's clock."""
        taken = [ranks.time_s(collective, size) for collective, size in trials]
        both = [value for pair in taken for value in pair]
        *slowest, left_s = ranks.largest([*both, budget_s - (perf_counter() - begin)])
        for trial, time_s, processor_s in zip(trials, slowest[::2], slowest[1::2]):
            times.setdefault(trial, []).append(time_s)
            processor_times.setdefault(trial, []).append(processor_s)
        if tell is not None:
            tell(min(1.0, 1 - left_s / budget_s))
        return left_s

    ranks.warm_up(collectives, sizes[0])
    left_s, cost_s = budget_s, 0.0
    taken_in: list[int] = []
    for size in sizes:
        if len(taken_in) >= _FEWEST_SIZES:
            # Time grows at most in proportion to size; because of latency this estimate is on the safe side.
            expected_s = cost_s * size / taken_in[-1]
            if expected_s * fewest_repetitions > left_s:
                break
        if ranks.on_cuda:
            ranks.warm_up(collectives, size)  # NCCL chooses and connects its algorithms by size
        trials = [(collective, size) for collective in collectives]
        left_s = measure(trials)
        taken_in.append(size)
        cost_s = _cost_s(times, trials)
        if repetitions > 1 and cost_s < left_s * _SECOND_LOOK_SHARE:
            # The prediction for the next size must not rest on one moment in which a core was busy.
            left_s = measure(trials)
            cost_s = _cost_s(times, trials)
    for number in itertools.count():
        everything = number % _LONG_EVERY == 0
        trials = _next_round(times, left_s, repetitions, None if everything else budget_s * _SHORT_SHARE)
        if trials:
            left_s = measure(trials)
        elif everything:
            break
    return NetworkModel(
        points={
            collective: tuple(
                NetworkPoint.from_times(size, times[collective, size], processor_times[collective, size])
                for size in taken_in
            )
            for collective in collectives
        },
        world_size=ranks.world_size,
        hosts=ranks.count_hosts(),
        backend=str(dist.get_backend(group)),
        device=ranks.device.type,
        environment=environment_fingerprint(ranks.device),
    )


def quick_probe(
    group: dist.ProcessGroup | None = None, budget_s: float = QUICK_BUDGET_S, device: torch.device | None = None
) -> NetworkModel:
    """Measure latency and bandwidth in about 0.3 s: enough to choose how to send gradients.

    Large sizes are skipped on slow links: at 100 Mbit/s the largest is 1 MiB. Links of 10 Mbit/s and less take longer,
    because at least two sizes are needed.

    Args:
        group: The ranks; None: all.
        budget_s: About how long it may take.
        device: Where the tensors are, as in `probe_network`.
    """
    return probe_network(group, QUICK_SIZES, QUICK_COLLECTIVES, budget_s, QUICK_REPETITIONS, 1, device)


def _next_round(
    times: dict[Trial, list[float]], left_s: float, repetitions: int, longest_s: float | None
) -> list[Trial]:
    """The trials to repeat: from the smallest size up, as long as all collectives of a size fit into the time left."""
    chosen: list[Trial] = []
    for size in sorted({size for _, size in times}):
        trials = [trial for trial, taken in times.items() if trial[1] == size and len(taken) < repetitions]
        cost_s = _cost_s(times, trials)
        if longest_s is not None and cost_s > longest_s * len(trials):
            break
        left_s -= cost_s
        if left_s <= 0:
            break
        chosen += trials
    return chosen


def _cost_s(times: dict[Trial, list[float]], trials: Sequence[Trial]) -> float:
    """The time of one repetition without disturbances."""
    return sum(min(times[trial]) for trial in trials)


class _Ranks:
    """The ranks of a group, and the collectives among them."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._root = 0 if group is None else dist.get_global_rank(group, 0)
        nccl = dist.get_backend(group) == "nccl"
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._barrier_on = [torch.cuda.current_device()] if nccl else None
        self._source = self._target = torch.empty(0, dtype=torch.uint8)

    def shareable(self, size_bytes: int) -> int:
        """Round up to a size that is a whole number of floats for every rank."""
        part = _FLOAT_BYTES * self.world_size
        return max(1, -(-size_bytes // part)) * part

    def warm_up(self, collectives: Sequence[str], size: int) -> None:
        """Call each collective once, which creates connections and buffers."""
        for collective in collectives:
            self.time_s(collective, size)

    def time_s(self, collective: str, size: int) -> tuple[float, float]:
        """This rank's time for a collective that all start together, and the processor time of all its threads."""
        if self._source.numel() < size:
            # Filled, so that times do not include first touches of pages.
            self._source, self._target = (
                torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0) for _ in range(2)
            )
        call = self._call(collective, self._source[:size], self._target[:size])
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=self._barrier_on)
        processor_begin, begin = process_time(), perf_counter()
        call()
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        return perf_counter() - begin, process_time() - processor_begin

    def _call(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
        if collective == "all_reduce":
            values = source.view(torch.float32)
            return lambda: dist.all_reduce(values, group=self.group)
        if collective == "all_gather":
            own = source[: source.numel() // self.world_size]
            # torch 2.13 renames it and warns about the old name.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(target, own, group=self.group)
        if collective == "all_to_all":
            return lambda: dist.all_to_all_single(target, source, group=self.group)
        if collective == "broadcast":
            return lambda: dist.broadcast(source, self._root, group=self.group)
        raise NetworkModelError(f"{collective} is not one of {', '.join(COLLECTIVES)}")

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over the ranks, except that the last is rank 0's."""
        last = values[-1] if self._rank == 0 else float("-inf")
        found = torch.tensor([*values[:-1], last], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in found.tolist()]

    def count_hosts(self) -> int:
        """Number of machines as the network sees them: containers with their own network namespace count."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, _network_identity(), group=self.group)
        return len(set(found))


def _network_identity() -> str:
    """A name shared by exactly those processes that use the same network interfaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
