"""What NVML says, from a stand-in for its module; a GPU is only needed at the end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frameworm.hardware.nvml import MOST_FAILURES, GpuState, NvmlGpu, open_gpu, throttle_words


class NotSupportedError(Exception):
    """As NVML raises it."""


class FakeNvml:
    """Answers for two GPUs; what is named in `absent` is not supported."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, absent: tuple[str, ...] = (), count: int = 2) -> None:
        self.absent = absent
        self.count = count
        self.calls: dict[str, int] = {}
        self.opened = 0
        self.reasons = 0x04 | 0x40 | 0x01 | 0x02

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.absent:
                raise NotSupportedError(name)
            return self.answer(name, arguments)

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            self.opened += 1 if name == "nvmlInit" else -1
            return None
        if name.startswith("nvmlDeviceGetHandleBy"):
            return (name.removeprefix("nvmlDeviceGetHandleBy"), arguments[0])
        return {
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=30 * 2**30, total=140 * 2**30, free=0),
            "nvmlDeviceGetPowerUsage": 512_300,
            "nvmlDeviceGetTotalEnergyConsumption": 9_000_500,
            "nvmlDeviceGetClockInfo": 1_755,
            "nvmlDeviceGetMaxClockInfo": 1_980,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
        }[name]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make torch show one GPU with the given properties, and NVML be a stand-in."""

    def install(fake: FakeNvml, **properties: Any) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
        return fake

    return install


def test_all_figures_in_the_units_of_the_record() -> None:
    state = NvmlGpu(FakeNvml(), "handle").read()
    assert state == GpuState(
        busy=0.87,
        memory_bytes=30 * 2**30,
        memory_total_bytes=140 * 2**30,
        clock_mhz=1755.0,
        clock_max_mhz=1980.0,
        power_w=512.3,
        energy_j=9000.5,
        temperature_c=61.0,
        throttle_reasons=["power cap", "thermal (hardware)"],
    )


def test_idle_and_set_clocks_are_no_throttling() -> None:
    assert throttle_words(0x01 | 0x02 | 0x100) == []
    assert throttle_words(0x08 | 0x20 | 0x80) == ["hardware slowdown", "thermal (software)", "power brake"]


def test_what_is_not_supported_is_none_and_soon_not_asked_any_more() -> None:
    absent = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksEventReasons")
    fake = FakeNvml(absent)
    gpu = NvmlGpu(fake, "handle")
    states = [gpu.read() for _ in range(10)]
    assert all(state.energy_j is None and state.power_w == 512.3 for state in states)
    assert states[-1].throttle_reasons == ["power cap", "thermal (hardware)"], "the older name was not tried"
    assert fake.calls["nvmlDeviceGetTotalEnergyConsumption"] == MOST_FAILURES
    assert fake.calls["nvmlDeviceGetPowerUsage"] == 10


def test_a_source_that_fails_once_is_asked_again() -> None:
    fake = FakeNvml(("nvmlDeviceGetPowerUsage",))
    gpu = NvmlGpu(fake, "handle")
    assert gpu.read().power_w is None
    fake.absent = ()
    assert [gpu.read().power_w for _ in range(5)] == [512.3] * 5


def test_the_gpu_is_found_by_identity_not_by_number(on_gpu: Any) -> None:
    on_gpu(FakeNvml(), uuid="12ab")
    gpu = open_gpu(torch.device("cuda", 0))
    assert gpu is not None
    assert gpu._handle == ("UUID", "GPU-12ab")


def test_without_identity_only_a_single_gpu_will_do(on_gpu: Any) -> None:
    fake = on_gpu(FakeNvml(("nvmlDeviceGetHandleByUUID",), count=2), uuid="12ab")
    assert open_gpu(torch.device("cuda", 0)) is None
    assert fake.opened == 0
    on_gpu(FakeNvml(count=1))
    gpu = open_gpu(torch.device("cuda", 0))
    assert gpu is not None
    assert gpu._handle == ("Index", 0)
    on_gpu(FakeNvml(("nvmlDeviceGetHandleByUUID",)), uuid="x", pci_bus_id=0x1A, pci_domain_id=0, pci_device_id=2)
    gpu = open_gpu(torch.device("cuda", 0))
    assert gpu is not None
    assert gpu._handle == ("PciBusId", "00000000:1A:02.0")


def test_absent_package_or_driver_is_none(monkeypatch: pytest.MonkeyPatch, on_gpu: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert open_gpu(torch.device("cuda", 0)) is None
    on_gpu(FakeNvml(("nvmlInit",)), uuid="12ab")
    assert open_gpu(torch.device("cuda", 0)) is None
    assert open_gpu(torch.device("cpu")) is None


def test_closing_lets_go_of_the_library(on_gpu: Any) -> None:
    fake = on_gpu(FakeNvml(), uuid="12ab")
    gpu = open_gpu(torch.device("cuda", 0))
    assert gpu is not None
    assert fake.opened == 1
    gpu.close()
    assert fake.opened == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_tells_its_memory() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = open_gpu(device)
    assert gpu is not None
    held = torch.zeros(2**28, device=device)
    state = gpu.read()
    gpu.close()
    assert state.memory_bytes is not None
    assert state.memory_bytes >= held.numel() * 4
    assert state.memory_total_bytes is not None
    assert state.memory_total_bytes >= torch.cuda.get_device_properties(device).total_memory
    assert state.busy is None or 0 <= state.busy <= 1
