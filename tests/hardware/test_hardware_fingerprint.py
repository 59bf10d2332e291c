from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from frameworm.hardware.fingerprint import driver_version, environment_fingerprint


def test_fingerprint_is_an_allow_list_without_names_or_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hush-hush-value")
    found = environment_fingerprint(torch.device("cpu"))
    assert set(found) == {
        *("frameworm", "python", "torch", "numpy", "os", "kernel", "machine", "cpu_model", "cpus_usable", "cpus_total"),
        *(
            "torch_threads",
            "memory_bytes",
            "device",
            "device_names",
            "device_memory_bytes",
            "driver",
            "cuda",
            "cudnn",
            "nccl",
        ),
    }
    assert found["torch"] == torch.__version__
    assert found["frameworm"] is not None
    assert 1 <= found["cpus_usable"] <= found["cpus_total"]
    assert found["memory_bytes"] > 2**28
    assert (found["device"], found["device_names"], found["driver"]) == ("cpu", [], None)
    text = json.dumps(found)
    for secret in (socket.gethostname(), "hush-hush-value", f'"{getpass.getuser()}"'):
        assert secret not in text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("NVRM version: something else\n", None),
    ],
)
def test_driver_version_is_read_from_the_kernel(tmp_path: Path, text: str, version: str | None) -> None:
    assert driver_version(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    assert driver_version(tmp_path) == version
