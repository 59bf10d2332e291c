"""The network lab for benchmarks: scripts/network_lab.py, loaded by its path, and ranks on its hosts."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LAB = Path(__file__).parents[1] / "scripts" / "network_lab.py"


@functools.cache
def load_lab() -> ModuleType:
    """scripts/network_lab.py as a module."""
    specification = importlib.util.spec_from_file_location("network_lab", LAB)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["network_lab"] = module  # its dataclasses look their module up
    specification.loader.exec_module(module)
    return module


class Ranks:
    """A process on each host, as the parent talks to them: a task is a line of JSON, and so is its answer.

    Args:
        lab: The hosts.
        command: What to run on each; it reads tasks until `["end"]`.
        folder: For what they say beside their answers.
    """

    def __init__(self, lab: Any, command: Sequence[str], folder: Path) -> None:
        port = lab.next_port()
        hosts = range(len(lab.hosts))
        self._logs = [(folder / f"rank{host}.log").open("w") for host in hosts]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [
            lab.popen(host, list(command), {"OMP_NUM_THREADS": "1"}, port, stderr=self._logs[host], **streams)
            for host in hosts
        ]

    def ask(self, *task: Any) -> Any:
        """Have all do a task; the first one's answer."""
        for process in self._processes:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes]
        if not all(answers):
            logs = "\n".join(Path(log.name).read_text()[-2000:] for log in self._logs)
            raise RuntimeError(f"a rank ended during {task}:\n{logs}")
        return json.loads(answers[0])

    def end(self) -> None:
        """Let all come to their end."""
        for process in self._processes:
            if process.poll() is None:
                process.stdin.write('["end"]\n')
                process.stdin.close()
        for process, log in zip(self._processes, self._logs, strict=True):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            log.close()
