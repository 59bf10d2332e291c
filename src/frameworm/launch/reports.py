"""Ranks report to rank 0 and get its decision, without a collective.

Collectives from a background thread could interleave with those of training. A key-value store has no such order, and
a rank that never reports only costs a bounded wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from frameworm.launch.stores import Store

CHUNK_BYTES = 2**20  # torch's store refuses messages above 8 MB
GIVEN_UP_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


class RankReports:
    """Rounds in which every rank sends a text to rank 0, and rank 0 returns one text to all.

    Args:
        store: A store shared by the ranks, under its own prefix; None with one process.
        rank: This rank.
        world_size: Number of ranks.
        limit_s: Longest wait for the others.
    """

    def __init__(self, store: Store | None, rank: int = 0, world_size: int = 1, limit_s: float = 600.0) -> None:
        assert store is not None or world_size == 1
        self.rank = rank
        self.world_size = world_size
        self._store = store if world_size > 1 else None
        self._limit_s = limit_s
        self._given_up_at: float | None = None
        self._local: dict[str, str] = {}

    def report(self, number: int, text: str) -> None:
        """Send this rank's text for a round.

        Raises:
            RuntimeError: The store is gone.
        """
        self._put(f"{number}/rank-{self.rank}", text)

    def collect(self, number: int) -> list[str]:
        """Return the texts of all ranks, on rank 0.

        Raises:
            TimeoutError: Some ranks did not report; the message names them.
            RuntimeError: The store is gone.
        """
        keys = [f"{number}/rank-{rank}" for rank in range(self.world_size)]
        if not self._wait(lambda: self._has(keys)):
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._has([key]))
            raise TimeoutError(f"nothing was heard from rank {missing}")
        return [self._take(key) for key in keys]

    def decide(self, number: int, text: str) -> None:
        """Publish rank 0's decision in a round.

        Raises:
            RuntimeError: The store is gone.
        """
        if self._store is not None:
            self._put(f"{number}/verdict", text)

    def verdict(self, number: int) -> str:
        """Return rank 0's decision in a round.

        Raises:
            TimeoutError: Rank 0 did not decide.
            RuntimeError: The store is gone.
        """
        key = f"{number}/verdict"
        if not self._wait(lambda: self._has([key])):
            raise TimeoutError("nothing was heard from rank 0")
        return self._take(key, leave=True)

    def give_up(self) -> None:
        """Another error is being raised: from now on, wait only a few seconds for other ranks."""
        self._given_up_at = time.monotonic()

    def _put(self, key: str, text: str) -> None:
        if self._store is None:
            self._local[key] = text
            return
        content = json.dumps(text)  # ASCII, so a character is a byte
        chunks = [content[place : place + CHUNK_BYTES] for place in range(0, len(content), CHUNK_BYTES)]
        for place, chunk in enumerate(chunks):
            self._store.set(f"{key}/{place}", chunk)
        self._store.set(key, str(len(chunks)))  # last, so that a reader who sees it finds the chunks

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._local for key in keys) if self._store is None else bool(self._store.check(keys))

    def _take(self, key: str, leave: bool = False) -> str:
        if self._store is None:
            return self._local.pop(key)
        names = [f"{key}/{place}" for place in range(int(self._store.get(key)))]
        content: str = json.loads(b"".join(self._store.get(name) for name in names))
        for name in () if leave else names:
            self._store.delete_key(name)
        return content

    def _wait(self, there: Callable[[], bool]) -> bool:
        """Wait until `there` returns true; False if time is up."""
        deadline = time.monotonic() + self._limit_s
        pause_s = _FIRST_PAUSE_S
        while not there():
            if self._given_up_at is not None:
                deadline = min(deadline, self._given_up_at + GIVEN_UP_S)
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True
