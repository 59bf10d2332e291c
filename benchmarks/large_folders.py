"""How long the verbs that read runs take on folders of millions of steps, and in how much memory.

Two shapes, each with two runs that part at a known step: 1,000,000 steps on 8 ranks (3.7 GB of steps) and 10,000 steps
on 256 ranks (1.2 GB). Every verb runs in a process of its own, as a user starts it: the time to the first line of its
answer, to its end, and its peak memory. `watch` is asked over HTTP, once for a finished run and once for the same
without its summary, which must then be judged by its steps: the time to the first verdict with curves, and until the
whole run is shown. The exact figures of all steps are in the summaries; what a sample of the steps says without them is
held against those: the largest error of a phase, in shares of the step and in its own 95% intervals.

    python benchmarks/large_folders.py [--folder DIR] [--small]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
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


def verb(*arguments: str) -> dict[str, Any]:
    """Run a verb; seconds to its first line and to its end, and its peak memory."""
    began = time.monotonic()
    process = subprocess.Popen([*FRAMEWORM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = Peak(process)
    assert process.stdout is not None
    first_line = process.stdout.readline()
    first_s = time.monotonic() - began
    text = first_line + process.stdout.read()
    process.wait()
    all_s = time.monotonic() - began
    if process.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}:\n{text}")
    return {"first_s": first_s, "all_s": all_s, "peak_bytes": peak.bytes, "text": text}


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
        first_s = None
        while True:
            head = get(f"/{run}")
            series = get(f"/{run}/series?bins=600")
            if first_s is None and head["verdict"] and series["x"]:
                first_s = time.monotonic() - began
            if head["progress"] >= 1:
                break
            time.sleep(0.1)
        all_s = time.monotonic() - began
        steps = head["steps"]
        zoomed = get(f"/{run}/series?bins=600&first={steps // 2}&last={steps // 2 + 400}")
        assert set(zoomed["count"]) == {1}, "a part of the run is shown step by step"
        shown = {"verdict": head["verdict"], "last": series["x"][-1], "notes": head["notes"]}
        return {"rows_s": rows_s, "first_s": first_s, "all_s": all_s, "peak_bytes": peak.bytes, **shown}
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
        "share_read": min(reader.share for reader in readers.values()),
        "largest_error": max(abs(error) for error, _ in off.values()),
        "largest_error_in_intervals": max(abs(error) / margin for error, margin in off.values() if margin > 0),
    }


def measure(root: Path, steps: int) -> dict[str, Any]:
    """All verbs on one shape."""
    runs = root / "runs"
    found = {
        "runs": verb("runs", str(runs)),
        "report": verb("report", "--root", str(runs), "--out", str(root / "plots")),
        "diagnose": verb("diagnose", str(runs / "a")),
        "diagnose, no summary": verb("diagnose", str(root / "unfinished")),
        "compare": verb("compare", str(runs / "a"), str(runs / "b")),
        "compare with itself": verb("compare", str(runs / "a"), str(root / "unfinished")),
        "watch": page(runs / "a"),
        "watch, no summary": page(root / "unfinished"),
    }
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
            verbs = measure(folder / name, steps)
            sampled = errors(RunFolder(folder / name / "runs" / "a"))
            results[name] = {"steps": steps, "ranks": ranks, "bytes": size, "verbs": verbs, "sample": sampled}
            print(f"\n{steps:,} steps on {ranks} ranks, {size / 1e9:.1f} GB a run")
            print(f"  {'':24}{'first':>9}{'all':>9}{'memory':>11}")
            for label, result in verbs.items():
                kept = "" if is_kept(result) else "  MISSED"
                first, last = f"{result['first_s']:.1f} s", f"{result['all_s']:.1f} s"
                print(f"  {label:24}{first:>9}{last:>9}{result['peak_bytes'] / 2**20:>7.0f} MiB{kept}")
            print(
                f"  {sampled['share_read']:.2%} of the steps: phases within {sampled['largest_error']:.2%} of the step "
                f"of the exact ones, at most {sampled['largest_error_in_intervals']:.1f} of their 95% intervals"
            )
    if results and not options.small:
        limits = {"first_s": FIRST_S, "all_s": ALL_S, "peak_bytes": MOST_BYTES}
        print("\nwritten to", write_results("large_folders", torch.device("cpu"), limits, results))
    missed = [label for shape in results.values() for label, item in shape["verbs"].items() if not is_kept(item)]
    if missed and not options.small:
        raise SystemExit(f"missed the limits: {', '.join(missed)}")


def is_kept(result: dict[str, Any]) -> bool:
    """Whether a verb keeps within the limits."""
    first_s = result["first_s"]
    is_quick = first_s is not None and first_s <= FIRST_S and result["all_s"] <= ALL_S
    return is_quick and result["peak_bytes"] <= MOST_BYTES


if __name__ == "__main__":
    main()
