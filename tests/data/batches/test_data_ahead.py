"""The thread that works ahead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from frameworm.data.batches.ahead import ReadAhead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "frameworm-read-ahead"]


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def test_results_come_in_order_and_the_thread_ends() -> None:
    assert list(ReadAhead(range(50), lambda item: item * 2, ahead=3)) == list(range(0, 100, 2))
    assert threads() == []


def test_it_stays_the_given_number_ahead() -> None:
    made: list[int] = []
    reader = ReadAhead(range(10), lambda item: made.append(item) or item, ahead=1)
    assert eventually(lambda: made == [0])
    time.sleep(0.05)
    assert made == [0]
    assert next(reader) == 0
    assert eventually(lambda: made == [0, 1])
    time.sleep(0.05)
    assert made == [0, 1]
    reader.close()


def test_errors_come_at_their_place() -> None:
    def make(item: int) -> int:
        if item == 2:
            raise OSError("disk on fire")
        return item

    reader = ReadAhead(range(5), make)
    assert [next(reader), next(reader)] == [0, 1]
    with pytest.raises(OSError, match="disk on fire"):
        next(reader)
    assert list(reader) == []
    assert threads() == []


def test_an_error_of_the_items_comes_too() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    reader = ReadAhead(items(), lambda item: item)
    assert next(reader) == 1
    with pytest.raises(ValueError, match="no more"):
        next(reader)


def test_closing_ends_the_thread() -> None:
    reader = ReadAhead(range(1000), lambda item: item)
    next(reader)
    reader.close()
    assert threads() == []
    assert list(reader) == []


def test_dropping_it_ends_the_thread() -> None:
    reader = ReadAhead(range(1000), lambda item: item)
    next(reader)
    assert len(threads()) == 1
    del reader
    gc.collect()
    assert threads() == []


def test_the_start_runs_first_in_the_thread() -> None:
    seen: list[str] = []
    reader = ReadAhead(
        range(1), lambda item: seen.append("made"), start=lambda: seen.append(threading.current_thread().name)
    )
    list(reader)
    assert seen == ["frameworm-read-ahead", "made"]
