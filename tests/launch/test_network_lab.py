"""The network lab: links as slow as asked for, honest counters, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "network_lab.py"
MEGABYTES = 4
PAYLOAD = MEGABYTES * 10**6

Lab = Callable[..., Any]

# Host 0 sends, host 1 says how long the bytes took from the first that came to the last.
TRANSFER = """
import os, socket, sys, time
size, skipped = int(sys.argv[1]), 400_000
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        connection, _ = server.accept()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    count, begin, counted = 0, None, 0
    while chunk := connection.recv(1 << 16):
        count += len(chunk)
        if begin is not None:
            counted += len(chunk)
        elif count >= skipped:  # the burst has passed
            begin = time.perf_counter()
    print(counted * 8 / (time.perf_counter() - begin) / 1e6, count)
"""

OWNER = """
import importlib.util, subprocess, sys, time
spec = importlib.util.spec_from_file_location("network_lab", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["network_lab"] = module
spec.loader.exec_module(module)
lab = module.NetworkLab(hosts=2, rate="10mbit")
with lab:
    inside = [lab.popen(host, ["sleep", "300"]) for host in range(2)]
    # One that leaves its session, so that only the namespace gives it away.
    deep = lab.popen(0, ["sh", "-c", "setsid sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    pids = [*(process.pid for process in inside), deep.pid, int(deep.stdout.readline())]
    print(*[host.namespace for host in lab.hosts], *pids, flush=True)
    if sys.argv[2] == "exception":
        raise ValueError("planted")
    time.sleep(300 if sys.argv[2] == "wait" else 0)
"""


def _transfer(lab: Any, size: int = PAYLOAD) -> tuple[float, int]:
    _, received = finished = lab.run([sys.executable, "-S", "-c", TRANSFER, str(size)], timeout_s=60)
    assert [item.returncode for item in finished] == [0, 0], finished
    rate, count = received.stdout.split()
    return float(rate), int(count)


def _median_rate(lab: Any) -> float:
    """Of three transfers: one of them may meet a stall."""
    return statistics.median(_transfer(lab)[0] for _ in range(3))


@pytest.mark.slow
@pytest.mark.timing
def test_rates_are_kept_and_can_be_changed(network_lab: Lab) -> None:
    lab = network_lab(hosts=2, rate="100mbit")
    assert _median_rate(lab) == pytest.approx(95, rel=0.15)
    lab.set_rate("50mbit", host=1)
    assert _median_rate(lab) == pytest.approx(47.5, rel=0.15), "the slower of two links decides"
    lab.set_rate(None)
    assert _median_rate(lab) > 190, "the limit is lifted"


def test_counters_are_the_payload(network_lab: Lab) -> None:
    lab = network_lab(hosts=2, rate=["1gbit", None])
    for _ in range(2):
        before = lab.counters()
        _, count = _transfer(lab)
        sender, receiver = (now - then for now, then in zip(lab.counters(), before))
        assert count == PAYLOAD
        assert sender.sent_bytes == pytest.approx(PAYLOAD, rel=0.02)
        assert receiver.received_bytes == pytest.approx(PAYLOAD, rel=0.02)
        assert receiver.sent_bytes < 0.02 * PAYLOAD


def test_hosts_are_ranks_of_one_job(network_lab: Lab) -> None:
    lab = network_lab(hosts=4)
    code = (
        "import json, socket, sys\n"
        "from frameworm.launch.environment import detect\n"
        "print(json.dumps([vars(detect()), socket.if_nameindex()[-1][1]]))"
    )
    env = {"RANK": "7", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}
    for name, value in env.items():
        os.environ[name] = value
    try:
        finished = lab.run([sys.executable, "-c", code], env={"OMP_NUM_THREADS": None})
    finally:
        for name in env:
            del os.environ[name]
    for host, item in enumerate(finished):
        assert item.returncode == 0, item.stderr
        process, interface = json.loads(item.stdout)
        assert (process["rank"], process["world_size"], process["local_rank"]) == (host, 4, 0)
        assert (process["node_rank"], process["num_nodes"]) == (host, 4)
        assert process["master_address"] == lab.hosts[0].address
        assert interface == "eth0"


def test_a_failing_host_ends_the_others(network_lab: Lab, network_lab_script: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(network_lab_script, "GRACE_S", 0.3)
    lab = network_lab(hosts=2)
    begin = time.monotonic()
    waiting, failed = lab.run([["sleep", "300"], ["sh", "-c", "echo why >&2; exit 3"]])
    assert (failed.returncode, failed.stderr, failed.late) == (3, "why\n", False)
    assert (waiting.returncode, waiting.late) == (-signal.SIGKILL, True)
    assert time.monotonic() - begin < 60


def _hear_signals() -> None:
    """Under nohup and in the background of a shell some signals are ignored, and children inherit that."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _start_owner(how: str) -> tuple[subprocess.Popen[str], list[str], list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-S", "-c", OWNER, str(SCRIPT), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_signals,
    )
    assert owner.stdout is not None
    first, second, *pids = owner.stdout.readline().split()
    return owner, [first, second, first.replace("-h0", "-sw")], [int(pid) for pid in pids]


def _alive(pids: list[int]) -> list[int]:
    """Those that run; what waits to be reaped by a parent has ended."""
    living = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
        except psutil.NoSuchProcess:
            continue
    return living


def _assert_gone(script: ModuleType, names: list[str], pids: list[int]) -> None:
    assert not set(names) & set(script.namespaces())
    assert not _alive(pids)


@pytest.mark.parametrize("how", ["regular", "exception", signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_behind(network_lab_script: ModuleType, how: str | signal.Signals) -> None:
    owner, names, pids = _start_owner("wait" if isinstance(how, signal.Signals) else how)
    with owner:
        if isinstance(how, signal.Signals):
            assert set(names) <= set(network_lab_script.namespaces())
            assert _alive(pids) == pids
            owner.send_signal(how)
        _, stderr = owner.communicate(timeout=60)
    expected = {"regular": 0, "exception": 1, signal.SIGINT: -signal.SIGINT}
    assert owner.returncode == expected.get(how, 128 + int(how) if isinstance(how, signal.Signals) else None), stderr
    _assert_gone(network_lab_script, names, pids)


def test_what_a_killed_owner_leaves_is_swept(network_lab_script: ModuleType, network_lab: Lab) -> None:
    living = network_lab(hosts=2)
    owner, names, pids = _start_owner("wait")
    with owner:
        assert not set(network_lab_script.sweep()) & set(names), "the owner lives"
        with network_lab_script.sweeping():  # a lab of another test would sweep too
            owner.kill()
            owner.wait(60)
            assert set(names) <= set(network_lab_script.namespaces())
            assert _alive(pids) == pids
    network_lab_script.sweep()
    _assert_gone(network_lab_script, names, pids)
    assert {host.namespace for host in living.hosts} <= set(network_lab_script.namespaces())
    assert len(living.counters()) == 2


def test_a_forked_child_does_not_take_the_lab_along(network_lab: Lab, network_lab_script: ModuleType) -> None:
    lab = network_lab(hosts=2)
    owner = lab._owner
    lab._owner = -1  # as a forked child sees it
    lab.close()
    lab._owner = owner
    assert {host.namespace for host in lab.hosts} <= set(network_lab_script.namespaces())
    lab.close()
    assert not {host.namespace for host in lab.hosts} & set(network_lab_script.namespaces())
    lab.close()


def test_impossible_labs_are_refused(network_lab_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, error = network_lab_script.NetworkLab, network_lab_script.LabError
    for settings, words in (
        ({"hosts": 1}, "2 to 8 hosts"),
        ({"hosts": 9}, "2 to 8 hosts"),
        ({"hosts": 2, "rate": ["1gbit"]}, "1 rates for 2 hosts"),
    ):
        with pytest.raises(error, match=words):
            lab(**settings)
    with pytest.raises(error, match="rate"), lab(rate="fast"):
        pass
    assert not [name for name in network_lab_script.namespaces() if f"-{os.getpid()}-" in name]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(error, match="need root"), lab():
        pass
    assert network_lab_script.main(["--", "true"]) == 2


def test_the_command_line_counts_bytes_and_passes_the_exit_code_on(network_lab_script: ModuleType) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)

    done = call("--rate", "1gbit", "--json", "--", sys.executable, "-S", "-c", TRANSFER, "1000000")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])["hosts"]
    assert first["sent_bytes"] == pytest.approx(10**6, rel=0.03)
    assert second["received_bytes"] == pytest.approx(10**6, rel=0.03)
    assert done.stdout.startswith("[1] ")
    failed = call("--", "sh", "-c", "exit $((RANK * 5))")
    assert failed.returncode == 5
    assert len(failed.stdout.splitlines()) == 3
    assert call().returncode == 2
    assert call("--sweep").returncode == 0
    helped = call("--help").stdout
    assert "network_lab.py --hosts 2 --rate 100mbit -- python train.py" in helped
