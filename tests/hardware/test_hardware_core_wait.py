"""What a process lost to others, from the kernel's own account."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frameworm.hardware.core_wait import CoreWait, Waits


def kernel(root: Path, waited_s: dict[int, float], steal: float = 0.0, user: float = 0.0) -> None:
    """Write the account of threads and cores, as Linux shows it."""
    for thread, seconds in waited_s.items():
        folder = root / "proc/7/task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"123456 {int(seconds * 1e9)} 42\n")
    core = min(os.sched_getaffinity(0))
    lines = [
        f"cpu {user} 0 0 0 0 0 0 {steal} 0 0",
        f"cpu{core} {user} 0 0 900 0 0 0 {steal} 0 0",
        "cpufreq 1",
        "intr 5",
    ]
    (root / "proc/stat").write_text("\n".join(lines))


def test_the_thread_that_waited_longest_says_how_much(tmp_path: Path) -> None:
    kernel(tmp_path, {7: 1.0, 8: 5.0})
    wait = CoreWait(7, tmp_path)
    assert wait.read(10.0) == Waits(None, None)
    kernel(tmp_path, {7: 1.1, 8: 5.5, 9: 0.2}, steal=10.0, user=30.0)
    assert wait.read(12.0) == pytest.approx((0.25, 0.25))
    assert Waits(0.25, 0.25).lost == pytest.approx(1 - 0.75 * 0.75)
    kernel(tmp_path, {7: 1.1, 8: 5.5, 9: 0.2}, steal=10.0, user=30.0)
    assert wait.read(13.0) == (0.0, 0.0)


def test_nothing_is_known_where_the_kernel_keeps_no_account(tmp_path: Path) -> None:
    wait = CoreWait(7, tmp_path)
    wait.read(1.0)
    waits = wait.read(2.0)
    assert waits == Waits(None, None)
    assert waits.lost == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no account of waits")
def test_a_process_that_shares_its_core_waits_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nend = time.monotonic() + 200\n"
    spin += "while time.monotonic() < end: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        deadline, waiting = time.monotonic() + 150, 0.0
        wait = CoreWait(both[0].pid)
        wait.read(time.perf_counter())
        while waiting < 0.3 and time.monotonic() < deadline:
            time.sleep(0.5)
            waiting = wait.read(time.perf_counter()).waiting or 0.0
        assert waiting >= 0.3, "two of them share one core"
    finally:
        for one in both:
            one.kill()
            one.wait()
