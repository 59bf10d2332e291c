"""`frameworm doctor` from end to end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, command_line

from frameworm.records.machine import GpuFacts, MachineFacts, PortFacts, StorageFacts

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
HEALTHY = MachineFacts(
    torch_version="2.13.0",
    cpus_total=4,
    cpus_bound=frozenset(range(4)),
    cpus_usable=4,
    load=0.0,
    torch_threads=4,
    memory_bytes=2**35,
    memory_available_bytes=2**34,
    shared_memory_bytes=2**34,
    shared_memory_free_bytes=2**34,
    open_files=(65536, 65536),
    host_resolves=True,
    host_is_loopback=False,
    compiler="gcc",
    storage=StorageFacts("runs", True, None, 2**40, 1e9, 2**20, "ext4"),
    port=PortFacts(29500, True),
)
LAUNCH = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SLURM_JOB_ID")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a fake machine in the place of this one."""

    def become(**changes: Any) -> None:
        facts = replace(HEALTHY, **changes)
        monkeypatch.setattr("frameworm.hardware.inspect.inspect_machine", lambda *args, **settings: facts)

    become()
    return become


def test_a_healthy_machine(here: CommandLine, machine: Any) -> None:
    ended = here("doctor")
    assert (ended.code, ended.stderr) == (0, "")
    assert "no problems, 0 with advice" in ended.stdout
    assert "checklist" not in ended.stdout


def test_a_problem_is_exit_code_1(here: CommandLine, machine: Any) -> None:
    machine(shared_memory_free_bytes=2**20)
    ended = here("doctor")
    assert ended.code == 1
    assert "PROBLEM  shared memory" in ended.stdout
    assert "--shm-size" in ended.stdout


def test_variables_are_looked_at(here: CommandLine, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "none")
    monkeypatch.setenv("RANK", "3")
    ended = here("doctor")
    assert ended.code == 1
    assert "PROBLEM  OMP_NUM_THREADS" in ended.stdout
    assert "WORLD_SIZE is not set, but RANK is" in ended.stdout


def test_the_checklist_of_a_config(here: CommandLine, machine: Any) -> None:
    ended = here("doctor", "--config", QUICKSTART, "--set", "checkpoint.mode=sync", "--json")
    assert (ended.code, ended.stderr) == (0, "")
    data = json.loads(ended.stdout)
    assert data["verdict"] == "ok"
    assert set(data["checks"][0]) == {"name", "group", "found", "verdict", "remedy", "why"}
    items = {item["name"]: item for item in data["checklist"]}
    assert items["checkpoints beside training"]["state"] == "not done"
    assert items["checkpoints beside training"]["settings"] == ["checkpoint.mode=async"]
    assert items["checkpoints beside training"]["gain"]["basis"] == "modelled", (
        "from the model's size and the disk's rate"
    )
    assert items["micro-batch against the memory plan"]["state"] == "done"
    assert data["machine"]["cpus_usable"] == 4
    assert [check["verdict"] for check in data["checks"] if check["name"] == "memory plan"] == ["ok"]


@pytest.mark.slow
def test_several_processes(here: CommandLine, machine: Any) -> None:
    ended = here("doctor", "--config", QUICKSTART, "--nproc-per-node", "8", "--json")
    data = json.loads(ended.stdout)
    assert (ended.code, data["processes"]) == (1, 8)
    assert {check["name"] for check in data["checks"] if check["verdict"] == "problem"} == {"cores"}
    states = {item["name"]: item["state"] for item in data["checklist"]}
    assert states["compressed gradients"] == "not done"
    assert states["enough work per rank"] == "not done"


@pytest.mark.slow
def test_a_config_for_a_gpu_that_is_not_here(here: CommandLine, machine: Any) -> None:
    ended = here("doctor", "--config", QUICKSTART, "--set", "gpu.device=cuda", "--set", "gpu.capture=step")
    assert ended.code == 1
    flat = " ".join(ended.stdout.split())
    assert "PROBLEM config" in flat
    assert "the checklist below is for one" in flat
    assert "quickstart.yaml · 1 process · cuda" in flat


@pytest.mark.slow
def test_gpus(here: CommandLine, machine: Any) -> None:
    gpu = GpuFacts("NVIDIA H200", 140 * 2**30, 9.0, 2**28, (), 40.0, 18, 16, 16, 5)
    machine(gpus=(gpu,) * 4, torch_cuda="13.0", driver="580.1", nvml=True, nccl="2.28", triton=True, cpus_usable=64)
    config = CONFIGS / "gpt2_124m.yaml"
    ended = here(
        "doctor", "--config", config, "--set", "model.num_layers=2", "--set", "parallel.strategy=zero3", "--json"
    )
    data = json.loads(ended.stdout)
    assert data["processes"] == 4, "one for each GPU"
    assert data["machine"]["gpus"][3]["name"] == "NVIDIA H200"
    items = {item["name"]: item for item in data["checklist"]}
    assert items["mixed precision"]["reason"] == "bf16"
    assert items["no more divided than needed"]["settings"] == ["parallel.strategy=ddp"]
    batch = items["micro-batch against the memory plan"]
    assert (batch["state"], batch["settings"][0]) == ("not done", "training.micro_batch=128"), batch


def test_a_step_that_does_not_fit(here: CommandLine, machine: Any) -> None:
    machine(memory_bytes=2**20, memory_available_bytes=2**20)
    ended = here("doctor", "--config", QUICKSTART)
    assert ended.code == 1
    flat = " ".join(ended.stdout.split())
    assert "PROBLEM memory plan" in flat
    assert re.search(r"micro-batch against the memory plan: [\d.]+ MiB do not fit in 1 MiB", flat)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("--set", "training.lr=1"), "give --config"),
        (("--config", str(QUICKSTART), "--set", "gpu.capure=step"), "did you mean gpu.capture"),
        (("--config", str(QUICKSTART), "--nproc-per-node", "7"), "does not divide"),
    ],
)
def test_usage(here: CommandLine, machine: Any, arguments: tuple[str, ...], words: str) -> None:
    ended = here("doctor", *arguments)
    assert ended.code == 2
    assert words in ended.stderr.replace("\n", " ")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_this_machine_as_a_user_would(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frameworm", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(done.stdout)
    assert (done.returncode == 1) == (data["verdict"] == "problem")
    assert data["machine"]["storage"]["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_bundle_for_a_bug_report(
    here: CommandLine, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-in-variables")
    config, run, bundle = tmp_path / "train.yaml", tmp_path / "run", tmp_path / "bundle.zip"
    config.write_text(QUICKSTART.read_text() + "# hub_token: planted-in-config\n")
    shutil.copytree(Path(__file__).parents[1] / "golden/stored/runs/single", run)
    (run / "train.log").write_text("reading hf://x?token=planted-in-log\nplanted-in-variables\n")
    ended = here("doctor", "--json", "--config", config, "--bundle", bundle, "--run", run)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["bundle"] == str(bundle)
    with zipfile.ZipFile(bundle) as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"doctor.json", "environment.json", "versions.json", "config.yaml", "run/config.yaml"} <= set(held)
    assert json.loads(held["doctor.json"])["machine"]["cpus_usable"] == 4
    assert [name for name, text in held.items() if "planted" in text] == []
    listed, _, written = ended.stderr.partition("before you attach it.")
    assert all(f"  {name} " in listed for name in held)
    assert written.strip() == f"written: {bundle}"
    again = here("doctor", "--bundle", bundle)
    assert (again.code, again.stdout) == (2, "")
    assert "exists already" in again.stderr


def test_a_config_that_is_refused_is_bundled(here: CommandLine, machine: Any, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("name: x\ntrainig: {epochs: 3}\n")
    ended = here("doctor", "--config", config, "--bundle", tmp_path / "bundle")
    assert ended.code == 2
    assert "trainig" in ended.stderr
    assert (tmp_path / "bundle/config.yaml").read_text() == config.read_text()
    assert "trainig" in (tmp_path / "bundle/notes.txt").read_text()
    without = here("doctor", "--run", tmp_path)
    assert without.code == 2
    assert "--bundle" in without.stderr
