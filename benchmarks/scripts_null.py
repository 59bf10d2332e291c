"""What `frameworm tune SCRIPT.py` finds where there is nothing to find, and what watching a script costs it.

    PYTHONPATH=src python benchmarks/scripts_null.py --trials 20

Null knobs set what means nothing without a GPU: page-locked batches and cuDNN's benchmark. Each is tried on scripts of
`scripts/` by the search itself. None should be accepted.

The cost: a loop of tiny steps, the worst case, that times itself. A process with nothing around it and one under
`frameworm run --with` a file that switches nothing on take turns. Ratios are medians over the pairs of processes.

Results are kept in benchmarks/results/scripts_null-cpu.json: what is measured again replaces what was there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from harness import RESULTS, bootstrap_median, tell_progress, write_results

from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.tune.scripts.knobs import ScriptKnob
from frameworm.tune.scripts.search import ScriptSearch

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from corpus import SCRIPTS

BUDGET_S = 120.0
NOTHING: tuple[dict[str, Any], ...] = ({"pin_memory": True}, {"cudnn_benchmark": True})
LOOP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(12800, 16), torch.randn(12800, 1)), 8)
times = []
for epoch in range(4):
    began = time.perf_counter()
    for inputs, target in loader:
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    times.append((time.perf_counter() - began) / len(loader))
print("STEP", min(times[1:]))
"""


def try_nothing(trials: int) -> list[dict[str, Any]]:
    """Null knobs on one script after another."""
    scripts = [item for item in SCRIPTS if item.ending == "trains" and item.ranks == 1 and not item.missing()]
    found = []
    for number in range(trials):
        script = scripts[number // len(NOTHING) % len(scripts)]
        changes = NOTHING[number % len(NOTHING)]
        knob = ScriptKnob(lambda facts, changes=changes: changes, lambda facts: 1.0, lambda facts: None)  # type: ignore[misc]
        with tempfile.TemporaryDirectory(prefix="frameworm-null-") as folder:
            search = ScriptSearch(script.original, script.always, Path(folder), BUDGET_S, knobs=[knob])
            result = search.run()
        attempt = result.attempts[0] if result.attempts else None
        told = {
            "script": script.name,
            "changes": changes,
            "status": "failed" if attempt is None else attempt.status,
            "reason": result.problem if attempt is None else attempt.reason,
        }
        tell_progress(f"{number + 1}: {told}")
        found.append(told)
    return found


def step_s(command: list[str], folder: Path) -> float:
    """What the loop has measured of itself."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split("STEP")[1])


def watch_cost(pairs: int) -> dict[str, Any]:
    """How much longer a step takes under `frameworm run --with`, with nothing switched on."""
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    with tempfile.TemporaryDirectory(prefix="frameworm-null-") as place:
        folder = Path(place)
        script, tuned = folder / "loop.py", folder / "tuned.yaml"
        script.write_text(LOOP, encoding="utf-8")
        bound_to = {**fingerprint_of(script, []), "device": "CPU"}
        tuned.write_text(yaml.safe_dump({"version": 1, "fingerprint": bound_to, "switches": {}}), encoding="utf-8")
        commands = {
            "plain": [sys.executable, str(script)],
            "watched": [sys.executable, "-m", "frameworm", "run", "--with", str(tuned), str(script)],
        }
        for number in range(pairs):
            for name in commands if number % 2 == 0 else reversed(commands):
                times[name].append(step_s(commands[name], folder))
    ratios = [watched / plain for plain, watched in zip(times["plain"], times["watched"])]
    cost = bootstrap_median(ratios)
    return {"step_s": times, "ratio": [cost.value, cost.low, cost.high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="null knobs to try")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of processes that show the cost")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    path = arguments.out / "scripts_null-cpu.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    if arguments.pairs:
        results["watching"] = watch_cost(arguments.pairs)
        tell_progress(f"watched / plain: {results['watching']['ratio']}")
    if arguments.trials:
        tried = results["null_knobs"] = try_nothing(arguments.trials)
        results["accepted"] = sum(item["status"] == "accepted" for item in tried)
        tell_progress(f"accepted: {results['accepted']} of {len(tried)}")
    settings = {"trials": arguments.trials, "pairs": arguments.pairs}
    write_results("scripts_null", torch.device("cpu"), settings, results, arguments.out)


if __name__ == "__main__":
    main()
