"""What NVML reports about one GPU. NVML runs beside CUDA, so asking delays no kernel."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# From nvml.h. Without idle clocks, clocks set by an administrator and display clocks, which hold nothing back.
_THROTTLE_WORDS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
# A query that fails this often in a row is not repeated, because a failure costs as much as an answer.
MOST_FAILURES = 3


@dataclass(slots=True)
class GpuState:
    """One GPU at one moment; None for what it does not report."""

    busy: float | None = None  # fraction of the driver's last interval (up to a second) in which a kernel ran
    memory_bytes: int | None = None  # of all processes
    memory_total_bytes: int | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    temperature_c: float | None = None
    throttle_reasons: list[str] = field(default_factory=list)


def throttle_words(mask: int) -> list[str]:
    """Return the reasons in an NVML mask for which clocks are held below the maximum."""
    return [word for bit, word in _THROTTLE_WORDS.items() if mask & bit]


class NvmlGpu:
    """One GPU as NVML sees it.

    Args:
        nvml: The module pynvml, already initialised.
        handle: The GPU's handle.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._failures: dict[str, int] = {}

    def read(self) -> GpuState:
        """Query everything; a query without an answer gives None."""
        nvml, handle = self._nvml, self._handle
        utilisation = self._ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        energy = self._ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        clock = self._ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        clock_max = self._ask("clock_max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        temperature = self._ask("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        # The same query under its new and its old name.
        mask = self._ask("events", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if mask is None:
            mask = self._ask("throttling", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuState(
            busy=None if utilisation is None else utilisation.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_mhz=None if clock is None else float(clock),
            clock_max_mhz=None if clock_max is None else float(clock_max),
            power_w=None if power is None else power / 1e3,
            energy_j=None if energy is None else energy / 1e3,
            temperature_c=None if temperature is None else float(temperature),
            throttle_reasons=throttle_words(int(mask or 0)),
        )

    def close(self) -> None:
        """Release the library; other users in this process keep it."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        failures = self._failures.get(name, 0)
        if failures >= MOST_FAILURES:
            return None
        try:
            answer = question()
        except Exception:  # not supported, not permitted, a function this version lacks, a GPU that fell off the bus
            self._failures[name] = failures + 1
            return None
        self._failures[name] = 0
        return answer


def open_gpu(device: torch.device) -> NvmlGpu | None:
    """Open the GPU that torch calls `device`; None on CPU, or if pynvml (nvidia-ml-py), driver or GPU do not answer."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    try:
        handle = handle_of(nvml, torch.cuda.get_device_properties(device))
    except Exception:
        handle = None
    if handle is None:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()
        return None
    return NvmlGpu(nvml, handle)


def handle_of(nvml: Any, properties: Any) -> Any:
    """Find the handle by identity, because torch numbers only visible GPUs and NVML numbers all."""
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        text = str(uuid)
        with contextlib.suppress(Exception):
            return nvml.nvmlDeviceGetHandleByUUID(text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}")
    bus = getattr(properties, "pci_bus_id", None)
    if bus is not None:
        address = (
            f"{getattr(properties, 'pci_domain_id', 0):08X}:{bus:02X}:{getattr(properties, 'pci_device_id', 0):02X}.0"
        )
        with contextlib.suppress(Exception):
            return nvml.nvmlDeviceGetHandleByPciBusId(address)
    return nvml.nvmlDeviceGetHandleByIndex(0) if nvml.nvmlDeviceGetCount() == 1 else None
