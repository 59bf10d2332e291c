"""`train`, `evaluate` and `runs` from end to end, on the quickstart made tiny."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml
from command_line import CommandLine, command_line

from frameworm.cli.main import app
from frameworm.config.load import load_config
from frameworm.records.writer import read_steps

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = (
    "data.limit=128",
    "model.d_model=16",
    "model.n_heads=2",
    "model.num_layers=1",
    "model.dim_feedforward=32",
    "model.max_seq_len=16",
    "training.epochs=1",
    "training.global_batch=32",
)
SUMMARY_KEYS = {
    "schema_version": int,
    "status": str,
    "environment": dict,
    "batch": dict,
    "throughput": dict,
    "phases": dict,
    "communication": dict,
    "memory": dict,
    "mfu": (float, type(None)),
    "padding_waste": float,
    "quality": dict,
    "checkpoint": dict,
    "verdict": str,
    "findings": list,
}
PHASES = {
    "data_wait",
    "transfer",
    "forward",
    "backward",
    "communication_exposed",
    "optimizer",
    "checkpoint",
    "validation",
    "other",
}


def _arguments(*settings: str) -> list[str]:
    chosen = [part for setting in (*TINY, *settings) for part in ("--set", setting)]
    return ["train", "--config", str(QUICKSTART), *chosen]


def _environ(data_cache_dir: Path) -> dict[str, str]:
    return {**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir), "TERM": "dumb", "COLUMNS": "120"}


class Run(NamedTuple):
    """A finished training."""

    folder: Path
    stdout: str
    stderr: str
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_cache_dir: Path) -> Run:
    """One training by the real command line."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    result = subprocess.run(
        [sys.executable, "-m", "frameworm", *_arguments(), "--out", str(folder)],
        env=_environ(data_cache_dir),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return Run(folder, result.stdout, result.stderr, json.loads((folder / "summary.json").read_text()))


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


@pytest.mark.slow
def test_training_ends_with_its_summary(run: Run) -> None:
    quality = run.summary["quality"]
    assert "quickstart · completed · CPU" in run.stdout
    assert f"validation accuracy {quality['val_accuracy']:.1%}" in run.stdout
    assert str(run.folder) in run.stdout
    assert run.stdout.rstrip() == (run.folder / "summary.txt").read_text().rstrip()
    assert re.fullmatch(
        r"epoch 1/1  loss \S+  val loss \S+  accuracy \S+%  \S+ samples/s  .*", run.stderr.splitlines()[-1]
    )
    assert "\x1b" not in run.stdout + run.stderr, "terminal codes where there is no terminal"


@pytest.mark.slow
def test_run_folder_holds_what_is_promised(run: Run) -> None:
    names = {path.name for path in run.folder.iterdir()}
    files = {"config.yaml", "steps-rank0.jsonl", "epochs.csv", "summary.json", "summary.txt", "report.html"}
    assert names == {*files, "checkpoints", "system-rank0.jsonl", "gradients.json", "begun.json", "train.log"}
    lines = (run.folder / "train.log").read_text().splitlines()
    assert lines[-1].endswith(f"completed after step 4, loss {run.summary['quality']['train_loss']:.4g}")
    assert any("epoch 1/1  loss" in line for line in lines)
    newest = (run.folder / "checkpoints" / "latest").read_text().strip()
    assert (run.folder / "checkpoints" / newest / "manifest.json").is_file()
    assert [step.step for step in read_steps(run.folder / "steps-rank0.jsonl")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_config_in_the_run_folder_is_resolved(run: Run) -> None:
    config = load_config(run.folder / "config.yaml", environ={})
    assert (config.training.global_batch, config.training.micro_batch, config.training.accumulation) == (32, 32, 1)
    assert (config.gpu.device, config.gpu.mixed_precision, config.parallel.strategy) == ("cpu", "off", "single")
    assert (config.model.d_model, config.data.limit) == (16, 128)


def test_epochs_table(run: Run) -> None:
    text = (run.folder / "epochs.csv").read_text()
    assert text.splitlines()[0] == "epoch,epoch_time_s,train_loss,val_loss,val_accuracy,samples_per_s"
    (row,) = csv.DictReader(text.splitlines())
    quality = run.summary["quality"]
    assert row["epoch"] == "1"
    assert {name: float(row[name]) for name in quality} == quality
    assert float(row["samples_per_s"]) == pytest.approx(128 / float(row["epoch_time_s"]))


def test_summary_has_every_key(run: Run) -> None:
    summary = run.summary
    for key, kind in SUMMARY_KEYS.items():
        assert isinstance(summary[key], kind), key
    assert summary["status"] == "completed"
    assert summary["steps"] == 4
    batch = summary["batch"]
    assert set(batch) == {"micro", "accumulation", "world_size", "global"}
    assert batch["global"] == batch["micro"] * batch["accumulation"] * batch["world_size"] == 32
    throughput = summary["throughput"]
    assert set(throughput) == {"samples_per_s", "tokens_per_s", "step_s"}
    spread = throughput["step_s"]
    assert set(spread) == {"mean", "std", "min", "max", "p50", "p95", "p99"}
    assert 0 < spread["min"] <= spread["p50"] <= spread["p95"] <= spread["p99"] <= spread["max"]
    assert set(summary["communication"]) >= {"total_s", "exposed_s", "bytes_per_step"}
    assert summary["memory"]["peak_bytes"] > 2**20
    assert 0 < summary["padding_waste"] < 1
    assert set(summary["quality"]) == {"train_loss", "val_loss", "val_accuracy"}
    assert summary["checkpoint"]["count"] == 1
    assert {"python", "torch", "device_names", "cpus_total", "driver"} <= set(summary["environment"])


def test_phases_add_up_to_the_step(run: Run) -> None:
    phases, step_s = run.summary["phases"], run.summary["throughput"]["step_s"]["mean"]
    assert set(phases) <= PHASES
    assert {"data_wait", "forward", "backward", "optimizer", "other"} <= set(phases)
    assert sum(phase["mean_s"] for phase in phases.values()) == pytest.approx(step_s, rel=0.02)
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1, abs=0.02)


def test_summary_names_no_variables(run: Run) -> None:
    """The fingerprint is an allow-list: a token in the environment must not end up in a shared report."""
    written = "".join((run.folder / name).read_text() for name in ("summary.json", "summary.txt", "report.html"))
    for name in ("PATH", "HOME"):
        assert os.environ[name] == "/" or f'"{os.environ[name]}"' not in written
    assert "FRAMEWORM_DATA_CACHE_DIR" not in written


def test_report_opens_offline(run: Run) -> None:
    page = (run.folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "quickstart" in page
    loads = re.findall(r"""(?:src|href|action|data)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|@import\s+(\S+)""", page)
    assert not [load for load in loads if re.search(r"https?:|^//", "".join(load))]
    assert not re.search(r"<(?:script|link|iframe|object|embed)\b[^>]*\b(?:src|href|data)=", page)
    # What is left of addresses are names of XML vocabularies, which nothing fetches.
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_evaluate_gives_the_loss_of_the_last_validation(run: Run, here: CommandLine) -> None:
    ended = here("evaluate", run.folder, "--json")
    assert ended.code == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["loss"] == pytest.approx(run.summary["quality"]["val_loss"], abs=1e-5)
    assert result["accuracy"] == pytest.approx(run.summary["quality"]["val_accuracy"], abs=1e-9)
    assert result["step"] == 4
    assert result["samples"] > 100
    plain = here("evaluate", run.folder)
    assert (
        f"loss {result['loss']:.4f}  accuracy {result['accuracy']:.2%}  ({result['samples']:,} samples)" in plain.stdout
    )


def test_evaluate_refuses_what_is_no_run(here: CommandLine) -> None:
    (here.folder / "plain").mkdir()
    for place, words in (("none", "does not exist"), ("plain", "is not a run")):
        ended = here("evaluate", place)
        assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert words in ended.stderr
    (here.folder / "begun").mkdir()
    (here.folder / "begun" / "config.yaml").write_text(QUICKSTART.read_text())
    ended = here("evaluate", "begun")
    assert (ended.code, ended.stdout) == (2, "")
    assert "begun has no checkpoint yet" in ended.stderr


def test_runs_lists_them(run: Run, here: CommandLine) -> None:
    (row,) = json.loads(here("runs", run.folder.parent, "--json").stdout)
    assert row["run"] == str(run.folder)
    assert (row["status"], row["workload"], row["steps"]) == ("completed", "text_classifier", 4)
    assert row["train_loss"] == run.summary["quality"]["train_loss"]
    listed = here("runs", run.folder.parent)
    assert listed.code == 0
    header, line = listed.stdout.splitlines()
    assert header.split() == ["run", "status", "workload", "steps", "train", "loss", "accuracy", "samples/s"]
    assert line.startswith(f"{run.folder}  completed"), "a cut path cannot be copied"


def test_runs_of_an_empty_folder(here: CommandLine) -> None:
    assert here("runs") == (0, "no runs in runs\n", "")
    assert json.loads(here("runs", "none", "--json").stdout) == []


def test_json_is_all_that_stdout_gets(here: CommandLine) -> None:
    ended = here(*_arguments(), "--out", "run", "--json")
    assert ended.code == 0
    assert json.loads(ended.stdout) == json.loads((here.folder / "run" / "summary.json").read_text())
    assert ended.stderr.splitlines()[-1].startswith("epoch 1/1")


def test_run_folder_is_named_after_run_and_time(here: CommandLine) -> None:
    assert here(*_arguments("name=trial")).code == 0
    (made,) = (here.folder / "runs").iterdir()
    assert re.fullmatch(r"trial-\d{8}-\d{6}", made.name)
    assert here("runs").stdout.splitlines()[1].startswith(f"runs/{made.name}  completed")


@pytest.mark.slow
def test_second_start_reads_the_token_cache(here: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the texts were made again")

    cache = tmp_path / "cache"
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(cache))
    first = here(*_arguments(), "--json")
    stored = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    assert len(stored) == 2, "training and validation tokens"
    monkeypatch.setattr("frameworm.data.corpora.generated.generate", never)
    second = here(*_arguments(), "--json")
    assert second.code == 0
    assert "tokenising" not in second.stderr
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == stored
    assert json.loads(second.stdout)["quality"] == json.loads(first.stdout)["quality"]


@pytest.mark.slow
def test_set_beats_variable_beats_file(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMEWORM_TRAINING_LR", "0.0021")  # the file says otherwise
    monkeypatch.setenv("FRAMEWORM_TRAINING_EPOCHS", "7")  # --set says 1
    monkeypatch.setenv("FRAMEWORM_NAME", "from_variable")
    assert here(*_arguments("seed=4", "seed=5"), "--out", "run").code == 0
    config = yaml.safe_load((here.folder / "run" / "config.yaml").read_text())
    assert config["training"]["lr"] == 0.0021
    assert config["training"]["epochs"] == 1
    assert config["name"] == "from_variable"
    assert config["seed"] == 5, "of two, the later one"
    assert config["training"]["schedule"] == "onecycle", "from the file"
    assert config["training"]["momentum"] == 0.9, "by default"


@pytest.mark.slow
def test_resume_auto_with_nothing_to_resume_starts_afresh_and_says_so(here: CommandLine) -> None:
    ended = here(*_arguments("training.max_steps=2"), "--out", "run", "--resume", "auto")
    assert ended.code == 0
    assert "no unfinished run of quickstart to resume: starting afresh" in ended.stderr
    again = here(*_arguments("training.max_steps=2"), "--out", "run", "--resume", "auto")
    assert again.code == 0
    assert "resumed run after step 2" in again.stderr
    assert "had come to its end" in again.stderr
    assert len(read_steps(here.folder / "run" / "steps-rank0.jsonl")) == 2


OWN_WORKLOAD = """
import os
import torch

class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(64, 4, generator=generator)
        self.read = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read += 1
        if self.read == 20:
            {event}
        return self.inputs[index], int(self.inputs[index].sum() > 0)

def build(config):
    return torch.nn.Linear(4, 2), Numbers(), None
"""


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "preempted"), (signal.SIGUSR1, 75, "preempted")],
)
def test_signals_have_their_exit_codes(here: CommandLine, number: signal.Signals, code: int, status: str) -> None:
    (here.folder / f"own_{number}.py").write_text(OWN_WORKLOAD.format(event=f"os.kill(os.getpid(), {int(number)})"))
    arguments = ["--set", f"workload=own_{number}:build", "--set", "training.global_batch=8", "--out", "run"]
    (here.folder / "own.yaml").write_text("gpu: {device: cpu}\ndata: {num_workers: 0}\nname: mine\n")
    ended = here("train", "--config", "own.yaml", *arguments)
    assert ended.code == code
    assert json.loads((here.folder / "run" / "summary.json").read_text())["status"] == status
    *_, where, how = ended.stderr.splitlines()
    assert where == f"{status}: saved after step 3 in run"
    assert shlex.split(how.removeprefix("resume with: ")) == [
        *("frameworm", "train", "--config", "own.yaml"),
        *("--set", f"workload=own_{number}:build", "--set", "training.global_batch=8"),
        *("--resume", "run"),
    ]
    assert "interrupted" in ended.stdout or "preempted" in ended.stdout


def test_error_of_the_users_own_code_comes_out_whole(here: CommandLine) -> None:
    """A message without its traceback would not tell where in their code to look."""
    (here.folder / "own_error.py").write_text(OWN_WORKLOAD.format(event="raise OSError('the planted fault')"))
    (here.folder / "own.yaml").write_text("gpu: {device: cpu}\ndata: {num_workers: 0}\nworkload: own_error:build\n")
    with pytest.raises(OSError, match="the planted fault"):
        here("train", "--config", "own.yaml", "--set", "training.global_batch=8", "--out", "run")
    summary = json.loads((here.folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["notes"] == ["failed in step 3: OSError: the planted fault"]


# Some seconds of steps, so that a signal comes before the end.
LONGER = (
    "data.limit=3072",
    "training.epochs=2",
    "training.global_batch=16",
    "training.cpu_threads=1",
    "checkpoint.every_steps=5",
)


@pytest.mark.slow
def test_interrupted_and_resumed_is_the_uninterrupted_run(here: CommandLine, data_cache_dir: Path) -> None:
    """Only what is interrupted needs a process of its own; the same numbers come of this one."""
    arguments = _arguments(*LONGER)
    stopped = _interrupt([*arguments, "--out", "parts"], here.folder / "parts", here.folder, data_cache_dir)
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted: saved after step" in stopped.stderr
    assert f"{shlex.join(['frameworm', *arguments])} --resume parts" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    summary = json.loads((here.folder / "parts" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["steps"] < 384
    (here.folder / "runs").mkdir()
    shutil.copytree(here.folder / "parts", here.folder / "runs" / "quickstart-20260101-000000")

    whole = here(*arguments, "--out", "whole", "--json")
    assert whole.code == 0, whole.stderr
    resumed = here(*arguments, "--out", "parts", "--resume", "auto", "--json")
    assert resumed.code == 0, resumed.stderr
    assert f"resumed parts after step {summary['steps']}" in resumed.stderr
    expected, found = json.loads(whole.stdout), json.loads(resumed.stdout)
    assert found["quality"] == expected["quality"]
    assert [epoch["train_loss"] for epoch in found["epochs"]] == [epoch["train_loss"] for epoch in expected["epochs"]]
    assert (found["status"], found["steps"]) == ("completed", 384)
    for key in ("step", "epoch", "loss", "lr", "samples"):
        of_run = [
            [getattr(step, key) for step in read_steps(here.folder / name / "steps-rank0.jsonl")]
            for name in ("parts", "whole")
        ]
        assert of_run[0] == of_run[1], key

    stop_soon = ("--set", f"training.max_steps={summary['steps'] + 1}")  # the rest of it was just trained
    newest = here(*arguments, *stop_soon, "--resume", "auto", "--json")
    assert newest.code == 0
    assert f"resumed runs/quickstart-20260101-000000 after step {summary['steps']}" in newest.stderr
    finished = here(*_arguments(), "--resume", "auto")
    assert finished.code == 0
    assert "starting afresh" in finished.stderr
    assert len(list((here.folder / "runs").iterdir())) == 2


def _interrupt(arguments: list[str], run: Path, folder: Path, data_cache_dir: Path) -> subprocess.CompletedProcess[str]:
    """Start a training, send SIGINT as Ctrl-C does once its first steps are written, and wait for the end."""
    command = [sys.executable, "-m", "frameworm", *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environ(data_cache_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        steps = run / "steps-rank0.jsonl"
        deadline = time.monotonic() + 120
        while not (steps.exists() and steps.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


_COMMANDS = typer.main.get_group(app).commands
VERBS = sorted(_COMMANDS)
WITH_PARTS = [
    f"{verb} {part}".strip() for verb in VERBS for part in getattr(_COMMANDS[verb], "commands", [""])
]  # those of a group one by one


@pytest.mark.parametrize("verb", WITH_PARTS)
def test_help_has_an_example(here: CommandLine, verb: str) -> None:
    ended = here(*verb.split(), "--help")
    assert ended.code == 0
    text = " ".join(ended.stdout.split())
    assert f"Example: frameworm {verb}" in text
    assert "--json" in text


def test_help_and_version_of_the_whole(here: CommandLine) -> None:
    from frameworm import __version__

    assert here("--version") == (0, f"frameworm {__version__}\n", "")
    listed = here("--help").stdout
    assert all(re.search(rf"\b{verb}\b", listed) for verb in VERBS)
    assert {"train", "evaluate", "runs"} <= set(VERBS)


@pytest.mark.parametrize("arguments", [["bogus"], ["train"], ["train", "--config"], ["train", "--bogus"], ["evaluate"]])
def test_usage_errors(here: CommandLine, arguments: list[str]) -> None:
    ended = here(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert "Error" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(here.folder.iterdir())


SCRIPT = QUICKSTART.parents[1] / "src" / "train.py"


def _batch(run: Path) -> tuple[int, int]:
    batch = json.loads((run / "summary.json").read_text())["batch"]
    return batch["world_size"], batch["global"]


def test_the_script_trains_alone(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *_arguments()[1:], "--out", "run"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not end.value.code
    assert _batch(here.folder / "run") == (1, 32)


@pytest.mark.slow
def test_the_script_trains_under_torchrun(tmp_path: Path, data_cache_dir: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), *_arguments()[1:], "--out", str(tmp_path / "run")],
        env={**_environ(data_cache_dir), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert _batch(tmp_path / "run") == (2, 32)


@pytest.mark.slow
def test_a_run_that_could_save_nothing_exits_with_1(tmp_path: Path) -> None:
    """No file may be larger than 1 MiB, and the state is."""
    words = [f"--set={item}" for item in (*TINY, "model.dim_feedforward=8192", "training.max_steps=2")]
    command = [sys.executable, "-m", "frameworm", "train", "-c", str(QUICKSTART), "--out", str(tmp_path / "run")]
    limited = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash", *command, *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "trained 2 steps, but no checkpoint was written: the checkpoint of step 2 could not" in done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
