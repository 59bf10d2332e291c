"""Many pages that look at the same thing cost as much as one: one reader, one answer, handed to all."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio.to_thread import run_sync

from frameworm.records.printable import printable

log = logging.getLogger("frameworm")

TICK_S = 1.0
BUSY_TICK_S = 0.05  # while a long run is being read in
KEEP_ALIVE_S = 15.0
MOST_ANSWERS = 32

Look = Callable[[str | None], tuple[str, dict[str, Any]]]


class Feeds:
    """Server-sent events: each thing that is followed is looked at by one task, and by none when nobody follows it.

    Args:
        look: The kind of an event and its data, for what a follower names.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._feeds: dict[str | None, _Feed] = {}

    @property
    def followers(self) -> int:
        """How many streams are open."""
        return sum(feed.followers for feed in self._feeds.values())

    async def follow(self, key: str | None) -> AsyncIterator[str]:
        """The state now, then each change; a slow follower misses all but the latest."""
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = _Feed(lambda: self._look(key))
        feed.followers += 1
        seen = 0
        try:
            yield "retry: 2000\n\n"
            while True:
                if feed.number == seen:
                    try:
                        await asyncio.wait_for(feed.changed.wait(), KEEP_ALIVE_S)
                    except (TimeoutError, asyncio.TimeoutError):
                        yield ": still here\n\n"
                        continue
                seen = feed.number
                yield feed.event
        finally:
            feed.followers -= 1
            if not feed.followers:
                feed.task.cancel()
                if self._feeds.get(key) is feed:
                    del self._feeds[key]


class _Feed:
    """One thing that is followed."""

    def __init__(self, look: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        self.followers = 0
        self.number = 0  # of the latest event
        self.event = ""
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(look))

    async def _read(self, look: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        told, told_at, problem = "", 0.0, ""
        while True:
            tick_s = TICK_S
            try:
                kind, data = await run_sync(look)
                text = json.dumps(data, sort_keys=True, allow_nan=False)
            except Exception as error:  # whatever a folder holds, the pages stay open
                words = f"{type(error).__name__}: {printable(error)}"
                if words != problem:
                    log.warning("a page could not be brought up to date: %s", words)
                problem = words
            else:
                if data.get("progress", 1.0) < 1.0:
                    tick_s = BUSY_TICK_S
                now = time.monotonic()
                if text != told and (tick_s == TICK_S or not told or now - told_at >= TICK_S):
                    told, told_at = text, now
                    self._tell(f"event: {kind}\ndata: {text}\n\n")
            await asyncio.sleep(tick_s)

    def _tell(self, event: str) -> None:
        self.event = event
        self.number += 1
        self.changed.set()
        self.changed = asyncio.Event()


class Answers:
    """The latest answers about one run, as JSON: many who ask the same while nothing changes cost as much as one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], _Answer] = OrderedDict()

    def get(self, question: tuple[Any, ...], version: Callable[[], int], make: Callable[[], Any]) -> bytes:
        """The answer to a question.

        Args:
            question: What is wanted of the run.
            version: Rises when the answer may have changed.
            make: Works it out.
        """
        with self._lock:
            answer = self._kept.setdefault(question, _Answer())
            self._kept.move_to_end(question)
            while len(self._kept) > MOST_ANSWERS:
                self._kept.popitem(last=False)
        with answer.lock:
            now = version()
            if answer.version != now:
                answer.body = json.dumps(make(), allow_nan=False, separators=(",", ":")).encode()
                answer.version = now
            return answer.body


class _Answer:
    """One answer, and the version it is of."""

    __slots__ = ("body", "lock", "version")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version: int | None = None
        self.body = b""
