"""Collectives of many buckets, issued in one fixed order on all ranks.

The work of a method on a bucket is a generator: it runs until it has issued a collective, yields its work, and is
resumed when that is done. The order of resumption depends only on the order of the buckets, which DDP makes the same on
all ranks: a new bucket is started, then the older ones advance one stage, oldest first; after the last bucket of a
backward pass all advance in turn until none is left. So a bucket is encoded while the previous one is on the wire, and
no two ranks can issue collectives in different orders, however fast they are.
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

from frameworm.torch_private.distributed import backend_name, collective_timeout
from frameworm.torch_private.tensors import sparse_indices, sparse_values

# Newer torch versions deprecate the older name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
JOIN_S = 5.0  # a thread that waits for a dead peer is abandoned until the process ends


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> Any: ...


# Yields the work of each collective and returns the reduced bucket.
Stages = Generator[Work, None, Tensor]
Result = torch.futures.Future[Tensor]


class Wire:
    """Collectives between the ranks, on a separate group, with their bytes counted.

    The main thread uses DDP's group while buckets are being sent, so they need another one. All ranks create theirs at
    the same time.

    Args:
        group: The ranks; None: all of them.
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
        self._counting = threading.Lock()  # uncompressed buckets are sent by the main thread

    def open(self) -> None:
        """Create the group if necessary; all ranks call this at the same time."""
        if self._own is not None:
            return
        base = self._base
        assert base is not None
        # If these are not all ranks, the others do not take part in creating the group.
        smaller = self.world_size < dist.get_world_size()
        self._own = dist.new_group(
            dist.get_process_group_ranks(base),
            timeout=_timeout_of(base),
            backend=_backend_of(base),
            use_local_synchronization=smaller,
        )
        self._by_gloo = dist.get_backend(self._own) == "gloo"

    def close(self) -> None:
        """Leave the group. NCCL communicators are left to the default group, which ends them in order."""
        own, self._own = self._own, None
        if own is None or not dist.is_initialized() or "nccl" in str(dist.get_backend_config(own)):
            return
        with contextlib.suppress(Exception):  # the default group may have destroyed it already
            dist.destroy_process_group(own)

    def waits_on_device(self, device: torch.device) -> bool:
        """Whether waiting for a collective blocks only a stream, not the host."""
        assert self._own is not None
        return device.type == "cuda" and backend_name(self._own, device) == "nccl"

    def all_reduce(self, values: Tensor) -> Work:
        """Sum over the ranks, in place."""
        self._count(2 * (self.world_size - 1) * values.nbytes // self.world_size)
        return _issued(dist.all_reduce(values, group=self._own, async_op=True))

    def all_reduce_plain(self, values: Tensor) -> Any:
        """Sum over the ranks on DDP's own group, issued where DDP would issue it."""
        size = sparse_values(values).nbytes + sparse_indices(values).nbytes if values.is_sparse else values.nbytes
        self._count(2 * (self.world_size - 1) * size // self.world_size)
        work = dist.all_reduce(values, group=self._base, async_op=True)
        assert work is not None
        return work

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Send part r of `sent` to rank r; all parts have the same size."""
        self._count((self.world_size - 1) * sent.nbytes // self.world_size)
        if self._in_pairs(sent):
            return self._swap(list(sent.chunk(self.world_size)), list(received.chunk(self.world_size)))
        return _issued(dist.all_to_all_single(received, sent, group=self._own, async_op=True))

    def all_gather(self, received: Tensor, sent: Tensor) -> Work:
        """Fill `received` with what all ranks sent, in rank order."""
        self._count((self.world_size - 1) * sent.nbytes)
        if self.world_size == 2 and self._in_pairs(sent):
            return self._swap([sent] * self.world_size, list(received.chunk(self.world_size)))
        return _issued(_all_gather(received, sent, group=self._own, async_op=True))

    def _in_pairs(self, values: Tensor) -> bool:
        return self._by_gloo and values.device.type == "cpu"

    def _swap(self, sent: list[Tensor], received: list[Tensor]) -> Work:
        """Exchange with every other rank, posting all receives before all sends.

        On slow links this is faster than gloo's all-to-all, and between two hosts faster than its all-gather
        (benchmarks/gloo_exchange.py).
        """
        assert self._own is not None
        self._exchanges += 1  # equal on all ranks, so it serves as a unique tag
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
        """Return the bytes sent so far and reset the count."""
        with self._counting:
            sent, self.sent_bytes = self.sent_bytes, 0
        return sent


class _All:
    """Several messages as one work."""

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
    """The backend for `new_group`: one name if all devices use the same, which torch would else treat as mixed."""
    config = str(dist.get_backend_config(group))  # device:backend,device:backend
    backends = {item.split(":")[-1] for item in config.split(",")}
    return backends.pop() if len(backends) == 1 else config


def _timeout_of(group: dist.ProcessGroup) -> Any:
    """The timeout of the group's collectives."""
    device = torch.device("cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu")
    return collective_timeout(group, device)


class Job:
    """One bucket being sent."""

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
    """Drives the generators of the buckets: in a thread, or on a side stream if waiting does not block the host."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._active: list[Job] = []  # used by the thread; oldest first
        self._error: Exception | None = None  # of the thread; once set, nothing more is sent

    @property
    def error(self) -> Exception | None:
        """The error after which nothing more is sent, if any."""
        return self._error

    def submit(self, stages: Stages, *, last: bool, device: torch.device) -> Result:
        """Take over a bucket without blocking the backward pass.

        Args:
            stages: The work on the bucket.
            last: Whether this is the last bucket of the backward pass.
            device: The device of its values.

        Returns:
            The future of the reduced bucket; it raises the error of this bucket or of an earlier one.
        """
        job, result = self.prepare(stages, last=last, device=device)
        self.start(job)
        return result

    def prepare(self, stages: Stages, *, last: bool, device: torch.device) -> tuple[Job, Result]:
        """Like `submit`, for a bucket that will be started later."""
        job = Job(stages, last, device)
        if self._wire.waits_on_device(device):
            return job, job.done
        # DDP does not see an exception set from Python, only one raised by a callback.
        return job, job.done.then(_value)

    def start(self, job: Job) -> None:
        """Start a bucket that was prepared."""
        if self._wire.waits_on_device(job.device):
            self._issue_all(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradient_compression", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _issue_all(self, job: Job) -> None:
        """Enqueue all work of a bucket on the side stream, without making the host wait."""
        with torch.no_grad(), self._on_stream(job):
            try:
                while True:
                    next(job.stages).wait()
            except StopIteration as ended:
                self._finish(job, ended.value)

    def close(self) -> None:
        """Stop the thread; buckets it still holds are dropped."""
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
                del job, older  # do not keep them alive while waiting for the next bucket

    def _advance(self, job: Job) -> None:
        """Advance one bucket to its next collective or to its end."""
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
        """Fail all waiting buckets, because skipping only one would leave the other ranks' collectives unanswered."""
        assert self._error is not None
        for job in self._active:
            job.stages.close()
            job.done.set_exception(self._error)  # type: ignore[arg-type]
        self._active.clear()

    @contextlib.contextmanager
    def _on_stream(self, job: Job) -> Generator[None, None, None]:
        """Run on the side stream of the bucket's device, after the work that wrote its values."""
        if job.ready is None:
            yield
            return
        stream = self._stream(job.device)
        stream.wait_event(job.ready)
        with torch.cuda.device(job.device), torch.cuda.stream(stream):
            yield


def _value(done: Result) -> Tensor:
    return done.value()
