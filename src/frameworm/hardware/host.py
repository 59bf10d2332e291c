"""What this machine, or the share of it that was given to this process, can do."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")

# cgroup v1 says "no limit" by a number near 2**63.
_NO_LIMIT = 2**60


def usable_cpus() -> int:
    """Cores this process may use: those it is bound to, cut down to its cgroup's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return bound if quota is None else max(1, min(bound, int(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores' worth of time that cgroups grant, None without a limit.

    Args:
        root: Where /proc and /sys are found.
    """
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = None, None
        if (words := _read(folder / "cpu.max").split())[1:]:
            quota, period = _number(words[0]), _number(words[1])
        elif text := _read(folder / "cpu.cfs_quota_us"):
            quota, period = _number(text), _number(_read(folder / "cpu.cfs_period_us"))
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def quota_throttled_share(root: Path = _ROOT) -> float | None:
    """Share of the periods in which a cgroup of this process was stopped for being beyond its quota; None: no quota.

    Args:
        root: Where /proc and /sys are found.
    """
    shares = []
    for folder in _cgroup_folders(root, "cpu"):
        counts = dict(line.split(None, 1) for line in _read(folder / "cpu.stat").splitlines() if " " in line)
        periods, throttled = _number(counts.get("nr_periods", "")), _number(counts.get("nr_throttled", ""))
        if periods and throttled is not None:
            shares.append(throttled / periods)
    return max(shares, default=None)


def memory_total_bytes() -> int:
    """Memory this process may use: the machine's, cut down to its cgroup's limit."""
    limit = memory_limit_bytes()
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Memory that cgroups grant, None without a limit.

    Args:
        root: Where /proc and /sys are found.
    """
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is not None and 0 < limit < _NO_LIMIT:
            limits.append(limit)
    return min(limits, default=None)


def memory_used_bytes(processes: int = 1, root: Path = _ROOT) -> int:
    """What counts against `memory_total_bytes`.

    With a limit: what the cgroup that has it holds, all its processes together, but for files it could drop. Without:
    this process and those it started (loader workers), as often as there are processes like it on the machine.

    Args:
        processes: Ranks on this machine.
        root: Where /proc and /sys are found.
    """
    tightest: tuple[int, Path] | None = None
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is not None and 0 < limit < _NO_LIMIT and (tightest is None or limit < tightest[0]):
            tightest = limit, folder
    if tightest is not None:
        folder = tightest[1]
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes"))
        if used is not None:
            statistics = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            files = statistics.get("total_inactive_file") or statistics.get("inactive_file") or "0"
            return max(used - (_number(files) or 0), 0)
    return process_tree_bytes() * max(processes, 1)


def process_tree_bytes() -> int:
    """Resident memory of this process, and what its children do not share with it."""
    own = psutil.Process()
    total = int(own.memory_info().rss)
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            memory = child.memory_info()
            total += int(memory.rss - getattr(memory, "shared", 0))
    return total


def oom_kills(root: Path = _ROOT) -> int:
    """How often the kernel has killed for memory in this process's cgroups; only its growth means something.

    Args:
        root: Where /proc and /sys are found.
    """
    kills = 0
    for folder in _cgroup_folders(root, "memory"):
        for line in (_read(folder / "memory.events") or _read(folder / "memory.oom_control")).splitlines():
            name, _, count = line.partition(" ")
            kills += (_number(count) or 0) if name == "oom_kill" else 0
    return kills


def address_space_bytes() -> tuple[int | None, int | None]:
    """Address space this process has mapped, and the most it may (`ulimit -v`); None where unknown or unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _number((_read(Path("/proc/self/statm")).split() or [""])[0])
    mapped = None if pages is None else pages * resource.getpagesize()
    return mapped, None if limit == resource.RLIM_INFINITY else limit


def host_peak_bytes() -> int:
    """Most memory this process has held so far."""
    # A started program inherits its parent's peak in getrusage, so the kernel's own count comes first.
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_model() -> str | None:
    """The processor's name."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip() or None
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders whose limits hold for this process: its own cgroup and all above it, in both versions."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mount = base
        elif controller in controllers.split(","):
            mount = base / controllers if (base / controllers).is_dir() else base / controller
        else:
            continue
        folder = mount / path.strip("/")
        yield mount
        while folder != mount:
            # Inside a container the path may be the host's; then only the mount itself is there.
            yield folder
            folder = folder.parent


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
