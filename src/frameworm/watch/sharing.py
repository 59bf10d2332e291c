"""Share work between pages: however many show the same thing, it is read once and the answer is sent to all.

Pages are updated less often where updates take long, so that trainings on the same machine keep their processors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio.to_thread import run_sync

from frameworm.records.printable import printable

log = logging.getLogger("frameworm")

TICK_S = 1.0
BUSY_TICK_S = 0.05  # while a long run is being read
MOST_TICK_S = 15.0
MOST_OF_A_CORE = 0.01  # what updating and answering all pages may take
FRESH_S = 0.5  # an answer this young is given again
KEEP_ALIVE_S = 15.0
MOST_ANSWERS = 32
MOST_SHARED = 256

Look = Callable[[str | None], tuple[str, dict[str, Any]]]


class Feeds:
    """Server-sent events: each followed thing is checked by one task, which ends when there are no followers.

    Args:
        look: Returns the kind of an event and its data, for the key that a follower names.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._feeds: dict[str | None, _Feed] = {}

    @property
    def followers(self) -> int:
        """Number of open streams."""
        return sum(feed.followers for feed in self._feeds.values())

    async def follow(self, key: str | None) -> AsyncIterator[str]:
        """Yield the current state, then each change; a slow follower only gets the latest."""
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
        spent_s, usual_s = time.process_time(), TICK_S
        while True:
            tick_s = usual_s
            try:
                kind, data = await run_sync(look)
                text = json.dumps(data, sort_keys=True, allow_nan=False)
            except Exception as error:  # whatever a folder contains, the pages must keep working
                words = f"{type(error).__name__}: {printable(error)}"
                if words != problem:
                    log.warning("a page could not be brought up to date: %s", words)
                problem = words
            else:
                if data.get("progress", 1.0) < 1.0:
                    tick_s = BUSY_TICK_S
                now = time.monotonic()
                if text != told and (tick_s == usual_s or not told or now - told_at >= TICK_S):
                    told, told_at = text, now
                    self._tell(f"event: {kind}\ndata: {text}\n\n")
            await asyncio.sleep(tick_s)
            usual_s, spent_s = tick_after(time.process_time() - spent_s, usual_s), time.process_time()

    def _tell(self, event: str) -> None:
        self.event = event
        self.number += 1
        self.changed.set()
        self.changed = asyncio.Event()


class Shared:
    """The latest answers, given again for a moment; requests that arrive while one is worked out wait for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], _InTheMaking] = OrderedDict()

    async def get(self, question: tuple[Any, ...], make: Callable[[], bytes | None]) -> bytes | None:
        """The answer to a question.

        Args:
            question: What is requested.
            make: Works it out, in a thread.
        """
        answer = self._kept.get(question)
        if answer is None or time.monotonic() >= answer.fresh_until:
            answer = self._kept[question] = _InTheMaking(make)
            self._kept.move_to_end(question)
            while len(self._kept) > MOST_SHARED:
                self._kept.popitem(last=False)
        return await asyncio.shield(answer.task)  # a page that leaves does not take the answer from the others


class _InTheMaking:
    """One answer that is worked out, or has been a moment ago."""

    def __init__(self, make: Callable[[], bytes | None]) -> None:
        self.fresh_until = math.inf
        self.task = asyncio.ensure_future(self._work_out(make))

    async def _work_out(self, make: Callable[[], bytes | None]) -> bytes | None:
        try:
            return await run_sync(make)
        finally:
            self.fresh_until = time.monotonic() + FRESH_S


def tick_after(spent_s: float, before_s: float) -> float:
    """Seconds to the next update.

    Args:
        spent_s: Processor time since the last update, answers to pages included.
        before_s: Seconds since then; what takes long only once, such as opening a page, hardly delays the next update.
    """
    return min(max(TICK_S, spent_s / MOST_OF_A_CORE), 2 * before_s, MOST_TICK_S)


class Answers:
    """The latest answers about one run, as JSON, so that repeated requests without changes are cheap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], _Answer] = OrderedDict()

    def get(self, question: tuple[Any, ...], version: Callable[[], int], make: Callable[[], Any]) -> bytes:
        """The answer to a question.

        Args:
            question: What is requested about the run.
            version: Increases when the answer may have changed.
            make: Computes it.
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
    """One answer, and the version it belongs to."""

    __slots__ = ("body", "lock", "version")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version: int | None = None
        self.body = b""
