"""Which device a process trains on, and the peak speed of that device."""

from __future__ import annotations

import re
from typing import Literal

import torch

from frameworm.errors import DeviceError

_TERA = 1e12

# Dense peak in TFLOP/s per precision, without sparsity; for consumer cards with fp32 accumulation, as in training. The
# pattern must match the whole name that CUDA reports (without the vendor's name), so that a variant with another clock,
# power limit or slice of the chip is unknown rather than wrong.
#   V100: NVIDIA V100 datasheet (2020). T4: NVIDIA T4 datasheet. A10, A100, L4, L40S, H200: NVIDIA datasheets of these
#   products. H100: NVIDIA H100 datasheet and Hopper architecture whitepaper. B200: NVIDIA HGX B200 figures / 8.
#   RTX 3090: GA102 whitepaper, appendix A. RTX 4090: Ada architecture whitepaper, appendix A.
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM[23]-\d+GB(-LS)?", {"fp32": 15.7, "fp16": 125}),
    (r"V100-PCIE-\d+GB", {"fp32": 14, "fp16": 112}),
    (r"V100S-PCIE-\d+GB", {"fp32": 16.4, "fp16": 130}),
    (r"T4", {"fp32": 8.1, "fp16": 65}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}),
    (r"A100-(SXM4?|PCIE)-[48]0GB|A100 80GB PCIE", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    (r"L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121}),
    (r"L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362}),
    (r"H100 80GB HBM3", {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    (r"H100 PCIE", {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756}),
    (r"H100 NVL", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    (r"H200", {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    (r"H200 NVL", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    (r"B200", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250}),
    (r"RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    (r"RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
)
_MAKER = re.compile(r"^((NVIDIA|TESLA|GEFORCE)\s+)+")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s.

    Args:
        device_name: The name that torch.cuda.get_device_name returns.
        precision: fp32, tf32, bf16 or fp16.

    Returns:
        The peak, or None if the GPU or precision is not in the table. Never a guess.
    """
    name = _MAKER.sub("", device_name.strip().upper())
    for pattern, peaks in _PEAK_TFLOPS:
        if re.fullmatch(pattern, name):
            tera = peaks.get(precision)
            return None if tera is None else tera * _TERA
    return None


def choose_device(
    kind: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0, device_ids: list[int] | None = None
) -> torch.device:
    """Return the device of this process.

    Args:
        kind: auto uses a GPU if there is one.
        local_rank: Number of this process on its node; it selects the GPU.
        device_ids: GPUs to choose from; default: all.

    Returns:
        A device that exists.

    Raises:
        DeviceError: The requested GPU does not exist.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"device {kind!r} is not one of auto, cpu, cuda")
    if kind == "cpu":
        if device_ids:
            raise DeviceError(f"device cpu contradicts device_ids {device_ids}; keep one of them")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        if kind == "auto" and not device_ids:
            return torch.device("cpu")
        wanted = f"gpu.device_ids {device_ids}" if device_ids else "gpu.device cuda"
        raise DeviceError(
            f"{wanted} asks for a GPU, but {_why_no_gpu()}; set gpu.device to cpu or auto to train on the CPU"
        )
    choice = list(range(count)) if device_ids is None else device_ids
    for index in choice:
        if not 0 <= index < count:
            raise DeviceError(
                f"device_ids {choice} asks for GPU {index}, but this machine shows {count}: {_gpus(count)}"
            )
    if local_rank >= len(choice):
        raise DeviceError(
            f"process {local_rank} of this node needs a GPU of its own, but there are {len(choice)}: {_gpus(count)}. "
            f"Start at most {len(choice)} processes per node, or set gpu.device to cpu."
        )
    return torch.device("cuda", choice[local_rank])


def supports_bf16(device: torch.device) -> bool:
    """True if the device supports bf16 natively; torch emulates it on older GPUs, which is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu"


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "no CUDA device is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)"


def _gpus(count: int) -> str:
    return ", ".join(f"{index} {torch.cuda.get_device_name(index)}" for index in range(count))
