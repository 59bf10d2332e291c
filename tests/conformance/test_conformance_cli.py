"""Every command of the contract, and the files that runs and reports leave behind, used as people use them."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from contract_entries import COMMANDS, covers
from safetensors import safe_open

from conftest import kill_tree

pytestmark = pytest.mark.slow(cases="all")
ROOT = Path(__file__).parents[2]
VERBS = [entry for entry in COMMANDS if not entry.startswith(("-", "exit"))]
SMALL = """
name: small
model: {d_model: 16, n_heads: 2, num_layers: 1, dim_feedforward: 16, max_seq_len: 16, dropout: 0.0}
data: {dataset: generated, vocab_size: 256, num_workers: 0, limit: 512}
training: {epochs: 2, global_batch: 16, cpu_threads: 1}
gpu: {device: cpu}
checkpoint: {every_steps: 10, keep: 2}
"""
SCRIPT = """
import torch

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(2, (160,)))
for inputs, targets in torch.utils.data.DataLoader(data, 8):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
print("script done")
"""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """What it printed for machines."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


class Workplace:
    """A folder with a config, a script and two runs of the config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
        (folder / "script.py").write_text(SCRIPT, encoding="utf-8")

    def __call__(self, *arguments: str, timeout_s: float = 240, program: str | None = None) -> Ended:
        """Run the command line in the folder, to its end or a deadline."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "120"}
        environ["FRAMEWORM_DATA_CACHE_DIR"] = str(self.folder / "cache")
        start = ["-m", "frameworm"] if program is None else [program]
        process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
        return Ended(process.returncode, stdout, stderr)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("conformance"))
    for name in ("first", "second"):
        ended = place("train", "--config", "small.yaml", "--out", name)
        assert ended.code == 0, ended.stderr
    return place


def summary(work: Workplace, run: str = "first") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((work.folder / run / "summary.json").read_text(encoding="utf-8"))
    return content


@covers("--help")
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    text = (ROOT / "tests" / "golden" / "stored" / "help" / f"{verb}.txt").read_text(encoding="utf-8")
    assert f"frameworm {verb}" in text
    assert "Example:" in text
    assert verb == "slurm" or "--json" in text


@covers("train", "exit-0", "--out", "config.yaml", "steps-rank0.jsonl", "epochs.csv", "summary.json", "summary.txt")
def test_a_run_leaves_its_files(work: Workplace) -> None:
    folder = work.folder / "first"
    for name in ("config.yaml", "steps-rank0.jsonl", "epochs.csv", "summary.json", "summary.txt", "report.html"):
        assert (folder / name).stat().st_size > 0
    steps = [json.loads(line) for line in (folder / "steps-rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(steps) == 64
    with (folder / "epochs.csv").open(encoding="utf-8") as file:
        epochs = list(csv.DictReader(file))
    assert list(epochs[0]) == ["epoch", "epoch_time_s", "train_loss", "val_loss", "val_accuracy", "samples_per_s"]
    assert len(epochs) == 2


@covers("report.html", "checkpoints", "checkpoints/latest")
def test_the_page_opens_offline_and_latest_is_durable(work: Workplace) -> None:
    page = (work.folder / "first" / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert 'src="http' not in page
    checkpoints = work.folder / "first" / "checkpoints"
    assert (checkpoints / "latest").exists()
    assert len(list(checkpoints.glob("step-*"))) == 2


@covers(
    "summary.schema_version",
    "summary.status",
    "summary.environment",
    "summary.batch",
    "summary.throughput",
    "summary.phases",
    "summary.communication",
    "summary.memory",
    "summary.mfu",
    "summary.padding_waste",
    "summary.quality",
    "summary.checkpoint",
    "summary.verdict",
    "summary.findings",
    "phases-add-up",
)
def test_the_summary_has_its_keys_and_phases_add_up(work: Workplace) -> None:
    found = summary(work)
    assert found["status"] == "completed"
    assert found["batch"] == {"micro": 16, "accumulation": 1, "world_size": 1, "global": 16}
    assert found["throughput"]["samples_per_s"] > 0
    assert set(found["throughput"]["step_s"]) == {"mean", "std", "min", "max", "p50", "p95", "p99"}
    assert {"forward", "backward", "optimizer", "other"} <= set(found["phases"])
    assert sum(phase["share"] for phase in found["phases"].values()) == pytest.approx(1, abs=0.02)
    assert found["mfu"] is None or found["mfu"] >= 0
    assert found["quality"]["val_accuracy"] is not None
    assert found["checkpoint"]["count"] >= 2
    for key in ("schema_version", "environment", "communication", "memory", "padding_waste", "verdict", "findings"):
        assert key in found


@covers("finding-fields")
def test_a_finding_has_its_fields(work: Workplace) -> None:
    for finding in summary(work)["findings"]:
        assert {"code", "severity", "share", "evidence", "remedies", "expected_speedup"} <= set(finding)
        for remedy in finding["remedies"]:
            assert {"knob", "value", "text"} <= set(remedy)
        if finding["expected_speedup"]:
            assert finding["expected_speedup"]["basis"] in ("measured", "modelled")


@covers("--resume", "--set")
def test_a_finished_run_is_extended(work: Workplace) -> None:
    shutil.copytree(work.folder / "first", work.folder / "longer")
    ended = work("train", "--config", "small.yaml", "--set", "training.epochs=3", "--resume", "longer")
    assert ended.code == 0, ended.stderr
    assert len((work.folder / "longer" / "epochs.csv").read_text(encoding="utf-8").splitlines()) == 4


@covers("diagnose", "runs", "compare", "--json")
def test_stored_runs_are_judged_listed_and_compared(work: Workplace) -> None:
    judged = work("diagnose", "first", "--json")
    assert judged.code in (0, 3)
    assert {"verdict", "findings"} <= set(json.loads(judged.stdout))
    assert len(work("runs", ".", "--json").json()) >= 2
    assert "first" in work("compare", "first", "second").stdout
    assert work("compare", "first", "second", "--json").json()


@covers("guard", "exit-1", "exit-2", "exit-3")
def test_guard_passes_fails_and_refuses(work: Workplace) -> None:
    only_quality = ("--max-regression", "off", "--max-memory", "off")
    passed = work("guard", "second", "--baseline", "first", *only_quality, "--json")
    assert passed.code == 0, passed.stdout + passed.stderr
    shutil.copytree(work.folder / "second", work.folder / "worse")
    content = summary(work, "worse")
    content["quality"]["val_loss"] *= 5
    content["quality"]["train_loss"] *= 5
    (work.folder / "worse" / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    assert work("guard", "worse", "--baseline", "first", *only_quality).code == 1
    assert work("guard", "nowhere", "--baseline", "first").code == 2
    shutil.copytree(work.folder / "second", work.folder / "unmeasured")
    for path in (work.folder / "unmeasured").glob("steps-*.jsonl"):
        path.unlink()
    content = summary(work, "unmeasured") | {
        "throughput": {"samples_per_s": None, "tokens_per_s": None, "step_s": None}
    }
    (work.folder / "unmeasured" / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    assert work("guard", "unmeasured", "--baseline", "first").code == 3


@covers("evaluate", "export")
def test_a_checkpoint_is_scored_and_exported(work: Workplace) -> None:
    scored = work("evaluate", "first", "--json").json()
    assert scored["accuracy"] == pytest.approx(summary(work)["quality"]["val_accuracy"], abs=1e-6)
    assert work("export", "first", "--out", "weights.safetensors", "--json").json()
    refused = work("export", "first", "--out", "weights.pt")
    assert refused.code == 2
    assert "weights.safetensors" in refused.stderr
    with safe_open(str(work.folder / "weights.safetensors"), "pt") as file:
        assert list(file.keys())


@covers("profile")
def test_an_unmodified_script_is_profiled(work: Workplace) -> None:
    ended = work("profile", "--out", "profiled", "script.py")
    assert ended.code == 0
    assert "script done" in ended.stdout
    assert summary(work, "profiled")["steps"] == 20


@covers("memory", "doctor", "slurm", "predict")
def test_plans_and_machines(work: Workplace) -> None:
    assert "2,800" in work("memory", "--params", "175e9", "--gpus", "64").stdout
    assert work("memory", "--config", "small.yaml", "--json").json()
    assert "cores" in work("doctor").stdout
    script = work("slurm", "--config", "small.yaml", "--nodes", "2", "--gpus-per-node", "0", "--out", "job.sh")
    assert script.code == 0, script.stderr
    assert "#SBATCH" in (work.folder / "job.sh").read_text(encoding="utf-8")
    predicted = work(
        "predict", "first", "--world-sizes", "1,2,8", "--bandwidth-gbps", "10", "--latency-us", "50", "--json"
    )
    assert predicted.json()


@covers("network")
def test_the_network_between_two_ranks(work: Workplace) -> None:
    ended = work("network", "--nproc-per-node", "2", "--budget", "0.3")
    assert ended.code == 0, ended.stderr
    assert (work.folder / "network.json").exists()


@covers("batch-size", "tune")
def test_a_config_is_tuned(work: Workplace) -> None:
    assert work("batch-size", "--config", "small.yaml", "--max", "4", "--no-speed", "--json").json()
    ended = work("tune", "--config", "small.yaml", "--out", "search", "--trials", "1", "--budget", "200s", "--json")
    found = ended.json()
    assert {"speedup", "accepted", "attempts", "baseline", "best"} <= set(found)
    for name in ("best.yaml", "tune.json", "report.html"):
        assert (work.folder / "search" / name).exists()


@covers(
    "scale",
    "report",
    "{dataset}_epoch_time_detailed.png",
    "{dataset}_speedup_efficiency.png",
    "{dataset}_throughput.png",
    "{dataset}_accuracy.png",
    "comprehensive_summary.csv",
    "summary_table.tex",
    "performance_report.txt",
    "scaling/report.html",
    "plot_comprehensive_analysis.py",
)
def test_a_sweep_and_its_reports(work: Workplace) -> None:
    ended = work("scale", "--config", "small.yaml", "--world-sizes", "1,2", "--repeats", "1", "--out", "sweep")
    assert ended.code == 0, ended.stderr
    assert (work.folder / "sweep" / "scaling.json").exists()
    reported = work("report", "--root", "sweep", "--out", "plots", "--warmup", "0")
    assert reported.code == 0, reported.stderr
    script = str(ROOT / "scripts" / "plot_comprehensive_analysis.py")
    again = work("--root", "sweep", "--out", "again", "--warmup", "0", program=script)
    assert again.code == 0, again.stderr
    for folder in ("plots", "again"):
        names = {path.name for path in (work.folder / folder).iterdir()}
        assert {"comprehensive_summary.csv", "summary_table.tex", "performance_report.txt", "report.html"} <= names
        for ending in ("epoch_time_detailed", "speedup_efficiency", "throughput", "accuracy"):
            assert any(name.endswith(f"_{ending}.png") for name in names)


@covers("watch")
def test_runs_are_watched(work: Workplace) -> None:
    command = [sys.executable, "-m", "frameworm", "watch", ".", "--port", "0", "--json"]
    process = subprocess.Popen(command, cwd=work.folder, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        address = f"http://{told['host']}:{told['port']}/api/runs"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {told['token']}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            rows = {row["name"]: row for row in json.load(answer)["runs"]}
        assert {"first", "second"} <= set(rows)
        assert rows["first"]["status"] == "completed"
        assert rows["first"]["steps"] == 64
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.communicate()
