"""`frameworm tune` on every script of `scripts/`: each gets faster with proof or is told why not; none is harmed.

    PYTHONPATH=src python benchmarks/scripts_campaign.py --budget 90

The scripts are the originals, including those that crash, ask a question, go into the background, never train or stop
after three steps, and those that ship inside PyPI packages. Each runs in its own folder, which is also HOME and TMPDIR.
Besides an answer in words, three things must hold: every file in that folder, beside the script and in its package is
unchanged; no process that it started is left; and the command ends within two minutes of its budget.

An outcome is `faster`, `nothing found` (with a reason for each switch), `told` (one line says why the script cannot be
tuned) or `broken`. The exit code is 1 if any script is broken. Results are kept in
benchmarks/results/scripts_campaign-cpu.json: a new run of a script replaces its old result. `--table` only prints them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import RESULTS, device_word, names_among, table, tell_progress, write_results

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
import corpus
import packaged

FRAMEWORM = ("-m", "frameworm", "tune")
MARK = "FRAMEWORM_CAMPAIGN"
OVER_S = 120.0
COLUMNS = ("script", "outcome", "gain", "switches", "patch", "took", "what it said")


@dataclass(frozen=True)
class Case:
    """A script to tune: the command up to the script's arguments, and its variables."""

    name: str
    original: corpus.Script | packaged.PackagedScript

    @property
    def file(self) -> Path:
        """The script."""
        return self.original.original if isinstance(self.original, corpus.Script) else self.original.file()

    def command(self, folder: Path, through: Sequence[str]) -> list[str]:
        """The command line, with what goes between Python and the script."""
        if isinstance(self.original, corpus.Script):
            return self.original.command(self.original.original, (), through)
        return [sys.executable, *through, *self.original.command(folder)]


CASES = {item.name: Case(item.name, item) for item in (*corpus.SCRIPTS, *packaged.SCRIPTS)}


def contents(*folders: Path) -> dict[str, str]:
    """The files below some folders, by what they hold; bytecode is Python's own affair."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def processes_with(mark: str) -> list[psutil.Process]:
    """Processes that have our word among their variables."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def run(case: Case, budget_s: float) -> dict[str, Any]:
    """Tune one script, and look at what that left behind."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="frameworm-campaign-") as place:
        folder, out = Path(place, "work"), Path(place, "tuned")
        folder.mkdir()
        command = case.command(folder, [*FRAMEWORM, "--budget", f"{budget_s:.0f}s", "--out", str(out)])
        variables = {**os.environ, **packaged.ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder), MARK: mark}
        before = contents(folder, case.file.parent)
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=2 * budget_s + OVER_S)
        except subprocess.TimeoutExpired:
            stdout, stderr = "", "still running"
        wall_s = time.perf_counter() - began
        left = processes_with(mark)
        names = [" ".join(item.cmdline())[:200] for item in left if item.is_running()]
        for item in left:
            item.kill()
        process.wait()
        after = contents(folder, case.file.parent)
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        told = out / "tune.json"
        found = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    last = next((line for line in reversed(stderr.splitlines()) if line.startswith("frameworm: ")), "")
    attempts = [{key: item[key] for key in ("label", "status", "reason")} for item in found.get("attempts", [])]
    row = {
        "exit_code": process.returncode,
        "wall_s": wall_s,
        "said": last.removeprefix("frameworm: "),
        "speedup": found.get("speedup"),
        "switches": {key: value["after"] for key, value in found.get("changes", {}).items()},
        "has_patch": bool(found.get("patch")),
        "no_patch": found.get("no_patch"),
        "stopped": found.get("stopped"),
        "attempts": attempts,
        "files_changed": changed,
        "processes_left": names,
    }
    outcome = outcome_of(row, wall_s > budget_s + OVER_S)
    return {"outcome": outcome, **row, **({"printed": (stdout + stderr)[-3000:]} if outcome == "broken" else {})}


def outcome_of(row: dict[str, Any], late: bool) -> str:
    """What became of a script."""
    if late or row["files_changed"] or row["processes_left"]:
        return "broken"
    if row["exit_code"] == 0:
        if row["switches"]:
            return "faster"
        return "nothing found" if row["attempts"] else "broken"
    return "told" if row["exit_code"] == 1 and row["said"] else "broken"


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    """A script's line of the table."""
    gain = found["speedup"]
    told = "-" if gain is None else f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
    switches = ", ".join(
        key if value is True else f"{key}={value}" for key, value in found["switches"].items()
    )  # fmt: skip
    harm = [*found["files_changed"], *found["processes_left"]]
    said = "; ".join(harm) or found["said"] or found["no_patch"] or ""
    patch = "yes" if found["has_patch"] else "-"
    return [name, found["outcome"], told, switches or "-", patch, f"{found['wall_s']:.0f} s", said[:100]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of each search")
    parser.add_argument("--table", action="store_true", help="print what was found so far")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = arguments.out / f"scripts_campaign-{device_word(device)}.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    for name in [] if arguments.table else arguments.scripts:
        case = CASES[name]
        missing = case.original.missing()
        if missing:
            tell_progress(f"{name}: {', '.join(missing)} is not installed")
            continue
        results[name] = {**run(case, arguments.budget), "budget_s": arguments.budget}
        tell_progress(" | ".join(row_of(name, results[name])))
        write_results("scripts_campaign", device, {}, results, arguments.out)
    print(table(COLUMNS, [row_of(name, results[name]) for name in CASES if name in results]))
    counts = Counter(item["outcome"] for item in results.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    sys.exit(1 if counts["broken"] else 0)


if __name__ == "__main__":
    main()
