"""Inspects this machine once, for `doctor`; what a source cannot tell stays None."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from frameworm.hardware.fingerprint import driver_version, nccl_version
from frameworm.hardware.host import (
    cpu_quota,
    memory_total_bytes,
    memory_used_bytes,
    quota_throttled_share,
    usable_cpus,
)
from frameworm.hardware.inspect_gpu import gpu_facts, peer_access
from frameworm.hardware.storage import probe_storage
from frameworm.records.machine import MachineFacts, PortFacts

_ROOT = Path("/")
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}


def inspect_machine(
    run_root: Path,
    port: int,
    *,
    master_address: str | None = None,
    port_asked: bool = False,
    probe_bytes: int | None = None,
    root: Path = _ROOT,
) -> MachineFacts:
    """Collect what doctor checks; takes a second or two, mostly for the write to the run folder.

    Args:
        run_root: The folder under which runs are written; it need not exist yet.
        port: Port at which the ranks would meet.
        master_address: The machine with that port; None if it is not set.
        port_asked: True if a variable sets the port.
        probe_bytes: Most bytes to write to the run folder; None: the default, 0: none.
        root: Where /proc, /sys and /dev are mounted.
    """
    gpus, nvml, error = gpu_facts(root)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    resolves, loopback = _host_name()
    total = memory_total_bytes()
    return MachineFacts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpus=gpus,
        gpu_error=error,
        nvidia_devices=_nvidia_devices(root),
        driver=driver_version(root),
        nvml=nvml,
        peer_access=peer_access(len(gpus)),
        nccl=nccl_version() if torch.version.cuda else None,
        triton=find_spec("triton") is not None,
        compiler=next((path for path in map(shutil.which, ("gcc", "cc", "clang")) if path), None),
        cpus_total=os.cpu_count(),
        cpus_bound=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        cpu_quota=cpu_quota(root),
        cpus_usable=usable_cpus(),
        quota_throttled_share=quota_throttled_share(root),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        torch_threads=torch.get_num_threads(),
        torch_interop_threads=torch.get_num_interop_threads(),
        memory_bytes=total,
        memory_available_bytes=min(int(psutil.virtual_memory().available), max(total - _held(root), 0)),
        **_shared_memory(root),
        open_files=(_limit(files[0]), _limit(files[1])),
        locked_memory_bytes=_limit(locked),
        infiniband=_names(root / "sys/class/infiniband"),
        interfaces=_interfaces(),
        host_resolves=resolves,
        host_is_loopback=loopback,
        storage=probe_storage(run_root, probe_bytes),
        port=try_port(port, master_address, port_asked),
    )


def try_port(port: int, master_address: str | None = None, asked: bool = False) -> PortFacts:
    """Test whether a port of this machine can be bound, and release it again.

    Args:
        port: The port.
        master_address: Host that should have it; None: this one.
        asked: True if it was set explicitly.
    """
    own = None if master_address is None else _is_own(master_address)
    if own is False:
        return PortFacts(port, None, None, False, asked)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like torch's store; otherwise a port counts as taken while old connections linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            return PortFacts(port, False, getattr(error, "strerror", None) or str(error), own, asked)
    return PortFacts(port, True, None, own, asked)


def _is_own(host: str) -> bool | None:
    if host in _LOOPBACK_NAMES:
        return True
    try:
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    return not wanted.isdisjoint(entry.address for entries in psutil.net_if_addrs().values() for entry in entries)


def _host_name() -> tuple[bool, bool | None]:
    """Whether this machine's own name resolves, and whether only to a loopback address."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except (OSError, UnicodeError):
        return False, None
    return bool(found), all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def _interfaces() -> tuple[str, ...]:
    return tuple(sorted(name for name, state in psutil.net_if_stats().items() if state.isup))


def _shared_memory(root: Path) -> dict[str, Any]:
    try:
        found = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return {}
    return {"shared_memory_bytes": found.total, "shared_memory_free_bytes": found.free}


def _held(root: Path) -> int:
    """Memory that counts against a cgroup's limit; 0 without one, because psutil already reports the machine's."""
    from frameworm.hardware.host import memory_limit_bytes

    return memory_used_bytes(root=root) if memory_limit_bytes(root) is not None else 0


def _nvidia_devices(root: Path) -> int | None:
    gpus = _names(root / "proc/driver/nvidia/gpus")
    return len(gpus) if gpus else None


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    return None


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value
