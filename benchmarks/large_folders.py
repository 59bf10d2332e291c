"""How long the verbs that read runs take on folders of millions of steps, and in how much memory.

Two shapes, each with two runs that part at a known step: 1,000,000 steps on 8 ranks (3.7 GB of steps) and 10,000 steps
on 256 ranks (1.2 GB). Every verb runs in a process of its own, as a user starts it: the time to the first line of its
answer, to its end, and its peak memory. Each is started a few times and the quickest counts, because other programs can
only make a verb slower; beside it stands the processor time up to the first line. `watch` is asked over HTTP, once for
a finished run and once for the same without its summary, which must then be judged by its steps: the time to the first
verdict with curves, and until the whole run is shown. The exact figures of all steps are in the summaries; what a
sample of the steps says without them is held against those: the largest error of a phase, in shares of the step and in
its own 95% intervals.

    python benchmarks/large_folders.py [--folder DIR] [--small] [--starts 3]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import write_results
from large_runs import Shape, write_run

from frameworm.diagnose.rules.accounting import gather
from frameworm.records.schema import Batch, RunRecord
from frameworm.records.store import RunFolder

FIRST_S, ALL_S, MOST_BYTES = 2.0, 30.0, 2**30
SHAPES = {"long": (1_000_000, 8), "wide": (10_000, 256)}
SMALL = {"long": (4_000, 2), "wide": (200, 8)}
FRAMEWORM = (sys.executable, "-m", "frameworm")


def make(root: Path, steps: int, ranks: int) -> None:
    """Two runs, and the first one without its summary; what is there already is kept."""
    parted = parting_of(steps)
    for name, shape in (("a", Shape(steps, ranks)), ("b", Shape(steps, ranks, seed=1, speed=1.03, parted=parted))):
        if not (root / "runs" / name / "summary.json").exists():
            shutil.rmtree(root / "runs" / name, ignore_errors=True)
            write_run(root / "runs" / name, shape)
    unfinished = root / "unfinished"
    if not unfinished.exists():
        unfinished.mkdir()
        for path in (root / "runs" / "a").iterdir():
            if path.name != "summary.json":
                (unfinished / path.name).hardlink_to(path)


def parting_of(steps: int) -> int:
    """The step in which the two runs part."""
    return steps * 7 // 10 + 3


class Peak:
    """The most resident memory of a process and its children, looked at until the process ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.bytes = 0
        self._process = psutil.Process(process.pid)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while True:
                family = [self._process, *self._process.children(recursive=True)]
                self.bytes = max(self.bytes, sum(member.memory_info().rss for member in family))
                time.sleep(0.02)
        except psutil.Error:
            pass


def best_of(starts: int, run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The shortest times of several runs, and the most memory of any of them."""
    found = [run(*arguments) for _ in range(starts)]
    times = {name: min(item[name] for item in found) for name in found[0] if name.endswith("_s")}
    return {**found[0], **times, "peak_bytes": max(item["peak_bytes"] for item in found)}


def verb(*arguments: str) -> dict[str, Any]:
    """Run a verb; seconds to its first line and to its end, and its peak memory."""
    began = time.monotonic()
    process = subprocess.Popen([*FRAMEWORM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = Peak(process)
    assert process.stdout is not None
    first_line = process.stdout.readline()
    first_s, first_cpu_s = time.monotonic() - began, cpu_of(process)
    text = first_line + process.stdout.read()
    process.wait()
    all_s = time.monotonic() - began
    if process.returncode not in (0, 3) and arguments[0] != "guard":
        raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}:\n{text}")
    return {"first_s": first_s, "first_cpu_s": first_cpu_s, "all_s": all_s, "peak_bytes": peak.bytes, "text": text}


def cpu_of(process: subprocess.Popen[str]) -> float:
    """Seconds that a process has computed so far; infinite where it is gone already."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return math.inf
    return float(times.user + times.system)


def page(root: Path) -> dict[str, Any]:
    """Serve a run; seconds to its first verdict and curve, and until all of it is shown, and the peak memory."""
    began = time.monotonic()
    command = [*FRAMEWORM, "watch", str(root), "--json", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = Peak(process)
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())

        def get(path: str) -> Any:
            address = f"http://127.0.0.1:{facts['port']}/api/runs{path}"
            asked = urllib.request.Request(address, headers={"Authorization": f"Bearer {facts['token']}"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.load(answer)

        rows = get("")
        rows_s = time.monotonic() - began
        run = (rows["runs"] if isinstance(rows, dict) else rows)[0]["id"]
        first_s = first_cpu_s = math.inf
        while True:
            head = get(f"/{run}")
            series = get(f"/{run}/series?bins=600")
            if first_s == math.inf and head["verdict"] and series["x"]:
                first_s, first_cpu_s = time.monotonic() - began, cpu_of(process)
            if head["progress"] >= 1:
                break
            time.sleep(0.1)
        all_s = time.monotonic() - began
        steps = head["steps"]
        zoomed = get(f"/{run}/series?bins=600&first={steps // 2}&last={steps // 2 + 400}")
        assert set(zoomed["count"]) == {1}, "a part of the run is shown step by step"
        shown = {"verdict": head["verdict"], "last": series["x"][-1], "notes": head["notes"]}
        times = {"rows_s": rows_s, "first_s": first_s, "first_cpu_s": first_cpu_s, "all_s": all_s}
        return {**times, "peak_bytes": peak.bytes, **shown}
    finally:
        process.terminate()
        process.wait(30)


def errors(folder: RunFolder) -> dict[str, float]:
    """How far the phases of a sample of the steps are from the exact ones."""
    exact = folder.read_summary()
    blank = RunRecord(exact.name, "interrupted", {}, Batch(None, 1, exact.batch.world_size, None), steps=exact.steps)
    readers = folder.step_readers()
    found = gather(blank, steps={0: readers[0]})
    off = {name: (item.value - exact.phases[name].share, item.margin) for name, item in found.phases.items()}
    return {
        "share_read": sum(reader.share for reader in readers.values()) / len(readers),
        "share_read_of_rank_0": readers[0].share,
        "largest_error": max(abs(error) for error, _ in off.values()),
        "largest_error_in_intervals": max(abs(error) / margin for error, margin in off.values() if margin > 0),
    }


def measure(root: Path, steps: int, starts: int) -> dict[str, Any]:
    """All verbs on one shape."""
    runs = root / "runs"
    a, b, unfinished = str(runs / "a"), str(runs / "b"), str(root / "unfinished")
    asked = {
        "runs": ("runs", str(runs)),
        "report": ("report", "--root", str(runs), "--out", str(root / "plots")),
        "diagnose": ("diagnose", a),
        "diagnose, no summary": ("diagnose", unfinished),
        "compare": ("compare", a, b),
        "compare with itself": ("compare", a, unfinished),
        "guard": ("guard", b, "--baseline", a),
    }
    found = {name: best_of(starts, verb, *arguments) for name, arguments in asked.items()}
    found["watch"] = best_of(starts, page, runs / "a")
    found["watch, no summary"] = best_of(starts, page, root / "unfinished")
    assert f"in step {parting_of(steps):,}" in found["compare"]["text"], found["compare"]["text"]
    assert "parting none" in " ".join(found["compare with itself"]["text"].split())
    for result in found.values():
        result.pop("text", None)
    return found


def main() -> None:
    """Make the folders, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the runs are made, and kept for the next time")
    parser.add_argument("--small", action="store_true", help="small folders, to try the benchmark itself")
    parser.add_argument("--starts", type=int, default=3, help="how often each verb is started; the quickest counts")
    parser.add_argument("--make", action="store_true", help="only make the folders")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        results = {}
        for name, (steps, ranks) in (SMALL if options.small else SHAPES).items():
            make(folder / name, steps, ranks)
            if options.make:
                continue
            size = sum(path.stat().st_size for path in (folder / name / "runs" / "a").iterdir())
            verbs = measure(folder / name, steps, options.starts)
            sampled = errors(RunFolder(folder / name / "runs" / "a"))
            results[name] = {"steps": steps, "ranks": ranks, "bytes": size, "verbs": verbs, "sample": sampled}
            print(f"\n{steps:,} steps on {ranks} ranks, {size / 1e9:.1f} GB a run")
            print(f"  {'':24}{'first':>9}{'computing':>11}{'all':>9}{'memory':>11}")
            for label, result in verbs.items():
                kept = "" if is_kept(result) else "  MISSED"
                first, last = f"{result['first_s']:.1f} s", f"{result['all_s']:.1f} s"
                computing = f"{result['first_cpu_s']:.1f} s"
                print(f"  {label:24}{first:>9}{computing:>11}{last:>9}{result['peak_bytes'] / 2**20:>7.0f} MiB{kept}")
            read, first_rank = sampled["share_read"], sampled["share_read_of_rank_0"]
            print(
                f"  {read:.2%} of the steps, {first_rank:.2%} of those of rank 0: phases within "
                f"{sampled['largest_error']:.2%} of the step of the exact ones, at most "
                f"{sampled['largest_error_in_intervals']:.1f} of their 95% intervals"
            )
    if results and not options.small:
        limits = {"first_s": FIRST_S, "all_s": ALL_S, "peak_bytes": MOST_BYTES, "starts": options.starts}
        print("\nwritten to", write_results("large_folders", torch.device("cpu"), limits, results))
    missed = [label for shape in results.values() for label, item in shape["verbs"].items() if not is_kept(item)]
    if missed and not options.small:
        raise SystemExit(f"missed the limits: {', '.join(missed)}")


def is_kept(result: dict[str, Any]) -> bool:
    """Whether a verb keeps within the limits."""
    is_quick = result["first_s"] <= FIRST_S and result["all_s"] <= ALL_S
    return is_quick and result["peak_bytes"] <= MOST_BYTES


if __name__ == "__main__":
    main()
