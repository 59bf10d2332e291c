"""The process that writes checkpoints: it reads orders from a pipe and tensors from shared memory, and answers.

It is spawned, never forked, so it inherits nothing from its parent (CUDA, threads, locks). It imports no torch. It ends
when its parent does, even in the middle of a write, so that it cannot disturb a process that resumes the run.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import threading
from typing import Any

from frameworm.engine.checkpoint.commit import CommitOrder, commit
from frameworm.engine.checkpoint.rank_writer import ShardWriter, WriteOrder
from frameworm.errors import CheckpointError

_LOOK_S = 0.1
_NICENESS = 5  # training goes first


def main(memory: int, parent: int) -> None:
    """Execute orders until an empty one arrives or the pipe is closed.

    Args:
        memory: Descriptor of the shared memory.
        parent: Process ID of the training process.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # printed output must not mix with the answers
    orders: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=listen, args=(orders, parent), daemon=True).start()
    share_writer = ShardWriter()
    while order := json.loads(orders.get()):  # an empty order ends the process
        answer(answers, perform(order, memory, share_writer, lambda: answer(answers, {"taken": 1})))
    os._exit(0)  # without waiting for the listening thread


def perform(order: dict[str, Any], memory: int, share_writer: ShardWriter, taken: Any) -> dict[str, Any]:
    """Execute one order and return the result."""
    try:
        if "commit" in order:
            return {"name": commit(CommitOrder.from_json(order["commit"]))}
        writing = WriteOrder.from_json(order["write"])
        mapped = mmap.mmap(memory, max(1, writing.memory_bytes), prot=mmap.PROT_READ)
        try:
            file, notes = share_writer.write(writing, memoryview(mapped), taken)
        finally:
            with contextlib.suppress(BufferError):  # an error's frames may still reference it
                mapped.close()
        return {"file": file.to_json(), "notes": notes}
    except Exception as error:  # whatever the error, report it to training, which continues
        return {"problem": in_words(error)}


def in_words(error: BaseException) -> str:
    """Describe an error for the user."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = isinstance(error, (CheckpointError, TimeoutError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def listen(orders: queue.Queue[bytes], parent: int) -> None:
    """Queue orders; exit with the parent, even if another child of it still holds the pipe open."""
    unread = b""
    while True:
        if os.getppid() != parent:
            os._exit(0)
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        content = os.read(0, 2**20)
        if not content:
            os._exit(0)
        *lines, unread = (unread + content).split(b"\n")
        for line in lines:
            orders.put(line)


def answer(descriptor: int, content: dict[str, Any]) -> None:
    line = json.dumps(content).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]
