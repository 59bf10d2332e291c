"""Collectives of many buckets, issued in one fixed order on all ranks.

What a method does with a bucket is a generator: it runs until it has issued a collective, yields its work, and is
resumed when that is done. Who is resumed when follows from the order of the buckets alone, which DDP makes the same on
all ranks: a bucket that arrives is started, then the older ones go one stage further, the oldest first; after the last
bucket of a backward all go on in turn until none is left. So a bucket is encoded while the one before it is on the
wire, and no two ranks can issue collectives in different orders, however fast they are.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The older name warns where the newer one exists.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
JOIN_S = 5.0  # a thread that waits for a dead peer is left to the end of the process


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


# Yields the work of each collective, returns the reduced bucket.
Stages = Generator[Work, None, Tensor]
Result = torch.futures.Future[Tensor]


class Wire:
    """The collectives between the ranks, on a group of their own, with their bytes counted.

    The main thread uses DDP's group while the buckets are on their way, so these need another one. All ranks make
    theirs at the same time.

    Args:
        group: The ranks; None is all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._base = group or dist.group.WORLD
        assert self._base is not None
        self._own: dist.ProcessGroup | None = None
        self.rank = dist.get_rank(self._base)
        self.world_size = dist.get_world_size(self._base)
        self.sent_bytes = 0
        self._by_gloo = False
        self._exchanges = 0
        self._counting = threading.Lock()  # plain buckets are sent by the main thread

    def open(self) -> None:
        """Make the group, unless it is there; all ranks call it at the same time."""
        if self._own is not None:
            return
        base = self._base
        assert base is not None
        # Of the same ranks, so a smaller group must not wait for processes outside of it.
        smaller = self.world_size < dist.get_world_size()
        self._own = dist.new_group(
            dist.get_process_group_ranks(base),
            timeout=_timeout_of(base),
            backend=_backend_of(base),
            use_local_synchronization=smaller,
        )
        self._by_gloo = dist.get_backend(self._own) == "gloo"

    def close(self) -> None:
        """Leave the group. NCCL's communicators are left to the end of the default group, which ends them in order."""
        own, self._own = self._own, None
        if own is None or not dist.is_initialized() or "nccl" in str(dist.get_backend_config(own)):
            return
        with contextlib.suppress(Exception):  # the default group may have ended it already
            dist.destroy_process_group(own)

    def waits_on_device(self, device: torch.device) -> bool:
        """Whether waiting for a collective holds up a stream only, not the host."""
        assert self._own is not None
        return device.type == "cuda" and self._own._get_backend(device).name() == "nccl"

    def all_reduce(self, values: Tensor) -> Work:
        """Sum over the ranks, in place."""
        self._count(2 * (self.world_size - 1) * values.nbytes // self.world_size)
        return _issued(dist.all_reduce(values, group=self._own, async_op=True))

    def all_reduce_plain(self, values: Tensor) -> Any:
        """Sum over the ranks on DDP's own group, to be issued where DDP would issue it."""
        size = values._values().nbytes + values._indices().nbytes if values.is_sparse else values.nbytes
        self._count(2 * (self.world_size - 1) * size // self.world_size)
        work = dist.all_reduce(values, group=self._base, async_op=True)
        assert work is not None
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Part r of `sent` goes to rank r; parts are equal."""
        self._count((self.world_size - 1) * sent.nbytes // self.world_size)
        if self._in_pairs(sent):
            return self._swap(list(sent.chunk(self.world_size)), list(received.chunk(self.world_size)))
        return _issued(dist.all_to_all_single(received, sent, group=self._own, async_op=True))

    def all_gather(self, received: Tensor, sent: Tensor) -> Work:
        """`received` becomes what all ranks sent, in order of rank."""
        self._count((self.world_size - 1) * sent.nbytes)
        if self.world_size == 2 and self._in_pairs(sent):
            return self._swap([sent] * self.world_size, list(received.chunk(self.world_size)))
        return _issued(_all_gather(received, sent, group=self._own, async_op=True))

    def _in_pairs(self, values: Tensor) -> bool:
        return self._by_gloo and values.device.type == "cpu"

    def _swap(self, sent: list[Tensor], received: list[Tensor]) -> Work:
        """Every rank sends to every other, all receives before all sends.

        On slow links this is faster than gloo's own all-to-all, and between two hosts than its all-gather
        (benchmarks/gloo_exchange.py).
        """
        assert self._own is not None
        self._exchanges += 1  # the same on all ranks, and so a tag that only the partner of a message has
        tag, others = self._exchanges % 2**30, [rank for rank in range(self.world_size) if rank != self.rank]
        peers = {rank: dist.get_global_rank(self._own, rank) for rank in others}
        works = [dist.irecv(received[rank], peers[rank], group=self._own, tag=tag) for rank in others]
        works += [dist.isend(sent[rank], peers[rank], group=self._own, tag=tag) for rank in others]
        received[self.rank].copy_(sent[self.rank])
        return _All([_issued(work) for work in works])

    def _count(self, size_bytes: int) -> None:
        with self._counting:
            self.sent_bytes += size_bytes

    def take_sent_bytes(self) -> int:
        """The bytes so far; counting starts anew."""
        with self._counting:
            sent, self.sent_bytes = self.sent_bytes, 0
        return sent


class _All:
    """Several messages that are done when all are."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _issued(work: Any) -> Work:
    assert work is not None
    found: Work = work
    return found


def _backend_of(group: dist.ProcessGroup) -> str:
    """As `new_group` wants it: one word where all devices use the same, which torch does not treat as a mixture."""
    config = str(dist.get_backend_config(group))  # device:backend,device:backend
    backends = {item.split(":")[-1] for item in config.split(",")}
    return backends.pop() if len(backends) == 1 else config


def _timeout_of(group: dist.ProcessGroup) -> Any:
    """The longest a collective of the group may take."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")
    return group._get_backend(device).options._timeout


class Job:
    """One bucket on its way."""

    __slots__ = ("device", "done", "last", "ready", "stages", "work")

    def __init__(self, stages: Stages, last: bool, device: torch.device) -> None:
        self.stages = stages
        self.last = last
        self.device = device
        on_gpu = device.type == "cuda"
        self.done: Result = torch.futures.Future(devices=[device] if on_gpu else [])
        self.ready = torch.cuda.current_stream(device).record_event() if on_gpu else None
        self.work: Work | None = None


class Pipeline:
    """Drives the generators of the buckets: by a thread, or on a side stream where waiting is the device's business."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._active: list[Job] = []  # of the thread; the oldest first
        self._error: Exception | None = None  # of the thread; once set nothing is sent any more

    @property
    def error(self) -> Exception | None:
        """Why nothing is sent any more, if so."""
        return self._error

    def submit(self, stages: Stages, *, last: bool, device: torch.device) -> Result:
        """Take a bucket over; backward goes on at once.

        Args:
            stages: What is to be done with it.
            last: Whether no other bucket follows in this backward.
            device: Where its values are.

        Returns:
            The future of the reduced bucket; it raises what went wrong with this bucket or one before it.
        """
        job, result = self.prepare(stages, last=last, device=device)
        self.start(job)
        return result

    def prepare(self, stages: Stages, *, last: bool, device: torch.device) -> tuple[Job, Result]:
        """As `submit`, for a bucket that is to start later."""
        job = Job(stages, last, device)
        if self._wire.waits_on_device(device):
            return job, job.done
        # DDP does not see an exception that was set in Python; it sees one that a callback raised.
        return job, job.done.then(_value)

    def start(self, job: Job) -> None:
        """Begin with a bucket that was prepared."""
        if self._wire.waits_on_device(job.device):
            self._issue_all(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradient_compression", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _issue_all(self, job: Job) -> None:
        """Queue all that a bucket needs on the side stream; the host waits for nothing."""
        with torch.no_grad(), self._on_stream(job):
            try:
                while True:
                    next(job.stages).wait()
            except StopIteration as ended:
                self._finish(job, ended.value)

    def close(self) -> None:
        """End the thread; buckets it still holds are dropped."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(JOIN_S)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _run(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                older = list(self._active)
                self._active.append(job)
                self._advance(job)
                for item in older:
                    self._advance(item)
                while job.last and self._active:
                    for item in list(self._active):
                        self._advance(item)
                del job, older  # the next bucket may be long in coming

    def _advance(self, job: Job) -> None:
        """Bring one bucket to its next collective, or to its end."""
        if self._error is not None:
            self._fail()
            return
        try:
            with self._on_stream(job):
                try:
                    if job.work is not None:
                        job.work.wait()
                    job.work = next(job.stages)
                except StopIteration as ended:
                    self._active.remove(job)
                    self._finish(job, ended.value)
        except Exception as error:
            self._error = error
            self._fail()

    def _finish(self, job: Job, values: Tensor) -> None:
        if values.is_cuda:
            values.record_stream(self._stream(job.device))
        job.done.set_result(values)

    def _fail(self) -> None:
        """Tell all that wait; a bucket that was left out would leave the others' collectives without an answer."""
        assert self._error is not None
        for job in self._active:
            job.stages.close()
            job.done.set_exception(self._error)  # type: ignore[arg-type]
        self._active.clear()

    @contextlib.contextmanager
    def _on_stream(self, job: Job) -> Generator[None, None, None]:
        """Work where the bucket's values are, after what wrote them."""
        if job.ready is None:
            yield
            return
        stream = self._stream(job.device)
        stream.wait_event(job.ready)
        with torch.cuda.device(job.device), torch.cuda.stream(stream):
            yield


def _value(done: Result) -> Tensor:
    return done.value()
