"""What this machine, or the part of it that this process may use, has and can do."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")

# cgroup v1 expresses "no limit" as a number near 2**63.
_NO_LIMIT = 2**60


def usable_cpus() -> int:
    """Number of cores this process may use: those it is bound to, limited by its cgroup's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return bound if quota is None else max(1, min(bound, int(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU quota of the cgroups, in cores; None without a limit.

    Args:
        root: Where /proc and /sys are mounted.
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
    """Fraction of the periods in which a cgroup of this process was throttled by its quota; None without a quota.

    Args:
        root: Where /proc and /sys are mounted.
    """
    shares = []
    for folder in _cgroup_folders(root, "cpu"):
        counts = dict(line.split(None, 1) for line in _read(folder / "cpu.stat").splitlines() if " " in line)
        periods, throttled = _number(counts.get("nr_periods", "")), _number(counts.get("nr_throttled", ""))
        if periods and throttled is not None:
            shares.append(throttled / periods)
    return max(shares, default=None)


def memory_total_bytes() -> int:
    """Memory this process may use: the machine's, limited by its cgroup."""
    limit = memory_limit_bytes()
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory limit of the cgroups; None without a limit.

    Args:
        root: Where /proc and /sys are mounted.
    """
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is not None and 0 < limit < _NO_LIMIT:
            limits.append(limit)
    return min(limits, default=None)


def memory_used_bytes(processes: int = 1, root: Path = _ROOT) -> int:
    """Return the memory in use that counts against `memory_total_bytes`.

    With a limit: what all processes of the limiting cgroup hold, without file cache it could drop. Without a limit:
        this
    process and its children (loader workers), times the number of such processes on the machine.

    Args:
        processes: Ranks on this machine.
        root: Where /proc and /sys are mounted.
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
    """Resident memory of this process, plus what its children do not share with it."""
    own = psutil.Process()
    total = int(own.memory_info().rss)
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            memory = child.memory_info()
            total += int(memory.rss - getattr(memory, "shared", 0))
    return total


def oom_kills(root: Path = _ROOT) -> int:
    """How often the kernel has killed for lack of memory in this process's cgroups; only its increase is meaningful.

    Args:
        root: Where /proc and /sys are mounted.
    """
    kills = 0
    for folder in _cgroup_folders(root, "memory"):
        for line in (_read(folder / "memory.events") or _read(folder / "memory.oom_control")).splitlines():
            name, _, count = line.partition(" ")
            kills += (_number(count) or 0) if name == "oom_kill" else 0
    return kills


def address_space_bytes() -> tuple[int | None, int | None]:
    """Address space this process has mapped, and its limit (`ulimit -v`); None if unknown or unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _number((_read(Path("/proc/self/statm")).split() or [""])[0])
    mapped = None if pages is None else pages * resource.getpagesize()
    return mapped, None if limit == resource.RLIM_INFINITY else limit


def host_peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    # getrusage inherits the parent's peak when a program is started, so the kernel's own count comes first.
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_model() -> str | None:
    """Return the processor's name."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip() or None
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits apply to this process: its own cgroup and all above it, in cgroup v1 and v2."""
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
            # Inside a container the path may be the host's; then only the mount itself exists.
            yield folder
            folder = folder.parent


def _read(path: Path) -> str:
    """Text of a kernel file; empty if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
