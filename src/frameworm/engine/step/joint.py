"""Joint decisions of all ranks: whether to record their steps as CUDA graphs, and from which step on.

A recorded collective matches only collectives recorded at the same point on the other ranks, so no rank may start
recording, or return to eager steps, alone. Each decision is one exchange through the store, for which the host waits;
there is one per batch shape, and none per step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from frameworm.errors import StuckError

# Long enough for a rank that is still compiling.
LIMIT_S = 600.0


class DecisionStore(Protocol):
    """The part of torch.distributed.Store that decisions need."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


class JointDecisions:
    """Exchanges plain values between the ranks, in the same order on all of them.

    Args:
        store: Shared by the ranks under a separate prefix; None with one rank.
        rank: This rank.
        world_size: Number of ranks.
        limit_s: Longest wait for a rank.
    """

    def __init__(
        self, store: DecisionStore | None = None, rank: int = 0, world_size: int = 1, limit_s: float = LIMIT_S
    ) -> None:
        assert store is not None or world_size == 1
        self.world_size = world_size
        self._store = store
        self._rank = rank
        self._limit_s = limit_s
        self._number = 0

    def exchange(self, value: Any) -> list[Any]:
        """Send a plain value to all ranks and return theirs, in rank order.

        Raises:
            StuckError: If a rank does not answer in time.
        """
        if self._store is None or self.world_size == 1:
            return [value]
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", json.dumps(value))
        deadline = time.monotonic() + self._limit_s
        return [json.loads(self._wait(f"{self._number}/{rank}", rank, deadline)) for rank in range(self.world_size)]

    def any_reason(self, reason: str | None) -> str | None:
        """Return the reason of the first rank that has one, prefixed with its rank unless all have the same."""
        return first_reason(self.exchange(reason))

    def _wait(self, key: str, rank: int, deadline: float) -> bytes:
        assert self._store is not None
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise StuckError(
                    f"rank {rank} did not say within {self._limit_s:.0f} s whether it can record its step as a CUDA "
                    "graph, and no rank may do so alone; gpu.capture: off trains without graphs"
                )
            time.sleep(0.001)
        return self._store.get(key)


def first_reason(reasons: Sequence[str | None]) -> str | None:
    """Pick a reason as `JointDecisions.any_reason` does."""
    found = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not found:
        return None
    rank, reason = found[0]
    return reason if len({text for _, text in found}) == 1 and len(found) == len(reasons) else f"rank {rank}: {reason}"
