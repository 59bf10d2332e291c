"""`compression: auto`: find the fastest method on this network while training continues.

1. The first steps run without compression, while DDP arranges its buckets and connections and caches warm up.
2. The network between the ranks is probed and the codecs are timed, which predicts the time of a step with each
   method. This only selects the candidates: `off` and the few that promise most.
3. The candidates race: short windows of real steps, one method after the other, in two rounds. The fastest is kept
   if it beats `off` by more than noise, else `off`. Every few hundred steps the closest loser races again.

All ranks run the same method in every step: windows are counted in steps, and times are the maximum over the ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist

from frameworm.records.observations import CompressionCandidate

OFF = "off"
ROUNDING = ("bf16", "int8", "int4")  # almost lossless with error feedback
APPROXIMATE = ("topk", "powersgd")  # need more steps to reach the same loss
METHODS = (*ROUNDING, *APPROXIMATE)
SETTLE = 4  # uncompressed steps that are not timed
WINDOW = 3  # timed steps of a window, after an untimed one in which a method allocates its buffers
ROUNDS = 2
RACERS = 3  # besides off
WORTH = 0.04  # a method must be this much faster than off; less is noise in such a short race
HOPELESS = 1.5  # off is not raced again if it is slower than the best prediction by this factor
RECHECK_STEPS = 500


class Switch(Protocol):
    """The part of a hook that the choice uses."""

    @property
    def method(self) -> str: ...

    def use(self, method: str) -> None: ...


@dataclass(frozen=True)
class Outlook:
    """Predictions made before the race.

    Attributes:
        sending_s: For each method, including `off`: seconds from the first byte to the last, codec included.
        hidden_s: How much of that overlaps with a step's computation.
        bandwidth_gbps: Bandwidth of the network, for the summary.
        latency_us: Latency of the network, for the summary.
    """

    sending_s: dict[str, float]
    hidden_s: float = 0.0
    bandwidth_gbps: float | None = None
    latency_us: float | None = None

    def expect(self, off_s: float) -> dict[str, float]:
        """Predict the time of a step with each method from that of an uncompressed one."""
        exposed = {method: max(0.0, seconds - self.hidden_s) for method, seconds in self.sending_s.items()}
        computing_s = max(0.0, off_s - exposed[OFF])
        return {method: computing_s + exposed_s for method, exposed_s in exposed.items()}


class MethodChoice:
    """Chooses the method of a hook; called after every step.

    Args:
        hook: The hook whose method is set; it starts with `off`.
        device: The device of the gradients.
        look: Probes network and codecs; all ranks call it at the same time.
        allow_approximate: Whether methods that do more than round may race.
        agree: Turns this rank's times into the maximum over all ranks.
        clock: Returns seconds; on a GPU it waits for the device.
    """

    def __init__(
        self,
        hook: Switch,
        device: torch.device,
        look: Callable[[], Outlook],
        *,
        allow_approximate: bool = False,
        agree: Callable[[list[float]], list[float]] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.bandwidth_gbps: float | None = None
        self.latency_us: float | None = None
        self.chosen: str | None = None
        self._hook = hook
        self._device = device
        self._allowed = METHODS if allow_approximate else ROUNDING
        self._look = look
        self._agree = agree or self._largest_of_all
        self._clock = clock or self._now
        self._expected: dict[str, float] = {}
        self._measured: dict[str, list[float]] = {OFF: []}
        self._plan: list[str] = [OFF]  # methods of the next windows
        self._left = SETTLE + WINDOW  # steps left in the window
        self._timed = 0
        self._last = self._clock()
        self._until_recheck = RECHECK_STEPS
        self._racing = True

    def adopt(self, method: str) -> bool:
        """Keep the method that a resumed run had chosen; returns whether it is known."""
        if method != OFF and method not in METHODS:
            return False
        self.chosen = method
        self._racing = False
        return True

    def candidates(self) -> list[CompressionCandidate]:
        """The methods that were considered, fastest first."""
        names = {*self._expected, *(name for name, times in self._measured.items() if times)}
        found = [
            CompressionCandidate(name, self._expected.get(name), _typical(self._measured.get(name, [])))
            for name in names
        ]
        return sorted(found, key=lambda item: (item.measured_s or float("inf"), item.expected_s or float("inf")))

    def after_step(self) -> bool:
        """Call after each step on all ranks; returns whether the ranks communicated."""
        if not self._racing:
            self._until_recheck -= 1
            if self._until_recheck > 0:
                return False
            self._recheck()
            return False
        now = self._clock()
        self._left -= 1
        if self._left < WINDOW:  # earlier steps only warm up
            self._measured[self._plan[0]].append(now - self._last)
        self._last = now
        if self._left > 0:
            return False
        self._plan.pop(0)
        if not self._expected:
            self._plan = self._enter()
            self._last = self._clock()
        elif not self._plan:
            self._decide()
            return True
        else:
            self._begin_window()
            return False
        self._begin_window()
        return True

    def _begin_window(self) -> None:
        method = self._plan[0]
        self._measured.setdefault(method, [])
        self._left = WINDOW + 1
        if self._hook.method != method:
            self._hook.use(method)

    def _enter(self) -> list[str]:
        """Probe network and codecs, and return the methods that race."""
        outlook = self._look()
        self.bandwidth_gbps, self.latency_us = outlook.bandwidth_gbps, outlook.latency_us
        names = list(outlook.sending_s)
        agreed = dict(zip(names, self._agree([outlook.sending_s[name] for name in names]), strict=True))
        off_s, hidden_s = self._agree([_typical(self._measured[OFF]) or 0.0, outlook.hidden_s])
        self._expected = Outlook(agreed, hidden_s).expect(off_s)
        racers = choose_racers(self._expected, self._allowed)
        best = min(self._expected[name] for name in racers)
        rounds = [*racers, OFF] if off_s < HOPELESS * best else racers
        return [*rounds, *reversed(rounds)] if ROUNDS == 2 else rounds * ROUNDS

    def _decide(self) -> None:
        names = sorted(name for name, times in self._measured.items() if times)
        own = [_typical(self._measured[name], doubtful=name != OFF) or 0.0 for name in names]
        self.chosen = choose_method(dict(zip(names, self._agree(own), strict=True)))
        self._racing = False
        self._until_recheck = RECHECK_STEPS
        if self._hook.method != self.chosen:
            self._hook.use(self.chosen)

    def _recheck(self) -> None:
        """Race the chosen method against the closest other one, unless that was hopelessly slow."""
        self._until_recheck = RECHECK_STEPS
        measured = {name: _typical(times) for name, times in self._measured.items() if times}
        own = measured.get(self.chosen or OFF)
        others = {name: seconds for name, seconds in measured.items() if name != self.chosen and seconds is not None}
        if own is None or not others:
            return
        # Decided alike on all ranks: local measurements differ, the agreed maxima do not.
        nearest, seconds = min(
            zip(others, self._agree(list(others.values())), strict=True), key=lambda item: (item[1], item[0])
        )
        if seconds > HOPELESS * self._agree([own])[0]:
            return
        assert self.chosen is not None
        self._measured = {
            name: [] if name in (self.chosen, nearest) else times for name, times in self._measured.items()
        }
        self._plan = [self.chosen, nearest, nearest, self.chosen]
        self._racing = True
        self._last = self._clock()
        self._begin_window()

    def _largest_of_all(self, seconds: list[float]) -> list[float]:
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def choose_racers(expected: dict[str, float], allowed: Sequence[str] = METHODS) -> list[str]:
    """The most promising methods, without `off`."""
    others = sorted((seconds, name) for name, seconds in expected.items() if name in allowed)
    return [name for _, name in others[:RACERS]]


def choose_method(times: dict[str, float]) -> str:
    """The fastest method if it is clearly faster than `off`."""
    best = min(times, key=lambda name: (times[name], name))
    return best if times[best] < (1 - WORTH) * times.get(OFF, float("inf")) else OFF


def _typical(times: Sequence[float], doubtful: bool = False) -> float | None:
    """The median; for an even count the lower one, since disturbances only add time, or the upper one if `doubtful`."""
    if not times:
        return None
    return statistics.median_high(times) if doubtful else statistics.median_low(times)
