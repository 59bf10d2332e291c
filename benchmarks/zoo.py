"""What `frameworm tune` finds on models that nobody here wrote, beside the loops that an expert would write for them.

    PYTHONPATH=src python benchmarks/zoo.py --zoo FOLDER --models vit,bert --budget 170

FOLDER holds the referee: `models.py` (the models, their data, `build` as a workload) and `expert.py` (the loops).
For each model: every loop in a process of its own, which gives samples/s and peak memory; `frameworm tune` as a
command, from a config that names the model, its batch and a rate; then what it found, timed in
windows of as many steps as the loops. The best loop is the expert.

Results are kept in benchmarks/results/zoo-DEVICE.json, so that the table may be filled over several days: what is
measured again replaces what was there, each loop for itself (`--loops none`: only the search). `--table` prints it and
measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, device_word, names_among, table, tell_progress, write_results

from frameworm.config.load import load_runnable
from frameworm.tune.trials.live import Live, LiveError

LOOPS = ("plain", "bf16", "compile", "graphs", "resident")
HOST_BOUND = ("llama_small", "vit", "bert", "lstm", "graph", "recommender")
GPU_BOUND = ("llama_medium", "convnext", "unet")
BATCHES = {
    **{"llama_small": 16, "llama_medium": 8, "bert": 32, "vit": 64, "convnext": 64},
    **{"unet": 32, "lstm": 64, "recommender": 2048, "graph": 64},
}
WARM_STEPS, TIMED_STEPS, WINDOWS = 20, 60, 5
LONGEST_S = 60.0  # after which no further window begins
COLUMNS = ("model", "plain", "expert", "loop", "tuned", "of expert", "of plain", "memory", "search", "settings")


def run_loops(zoo: Path, model: str, loops: list[str], device: str, limit_s: float) -> list[dict[str, Any]]:
    """Each loop of the expert alone; one that fails says why."""
    found = []
    for loop in loops:
        command = [sys.executable, "expert.py", "--models", model, "--loops", loop, "--device", device]
        try:
            done = subprocess.run(command, cwd=zoo, capture_output=True, text=True, timeout=limit_s, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            told = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()[-300:]}
        except subprocess.TimeoutExpired:
            told = {"error": f"not done after {limit_s:.0f} s"}
        tell_progress(f"{model}, {loop}: {told.get('samples_per_s', told.get('error'))}")
        found.append({"model": model, "loop": loop, **told, "measured": _now()})
    return found


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def merged(earlier: list[dict[str, Any]], loops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of all loops, the later ones where there are two."""
    found = {item["loop"]: item for item in (*earlier, *loops)}
    return [found[loop] for loop in LOOPS if loop in found]


def write_config(model: str, folder: Path, device: str) -> Path:
    """What a user would write for the model."""
    path = folder / f"{model}.yaml"
    path.write_text(
        f"name: {model}\nworkload: models:build\nmodel:\n  which: {model}\ngpu:\n  device: {device}\n"
        f"training:\n  global_batch: {BATCHES[model]}\n  epochs: 1000\n  lr: 0.001\n",
        encoding="utf-8",
    )
    return path


def search(zoo: Path, config: Path, folder: Path, budget_s: float) -> dict[str, Any]:
    """`frameworm tune` as a command; what it tells in tune.json, and how long it took."""
    command = [sys.executable, "-m", "frameworm", "tune", "--config", str(config), "--out", str(folder)]
    began = time.perf_counter()
    with (folder.parent / f"{config.stem}.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            [*command, "--budget", f"{budget_s:.0f}s"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=with_zoo(zoo),
            timeout=3 * budget_s + 120,
            check=False,
        )
    wall_s = time.perf_counter() - began
    if not (folder / "tune.json").exists():
        return {"error": (folder.parent / f"{config.stem}.log").read_text(encoding="utf-8")[-300:], "wall_s": wall_s}
    told = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    return {**in_short(told), "wall_s": wall_s}


def in_short(told: dict[str, Any]) -> dict[str, Any]:
    """What is kept of tune.json: what was found and tried; the proofs have hundreds of lines."""
    trial = ("seconds_per_sample", "setup_s", "verdict")
    kept: dict[str, Any] = {key: told.get(key) for key in ("speedup", "changes", "stopped")}
    kept["attempts"] = [{key: item[key] for key in ("label", "status", "reason")} for item in told["attempts"]]
    return {**kept, **{side: {key: (told.get(side) or {}).get(key) for key in trial} for side in ("baseline", "final")}}


def measure(path: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Samples/s of a config, over windows of as many steps as the expert's loops take."""
    config = load_runnable(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Live(config, folder, time.monotonic() + limit_s) as live:
            live.stand()
            live.go(0, WARM_STEPS)
            rates: list[float] = []
            ends = time.monotonic() + LONGEST_S
            while not rates or (len(rates) < WINDOWS and time.monotonic() < ends):
                stand = live.go(2, TIMED_STEPS)
                assert stand.seconds is not None
                rates.append(stand.samples / stand.seconds)
            (told,) = live.finish()
    except LiveError as error:
        return {"error": str(error)}
    return {"samples_per_s": statistics.median(rates), "windows": rates, "peak_bytes": told["peak_bytes"]}


def with_zoo(zoo: Path) -> dict[str, str]:
    """The environment in which the zoo's modules can be imported."""
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in (known, str(zoo)) if item)}


def row_of(model: str, found: dict[str, Any]) -> list[str]:
    """A model's line of the table."""
    loops = {item["loop"]: item for item in found["loops"] if "samples_per_s" in item}
    best = max(loops.values(), key=lambda item: float(item["samples_per_s"]), default=None)
    tuned, changes = found["tuned"], found["search"].get("changes") or {}
    if best is None or "samples_per_s" not in tuned:
        return [model, *["-"] * 7, f"{found['search'].get('wall_s', 0):.0f} s", str(tuned.get("error", ""))[:60]]
    plain = loops.get("plain", {}).get("samples_per_s")
    memory = tuned["peak_bytes"] / best["peak_bytes"] if best.get("peak_bytes") and tuned.get("peak_bytes") else None
    return [
        model,
        "-" if plain is None else f"{plain:,.0f}",
        f"{best['samples_per_s']:,.0f}",
        best["loop"],
        f"{tuned['samples_per_s']:,.0f}",
        f"{tuned['samples_per_s'] / best['samples_per_s']:.2f}x",
        "-" if plain is None else f"{tuned['samples_per_s'] / plain:.2f}x",
        "-" if memory is None else f"{memory:.2f}",
        f"{found['search']['wall_s']:.0f} s",
        ", ".join(f"{key.partition('.')[2]}={value['after']}" for key, value in changes.items()),
    ]


def ratios(results: dict[str, Any], models: tuple[str, ...], against: str) -> list[float]:
    """How many times as fast as the best loop, or as one of them, by model."""
    found = []
    for model in models:
        entry = results.get(model) or {"loops": [], "tuned": {}}
        rates = {item["loop"]: float(item["samples_per_s"]) for item in entry["loops"] if "samples_per_s" in item}
        other = max(rates.values(), default=None) if against == "best" else rates.get(against)
        if other and "samples_per_s" in entry["tuned"]:
            found.append(entry["tuned"]["samples_per_s"] / other)
    return found


def tell(results: dict[str, Any]) -> None:
    """The table, and the geometric means of the groups."""
    print(table(COLUMNS, [row_of(model, results[model]) for model in BATCHES if model in results]))
    for name, models, against in (
        ("host-bound, of the expert", HOST_BOUND, "best"),
        ("GPU-bound, of the expert", GPU_BOUND, "best"),
        ("all, of the plain loop", tuple(BATCHES), "plain"),
    ):
        found = ratios(results, models, against)
        if found:
            mean = statistics.geometric_mean(found)
            print(f"{name}: {mean:.2f}x on average over {len(found)} of {len(models)}, {min(found):.2f}x at least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, help="folder with models.py and expert.py")
    parser.add_argument("--models", type=names_among(BATCHES), default=list(BATCHES))
    parser.add_argument("--loops", type=names_among((*LOOPS, "none")), default=list(LOOPS))
    parser.add_argument("--budget", type=float, default=170.0, help="seconds of each search")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of a loop")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, help="folder for what the searches leave behind")
    parser.add_argument("--table", action="store_true", help="print what was measured so far")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.table:
        for path in sorted(arguments.out.glob("zoo-*.json")):
            print(path.name)
            tell(json.loads(path.read_text(encoding="utf-8"))["results"])
        return
    device = torch.device(arguments.device)
    path = arguments.out / f"zoo-{device_word(device)}.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    if arguments.zoo is None or not (arguments.zoo / "expert.py").exists():
        parser.error("--zoo must be a folder with models.py and expert.py")
    zoo = arguments.zoo.absolute()
    sys.path.insert(0, str(zoo))
    os.environ.update(with_zoo(zoo))
    with tempfile.TemporaryDirectory(prefix="frameworm-zoo-") as place:
        kept = (arguments.keep or Path(place)).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        for model in arguments.models:
            wanted = [loop for loop in arguments.loops if loop != "none"]
            loops = run_loops(zoo, model, wanted, arguments.device, arguments.limit)
            loops = merged(results.get(model, {}).get("loops", []), loops)
            config, folder = write_config(model, kept, arguments.device), kept / model
            folder.mkdir(exist_ok=True)
            found = search(zoo, config, folder, arguments.budget)
            best = folder / "best.yaml"
            tuned = measure(best if best.exists() else config, kept / f"{model}-timed", arguments.limit)
            tell_progress(f"{model}, tuned: {tuned.get('samples_per_s', tuned.get('error'))}")
            results[model] = {"loops": loops, "search": found, "tuned": tuned, "measured": _now()}
            settings = {"budget_s": arguments.budget, "timed_steps": TIMED_STEPS, "windows": WINDOWS}
            write_results("zoo", device, settings, results, arguments.out)
    tell(results)


if __name__ == "__main__":
    main()
