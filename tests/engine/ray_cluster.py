"""A Ray cluster of several hosts on one machine: a raylet in each host's network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from conftest import kill_tree

PORT = 6379
START_S = 240.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: on a busy machine its workers hardly get to run
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
}


class RayCluster:
    """Host 0 has the head and no processor for workers; every other host has one.

    Args:
        lab: A `NetworkLab`.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.address = f"{lab.hosts[0].address}:{PORT}"
        # Paths of sockets are limited in length.
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self.environment = {**os.environ, **QUIET}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RayCluster:
        try:
            self._start(0, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
            for host in range(1, len(self._lab.hosts)):
                self.start_node(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start_node(self, host: int) -> None:
        """Add the node of a host."""
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def _start(self, host: int, *arguments: str) -> None:
        """Start Ray on a host, and wait until it runs: nodes that start at once take each other's sockets."""
        here = self._lab.hosts[host].address
        memory = f"--object-store-memory={80 * 2**20}"
        files = f"--temp-dir={self.folder}/{host}"
        command = ["start", "--block", f"--node-ip-address={here}", memory, files, *arguments]
        program = [sys.executable, "-m", "ray.scripts.scripts"]
        path = self.folder / f"host-{host}.log"
        # As every real host has one: Ray asks for it to find its own address.
        route = ["ip", "-n", self._lab.hosts[host].namespace, "route", "replace", "default", "dev", "eth0"]
        subprocess.run(route, check=True, timeout=20)
        with path.open("wb") as log:
            self._nodes[host] = subprocess.Popen(
                [*self._lab.prefix(host), *program, *command],
                env={**self.environment, "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in path.read_text(errors="replace"):
            assert self._nodes[host].poll() is None, path.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, path.read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def kill_node(self, host: int) -> None:
        """Take a host's power away."""
        process = self._nodes.pop(host)
        kill_tree(process.pid)
        process.wait(60)

    def workers(self, host: int) -> list[psutil.Process]:
        """The workers of Ray Train on a host."""
        family = psutil.Process(self._nodes[host].pid).children(recursive=True)
        return [process for process in family if "RayTrainWorker" in _title(process)]

    def frameworm(self, *arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start the command line on the head's host."""
        return self.python("-m", "frameworm", *arguments, cwd=cwd)

    def python(self, *arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Start Python on the head's host."""
        return subprocess.Popen(
            [*self._lab.prefix(0), sys.executable, *map(str, arguments)],
            env={**self.environment, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End every process of the cluster and remove its files."""
        for host in list(self._nodes):
            self.kill_node(host)
        shutil.rmtree(self.folder, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
