"""What doctor reads of a machine: fake files, a fake management library, and this machine once."""

# ruff: noqa: N802  (the names are those of the library)

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frameworm.diagnose.machine.judge import judge_machine
from frameworm.hardware import host, storage
from frameworm.hardware.inspect import inspect_machine, try_port
from frameworm.hardware.inspect_gpu import facts_of, peer_access
from frameworm.hardware.storage import probe_storage


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """Answers as an H200 in a narrow slot, with six of its links up."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVMLError_NotSupported = FakeNvmlError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=2**30, total=2**37)

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 91

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x40

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= 8:
            raise FakeNvmlError("not supported")
        return int(link < 6)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    total_memory=2**37,
    major=9,
    minor=0,
    uuid="12",
    pci_bus_id=0x1A,
    pci_device_id=0,
    pci_domain_id=0,
)


def test_gpu_by_its_management_library(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-2,8\n")
    facts = facts_of(PROPERTIES, FakeNvml(), tmp_path)
    assert (facts.name, facts.capability, facts.used_bytes) == ("NVIDIA H200", 9.0, 2**30)
    assert facts.throttle_reasons == ("thermal (hardware)",)
    assert (facts.nvlinks, facts.pcie_width, facts.pcie_width_max) == (6, 4, 16)
    assert facts.pcie_generation_max is None, "a question without an answer"
    assert facts.local_cpus == {0, 1, 2, 8}


def test_gpu_without_its_management_library(tmp_path: Path) -> None:
    facts = facts_of(PROPERTIES, None, tmp_path)
    assert facts.memory_bytes == 2**37
    assert facts.used_bytes is facts.throttle_reasons is facts.nvlinks is facts.local_cpus is None
    silent = facts_of(PROPERTIES, SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda uuid: uuid), tmp_path)
    assert silent.throttle_reasons is None, "no answer is not: no throttling"
    assert silent.nvlinks is None


def test_peer_access_is_a_question_of_two() -> None:
    assert peer_access(1) is None


def test_storage_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    facts = probe_storage(tmp_path / "not" / "there", 2**20)
    assert facts.writable
    assert facts.written_bytes == 2**20
    assert facts.write_bytes_per_s is not None
    assert facts.write_bytes_per_s > 0
    assert facts.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_storage_stops_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([float(number) for number in range(100)])
    monkeypatch.setattr(storage.time, "perf_counter", lambda: next(ticks))
    facts = probe_storage(tmp_path, 2**26, limit_s=3.0)
    assert facts.written_bytes == 2 * 4 * 2**20


def test_storage_is_timed_until_the_file_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(storage.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(storage.os, "fsync", lambda descriptor: clock.append(clock.pop() + 2.0))
    facts = probe_storage(tmp_path, 2**20)
    assert facts.write_bytes_per_s == 2**19, "a file in the page cache is not written yet"


def test_storage_takes_little_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert probe_storage(tmp_path).written_bytes == 2**20 // 20


def test_storage_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert probe_storage(file, 10).writable is False

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "NamedTemporaryFile", refuse)
    facts = probe_storage(tmp_path, 10)
    assert (facts.writable, facts.error) == (False, "Permission denied")


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        facts = try_port(port, "127.0.0.1", asked=True)
        assert facts.free is False
        assert facts.error
        assert facts.own_address
        assert try_port(port, "192.0.2.1").own_address is False, "of another machine"
    assert try_port(port).free
    assert try_port(70000).free is False


def test_quota_throttling(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 50",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert host.quota_throttled_share(tmp_path) == 0.25
    assert host.quota_throttled_share(tmp_path / "elsewhere") is None


def test_this_machine(tmp_path: Path) -> None:
    facts = inspect_machine(tmp_path, 29500, probe_bytes=2**20)
    assert facts.cpus_usable == host.usable_cpus()
    assert facts.cpus_bound == os.sched_getaffinity(0)
    assert facts.memory_bytes is not None
    assert 0 < (facts.memory_available_bytes or 0) <= facts.memory_bytes
    assert "lo" in facts.interfaces
    assert facts.storage is not None
    assert facts.storage.writable
    assert facts.storage.filesystem
    assert facts.to_dict()["cpus_bound"] == sorted(os.sched_getaffinity(0))
    assert {check.verdict for check in judge_machine(facts, {})} <= {"ok", "advice", "problem", "unknown"}
