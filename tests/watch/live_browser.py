"""A real browser that stays open: pages are looked at while they change, over the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 60.0


class Browser:
    """One page of a headless Chromium.

    Attributes:
        console: What the page said to its console, errors of its scripts, and violations of its policy.
    """

    def __init__(self, chromium: str, folder: Path, size: tuple[int, int] = (1300, 1000), dark: bool = False) -> None:
        self.console: list[str] = []
        self._number = 0
        self._buffer = b""
        their_read, self._write = os.pipe()
        self._read, their_write = os.pipe()
        their_read, their_write = _far_away(their_read), _far_away(their_write)
        command = [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={size[0]},{size[1]}",
            *(["--force-dark-mode"] if dark else []),
            "about:blank",
        ]
        # The protocol lies on descriptors 3 and 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{their_read} 4>&{their_write}', "browser", *command]
        self._log = folder / "browser.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                shell,
                pass_fds=(their_read, their_write),
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        os.close(their_read)
        os.close(their_write)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        if dark:
            feature = {"name": "prefers-color-scheme", "value": "dark"}
            self._call("Emulation.setEmulatedMedia", features=[feature])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, url: str) -> None:
        """Go to an address."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:
        """The value of an expression as soon as it is true."""
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            tried = (
                f"try {{ const found = {expression}; return found instanceof Node || found }} catch {{ return null }}"
            )
            found = self.evaluate(f"(() => {{ {tried} }})()")
            if found:
                return found
            time.sleep(0.1)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(f"{expression} did not come true; the console: {self.console}; the page: {text[:2000]}")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write what is shown, or all of the page, as PNG."""
        options: dict[str, Any] = {"format": "png"}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse over the page."""
        for kind, (x, y), pressed in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", ((start[0] + end[0]) / 2, end[1]), 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=pressed, clickCount=1)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(ends)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self._listen(answer)

    def _next(self, ends: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, ends - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 2**20)
            assert data, f"the browser has ended: {self._log.read_text(errors='replace')[-2000:]}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _listen(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(item.get("value")) for item in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])


def _far_away(descriptor: int) -> int:
    """The same file under a number that putting others in places 3 and 4 cannot overwrite."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(descriptor)
    return moved
