"""The live page: what it costs the training that is watched, and how soon 100,000 steps are on the screen.

    python benchmarks/watch.py                          # both parts
    python benchmarks/watch.py --only overhead --places apart --rounds 8
    python benchmarks/watch.py --only pages --pairs 100 # eleven minutes: 50 pages or none, in quick turns
    python benchmarks/watch.py --only paint --data DIR  # DIR keeps the two copies of the run for the next time

Overhead: one training (a small network, hundreds of steps a second on a core, so a page has much to read) goes on while
`frameworm watch` is stopped (SIGSTOP), up with nobody looking, looked at by 1 page and by 50. The four take turns in
windows; figures are per step of the training, each against the window without a server in the same round: wall time,
and processor time of the thread that trains, in which a busy machine shows less. A client does what a page does: it
follows the events of the run, and after an event fetches curves, machine and log, at most every two seconds; it draws
nothing. Places: `apart` pins the training to one core, server and clients to the other; `same` pins training and server
to one core, the clients to the other; `free` leaves all to the system. Beside the ratios stands the processor time of
the server: where it has no core to itself, this is what it can take away.

Pages: the same training; server and 50 pages run for some seconds, then all of them stand still as long (SIGSTOP), and
so on. Neither side has to start anything: turns are short and many, and a slow minute of the machine hits both sides.

First paint: 100,000 steps with the same scalars as a run folder and as TensorBoard's events. Server and page are timed
from the server's start, in turns, in one Chromium each time: until the first curve is on the screen, and until the
curves reach the last step. `warm` is a page that is opened when the server has read everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import bootstrap_median, table, tell_progress, write_results

TESTS = Path(__file__).resolve().parents[1] / "tests" / "watch"
TOKEN = "a-token-for-the-benchmark"
TRAINING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from frameworm import Trainer

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
trainer = Trainer(model, torch.optim.AdamW(model.parameters()), run_dir="runs/watched", device="cpu", every_steps=10**6)
trainer.train(DataLoader(data, batch_size=64, shuffle=True), epochs=10**6)
"""
CLIENTS = {"stopped": None, "nobody": 0, "1 page": 1, "50 pages": 50}
PLACES = {"apart": ("0", "1", "1"), "same": ("0", "0", "1"), "free": ("0-1", "0-1", "0-1")}
WINDOW_S, SETTLE_S = 16.0, 1.5  # many pages are updated only every 15 s
TURN_S, TURN_SETTLE_S = 2.2, 0.2  # a page fetches again after two seconds
SHORTEST_S = 2.0  # between two fetches of a page
STEPS = 100_000
# Notes when the page says that all has been read; what it fetches next are the whole curves.
NOTING = (
    "(window.noting ??= (() => { const look = () => {"
    "const shown = document.querySelector('.figures')?.innerText ?? '';"
    f"if (!document.querySelector('.progress') && shown.includes('{STEPS:,}')) window.readAt ??= performance.now() - 10"
    "}; new MutationObserver(look).observe(document, {subtree: true, childList: true}); look(); return true })())"
)
PAINTED = (
    f"{NOTING} && (() => {{ const item = document.querySelector('.chart:not([hidden]) canvas');"
    "const copy = new OffscreenCanvas(item.width, item.height).getContext('2d', {willReadFrequently: true});"
    "copy.drawImage(item, 0, 0);"
    "return copy.getImageData(0, 0, item.width, item.height).data.some(value => value > 0) })()"
)
WHOLE = (
    "window.readAt !== undefined && performance.getEntriesByType('resource').some(item => "
    "item.name.includes('/series') && item.startTime >= window.readAt && item.responseEnd)"
)
THEIR_TABLE = "document.querySelector('scalar-card-data-table').innerText"


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overhead", "pages", "paint"])
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(PLACES))
    parser.add_argument("--rounds", type=int, default=6, help="of each place")
    parser.add_argument("--pairs", type=int, default=100, help="of turns with and without pages")
    parser.add_argument("--paint-rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="keep the long run here")
    parser.add_argument("--clients", nargs=3, help=argparse.SUPPRESS)  # the part of the clients: port, run, how many
    options = parser.parse_args()
    if options.clients:
        port, run, count = options.clients
        asyncio.run(be_clients(int(port), run, int(count)))
        return
    if options.only == "pages":
        measure_pages(options.pairs)
    if options.only not in ("paint", "pages"):
        for place in options.places:
            measure_overhead(place, options.rounds)
    if options.only not in ("overhead", "pages"):
        with tempfile.TemporaryDirectory() as folder:
            measure_paint(options.data or Path(folder), options.paint_rounds)


# --- what it costs the training


def measure_overhead(place: str, rounds: int) -> None:
    """The four states of the server in turns, beside one training."""
    cores = PLACES[place]
    found: dict[str, list[Window]] = {name: [] for name in CLIENTS}
    with watched_training(cores) as (folder, training, steps, server, port, run_id):
        for number in range(rounds):
            names = list(CLIENTS)
            for name in names[number % 4 :] + names[: number % 4]:  # nobody always comes after the same
                with looking_on(CLIENTS[name], server, port, run_id, cores[2], folder):
                    found[name].append(one_window(training.pid, server.pid, steps))
            latest = ", ".join(f"{name} {values[-1].step_s * 1e6:,.0f}" for name, values in found.items())
            tell_progress(f"{place}, round {number + 1}/{rounds}, us a step: {latest}")
        peak_mib = peak_bytes(server.pid) / 2**20
    rows, ratios = [], {}
    for name, values in found.items():
        row = [name, f"{statistics.median(item.step_s for item in values) * 1e6:,.0f}"]
        if name != "stopped":
            for clock in ("step_s", "cpu_s"):
                pairs = zip(values, found["stopped"])
                item = bootstrap_median([getattr(one, clock) / getattr(other, clock) for one, other in pairs])
                ratios[f"{name}, {clock}"] = [item.value, item.low, item.high]
                row.append(f"{item.value:.4f} ({item.low:.4f}..{item.high:.4f})")
            row.append(f"{statistics.fmean(item.server_share for item in values):.1%}")
        rows.append(row + [""] * (5 - len(row)))
    columns = [
        f"{place}, {rounds} rounds",
        "us/step",
        "wall, ratio (95%)",
        "processor, ratio (95%)",
        "server, of a core",
    ]
    print(table(columns, rows))
    print(f"peak memory of the server: {peak_mib:.0f} MiB\n", flush=True)
    results = {
        "windows": {name: [asdict(item) for item in values] for name, values in found.items()},
        "ratio": ratios,
        "server_peak_mib": round(peak_mib, 1),
    }
    write_results(f"watch-{place}", torch.device("cpu"), {"window_s": WINDOW_S, "rounds": rounds}, results)


def measure_pages(pairs: int) -> None:
    """50 pages or none beside one training, in quick turns; the training has a core to itself."""
    cores = PLACES["apart"]
    found: dict[str, list[Window]] = {"none": [], "50 pages": []}
    with watched_training(cores) as (folder, training, steps, server, port, run_id):
        command = [sys.executable, __file__, "--clients", str(port), run_id, "50"]
        with running(command, folder, cores[2]) as clients:
            time.sleep(10.0)  # they have started and show the run
            for number in range(pairs):
                for name in ("none", "50 pages") if number % 2 else ("50 pages", "none"):
                    for pid in (server.pid, clients.pid):
                        os.kill(pid, signal.SIGSTOP if name == "none" else signal.SIGCONT)
                    time.sleep(TURN_SETTLE_S)
                    found[name].append(one_window(training.pid, server.pid, steps, TURN_S))
                if number % 10 == 9:
                    tell_progress(f"pair {number + 1}/{pairs}")
            for pid in (server.pid, clients.pid):
                os.kill(pid, signal.SIGCONT)
    ratios = {}
    for clock in ("step_s", "cpu_s"):
        item = bootstrap_median(
            [getattr(one, clock) / getattr(two, clock) for one, two in zip(*reversed(found.values()))]
        )
        ratios[clock] = [item.value, item.low, item.high]
        print(f"{clock} with 50 pages, of that without: {item.value:.4f} ({item.low:.4f} to {item.high:.4f})")
    share = statistics.fmean(item.server_share for item in found["50 pages"])
    print(f"server {share:.1%} of another core; {pairs} pairs of {TURN_S:g} s\n", flush=True)
    results = {
        "windows": {name: [asdict(item) for item in values] for name, values in found.items()},
        "ratio": ratios,
        "server_share": share,
    }
    write_results("watch-pages", torch.device("cpu"), {"window_s": TURN_S, "pairs": pairs}, results)


@contextlib.contextmanager
def watched_training(
    cores: Sequence[str],
) -> Iterator[tuple[Path, subprocess.Popen[bytes], Path, subprocess.Popen[bytes], int, str]]:
    """A training and its live page: a folder, the training, its file of steps, the server, its port, the run's id."""
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        (folder / "train.py").write_text(TRAINING)
        training = stack.enter_context(running([sys.executable, "train.py"], folder, cores[0]))
        steps = folder / "runs" / "watched" / "steps-rank0.jsonl"
        wait_until(lambda: steps.exists() and steps.stat().st_size > 200_000)
        server, port = stack.enter_context(watching(folder / "runs", cores[1]))
        yield folder, training, steps, server, port, ask(port, "/api/runs")["runs"][0]["id"]


@dataclass
class Window:
    """What was seen in one window: of the mean step, and of a core for the server."""

    step_s: float
    cpu_s: float
    server_share: float
    steps: int


@contextlib.contextmanager
def looking_on(
    count: int | None, server: subprocess.Popen[bytes], port: int, run_id: str, core: str, folder: Path
) -> Iterator[None]:
    """So many pages are open; None: the server does not even run."""
    os.kill(server.pid, signal.SIGSTOP if count is None else signal.SIGCONT)
    command = [sys.executable, __file__, "--clients", str(port), run_id, str(count)]
    with running(command, folder, core) if count else contextlib.nullcontext():
        time.sleep(SETTLE_S + (1.5 if count else 0))  # the clients have started and are being told
        yield
    os.kill(server.pid, signal.SIGCONT)


def one_window(training: int, server: int, steps: Path, seconds: float = WINDOW_S) -> Window:
    """Look at the training for a while."""
    place = steps.stat().st_size
    began, cpu_began, server_began = time.time(), thread_cpu_s(training), cpu_s(server)
    time.sleep(seconds)
    ended, cpu_ended, server_ended = time.time(), thread_cpu_s(training), cpu_s(server)
    time.sleep(1.0)  # what was done is written
    with steps.open("rb") as file:
        file.seek(place)
        seen = [json.loads(line) for line in file.read().split(b"\n")[1:-1]]
    times = [step["step_s"] for step in seen if began <= step["time"] <= ended]
    assert len(times) >= 50, f"{len(times)} steps in {seconds:g} s"
    return Window(
        step_s=(ended - began) / len(times),
        cpu_s=(cpu_ended - cpu_began) / len(times),
        server_share=(server_ended - server_began) / seconds,
        steps=len(times),
    )


async def be_clients(port: int, run_id: str, count: int) -> None:
    """So many pages that show one run."""
    await asyncio.gather(*(be_client(port, run_id) for _ in range(count)))


async def be_client(port: int, run_id: str) -> None:
    """One page: follow the events, and fetch what has changed, through one connection each as a browser does."""
    stream, page = await connected(port), await connected(port)
    events, _ = await ask_for(f"/api/stream?run={run_id}", stream)
    fetched_at = -SHORTEST_S
    while line := await events.readline():
        if line.startswith(b"event:") and time.monotonic() - fetched_at >= SHORTEST_S:
            for path in ("series?bins=600", "system?bins=400", "log?name=train.log"):
                reader, length = await ask_for(f"/api/runs/{run_id}/{path}", page)
                await reader.readexactly(length)
            fetched_at = time.monotonic()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(port: int) -> Connection:
    """A connection to the server."""
    return await asyncio.open_connection("127.0.0.1", port, limit=2**24)


async def ask_for(path: str, connection: Connection) -> tuple[asyncio.StreamReader, int]:
    """Ask for something and read the headers of the answer; its length, 0 if it says none."""
    reader, writer = connection
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    await writer.drain()
    length = 0
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return reader, length


# --- how soon it is on the screen


def measure_paint(data: Path, rounds: int) -> None:
    """Both servers in turns, each from its start."""
    write_long_run(data)
    sys.path.insert(0, str(TESTS))
    from live_browser import Browser

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "this part needs Chromium"
    found: dict[str, list[dict[str, float]]] = {"frameworm watch": [], "TensorBoard": []}
    for number in range(rounds):
        for name, values in found.items():
            with tempfile.TemporaryDirectory() as folder, Browser(chromium, Path(folder)) as browser:
                paint = paint_own if name == "frameworm watch" else paint_theirs
                values.append(paint(data, browser))
            tell_progress(f"paint, round {number + 1}/{rounds}, {name}: {values[-1]}")
    rows, ratios = [], {}
    for key in found["TensorBoard"][0]:
        own, theirs = ([item[key] for item in values] for values in found.values())
        ratios[key] = item = bootstrap_median([one / other for one, other in zip(own, theirs)])
        figures = [f"{statistics.median(values):.1f}" for values in (own, theirs)]
        rows.append([key, *figures, f"{item.value:.2f} ({item.low:.2f}..{item.high:.2f})"])
    print(table([f"{STEPS:,} steps, {rounds} rounds", "frameworm watch", "TensorBoard", "ratio (95%)"], rows))
    settings = {"steps": STEPS, "rounds": rounds, "tensorboard": importlib.metadata.version("tensorboard")}
    results = {**found, "ratio": {key: [item.value, item.low, item.high] for key, item in ratios.items()}}
    write_results("watch-paint", torch.device("cpu"), settings, results)


def paint_own(data: Path, browser: Any) -> dict[str, float]:
    """`frameworm watch RUN`, whose page is that of the run."""
    began = time.monotonic()
    with watching(data / "runs" / "long") as (server, port):
        address = f"http://127.0.0.1:{port}/?token={TOKEN}"
        browser.open(address)
        browser.wait_for(PAINTED, 120)
        first_s = time.monotonic() - began
        browser.wait_for(WHOLE, 240)
        whole_s = time.monotonic() - began
        browser.open("about:blank")
        again = time.monotonic()
        browser.open(address)
        browser.wait_for(f"{PAINTED} && window.readAt !== undefined", 120)
        return seconds(first_s, whole_s, time.monotonic() - again, server.pid)


def paint_theirs(data: Path, browser: Any) -> dict[str, float]:
    """TensorBoard with its fast loader."""
    port = free_port()
    command = ["-m", "tensorboard.main", "--logdir", str(data / "events"), "--port", str(port)]
    began = time.monotonic()
    with running([sys.executable, *command], data) as server:
        address = f"http://127.0.0.1:{port}/#timeseries"
        wait_until(lambda: is_up(port))
        browser.open(address)
        browser.wait_for(f"/\\d/.test({THEIR_TABLE})", 120)
        first_s = time.monotonic() - began
        browser.wait_for(f"{THEIR_TABLE}.includes('{STEPS:,}')", 240)
        whole_s = time.monotonic() - began
        browser.open("about:blank")
        again = time.monotonic()
        browser.open(address)
        browser.wait_for(f"{THEIR_TABLE}.includes('{STEPS:,}')", 120)
        return seconds(first_s, whole_s, time.monotonic() - again, server.pid)


def seconds(first_s: float, whole_s: float, warm_s: float, pid: int) -> dict[str, float]:
    """One round of one server."""
    return {
        "first curve, s": round(first_s, 2),
        "to the last step, s": round(whole_s, 2),
        "warm, s": round(warm_s, 2),
        "peak memory, MiB": round(peak_bytes(pid) / 2**20, 1),
    }


def write_long_run(data: Path) -> None:
    """The same scalars as steps of a run and as TensorBoard's events."""
    if (data / "whole").exists():
        return
    sys.path.insert(0, str(TESTS))
    from made_runs import step
    from torch.utils.tensorboard import SummaryWriter

    from frameworm.records.writer import step_line

    run = data / "runs" / "long"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: long\nworkload: text_classifier\n")
    events = SummaryWriter(str(data / "events" / "long"))
    with (run / "steps-rank0.jsonl").open("w") as file:
        for number in range(1, STEPS + 1):
            item = step(number)
            file.write(step_line(item) + "\n")
            scalars = {"loss": item.loss, "lr": item.lr, "grad_norm": item.grad_norm, "step_s": item.step_s}
            scalars |= {"samples_per_s": item.samples / item.step_s}
            for name, value in {**scalars, **{f"phase/{key}": value for key, value in item.phases.items()}}.items():
                events.add_scalar(name, value, number, item.time)
    events.close()
    (data / "whole").touch()


# --- processes


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, core: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process, pinned to cores if any are given, that is ended with what it has started."""
    pinned = [] if core is None else ["taskset", "-c", core]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*pinned, *command], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def watching(path: Path, core: str | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`frameworm watch`, and its port."""
    port = free_port()
    command = [sys.executable, "-m", "frameworm", "watch", str(path), "--port", str(port), "--token", TOKEN]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder), core) as server:
        wait_until(lambda: is_up(port))
        yield server, port


def ask(port: int, path: str) -> Any:
    """An answer of the server."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def is_up(port: int) -> bool:
    """Whether anything listens."""
    import socket

    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody has."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(is_so: Any, deadline_s: float = 120.0) -> None:
    """Wait for something, with an end."""
    ends = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.05)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int) -> float:
    """Processor time of the first thread of a process so far."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had, and those that it has started."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        own = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return own + sum(peak_bytes(int(child)) for child in below)
    return 0


if __name__ == "__main__":
    main()
