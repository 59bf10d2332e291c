"""The same training scripts under `frameworm profile` and under TraceML (PyPI: traceml-ai): who names the fault?

    pip install traceml-ai && python benchmarks/traceml.py
    python benchmarks/traceml.py --cases slow_dataset,leak
    python benchmarks/traceml.py --only frameworm

The cases of planted.py that TraceML's documentation claims to tell, written as plain PyTorch scripts. frameworm gets
each script as it is. TraceML asks for three lines in a plain loop (import, init, trace_step around the step); they are
put in here, around the whole body of the loop, since TraceML does not see what stands outside. Each tool runs each
script once, one after the other, as its users would start it; the verdict is read from the summary it leaves.

An answer of TraceML is right if it is the one its documentation gives for the fault: `RESIDUAL_HEAVY` stands for
logging and checkpoints alike, and memory creep may be in any section of its summary; it reads that from the GPU, so
without one the case does not count for it. On a healthy run its verdict must be one it calls information, as
frameworm's must be `healthy`.

`--only` asks one of the tools anew and takes the answers of the other from the stored results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diagnosis import FAILED, _free_port, _wait, warnings_of
from harness import RESULTS, names_among, table, tell_progress, write_results
from planted import CASES as PLANTED
from planted import HEALTHY

INSTALL = "pip install traceml-ai"
DEADLINE_S = 150.0
SLOW_RANK = 1

# What TraceML's documentation says it would answer.
ITS_WORDS = {
    "input_bound": {"INPUT_BOUND"},
    "logging_stall": {"RESIDUAL_HEAVY"},
    "checkpoint_stall": {"RESIDUAL_HEAVY"},
    "memory_growth": {"CREEP_EARLY", "CREEP_CONFIRMED"},
    "straggler": {"INPUT_STRAGGLER", "COMPUTE_STRAGGLER", "STRAGGLER"},
}
UNSURE = {"INSUFFICIENT_STEP_TIME_DATA", "NO_DATA"}
SECTIONS = ("step_time", "step_memory", "process", "system")

HEAD = """
import os, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, value, forward_s, backward_s):
        context.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.backward_s)
        return gradient, None, None

class Sleeper(nn.Module):
    def __init__(self, forward_s=0.01, backward_s=0.02, extra=0):
        super().__init__()
        self.times = (forward_s, backward_s)
        self.body = nn.Linear(16, 16)
        self.extra = nn.Linear(16, extra) if extra else None
        self.head = nn.Linear(16 + extra, 4)

    def forward(self, inputs):
        hidden = self.body(inputs)
        if self.extra is not None:
            hidden = torch.cat([hidden, self.extra(hidden)], -1)
        return self.head(Sleep.apply(hidden, *self.times))

class Samples(Dataset):
    def __init__(self, count, work=lambda index: None):
        self.inputs = torch.randn(count, 16)
        self.work = work

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.work(index)
        return self.inputs[index], index % 4

def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

torch.manual_seed(0)
epochs = 1
"""
RANKS = """
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
number = 0
for _ in range(epochs):
    for inputs, labels in loader:
        number += 1
"""
STEP = """
optimizer.zero_grad()
loss = nn.functional.cross_entropy(model(inputs), labels)
loss.backward()
optimizer.step()
"""
ACCUMULATION = """
loss = nn.functional.cross_entropy(model(inputs), labels) / 4
loss.backward()
if number % 4 == 0:
    optimizer.step()
    optimizer.zero_grad()
"""
SAVE = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")'


@dataclass(frozen=True)
class Script:
    """What differs between the scripts: what comes before the loop, the step, what follows it, and at the end."""

    before: str
    step: str = STEP
    after: str = ""
    ranks: int = 1

    def plain(self) -> str:
        """As frameworm gets it."""
        return self._text(self.step + self.after, "", "        ")

    def for_traceml(self) -> str:
        """With the lines that TraceML asks for."""
        init = 'import traceml_ai as traceml\ntraceml.init(mode="auto")\n'
        return self._text(
            "with traceml.trace_step(model):\n" + textwrap.indent(self.step + self.after, "    "), init, " " * 8
        )

    def _text(self, body: str, init: str, margin: str) -> str:
        distributed = self.ranks > 1
        start = RANKS if distributed else ""
        wrap = "model = nn.parallel.DistributedDataParallel(model)\n" if distributed else ""
        end = "dist.destroy_process_group()\n" if distributed else ""
        return HEAD + init + start + self.before + wrap + LOOP + textwrap.indent(body, margin) + end


WIDE = """
wide = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), *wide, nn.Linear(512, 4))
"""
TERMINAL = """
out, into = os.pipe()
terminal = os.fdopen(into, "w")
def read_slowly():
    while data := os.read(out, 4096):
        time.sleep(len(data) / 150e3)
threading.Thread(target=read_slowly, daemon=True).start()
"""
TABLE = """
for row in range(100):
    print(f"step {number:6d} row {row:3d} loss {loss.item()!r:>24} {'-' * 40}", file=terminal)
terminal.flush()
"""
HISTOGRAMS = """
end = time.perf_counter() + 0.02
while time.perf_counter() < end:
    for parameter in model.parameters():
        torch.histc(parameter.detach(), 100)
"""
COLLATE = """
def collate(samples):
    busy(0.03)
    return torch.utils.data.default_collate(samples)
"""
DISK = """
with open("samples.bin", "wb") as file:
    file.write(os.urandom(16_384 * 64))
def read(index):
    begin = time.perf_counter()
    with open("samples.bin", "rb", buffering=0) as file:
        file.seek(index % 64 * 16_384)
        file.read(16_384)
    time.sleep(max(0.0, 16_384 / 2e6 - (time.perf_counter() - begin)))
"""
IN_MEMORY = "loader = DataLoader(Samples(8 * 120), 8)\n"
SLEEPER = "model = Sleeper()\n"

SCRIPTS: dict[str, Script] = {
    "slow_dataset": Script(SLEEPER + "loader = DataLoader(Samples(8 * 80, lambda index: busy(0.005)), 8)\n"),
    "slow_collate": Script(SLEEPER + COLLATE + "loader = DataLoader(Samples(8 * 120), 8, collate_fn=collate)\n"),
    "too_few_workers": Script(
        SLEEPER + "loader = DataLoader(Samples(8 * 120, lambda index: time.sleep(0.008)), 8, num_workers=1)\n"
    ),
    "restarted_workers": Script(SLEEPER + "epochs = 16\nloader = DataLoader(Samples(8 * 5), 8, num_workers=2)\n"),
    "slow_disk": Script(SLEEPER + DISK + "loader = DataLoader(Samples(8 * 120, read), 8)\n"),
    "print_every_step": Script(SLEEPER + TERMINAL + IN_MEMORY, after=TABLE),
    "busy_callback": Script(SLEEPER + IN_MEMORY, after=HISTOGRAMS),
    "checkpoint_sync": Script(
        "model = Sleeper(extra=60_000)\nloader = DataLoader(Samples(8 * 60), 8)\n",
        after=f"if number % 2 == 0:\n    {SAVE}\n",
    ),
    "leak": Script(
        SLEEPER + "kept = []\nloader = DataLoader(Samples(8 * 250), 8)\n", after="kept.append(torch.ones(2**20))\n"
    ),
    "straggler_compute": Script(
        "model = Sleeper(forward_s=0.01 + 0.04 * rank)\nloader = DataLoader(Samples(16 * 120), 16)\n", ranks=2
    ),
    "straggler_data": Script(
        SLEEPER + "loader = DataLoader(Samples(8 * 120, lambda index: time.sleep(0.005 * rank)), 8)\n", ranks=2
    ),
    "healthy_compute": Script(WIDE + "loader = DataLoader(Samples(128 * 80), 128)\n"),
    "healthy_workers": Script(
        "model = Sleeper(0.03, 0.06)\n"
        "loader = DataLoader(Samples(8 * 120, lambda index: time.sleep(0.001)), 8, num_workers=1)\n",
        after=f"if number == 100:\n    {SAVE}\n",
    ),
    "healthy_accumulation": Script(SLEEPER + "loader = DataLoader(Samples(4 * 240), 4)\n", step=ACCUMULATION),
    "healthy_ranks": Script("model = Sleeper(0.02, 0.04)\nloader = DataLoader(Samples(16 * 120), 16)\n", ranks=2),
}


def ask_frameworm(name: str, folder: Path) -> dict[str, Any]:
    """Run a script under `frameworm profile`; verdict, rank and other warnings."""
    script = SCRIPTS[name]
    path = folder / f"{name}.py"
    path.write_text(script.plain(), encoding="utf-8")
    start = [sys.executable]
    if script.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(script.ranks)]
    problem = _run([*start, "-m", "frameworm", "profile", "--out", str(folder / "run"), str(path)], folder)
    summary = _read(folder / "run" / "summary.json")
    if problem or summary is None:
        return {"verdict": FAILED, "problem": problem or "left no summary"}
    verdict = summary["verdict"]
    return {
        "verdict": verdict,
        "rank": summary["communication"]["slowest_rank"] if verdict == "straggler" else None,
        "also": [code for code in warnings_of(summary) if code != verdict],
        "phases": {phase: figures["share"] for phase, figures in summary["phases"].items()},
        "notes": summary["notes"],
    }


def ask_traceml(name: str, folder: Path) -> dict[str, Any]:
    """Run a script under `traceml run`; its primary diagnosis and the warnings of its sections."""
    script = SCRIPTS[name]
    path = folder / f"{name}.py"
    path.write_text(script.for_traceml(), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "traceml"), "run", str(path), "--logs-dir", str(folder / "logs")]
    command += ["--run-name", "run", "--aggregator-port", str(_free_port()), "--master-port", str(_free_port())]
    problem = _run([*command, "--nproc-per-node", str(script.ranks)], folder)
    summary = _read(folder / "logs" / "run" / "final_summary.json")
    if problem or summary is None:
        return {"verdict": FAILED, "problem": problem or "left no summary"}
    return read_traceml(summary)


def read_traceml(summary: dict[str, Any]) -> dict[str, Any]:
    """What a summary of TraceML says, in a few words."""
    primary = summary["primary_diagnosis"]
    issues = {item["kind"]: item for section in SECTIONS for item in (summary.get(section) or {}).get("issues") or []}
    ranks = issues.get(primary["kind"], {}).get("ranks") or []
    warned = [kind for kind, item in issues.items() if item.get("severity") in ("warn", "crit")]
    return {
        "verdict": primary["kind"],
        "severity": primary.get("severity"),
        "rank": ranks[0] if ranks and "STRAGGLER" in primary["kind"] else None,
        "also": [kind for kind in warned if kind != primary["kind"]],
        "issues": sorted(issues),
        "why": primary.get("summary"),
        "evidence": primary.get("evidence"),
    }


def right_of_frameworm(expected: str, answer: dict[str, Any]) -> bool:
    """Whether frameworm's verdict is the planted one, and names the rank where there is one."""
    return bool(answer["verdict"] == expected and (expected != "straggler" or answer["rank"] == SLOW_RANK))


def right_of_traceml(expected: str, answer: dict[str, Any]) -> bool | None:
    """The same of TraceML, in its own words; None where it says that it cannot tell on this machine."""
    if answer["verdict"] == FAILED:
        return False
    if expected == HEALTHY:
        return answer["severity"] == "info" and answer["verdict"] not in UNSURE
    if expected == "memory_growth":
        return None if "NO_GPU" in answer["issues"] else bool(ITS_WORDS[expected] & set(answer["issues"]))
    return answer["verdict"] in ITS_WORDS[expected] and (expected != "straggler" or answer["rank"] == SLOW_RANK)


def _run(command: Sequence[str], folder: Path) -> str | None:
    """Run to the end or the deadline; what went wrong, with the last lines of its output."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file, start_new_session=True)
        late = _wait([process], DEADLINE_S)
    if late or process.returncode != 0:
        what = f"still running after {DEADLINE_S:.0f} s" if late else f"exit code {process.returncode}"
        return f"{what}: {log.read_text(errors='replace')[-1500:]}"
    return None


def _read(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def _words(answer: dict[str, Any], right: bool | None) -> str:
    rank = "" if answer.get("rank") is None else f" (rank {answer['rank']})"
    mark = {True: "", False: " MISS", None: " (needs a GPU)"}[right]
    return f"{answer['verdict']}{rank}{mark}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and draw the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=names_among(SCRIPTS), help="some of them, comma between")
    parser.add_argument("--only", choices=("frameworm", "traceml"), help="ask one tool, keep what the other has said")
    parser.add_argument("--out", type=Path, help="folder for the results")
    chosen = parser.parse_args(arguments)
    kept = None
    if chosen.only is not None:
        kept = _read(RESULTS / f"traceml-{'cuda' if torch.cuda.is_available() else 'cpu'}.json")
        if kept is None:
            print("there are no stored results to keep")
            return 1
    if chosen.only != "frameworm" and importlib.util.find_spec("traceml_ai") is None:
        print(f"skipped: TraceML is not installed here; {INSTALL}")
        return 0
    asked_anew = chosen.only != "frameworm" or kept is None
    version = importlib.metadata.version("traceml-ai") if asked_anew else kept["settings"]["traceml"]
    cases: dict[str, Any] = {}
    for name in chosen.cases or SCRIPTS:
        expected = PLANTED[name].expected
        answers = {}
        for tool, ask, judge in (
            ("traceml", ask_traceml, right_of_traceml),
            ("frameworm", ask_frameworm, right_of_frameworm),
        ):
            if kept is not None and tool != chosen.only:
                answers[tool] = kept["results"]["cases"][name][tool]
                continue
            begin = perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                answer = ask(name, Path(folder))
            answers[tool] = {**answer, "right": judge(expected, answer), "wall_s": perf_counter() - begin}
            tell_progress(f"{name}, {tool}: {answer['verdict']} {answer.get('problem', '')}")
        cases[name] = {"expected": expected, "about": PLANTED[name].about, **answers}
    rows = [
        (
            name,
            case["expected"],
            _words(case["frameworm"], case["frameworm"]["right"]),
            ",".join(case["frameworm"].get("also", ())) or "-",
            _words(case["traceml"], case["traceml"]["right"]),
            ",".join(case["traceml"].get("also", ())) or "-",
        )
        for name, case in cases.items()
    ]
    print(table(("case", "planted", "frameworm", "also", f"TraceML {version}", "also"), rows))
    right = {}
    for tool in ("frameworm", "traceml"):
        answers = [case[tool]["right"] for case in cases.values() if case[tool]["right"] is not None]
        right[tool] = {"right": sum(answers), "of": len(answers)}
    print("right: " + ", ".join(f"{tool} {count['right']} of {count['of']}" for tool, count in right.items()))
    uncovered = sorted(set(PLANTED) - set(SCRIPTS))
    folder = chosen.out or (RESULTS if chosen.cases is None else None)
    if folder is not None:
        settings = {"traceml": version, "threads": 1, "runs_of_each": 1, "not_compared": uncovered}
        if chosen.only is not None:
            settings["asked_anew"] = chosen.only
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(f"written: {write_results('traceml', device, settings, {'right': right, 'cases': cases}, folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
