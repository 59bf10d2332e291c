"""Delays of known length for tests of where time goes: in a layer, and on the way of the gradients."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.observe.clocks import phases
from frameworm.parallel import replicated


def close(found_s: float, planted_s: float) -> bool:
    """Within a tenth or two milliseconds."""
    return abs(found_s - planted_s) <= max(0.1 * planted_s, 0.002)


def median(values: Iterable[Any]) -> float:
    return float(statistics.median(values))


def clock_to_set(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of the phases forward: a delay of any length in no time, which no busy machine can outdo."""
    ahead_s = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    monkeypatch.setattr(phases, "perf_counter", lambda: time.perf_counter() + ahead_s)
    return pass_by


class _Sleep(torch.autograd.Function):
    """Passes through, and takes its time in one direction or the other."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Slow(nn.Module):
    """A layer that costs nothing but time."""

    def __init__(self, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.times = (forward_s, backward_s)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(values, *self.times)
        return slept


class Link:
    """A hook that hands the first bucket back some time after it has arrived, in every second step or so."""

    def __init__(self, delay_s: float, every: int = 2) -> None:
        self.delay_s = delay_s
        self.every = every
        self.sent: list[int] = []
        self._hook = replicated.mean_of_gradients

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        arrived = self._hook(state, bucket)
        index = bucket.index()
        self.sent.append(index)
        if index or self.sent.count(0) % self.every:
            return arrived
        device = bucket.buffer().device
        late: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )

        def hand_over() -> None:
            value = arrived.wait()
            time.sleep(self.delay_s)
            late.set_result(value)

        threading.Thread(target=hand_over, daemon=True).start()
        return late
