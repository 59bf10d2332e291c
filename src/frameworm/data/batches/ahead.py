"""Work done in a thread, a little ahead of its consumer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class ReadAhead(Iterator[Made], Generic[Item, Made]):
    """Yield `make(item)` for each item, computed in a thread while earlier results are used.

    An error is raised where its result would have been returned. The thread ends after the last item, on `close`, or
    when the iterator is garbage-collected.

    Args:
        items: The work items; the thread iterates over them.
        make: The work.
        ahead: Most results that may wait to be fetched.
        start: Called first in the thread.
    """

    def __init__(
        self,
        items: Iterable[Item],
        make: Callable[[Item], Made],
        *,
        ahead: int = 1,
        start: Callable[[], None] | None = None,
    ) -> None:
        self._results: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._slots = threading.Semaphore(ahead)
        stopped = threading.Event()
        # The thread holds no reference to this object, so the object can be collected while the thread runs.
        thread = threading.Thread(
            target=_work,
            args=(items, make, start, self._results, self._slots, stopped),
            name="frameworm-read-ahead",
            daemon=True,
        )
        self._ended = False
        self._finish = weakref.finalize(self, _stop, thread, self._slots, stopped)
        thread.start()

    def __iter__(self) -> ReadAhead[Item, Made]:
        return self

    def __next__(self) -> Made:
        if self._ended:
            raise StopIteration
        kind, result = self._results.get()
        if kind == "made":
            self._slots.release()
            made: Made = result
            return made
        self._ended = True
        self._finish()
        if kind == "error":
            raise result
        raise StopIteration

    def close(self) -> None:
        """Stop the thread, wait for it to end, and drop results not fetched yet."""
        self._ended = True
        self._finish()


def _work(
    items: Iterable[Item],
    make: Callable[[Item], Made],
    start: Callable[[], None] | None,
    results: SimpleQueue[tuple[str, Any]],
    slots: threading.Semaphore,
    stopped: threading.Event,
) -> None:
    try:
        if start is not None:
            start()
        for item in items:
            slots.acquire()
            if stopped.is_set():
                return
            results.put(("made", make(item)))
        results.put(("end", None))
    except BaseException as error:  # any error belongs to the consumer that waits for the result
        results.put(("error", error))


def _stop(thread: threading.Thread, slots: threading.Semaphore, stopped: threading.Event) -> None:
    stopped.set()
    slots.release()
    # Garbage collection may run `_stop` in any thread, including this one.
    if thread is not threading.current_thread():
        thread.join()
