from __future__ import annotations

import pytest
import torch

from frameworm.errors import DeviceError
from frameworm.hardware.devices import choose_device, peak_flops, supports_bf16


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
    ],
)
def test_peak_of_known_gpus(name: str, precision: str, tera: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA A1000", "bf16"),
        ("NVIDIA A100-SXM-64GB", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("AMD Instinct MI300X", "bf16"),
        ("", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA H200", "fp64"),
    ],
)
def test_unknown_is_unknown(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


@pytest.mark.usefixtures("no_gpus")
def test_without_gpus_auto_is_cpu_and_asking_for_one_fails() -> None:
    assert choose_device("auto", 3) == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="device cuda asks for a GPU"):
        choose_device("cuda")
    with pytest.raises(DeviceError, match=r"device_ids \[0, 1\]"):
        choose_device("auto", 0, [0, 1])


@pytest.mark.usefixtures("gpus")
def test_the_local_rank_picks_the_gpu() -> None:
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cuda", 0, [1]) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
def test_gpus_that_are_not_there() -> None:
    with pytest.raises(DeviceError, match="at most 2 processes per node"):
        choose_device("auto", 2)
    with pytest.raises(DeviceError, match="asks for GPU 2"):
        choose_device("cuda", 0, [0, 2])
    with pytest.raises(DeviceError, match="contradicts"):
        choose_device("cpu", 0, [0])
    with pytest.raises(DeviceError, match="'tpu' is not one of"):
        choose_device("tpu")  # type: ignore[arg-type]


def test_bf16_is_asked_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_bf16(torch.device("cpu"))
    for capability, supported in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert supports_bf16(torch.device("cuda", 0)) is supported
