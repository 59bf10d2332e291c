from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from frameworm.hardware import host


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n3:memory:/job",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/host/path",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert host.cpu_quota(make(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "1000", "sys/fs/cgroup/memory.max": "max"}, 1000),
        ({"proc/self/cgroup": "3:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "2048"}, 2048),
        ({"proc/self/cgroup": "3:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory_limit_of_both_cgroup_versions(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert host.memory_limit_bytes(make(tmp_path, files)) == limit


def test_usable_cpus_is_cut_by_the_quota_but_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, cpus in ((None, 8), (2.5, 2), (0.3, 1), (64.0, 8)):
        monkeypatch.setattr(host, "cpu_quota", lambda quota=quota: quota)
        assert host.usable_cpus() == cpus


def test_memory_total_is_the_smaller_of_machine_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: 12345)
    assert host.memory_total_bytes() == 12345
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: None)
    assert host.memory_total_bytes() == psutil.virtual_memory().total


def test_peak_grows_with_what_was_held() -> None:
    before = host.host_peak_bytes()
    # Beyond the peak so far, whatever other tests have held before.
    held = bytearray(before - psutil.Process().memory_info().rss + 64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    assert host.host_peak_bytes() >= before + 32 * 2**20


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    folder = tmp_path / "sys/fs/cgroup/job"
    folder.mkdir(parents=True)
    assert host.oom_kills(tmp_path) == 0
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert host.oom_kills(tmp_path) == 2
