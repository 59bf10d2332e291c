"""Reports of ranks to rank 0, here threads with a store between them."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from frameworm.launch import reports as module
from frameworm.launch.reports import RankReports


def _two(store: HashStore, limit_s: float = 60.0) -> list[RankReports]:
    return [RankReports(store, rank, 2, limit_s) for rank in range(2)]


def test_rank_0_hears_all_and_all_hear_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 10)  # so that a report takes several messages
    store = HashStore()
    first, second = _two(store)
    long = "zurück " * 20
    thread = threading.Thread(target=lambda: (time.sleep(0.1), second.report(0, long)))
    thread.start()
    first.report(0, "")
    assert first.collect(0) == ["", long]
    first.decide(0, "gut")
    assert second.verdict(0) == "gut"
    thread.join()
    assert store.num_keys() < 10  # what was read is gone


def test_one_process_needs_no_store() -> None:
    alone = RankReports(None)
    alone.report(3, "text")
    assert alone.collect(3) == ["text"]
    alone.decide(3, "")


def test_a_rank_that_never_reports_is_named() -> None:
    first, second = _two(HashStore(), limit_s=0.05)
    first.report(0, "here")
    with pytest.raises(TimeoutError, match="rank 1"):
        first.collect(0)
    with pytest.raises(TimeoutError, match="rank 0"):
        second.verdict(0)


def test_who_gave_up_does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVEN_UP_S", 0.05)
    first, _ = _two(HashStore(), limit_s=600)
    threading.Timer(0.1, first.give_up).start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        first.collect(0)
    assert time.monotonic() - begin < 60
