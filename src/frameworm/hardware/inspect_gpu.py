"""What torch and NVML report about each GPU, for `doctor`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from frameworm.hardware.nvml import NvmlGpu, handle_of, throttle_words
from frameworm.records.machine import GpuFacts

_MOST_LINKS = 18  # on a Hopper or Blackwell GPU; asking beyond the last one fails


def gpu_facts(root: Path = Path("/")) -> tuple[tuple[GpuFacts, ...], bool | None, str | None]:
    """Return the GPUs that torch sees, whether NVML answers (None: not asked), and any error."""
    try:
        count = torch.cuda.device_count()
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    except (RuntimeError, AssertionError) as error:
        return (), None, str(error).splitlines()[0]
    if not properties:
        return (), None, None
    nvml = _open_nvml()
    try:
        return tuple(facts_of(item, nvml, root) for item in properties), nvml is not None, None
    finally:
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def facts_of(properties: Any, nvml: Any | None, root: Path = Path("/")) -> GpuFacts:
    """Describe one GPU.

    Args:
        properties: From torch.cuda.get_device_properties.
        nvml: The module pynvml, already initialised; None if it is not available.
        root: Where /sys is mounted.
    """
    base = {
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "capability": properties.major + properties.minor / 10,
        "local_cpus": _local_cpus(properties, root),
    }
    handle = None
    if nvml is not None:
        with contextlib.suppress(Exception):
            handle = handle_of(nvml, properties)
    if nvml is None or handle is None:
        return GpuFacts(**base)
    state = NvmlGpu(nvml, handle).read()
    return GpuFacts(
        **base,
        used_bytes=state.memory_bytes,
        throttle_reasons=_throttle_reasons(nvml, handle),
        temperature_c=state.temperature_c,
        nvlinks=_links(nvml, handle),
        pcie_width=_ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        pcie_width_max=_ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        pcie_generation_max=_ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
    )


def peer_access(count: int) -> bool | None:
    """True if every GPU can access every other's memory; None with fewer than two, or if torch cannot tell."""
    if count < 2:
        return None
    try:
        return all(
            torch.cuda.can_device_access_peer(one, other)
            for one in range(count)
            for other in range(count)
            if one != other
        )
    except (RuntimeError, AssertionError):
        return None


def _open_nvml() -> Any | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    return nvml


def _throttle_reasons(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Throttle reasons; unlike in `GpuState`, "none" differs from "no answer". The query has a new and an old name."""
    mask = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if mask is None:
        mask = _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return None if mask is None else tuple(throttle_words(mask))


def _links(nvml: Any, handle: Any) -> int | None:
    """Number of NVLinks that are up; 0 on GPUs without any."""
    up, told = 0, False
    for link in range(_MOST_LINKS):
        try:
            up += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            told = True
        except Exception as error:
            unsupported = getattr(nvml, "NVMLError_NotSupported", None)
            if unsupported is not None and isinstance(error, unsupported):
                return up
            return up if told else None
    return up


def _local_cpus(properties: Any, root: Path) -> frozenset[int] | None:
    """Cores local to the GPU, from the kernel's list such as 0-15,64-79."""
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    address = f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
    try:
        text = (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text(encoding="utf-8").strip()
        cores: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return None
    return frozenset(cores) or None


def _ask(question: Callable[[], Any]) -> int | None:
    try:
        return int(question())
    except Exception:  # not supported, not permitted, or a function this version lacks
        return None
