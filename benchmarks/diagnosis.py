"""Are the verdicts right? Trainings with planted faults, and healthy ones, judged by the rules.

    python benchmarks/diagnosis.py                       every case this machine can run, once
    python benchmarks/diagnosis.py --cases leak,slow_disk --repeat 3

Each case (planted.py, planted_gpu.py) runs in processes of its own with a deadline; its verdict is compared with the
one that was planted. The table shows verdicts by what was expected; a healthy run must have no finding above `info`.
Cases that need a GPU, root (network namespaces), a C++ compiler or idle cores are skipped, with the reason, where there
are none.
Results are written by a run of all cases, or to --out. Exit code 1 if fewer than 95% are right or a healthy one has a
false finding.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import planted_gpu  # noqa: F401 - registers its cases
import torch
from harness import RESULTS, names_among, table, tell_progress, write_results
from lab import load_lab
from planted import CASES, HEALTHY, Case

from frameworm.hardware.host import usable_cpus

GOAL = 0.95
FAILED = "failed"
LINK_RATE = "100mbit"
QUIET = 0.8


def why_not(case: Case) -> str | None:
    """Why this machine cannot run a case, or None."""
    if case.needs in ("cuda", "clock") and not torch.cuda.is_available():
        return "there is no GPU here"
    if case.needs == "clock":
        done = subprocess.run(["nvidia-smi", "-lgc", "345,345"], capture_output=True, check=False)
        subprocess.run(["nvidia-smi", "-rgc"], capture_output=True, check=False)
        return None if done.returncode == 0 else "the GPU's clock cannot be locked here"
    if case.needs == "compiler" and shutil.which("g++") is None:
        return "torch.compile needs a C++ compiler"
    if case.needs == "cores":
        got, usable = cores_got(), usable_cpus()
        if got < QUIET * usable:
            return f"others keep the cores busy: this process got {got:.1f} of {usable}"
    if case.needs == "root":
        why: str | None = load_lab().available()
        return why
    return None


@functools.cache
def cores_got(seconds: float = 1.0) -> float:
    """Cores that busy processes of ours get while they want all of them."""
    spin = f"import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass\nprint(time.process_time())"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", spin], stdout=subprocess.PIPE, text=True)
        for _ in range(2 * usable_cpus())
    ]
    return sum(float(process.communicate()[0]) for process in processes) / seconds


def run_case(case: Case) -> dict[str, Any]:
    """Run a case in processes of its own; its verdict and findings, or how it failed."""
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        prefixes: list[list[str]] = [[]] * case.ranks
        address = "127.0.0.1"
        interface = "lo"
        if case.needs == "root":
            lab = stack.enter_context(load_lab().NetworkLab(hosts=case.ranks, rate=LINK_RATE))
            prefixes = [lab.prefix(rank) for rank in range(case.ranks)]
            address, interface = lab.hosts[0].address, "eth0"
        port = _free_port()
        processes = []
        for rank, prefix in enumerate(prefixes):
            environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            if case.threads is not None:
                environ["OMP_NUM_THREADS"] = str(case.threads)
            if case.ranks > 1:
                environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks),
                    "LOCAL_WORLD_SIZE": str(case.ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": interface,
                }  # fmt: skip
            command = [*prefix, sys.executable, __file__, "--one", case.name, "--folder", folder, "--rank", str(rank)]
            log = stack.enter_context((Path(folder) / f"log{rank}").open("wb"))
            processes.append(
                subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True, cwd=folder)
            )
        late = _wait(processes, case.deadline_s)
        result = Path(folder) / "result.json"
        if late or not result.exists():
            why = f"still running after {case.deadline_s:.0f} s" if late else "ended without a result"
            logs = [(Path(folder) / f"log{rank}").read_text(errors="replace")[-2000:] for rank in range(case.ranks)]
            return {"verdict": FAILED, "findings": [], "problem": why, "log": logs, "wall_s": perf_counter() - begin}
        outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return {**outcome, "wall_s": perf_counter() - begin}


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> bool:
    """Until all have ended; whether some had to be killed because time was up."""
    deadline = monotonic() + deadline_s
    while any(process.poll() is None for process in processes):
        if monotonic() > deadline:
            break
        if any(process.poll() not in (None, 0) for process in processes):
            deadline = min(deadline, monotonic() + 5)
        sleep(0.05)
    late = False
    for process in processes:
        if process.poll() is None:
            late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # its own session: nobody else's processes
            process.wait()
    return late


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_here(name: str, folder: Path, rank: int) -> None:
    """The body of a case's process."""
    case = CASES[name]
    if case.ranks > 1:
        from frameworm.launch.process_group import setup_ddp

        setup_ddp(backend="gloo", timeout_s=60)
    record = case.run(folder / "run", rank)
    if rank == 0:
        data = record.to_dict()
        kept = ("verdict", "findings", "phases", "steps", "notes", "wall_s", "system", "communication")
        draft = folder / "result.draft"
        draft.write_text(json.dumps({key: data[key] for key in kept}), encoding="utf-8")
        draft.replace(folder / "result.json")
    if case.ranks > 1:
        from frameworm.launch.process_group import cleanup

        cleanup()


def apart_from_others(outcome: dict[str, Any]) -> dict[str, Any]:
    """The same outcome without what other processes of this machine did to it: nobody planted those.

    The findings are sorted by what they cost, so that the verdict is the first of those that remain.
    """
    foreign = [item for item in outcome["findings"] if item["evidence"].get("cores_of_others")]
    if not foreign:
        return outcome
    findings = [item for item in outcome["findings"] if item not in foreign]
    verdict = outcome["verdict"]
    if verdict == foreign[0]["code"]:
        verdict = next((item["code"] for item in findings if item["severity"] != "info"), HEALTHY)
    note = f"other processes took {foreign[0]['evidence']['cores_of_others']:.1f} cores"
    return {**outcome, "verdict": verdict, "findings": findings, "notes": [*outcome.get("notes", ()), note]}


def warnings_of(outcome: dict[str, Any]) -> list[str]:
    """Codes of the findings above `info`."""
    return [finding["code"] for finding in outcome["findings"] if finding["severity"] != "info"]


def summarise(outcomes: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Confusion table, accuracy, and the findings that healthy runs should not have."""
    confusion: dict[str, dict[str, int]] = {}
    right = total = 0
    false: dict[str, list[str]] = {}
    for name, runs in outcomes.items():
        expected = CASES[name].expected
        for outcome in runs:
            row = confusion.setdefault(expected, {})
            row[outcome["verdict"]] = row.get(outcome["verdict"], 0) + 1
            total += 1
            right += outcome["verdict"] == expected
            if expected == HEALTHY and warnings_of(outcome):
                false.setdefault(name, []).extend(warnings_of(outcome))
    return {
        "runs": total,
        "right": right,
        "accuracy": right / total if total else None,
        "confusion": confusion,
        "false_findings_on_healthy": false,
    }


def draw(outcomes: dict[str, list[dict[str, Any]]], summary: dict[str, Any], skipped: dict[str, str]) -> str:
    """What was found, case by case, and the confusion table."""
    rows = []
    for name, runs in outcomes.items():
        expected = CASES[name].expected
        for outcome in runs:
            share = next((item["share"] for item in outcome["findings"] if item["code"] == outcome["verdict"]), None)
            others = [code for code in warnings_of(outcome) if code != outcome["verdict"]]
            rows.append(
                (
                    name,
                    expected,
                    outcome["verdict"],
                    "-" if share is None else f"{share:.0%}",
                    ",".join(others) or "-",
                    "right" if outcome["verdict"] == expected else "WRONG",
                    f"{outcome['wall_s']:.0f} s",
                )
            )
    cases = table(("case", "expected", "verdict", "share", "also", "", "took"), rows)
    verdicts = sorted({verdict for row in summary["confusion"].values() for verdict in row})
    confusion = table(
        ("expected \\ verdict", *verdicts),
        [(name, *(str(row.get(item, ".")) for item in verdicts)) for name, row in sorted(summary["confusion"].items())],
    )
    lines = [cases, "", confusion, ""]
    lines += [f"skipped: {name} ({why})" for name, why in skipped.items()]
    accuracy = summary["accuracy"]
    if accuracy is not None:
        lines.append(f"right: {summary['right']} of {summary['runs']} ({accuracy:.0%}; goal {GOAL:.0%})")
    false = summary["false_findings_on_healthy"]
    lines.append(f"false findings on healthy runs: {json.dumps(false) if false else 'none'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    fast = ",".join(name for name, case in CASES.items() if case.fast)
    parser.add_argument("--cases", type=names_among(CASES), help=f"some of them, comma between (fast ones: {fast})")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.one is not None:
        try:
            run_here(chosen.one, chosen.folder, chosen.rank)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # threads of a collective that nobody answers would hold the process
        return 0
    names = chosen.cases or list(CASES)
    skipped = {name: why for name in names if (why := why_not(CASES[name])) is not None}
    folder = chosen.out or (RESULTS if chosen.cases is None else None)
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for number in range(chosen.repeat):
        for name in names:
            if name in skipped:
                continue
            outcome = apart_from_others(run_case(CASES[name]))
            outcomes.setdefault(name, []).append(outcome)
            tell_progress(f"{number + 1}/{chosen.repeat} {name}: {outcome['verdict']} {outcome.get('problem', '')}")
            if outcome["verdict"] == FAILED:
                tell_progress("\n".join(outcome["log"]))
            if chosen.out is not None:  # what was found so far, should time run out
                write(chosen.out, chosen.repeat, outcomes, skipped)
    summary = summarise(outcomes)
    print(draw(outcomes, summary, skipped))
    if folder is not None:
        print(f"written: {write(folder, chosen.repeat, outcomes, skipped)}")
    return 0 if summary["accuracy"] is None or _reached(summary) else 1


def write(folder: Path, repeat: int, outcomes: dict[str, list[dict[str, Any]]], skipped: dict[str, str]) -> Path:
    """The results file of what has been run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {
        name: {
            "expected": CASES[name].expected,
            "about": CASES[name].about,
            "runs": [_short(item) for item in runs],
        }
        for name, runs in outcomes.items()
    }
    results = {"summary": summarise(outcomes), "cases": cases, "skipped": skipped}
    return write_results("diagnosis", device, {"repeat": repeat, "goal": GOAL}, results, folder)


def _reached(summary: dict[str, Any]) -> bool:
    return summary["accuracy"] >= GOAL and not summary["false_findings_on_healthy"]


def _short(outcome: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of one run."""
    findings = [
        {key: finding[key] for key in ("code", "severity", "share", "evidence", "expected_speedup")}
        for finding in outcome["findings"]
    ]
    phases = {name: phase["share"] for name, phase in (outcome.get("phases") or {}).items()}
    kept = {key: outcome[key] for key in ("verdict", "steps", "wall_s", "notes", "problem") if key in outcome}
    busy = (outcome.get("system") or {}).get("gpu_busy")
    return {**kept, "phases": phases, "findings": findings, **({"gpu_busy": busy} if busy else {})}


if __name__ == "__main__":
    sys.exit(main())
