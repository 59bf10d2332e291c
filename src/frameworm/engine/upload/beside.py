"""Training's interface to the upload service: starts it with the run, logs its reports, waits for it at the end."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from frameworm.engine.checkpoint.writer_client import start_process
from frameworm.engine.upload.service import Service, Task
from frameworm.records.objects.runs import age_of

log = logging.getLogger("frameworm")
_SERVICE = "frameworm.engine.upload.service"
_END_S = 5.0


class Uploads:
    """Uploads a run in the background.

    Args:
        task: What to upload and where.
        own_process: Whether to use a separate process; otherwise a thread.

    Attributes:
        newest: The newest checkpoint that was uploaded.
        problem: Why uploads are failing; None while all is well.
    """

    def __init__(self, task: Task, *, own_process: bool = True) -> None:
        self.newest: str | None = None
        self.problem: str | None = None
        self._url = task.ownership.url
        self._heard = threading.Condition()
        self._finished = self._asked = 0
        self._gone = False
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: queue.Queue[bytes] = queue.Queue()
        if own_process:
            try:
                self._process = start_process(_SERVICE, json.dumps(task.to_json()), os.getpid())
            except (OSError, ValueError, TypeError) as error:
                self._hear({"refused": f"the process that uploads cannot be started: {error}"})
                return
        self._thread = threading.Thread(target=self._listen if own_process else self._serve, args=[task], daemon=True)
        self._thread.start()

    def _serve(self, task: Task) -> None:
        Service(task, self._hear).serve(self._orders)

    def _listen(self, task: Task) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        unread = b""
        while content := self._process.stdout.read(2**16):
            *lines, unread = (unread + content).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        if not self._gone:
            self._hear({"refused": "the process that uploads has ended"})

    def _hear(self, message: dict[str, Any]) -> None:
        with self._heard:
            if "uploaded" in message:
                self.newest = max(message["uploaded"], self.newest or message["uploaded"], key=age_of)
            elif "finished" in message:
                self._finished = message["finished"]
            elif "lost" in message:
                self.problem = message["lost"]
                log.warning("%s; training continues, and the upload is tried again", self.problem)
            elif "back" in message:
                self.problem = None
                log.warning("%s is back after %.0f s; the upload continues", self._url, message["back"])
            elif "refused" in message:
                self.problem, self._gone = message["refused"], True
                log.warning("%s; training continues, and nothing more is uploaded", self.problem)
            self._heard.notify_all()

    @property
    def alive(self) -> bool:
        """Whether the service may still upload something."""
        return not self._gone

    def finish(self, limit_s: float, without: Sequence[str], hurried: Callable[[], bool]) -> bool:
        """Wait until everything in the folder is uploaded; return False if it is not.

        Args:
            limit_s: How long to wait.
            without: Files that are yet to be written.
            hurried: Polled for whether to give up.
        """
        self._asked += 1
        self._order({"finish": self._asked, "without": list(without)})
        deadline = monotonic() + limit_s
        with self._heard:
            while self._finished < self._asked and not self._gone:
                if monotonic() > deadline or hurried():
                    break
                self._heard.wait(0.2)
        return self._finished == self._asked

    def _order(self, order: dict[str, Any]) -> None:
        line = json.dumps(order).encode()
        if self._process is None:
            self._orders.put(line)
            return
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(line + b"\n")

    def close(self) -> None:
        """End the service, whatever it is doing; an upload that is cut short does not count."""
        self._gone = True
        self._order({"end": 1})
        if self._process is None:
            if self._thread is not None:
                self._thread.join(_END_S)
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()  # it ends at once, even in the middle of an upload
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.poll() is None:
            process.kill()
            process.wait(_END_S)
        if self._thread is not None:
            self._thread.join(_END_S)
        process.stdout.close()
