"""Several hosts on one machine: network namespaces, veth pairs and a bridge, with links as slow as you like.

    python scripts/network_lab.py --hosts 2 --rate 100mbit -- python train.py
    python scripts/network_lab.py --sweep          remove what labs of processes that are gone have left behind

Each host is a network namespace with one interface, eth0 (10.77.0.1, 10.77.0.2, ...). A host's link is limited in both
directions by a token bucket. The command runs once per host with the variables of a torchrun worker (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, ...), so that one rank per host finds the others. Needs root and iproute2.

What an interface counts is what goes into the virtual cable. Large segments are cut nowhere on the way, so headers are
counted once for up to 64 kB and the bytes match the payload to about 0.3%; the rate limit does count the headers of the
packets that a real cable would carry: 100mbit is 95 Mbit/s of TCP payload.

In Python (load this file by its path, it is not part of the package):

    with NetworkLab(hosts=2, rate="100mbit") as lab:
        finished = lab.run([sys.executable, "train.py"], timeout_s=300)
        print(lab.counters())
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

FEWEST_HOSTS, MOST_HOSTS = 2, 8
INTERFACE = "eth0"
FIRST_PORT = 29500
BURST = "128kb"
QUEUE_LATENCY = "50ms"
PREFIX = "fwlab"
SWEEP_LOCK = Path(f"/run/{PREFIX}.lock")
COMMAND_LIMIT_S = 20.0
# A host whose command goes on after another's has failed waits for a rank that is gone.
GRACE_S = 10.0

Rate = str | None

_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-\d+-(sw|h\d)")
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_")
_serials = itertools.count()


class LabError(RuntimeError):
    """The lab cannot be built or used as asked; the message says why."""


@dataclass(frozen=True)
class Counters:
    """What one host's interface has counted since the lab was built."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes)


@dataclass(frozen=True)
class Finished:
    """How the command of one host ended."""

    host: int
    returncode: int
    stdout: str
    stderr: str
    late: bool = False  # it was ended because its time was up


@dataclass(frozen=True)
class Host:
    """One host of a lab."""

    index: int
    namespace: str
    address: str


class NetworkLab:
    """Hosts with their own addresses and limited links between them; everything is gone after the `with` block.

    Args:
        hosts: How many, from 2 to 8.
        rate: Of each host's link, in both directions, as tc writes it (`100mbit`); None is unlimited. A list gives
            each host its own.
        burst: What may pass at once after a pause.
    """

    def __init__(self, hosts: int = 2, rate: Rate | Sequence[Rate] = None, burst: str = BURST) -> None:
        if not FEWEST_HOSTS <= hosts <= MOST_HOSTS:
            raise LabError(f"a lab has {FEWEST_HOSTS} to {MOST_HOSTS} hosts, not {hosts}")
        self._wanted = _rates(rate, hosts)
        self._rates: list[Rate] = [None] * hosts
        self._burst = burst
        stem = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serials)}"
        self.hosts = tuple(Host(index, f"{stem}-h{index}", f"10.77.0.{index + 1}") for index in range(hosts))
        self._switch = f"{stem}-sw"
        self._owner = os.getpid()
        self._made: list[str] = []  # namespaces, until they are removed
        self._ports = itertools.count(FIRST_PORT)
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> NetworkLab:
        _require_tools()
        sweep()
        atexit.register(self.close)
        self._catch_signals()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs on the hosts and remove them; again and again does no harm."""
        if os.getpid() != self._owner:
            return  # a forked child: the lab is its parent's
        # One name leaves the list only when it is gone, so that a close cut short can be taken up again.
        while self._made:
            _remove(self._made[-1])
            self._made.pop()
        self._release_signals()
        atexit.unregister(self.close)

    def set_rate(self, rate: Rate | Sequence[Rate], host: int | None = None) -> None:
        """Change the rate of one host's link, or of all, while the lab is in use; None lifts the limit."""
        chosen = self.hosts if host is None else (self.hosts[host],)
        for item, limit in zip(chosen, _rates(rate, len(chosen)), strict=True):
            for namespace, device in ((item.namespace, INTERFACE), (self._switch, f"v{item.index}")):
                where = ("tc", "-n", namespace, "qdisc")
                if limit is not None:
                    bucket = ("tbf", "rate", limit, "burst", self._burst, "latency", QUEUE_LATENCY)
                    _call(*where, "replace", "dev", device, "root", *bucket)
                elif self._rates[item.index] is not None:
                    _call(*where, "delete", "dev", device, "root")
            self._rates[item.index] = limit

    def counters(self) -> list[Counters]:
        """Bytes each host has sent and received so far."""
        found = []
        for host in self.hosts:
            (link,) = json.loads(_call("ip", "-n", host.namespace, "-s", "-j", "link", "show", "dev", INTERFACE))
            statistics = link["stats64"]
            found.append(Counters(statistics["tx"]["bytes"], statistics["rx"]["bytes"]))
        return found

    def next_port(self) -> int:
        """A port for MASTER_PORT that no run of this lab has had."""
        return next(self._ports)

    def environment(
        self, host: int, env: Mapping[str, str | None] | None = None, port: int = FIRST_PORT
    ) -> dict[str, str]:
        """Variables for the one rank on a host; `env` adds some, and removes those whose value is None."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
        size, rank = str(len(self.hosts)), str(host)
        variables: dict[str, str | None] = {
            "OMP_NUM_THREADS": "1",
            **inherited,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": rank,
            "GROUP_WORLD_SIZE": size,
            **(env or {}),
        }
        return {name: value for name, value in variables.items() if value is not None}

    def prefix(self, host: int) -> list[str]:
        """Words to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host].namespace]

    def popen(
        self,
        host: int,
        command: Sequence[str | Path],
        env: Mapping[str, str | None] | None = None,
        port: int = FIRST_PORT,
        **settings: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on one host; the ranks of one run share a `port`. The lab's end ends it."""
        words = [*self.prefix(host), *map(str, command)]
        settings.setdefault("start_new_session", True)
        return subprocess.Popen(words, env=self.environment(host, env, port), **settings)

    def run(
        self,
        command: Sequence[str | Path] | Sequence[Sequence[str | Path]],
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 300.0,
        echo: bool = False,
        cwd: str | Path | None = None,
    ) -> list[Finished]:
        """Run a command on every host at once and wait for all.

        Args:
            command: The same for each host, or a list with one for each.
            env: Variables to add; None as a value removes one.
            timeout_s: Longest wait; then all are ended. When one fails, the others get 10 seconds.
            echo: Print each line as it comes, with the host's number before it.
            cwd: Working folder.

        Returns:
            One result per host.
        """
        each: list[Any] = [command] * len(self.hosts) if isinstance(command[0], (str, Path)) else list(command)
        if len(each) != len(self.hosts):
            raise LabError(f"{len(each)} commands for {len(self.hosts)} hosts")
        port = self.next_port()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started: list[subprocess.Popen[str]] = []
        readers: list[_Reader] = []
        try:
            for host, words in enumerate(each):
                process = self.popen(host, words, env, port, cwd=cwd, text=True, errors="replace", **streams)
                started.append(process)
                tag = f"[{host}] " if echo else None
                readers += [_Reader(process.stdout, tag, sys.stdout), _Reader(process.stderr, tag, sys.stderr)]
            _wait(started, time.monotonic() + timeout_s)
        finally:
            late = [process.poll() is None for process in started]
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = [reader.text() for reader in readers]
        return [
            Finished(host, process.returncode, texts[2 * host], texts[2 * host + 1], late[host])
            for host, process in enumerate(started)
        ]

    def _build(self) -> None:
        self._add(self._switch)
        _call("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        # No IPv6 addresses: their announcements would be counted with the payload.
        _call("ip", "-n", self._switch, "link", "set", "br0", "addrgenmode", "none", "up")
        for host in self.hosts:
            name, port = host.namespace, f"v{host.index}"
            self._add(name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", INTERFACE, "netns", name)
            _call("ip", "link", "add", port, "netns", self._switch, *peer)
            _call("ip", "-n", self._switch, "link", "set", port, "master", "br0", "addrgenmode", "none", "up")
            _call("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        self.set_rate(self._wanted)

    def _add(self, namespace: str) -> None:
        self._made.append(namespace)
        _call("ip", "netns", "add", namespace)

    def _catch_signals(self) -> None:
        """SIGTERM and SIGHUP end Python without a word; here they must unwind the `with` block."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _leave)

    def _release_signals(self) -> None:
        for number in list(self._handlers):
            signal.signal(number, self._handlers.pop(number))


class _Reader:
    """Reads one stream to its end in a thread, so that no process waits for a full pipe."""

    def __init__(self, stream: IO[str] | None, tag: str | None, screen: TextIO) -> None:
        assert stream is not None
        self._stream, self._tag, self._screen = stream, tag, screen
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        self._thread.join(GRACE_S)
        return "".join(self._lines)

    def _read(self) -> None:
        with self._stream:
            for line in self._stream:
                self._lines.append(line)
                if self._tag is not None:
                    self._screen.write(self._tag + line)
                    self._screen.flush()


@functools.cache
def available() -> str | None:
    """Why no lab can be built here, or None; found out by building one."""
    try:
        with NetworkLab(hosts=2, rate="1mbit"):
            return None
    except LabError as error:
        return str(error)


def sweep() -> list[str]:
    """Remove the labs of processes that are gone, with all that still runs in them; the names of what was removed."""
    removed = []
    with sweeping():
        for namespace in namespaces():
            match = _NAME.fullmatch(namespace)
            if match is not None and _started(int(match["pid"])) != match["started"]:
                _remove(namespace)
                removed.append(namespace)
    return removed


@contextlib.contextmanager
def sweeping() -> Iterator[None]:
    """While this is held, no other process of this machine sweeps; it ends with the process at the latest."""
    with SWEEP_LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def namespaces() -> list[str]:
    """All network namespaces that have a name on this machine."""
    return [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()]


def _rates(rate: Rate | Sequence[Rate], count: int) -> list[Rate]:
    if rate is None or isinstance(rate, str):
        return [rate] * count
    if len(rate) != count:
        raise LabError(f"{len(rate)} rates for {count} hosts: give one for all, or one for each")
    return list(rate)


def _started(pid: int) -> str | None:
    """When a living process was started, in ticks: a number that is given out again gets another one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run this as root (sudo)")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2")


def _call(*words: str) -> str:
    """What a command printed; LabError with its own words when it fails."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(words)}` did not end within {COMMAND_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove(namespace: str) -> None:
    """Delete a namespace that may be gone already; its interfaces go with it once nobody is inside."""
    _end_processes(namespace)
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": COMMAND_LIMIT_S}
    # A veth pair lives in two namespaces; without this it would stay as long as a socket of a dying process does.
    subprocess.run(["ip", "-n", namespace, "link", "delete", INTERFACE], check=False, **quiet)
    subprocess.run(["ip", "netns", "delete", namespace], check=False, **quiet)


def _end_processes(namespace: str, patience_s: float = 5.0) -> None:
    """Kill all that runs in a namespace, also what left its session."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
        pids = [int(word) for word in listed.stdout.split()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _wait(processes: Sequence[subprocess.Popen[Any]], deadline: float) -> None:
    """Until all have ended or time is up; after a failure the rest get a little longer."""
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not failed and any(code not in (None, 0) for code in codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    about, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="network_lab.py", description=f"{about}\n{details}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, 2 to 8 (default 2)")
    parser.add_argument(
        "--rate",
        default="unlimited",
        help="of each link in both directions: 100mbit, 1gbit (default: unlimited); a,b,... gives each host its own",
    )
    parser.add_argument("--burst", default=BURST, help=f"what may pass at once after a pause (default {BURST})")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds until the commands are ended (default 3600)"
    )
    parser.add_argument("--json", action="store_true", help="print the bytes as JSON, as the last line")
    parser.add_argument("--sweep", action="store_true", help="only remove what labs of dead processes have left")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run on each host")
    parsed = parser.parse_args(arguments)
    if parsed.command[:1] == ["--"]:
        del parsed.command[0]
    if not parsed.command and not parsed.sweep:
        parser.error("what shall the hosts run? Give the command after --")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Run the command line; the exit code is the first host's that failed."""
    options = _parse(arguments)
    try:
        if options.sweep:
            _require_tools()
            print("\n".join(sweep()) or "nothing was left behind")
            return 0
        limits = [None if item in ("none", "unlimited") else item for item in options.rate.split(",")]
        with NetworkLab(options.hosts, limits if len(limits) > 1 else limits[0], options.burst) as lab:
            begin = time.monotonic()
            finished = lab.run(options.command, timeout_s=options.timeout, echo=True)
            wall_s = time.monotonic() - begin
            counters = lab.counters()
    except LabError as error:
        print(f"network_lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if options.json:
        rows = [{"host": item.host, "exit": item.returncode, **vars(counters[item.host])} for item in finished]
        print(json.dumps({"rate": options.rate, "wall_s": wall_s, "hosts": rows}))
    else:
        print(f"{'host':>4}  {'exit':>4}  {'sent':>16}  {'received':>16}   in {wall_s:.1f} s, {options.rate}")
        for item in finished:
            count = counters[item.host]
            late = "  ended: time was up" if item.late else ""
            print(
                f"{item.host:>4}  {item.returncode:>4}  {count.sent_bytes:>14,} B  {count.received_bytes:>14,} B{late}"
            )
    codes = [item.returncode for item in finished if item.returncode]
    return codes[0] if codes and codes[0] > 0 else int(bool(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
