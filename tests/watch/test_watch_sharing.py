"""What many pages share: one reader for each thing that is followed, one answer to each question."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from frameworm.watch import sharing
from frameworm.watch.sharing import MOST_ANSWERS, MOST_SHARED, Answers, Feeds, Shared

WAIT_S = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "TICK_S", 0.02)
    monkeypatch.setattr(sharing, "MOST_TICK_S", 0.02)


class Thing:
    """Something that is looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.state = 0
        self.fails = False

    def look(self, key: str | None) -> tuple[str, dict[str, Any]]:
        self.looks += 1
        if self.fails:
            raise OSError("no such disk")
        return "run", {"id": key, "state": self.state}


async def next_event(stream: AsyncIterator[str]) -> str:
    async def following() -> str:
        async for text in stream:
            if text.startswith("event:"):
                return text
        raise AssertionError("the stream has ended")

    return await asyncio.wait_for(following(), WAIT_S)


async def close(*streams: Any) -> None:
    for stream in streams:
        await stream.aclose()


def test_fifty_followers_have_one_reader_and_none_have_none() -> None:
    thing = Thing()

    async def follow() -> None:
        feeds = Feeds(thing.look)
        streams = [feeds.follow("a") for _ in range(50)]
        first = await asyncio.gather(*(next_event(stream) for stream in streams))
        assert set(first) == {'event: run\ndata: {"id": "a", "state": 0}\n\n'}
        assert feeds.followers == 50
        before, thing.state = thing.looks, 1
        assert len(set(await asyncio.gather(*(next_event(stream) for stream in streams)))) == 1
        assert thing.looks - before < 10, "all are told by the same look"
        await close(*streams)
        assert feeds.followers == 0
        for _ in range(100):  # a look that had begun may take a while where others have the cores
            looks = thing.looks
            await asyncio.sleep(0.2)
            if thing.looks == looks:
                break
        assert thing.looks == looks
        again = feeds.follow("a")
        assert '"state": 1' in await next_event(again)
        await close(again)

    asyncio.run(follow())


def test_each_follows_its_own_and_one_that_comes_later_is_told_at_once() -> None:
    thing = Thing()

    async def follow() -> None:
        feeds = Feeds(thing.look)
        one, table = feeds.follow("a"), feeds.follow(None)
        assert '"id": "a"' in await next_event(one)
        assert '"id": null' in await next_event(table)
        late = feeds.follow("a")
        assert '"id": "a"' in await next_event(late)
        await close(one)
        thing.state = 7
        assert '"state": 7' in await next_event(late)
        await close(late, table)
        assert feeds.followers == 0

    asyncio.run(follow())


def test_a_slow_follower_gets_the_latest() -> None:
    thing = Thing()

    async def follow() -> None:
        feeds = Feeds(thing.look)
        slow, quick = feeds.follow("a"), feeds.follow("a")
        await next_event(slow)
        await next_event(quick)
        for state in range(1, 6):
            thing.state = state
            while f'"state": {state}' not in await next_event(quick):
                pass
        assert '"state": 5' in await next_event(slow)
        await close(slow, quick)

    asyncio.run(follow())


def test_what_takes_long_is_updated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "TICK_S", 1.0)
    monkeypatch.setattr(sharing, "MOST_TICK_S", 15.0)
    assert sharing.tick_after(0.0, 1.0) == sharing.tick_after(0.005, 8.0) == 1.0
    assert sharing.tick_after(0.04, 3.0) == pytest.approx(4.0)
    assert sharing.tick_after(0.04, 1.0) == 2.0, "it may have been for once"
    assert sharing.tick_after(100.0, 10.0) == 15.0


def test_a_look_that_fails_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    thing = Thing()
    logging.getLogger("frameworm").propagate = True

    async def follow() -> None:
        stream = Feeds(thing.look).follow("a")
        await next_event(stream)
        thing.fails = True
        before = thing.looks
        while thing.looks < before + 4:
            await asyncio.sleep(0.02)
        thing.fails, thing.state = False, 1
        assert '"state": 1' in await next_event(stream)
        await close(stream)

    with caplog.at_level(logging.WARNING, logger="frameworm"):
        asyncio.run(follow())
    assert [line for line in caplog.messages if "no such disk" in line] == [
        "a page could not be brought up to date: OSError: no such disk"
    ]


def test_a_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "KEEP_ALIVE_S", 0.05)

    async def follow() -> None:
        stream = Feeds(Thing().look).follow("a")
        await next_event(stream)
        assert (await asyncio.wait_for(stream.__anext__(), WAIT_S)).startswith(":")
        await close(stream)

    asyncio.run(follow())


def test_a_question_that_many_ask_at_once_is_worked_out_once() -> None:
    answers, made, gate = Answers(), [], threading.Event()

    def make() -> dict[str, int]:
        made.append(1)
        gate.wait(WAIT_S)
        return {"x": len(made)}

    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(answers.get(("series", 600), lambda: 1, make))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [b'{"x":1}'] * 20
    assert answers.get(("series", 300), lambda: 1, make) == b'{"x":2}', "another question"
    assert answers.get(("series", 600), lambda: 2, make) == b'{"x":3}', "something has changed"
    assert answers.get(("series", 600), lambda: 2, make) == b'{"x":3}'


def test_requests_that_come_together_share_an_answer_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: now_s, process_time=time.process_time))
    made, gate = [], threading.Event()

    def make() -> bytes:
        made.append(1)
        gate.wait(WAIT_S)
        return b"%d" % len(made)

    async def ask() -> None:
        nonlocal now_s
        shared = Shared()
        waiting = [asyncio.ensure_future(shared.get(("a",), make)) for _ in range(50)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()  # this page was closed
        gate.set()
        assert await asyncio.gather(*waiting[1:]) == [b"1"] * 49
        assert await shared.get(("a",), make) == b"1"
        assert await shared.get(("b",), make) == b"2", "another question"
        now_s += 0.9 * sharing.FRESH_S
        assert await shared.get(("a",), make) == b"1"
        now_s += 0.2 * sharing.FRESH_S
        assert await shared.get(("a",), make) == b"3"

    asyncio.run(ask())


def test_an_answer_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "FRESH_S", 0.0)

    def fails() -> bytes:
        raise OSError("no such disk")

    async def ask() -> None:
        shared = Shared()
        with pytest.raises(OSError, match="no such disk"):
            await shared.get(("a",), fails)
        assert await shared.get(("a",), lambda: b"1") == b"1"

    asyncio.run(ask())


def test_shared_answers_are_kept_within_bounds() -> None:
    async def ask() -> None:
        shared = Shared()
        for number in range(MOST_SHARED + 10):
            await shared.get((number,), lambda: b"")
        assert len(shared._kept) == MOST_SHARED

    asyncio.run(ask())


def test_answers_are_kept_within_bounds() -> None:
    answers = Answers()
    for number in range(3 * MOST_ANSWERS):
        answers.get((number,), lambda: 1, lambda: [])
    assert len(answers._kept) == MOST_ANSWERS
