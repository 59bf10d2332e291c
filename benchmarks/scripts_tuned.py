"""What `frameworm tune SCRIPT.py` makes of scripts that know nothing of it, beside versions tuned by hand.

    PYTHONPATH=src python benchmarks/scripts_tuned.py --scripts dcgan,hf_trainer --budget 170

The scripts and the experts' versions are in `scripts/`; those were written first and stay as they are. For each script:
`frameworm tune` as a command; then the original, the original with what was found, and the expert's version take turns
in windows of steps. Ratios are medians over the rounds with their 95% intervals.

Results are kept in benchmarks/results/scripts-DEVICE.json: what is measured again replaces what was there. `--table`
prints them and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, bootstrap_median, device_word, names_among, table, tell_progress, write_results

from frameworm.attach.trial.job import ScriptJob
from frameworm.tune.scripts.process import ScriptError, ScriptProcess

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from corpus import SCRIPTS, Script

ROUNDS = 7
PORT = 29400  # in a network of their own
WINDOW_S, LEAD_IN, WARM_STEPS = 0.5, 6, 8
TUNABLE = {script.name: script for script in SCRIPTS if script.ending == "trains"}
COLUMNS = ("script", "original", "tuned", "expert", "over the original", "of the expert", "search", "switches")


def tune(script: Script, arguments: list[str], folder: Path, budget_s: float) -> dict[str, Any]:
    """`frameworm tune` as a command; what tune.json tells."""
    through = ["-m", "frameworm", "tune", "--budget", f"{budget_s:.0f}s", "--out", str(folder)]
    began = time.perf_counter()
    done = subprocess.run(
        script.command(script.original, arguments, through),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=3 * budget_s + 60,
        check=False,
    )
    wall_s = time.perf_counter() - began
    (folder.parent / "tune.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not (folder / "tune.json").exists():
        return {"error": done.stderr.strip().splitlines()[-1:], "wall_s": wall_s}
    told = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    attempts = [{key: item[key] for key in ("label", "status", "reason")} for item in told["attempts"]]
    kept = {key: told.get(key) for key in ("speedup", "patch", "no_patch", "stopped", "trials")}
    switches = {key: value["after"] for key, value in told["changes"].items()}
    return {**kept, "switches": switches, "attempts": attempts, "wall_s": wall_s}


def measure(script: Script, arguments: list[str], switches: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds per step of the three, in turns."""
    given, ranks = [*script.always, *arguments], ranks_of(script)
    jobs = {
        "original": ScriptJob(str(script.original), given),
        "tuned": ScriptJob(str(script.original), given, switches=switches),
    }
    if script.expert is not None:
        jobs["expert"] = ScriptJob(str(script.tuned_by_hand), given)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    deadline = time.monotonic() + 240
    with ExitStack() as all_of_them:
        processes = {}
        for name, job in jobs.items():
            named = replace(job, name=name, folder=str(folder), ranks=ranks, port=PORT if ranks else 0)
            processes[name] = all_of_them.enter_context(ScriptProcess(named, folder / "processes", deadline))
        failed = {}
        for name, process in list(processes.items()):
            try:
                process.stand()
            except ScriptError as error:
                if name != "expert":
                    raise
                failed = {"expert_fails": str(error)}  # on this version of torch: the others are timed without it
                del processes[name], times[name]
        warm = {name: process.go(WARM_STEPS) for name, process in processes.items()}
        slowest_s = max((stand.seconds or 0.0) / WARM_STEPS for stand in warm.values())
        steps = max(4, round(WINDOW_S / slowest_s))
        try:
            for _ in range(ROUNDS):
                taken = {}
                for name, process in processes.items():
                    process.go(LEAD_IN)
                    taken[name] = (process.go(steps).seconds or 0.0) / steps
                for name, seconds in taken.items():
                    times[name].append(seconds)
        except ScriptError as error:
            if len(times["original"]) < 3:
                return {"error": str(error)}
    return {"step_s": times, "steps": steps, **failed}


def ranks_of(script: Script) -> list[dict[str, str | None]]:
    """The variables of a script's processes, as torchrun sets them; none where it is one process."""
    count = str(script.ranks)
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        for rank in range(script.ranks if script.ranks > 1 else 0)
    ]


def ratio(times: dict[str, list[float]], one: str, other: str) -> list[float] | None:
    """How many times as fast one is as the other: median and interval."""
    if other not in times:
        return None
    found = bootstrap_median([before / after for after, before in zip(times[one], times[other])])
    return [found.value, found.low, found.high]


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    """A script's line of the table."""
    search, timed = found["search"], found["timed"]
    if "error" in search or "error" in timed:
        return [name, *["-"] * 5, f"{search['wall_s']:.0f} s", str(search.get("error") or timed.get("error"))[:60]]
    step_ms = {side: sorted(values)[len(values) // 2] * 1e3 for side, values in timed["step_s"].items()}
    shown = [f"{step_ms[side]:.1f} ms" if side in step_ms else "-" for side in ("original", "tuned", "expert")]
    ratios = [found["over_original"], found["of_expert"]]
    told = ["-" if item is None else f"{item[0]:.2f} ({item[1]:.2f} to {item[2]:.2f})" for item in ratios]
    switches = ", ".join(f"{key}={value}" for key, value in search["switches"].items())
    return [name, *shown, *told, f"{search['wall_s']:.0f} s", switches or "nothing was found"]


def tell(results: dict[str, Any]) -> None:
    """The table."""
    print(table(COLUMNS, [row_of(name, results[name]) for name in TUNABLE if name in results]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=names_among(TUNABLE), default=list(TUNABLE))
    parser.add_argument("--budget", type=float, default=170.0, help="seconds of each search")
    parser.add_argument("--keep", type=Path, help="folder for what the searches leave behind")
    parser.add_argument("--table", action="store_true", help="print what was measured so far")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = arguments.out / f"scripts-{device_word(device)}.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    if arguments.table:
        tell(results)
        return
    for name in arguments.scripts:
        script = TUNABLE[name]
        if script.missing():
            tell_progress(f"{name}: {', '.join(script.missing())} is not installed")
            continue
        given = list(script.gpu if device.type == "cuda" else ())
        with tempfile.TemporaryDirectory(prefix="frameworm-scripts-") as place:
            kept = (arguments.keep or Path(place)).absolute() / name
            kept.mkdir(parents=True, exist_ok=True)
            search = tune(script, given, kept / "tune", arguments.budget)
            timed = {"error": "not tuned"}
            if "error" not in search:
                timed = measure(script, given, search["switches"], kept)
        found: dict[str, Any] = {"search": search, "timed": timed, "over_original": None, "of_expert": None}
        if "error" not in timed:
            found["over_original"] = ratio(timed["step_s"], "tuned", "original")
            found["of_expert"] = ratio(timed["step_s"], "tuned", "expert")
        found["measured"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        results[name] = found
        tell_progress(f"{name}: {row_of(name, found)[4:]}")
        write_results("scripts", device, {"budget_s": arguments.budget, "rounds": ROUNDS}, results, arguments.out)
    tell(results)


if __name__ == "__main__":
    main()
