"""What a run was measured on: an allow-list of facts, without host or user names and without variables."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy
import torch

from frameworm import __version__
from frameworm.hardware.host import cpu_model, memory_total_bytes, usable_cpus


def environment_fingerprint(device: torch.device) -> dict[str, Any]:
    """Describe versions and hardware, so that it can be decided whether two runs are comparable.

    Args:
        device: The device trained on.

    Returns:
        JSON-ready facts; None for what cannot be known.
    """
    on_gpu = device.type == "cuda"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if on_gpu else []
    return {
        "frameworm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "os": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cpus_usable": usable_cpus(),
        "cpus_total": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory_total_bytes(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "device_names": names,
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "nccl": nccl_version() if on_gpu else None,
    }


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver.

    Args:
        root: Where /proc is mounted.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def nccl_version() -> str | None:
    """Return the version of torch's NCCL; None in builds without it."""
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None
