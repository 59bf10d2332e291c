"""Orderly stopping: signals (or the memory guard) request it, and all ranks agree on one step to stop before.

A signal may reach only one rank, and ranks are slightly apart in time. A rank that stopped at once would leave the
others waiting in a collective forever. So a rank that knows of the request posts the step it is about to run and
continues training. Once every rank has posted, all stop before the same later step.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Literal, Protocol

from frameworm.errors import StateError

StopReason = Literal["interrupted", "preempted", "memory", "stopped"]  # stopped: by a callback

_REASONS: dict[signal.Signals, StopReason] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
}


def end_at_once_on_interrupt() -> None:
    """Let SIGINT end this process at once until training begins and `StopRequest` takes over.

    While a worker waits for the others in a library call, Python's own handler would not run, and there is nothing to
    save yet.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopStore(Protocol):
    """The part of torch.distributed.Store that the agreement needs."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""


class _Part:
    """A store under its own prefix."""

    def __init__(self, store: StopStore, name: str) -> None:
        self._store = store
        self._name = name

    def set(self, key: str, value: str, /) -> None:
        self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(f"{self._name}/{key}")

    def add(self, key: str, amount: int, /) -> int:
        return self._store.add(f"{self._name}/{key}", amount)


class StopRequest:
    """Turns SIGINT, SIGTERM and SIGUSR1 into a request that the training loop checks between steps.

    As a context manager, it installs the handlers in the main thread. A second SIGINT raises KeyboardInterrupt at once,
    for users who do not want to wait for a checkpoint.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.detail = ""
        self.interrupts = 0
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, object] = {}

    def ask(self, reason: StopReason, detail: str = "") -> None:
        """Request a stop; the first reason is kept, with its optional explanation."""
        if self.reason is None:
            self.reason, self.detail, self._asked_at = reason, detail, time.monotonic()

    @property
    def asked_s_ago(self) -> float:
        """Seconds since the stop was requested; zero if it was not, or was requested by another rank."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def __enter__(self) -> StopRequest:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            # None means a handler that was not set from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.ask(_REASONS[signal.Signals(number)])


class StopAgreement:
    """Makes all ranks stop before the same step.

    Args:
        request: This rank's stop request.
        store: A store shared by the ranks, under its own prefix; None with one process.
        rank: This rank.
        world_size: Number of ranks.
        lookahead: Steps between the last step posted and the stop. One is enough if the ranks end every step together
            (gradients synchronised on the host, as on CPU). If the host runs k steps ahead of the device, use k + 1.
        poll_interval_s: How often a rank without a request checks whether another one has posted.
    """

    def __init__(
        self,
        request: StopRequest,
        store: StopStore | None,
        rank: int,
        world_size: int,
        lookahead: int = 1,
        poll_interval_s: float = 1.0,
    ) -> None:
        assert lookahead >= 1
        assert store is not None or world_size == 1
        self._request = request
        self._store = store if world_size > 1 else None
        self._rank = rank
        self._world_size = world_size
        self._lookahead = lookahead
        self._poll_interval_s = poll_interval_s
        self._next_poll = 0.0
        self._posted = False
        self._stop_step: int | None = None
        self._reason: StopReason | None = None
        self._details: list[str] = []

    def for_another(self, request: StopRequest, name: str) -> StopAgreement:
        """Return an agreement of the same ranks on something else.

        Args:
            request: This rank's request.
            name: Unique name of the agreement.
        """
        store = None if self._store is None else _Part(self._store, name)
        return StopAgreement(request, store, self._rank, self._world_size, self._lookahead, self._poll_interval_s)

    @property
    def details(self) -> list[str]:
        """Explanations of the ranks that requested the stop; all ranks know them once they have agreed."""
        return [text for text in ([self._request.detail] if self._store is None else self._details) if text]

    def stop_before(self, step: int) -> StopReason | None:
        """Decide whether to stop instead of running this step; call it once before every step.

        Args:
            step: Number of the step that would run next.

        Returns:
            Why to stop, or None to continue.
        """
        if self._store is None:
            return self._request.reason
        if self._stop_step is None:
            if not self._posted:
                if self._request.reason is None and not self._others_asked(self._store):
                    return None
                self._post(self._store, step)
            if self._store.add("posted", 0) < self._world_size:
                return None
            self._settle(self._store)
        assert self._stop_step is not None
        if step > self._stop_step:
            raise StateError(
                f"rank {self._rank} is about to run step {step}, but the ranks agreed to stop before step "
                f"{self._stop_step}: the loop runs further ahead than a lookahead of {self._lookahead} allows"
            )
        return self._reason if step == self._stop_step else None

    def _others_asked(self, store: StopStore) -> bool:
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + self._poll_interval_s
        return store.add("posted", 0) > 0

    def _post(self, store: StopStore, step: int) -> None:
        store.set(f"rank-{self._rank}", f"{step} {self._request.reason or ''} {self._request.detail}")
        # `set` returns before the value has arrived; `add` waits for its answer on the same connection. So any rank
        # that gets this rank's gradients of the coming step also finds its post.
        store.add("posted", 1)
        self._posted = True

    def _settle(self, store: StopStore) -> None:
        """Compute the stop step and the reason from all posts, so that every rank gets the same result."""
        posts = [store.get(f"rank-{rank}").decode().split(" ", 2) for rank in range(self._world_size)]
        self._stop_step = max(int(step) for step, _, _ in posts) + self._lookahead
        self._details = [detail for _, _, detail in posts]
        reasons = {reason for _, reason, _ in posts}
        order: tuple[StopReason, ...] = ("interrupted", "memory", "preempted", "stopped")
        self._reason = next(reason for reason in order if reason in reasons)
