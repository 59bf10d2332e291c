"""The shape of every JSON file and `--json` output that a user gets: key paths and the types of their values.

An outline maps a path to a type, such as `throughput.step_s.mean: number`. Items of a list share the path `[]`; keys of
a dictionary are kept, also those that are data, such as names of phases. Two outlines agree if they have the same paths
with the same types, but for what may differ between machines and moments:

- null on one side, next to any type on the other; what lies below is then missing there,
- a list that is empty on one side, so that nothing is known about its items,
- what lies below paths whose content is data of that machine or run (`OPEN`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden_cases import PLAIN, SMALL, STORED, STORED_RUNS, command

KEYS = STORED / "keys.json"
STORED_SWEEP = STORED / "sweep"
VERB_DEADLINE_S = 300.0

Outline = dict[str, str]

# Regular expressions on whole paths. What is below `OPEN` depends on the run, the machine or the version of torch.
OPEN = (
    r"(.*\.)?evidence",
    r"(.*\.)?remedies\[\]\.value",
    r"(.*\.)?changes",
    r"(.*\.)?metrics",
    r"content\.shared\.optimizer\.param_groups\[\]",
)
# Dictionaries of things of one kind, by name; the names share the path `*`.
NAMED = (r"content\.(tensors|files)", r"content\.shared\.model", r"content\.shared\.optimizer\.state")
_OPEN, _NAMED = (re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) for patterns in (OPEN, NAMED))
_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}


def outline(value: Any, path: str = "") -> Outline:
    """Paths and types of a JSON value."""
    if _OPEN.fullmatch(path):
        return {path: "anything"}
    if isinstance(value, dict):
        found = {path: "object"}
        for key, item in value.items():
            name = "*" if _NAMED.fullmatch(path) else key
            found = _merged(found, outline(item, f"{path}.{name}" if path else name))
        return found
    if isinstance(value, list):
        found = {path: "list"}
        for item in value:
            found = _merged(found, outline(item, f"{path}[]"))
        return found
    return {path: _TYPES[type(value)]}


def _merged(first: Outline, second: Outline) -> Outline:
    merged = dict(first)
    for path, kind in second.items():
        kinds = {*merged.get(path, kind).split("|"), *kind.split("|")}
        merged[path] = "|".join(sorted(kinds - {"null"})) or "null"
    return merged


def disagreements(found: Outline, expected: Outline) -> list[str]:
    """Say where two outlines differ in more than the module's docstring allows."""
    told = []
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            if not _unknown(path, found):
                told.append(f"{path}: is gone")
        elif path not in expected:
            if not _unknown(path, expected):
                told.append(f"{path}: is new")
        elif found[path] != expected[path] and "null" not in (found[path], expected[path]):
            told.append(f"{path}: {found[path]} instead of {expected[path]}")
    return told


def _unknown(path: str, known: Outline) -> bool:
    """True if nothing can be said about a path: something above it is null or an empty list."""
    for end in range(len(path) - 1, 0, -1):
        above = path[:end]
        if known.get(above) == "null":
            return True
        if known.get(above) == "list" and path[end:].startswith("[]") and f"{above}[]" not in known:
            return True
    return False


def check(found: dict[str, Outline]) -> list[str]:
    """Compare outlines by name with those that are stored."""
    stored = json.loads(KEYS.read_text(encoding="utf-8"))
    told = []
    for name, item in found.items():
        if name in stored:
            told += [f"{name}: {line}" for line in disagreements(item, stored[name])]
        else:
            told.append(f"{name}: is not stored; run tests/golden/write.py keys")
    return told


# ---------------------------------------------------------------------------------------------------------------------
# Files of run folders.


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_outlines(folder: Path, name: str) -> dict[str, Outline]:
    """Outlines of all JSON files of a run folder."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        label = re.sub(r"step-\d+", "step", str(path.relative_to(folder)))
        found[f"{name}/{label}"] = outline(json.loads(path.read_text(encoding="utf-8")))
    for path in sorted(folder.glob("*.jsonl")):
        found[f"{name}/{path.name}"] = outline(_lines(path), "")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Output of verbs, run in a working folder that holds the data, the stored runs and the stored sweep.

CONFIG = "small.yaml"
SCRIPT = "script.py"
_SCRIPT = """
import torch

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
for inputs, targets in torch.utils.data.DataLoader(data, 8):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
"""
_CONFIG = f"""
name: small
model: {{d_model: 16, n_heads: 2, num_layers: 1, dim_feedforward: 16, max_seq_len: {SMALL["model.max_seq_len"]}}}
data: {{dataset: ag_news, root: data, tokenizer: data/vocab.txt, cache_dir: cache, num_workers: 0}}
training: {{epochs: 5, global_batch: 16, cpu_threads: 1}}
gpu: {{device: cpu}}
checkpoint: {{every_steps: off}}
"""
SWEEP = ("scale", "--config", CONFIG, "--world-sizes", "1,2", "--repeats", "1", "--out", "sweep")


def prepare(folder: Path) -> None:
    """Write what the verbs need into a working folder."""
    (folder / CONFIG).write_text(_CONFIG, encoding="utf-8")
    (folder / SCRIPT).write_text(_SCRIPT, encoding="utf-8")
    shutil.copytree(STORED_RUNS, folder / "runs", dirs_exist_ok=True)
    if STORED_SWEEP.exists():
        shutil.copytree(STORED_SWEEP, folder / "sweep", dirs_exist_ok=True)
        shutil.copytree(STORED_SWEEP / "runs" / "ws0001-run01", folder / "again", dirs_exist_ok=True)


def _told(*arguments: str) -> dict[str, Outline]:
    return {arguments[0]: outline(json.loads(command(*arguments)[1]))}


def apart(*arguments: str, folder: Path | None = None) -> str:
    """Standard output of `python -m frameworm ARGUMENTS...`, for verbs that start processes or end their own."""
    ended = subprocess.run(
        [sys.executable, "-m", "frameworm", *arguments],
        cwd=folder,
        env={**os.environ, **PLAIN},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=VERB_DEADLINE_S,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"frameworm {arguments} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def _profile() -> dict[str, Outline]:
    apart("profile", "--out", "profiled", SCRIPT)
    return run_outlines(Path("profiled"), "profile")


def _same(printed: str, path: Path) -> dict[str, Outline]:
    """The outline of a file whose content was printed too."""
    written = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(printed) == written
    return {path.name: outline(written)}


def _network() -> dict[str, Outline]:
    printed = apart("network", "--nproc-per-node", "2", "--budget", "0.3", "--json")
    return _same(printed, Path("network.json"))


def _tune() -> dict[str, Outline]:
    printed = apart("tune", "--config", CONFIG, "--out", "search", "--trials", "2", "--budget", "250s", "--json")
    return _same(printed, Path("search/tune.json"))


def _scale() -> dict[str, Outline]:
    """A sweep whose runs are all done: only the analysis is made again."""
    return _same(command(*SWEEP, "--resume", "--json")[1], Path("sweep/scaling.json"))


def _guard() -> dict[str, Outline]:
    run = "sweep/runs/ws0001-run01"
    told = _told("guard", run, "--baseline", "again", "--json")
    command("guard", run, "again", "--baseline", "baseline.json", "--update-baseline")
    return {**told, "baseline.json": outline(json.loads(Path("baseline.json").read_text(encoding="utf-8")))}


# Not here: `batch-size`, whose trials take most of a minute.
VERBS: dict[str, Callable[[], dict[str, Outline]]] = {
    "memory_params": lambda: {"memory --params": _told("memory", "--params", "1e9", "--gpus", "8", "--json")["memory"]},
    "memory_config": lambda: {"memory --config": _told("memory", "--config", CONFIG, "--json")["memory"]},
    "doctor": lambda: _told("doctor", "--root", "runs", "--json"),
    "doctor_config": lambda: {"doctor --config": _told("doctor", "--config", CONFIG, "--json")["doctor"]},
    "runs": lambda: _told("runs", "runs", "--json"),
    "diagnose": lambda: _told("diagnose", "runs/ddp", "--json"),
    "evaluate": lambda: _told("evaluate", "runs/ddp", "--json"),
    "export": lambda: _told("export", "runs/ddp", "--out", "exported.safetensors", "--json"),
    "compare": lambda: _told("compare", "runs/ddp", "runs/zero1", "--json"),
    "predict": lambda: _told(
        "predict", "sweep/runs/ws0001-run01", "--fabric", "10gbe", "--no-measure-codecs", "--json"
    ),
    "guard": _guard,
    "scale": _scale,
    "profile": _profile,
    "network": _network,
    "tune": _tune,
}
# What one process runs in a row; `tune` takes as long as the others together.
VERB_GROUPS = {"quick": [name for name in VERBS if name != "tune"], "tune": ["tune"]}
