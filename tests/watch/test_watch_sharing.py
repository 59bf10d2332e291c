"""What many pages share: one reader for each thing that is followed, one answer to each question."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from frameworm.watch import sharing
from frameworm.watch.sharing import MOST_ANSWERS, Answers, Feeds

WAIT_S = 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "TICK_S", 0.02)


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
        await asyncio.sleep(0.05)
        looks = thing.looks
        await asyncio.sleep(0.2)
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


def test_answers_are_kept_within_bounds() -> None:
    answers = Answers()
    for number in range(3 * MOST_ANSWERS):
        answers.get((number,), lambda: 1, lambda: [])
    assert len(answers._kept) == MOST_ANSWERS
