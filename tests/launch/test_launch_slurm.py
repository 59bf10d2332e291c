"""The text of batch scripts: what they ask for, what they run, and that nothing in a request can break out of it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.slurm import SlurmJob, batch_script
from frameworm.launch.slurm_environment import derived_port

REPOSITORY = Path(__file__).parents[2]
TWO_NODES = SlurmJob("configs/x.yaml", "x", nodes=2, gpus_per_node=4)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_one_launcher_per_node() -> None:
    script = batch_script(dataclasses.replace(TWO_NODES, time="2-00", partition="gpu", account="lab-1"))
    assert directives(script) == [
        "job-name=x",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=32",
        "gpus-per-node=4",
        "time=2-00",
        "partition=gpu",
        "account=lab-1",
        "signal=B:USR1@120",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
    ]
    assert "--distributed --nproc-per-node 4 --stop-grace 100" in script
    assert "set -euo pipefail" in script


def test_one_task_per_worker() -> None:
    script = batch_script(dataclasses.replace(TWO_NODES, launcher="srun"))
    assert {"ntasks-per-node=4", "cpus-per-task=8"} <= set(directives(script))
    assert "--distributed" in script
    assert "--nproc-per-node" not in script


def test_without_gpus_none_are_asked_for() -> None:
    script = batch_script(SlurmJob("x.yaml", "x", nodes=2, cpus_per_task=3))
    assert not [item for item in directives(script) if item.startswith("gpus")]
    assert "cpus-per-task=3" in directives(script)
    assert "--set gpu.device=cpu" in script


def test_alone_there_is_nobody_to_meet() -> None:
    script = batch_script(SlurmJob("x.yaml", "x", gpus_per_node=1))
    assert "MASTER_PORT=" not in script
    assert "--distributed" not in script


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": "a\nb"}, "--config"),
        ({"name": "a\nrm -rf"}, "name"),
        ({"venv": "a\rb"}, "--venv"),
        ({"settings": ("a=b\n#SBATCH --account=x",)}, "--set"),
        ({"modules": ("cuda\nreboot",)}, "--module"),
        ({"modules": ("--help",)}, "--module"),
        ({"command": ("frameworm", "x\ny")}, "command line"),
        ({"time": "1:00 --account=x"}, "--time"),
        ({"time": "soon"}, "--time"),
        ({"partition": "a b"}, "--partition"),
        ({"partition": "-x"}, "--partition"),
        ({"account": "$(id)"}, "--account"),
        ({"nodes": 0}, "--nodes"),
        ({"gpus_per_node": -1}, "--gpus-per-node"),
        ({"cpus_per_task": 0}, "--cpus-per-task"),
        ({"signal_before_s": 5}, "--signal-before"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=named):
        batch_script(dataclasses.replace(TWO_NODES, **changes))


@pytest.mark.parametrize("text", ["5", "90:00", "12:00:00", "2-00", "1-12:30", "1-12:30:00"])
def test_times_of_slurm(text: str) -> None:
    assert f"time={text}" in directives(batch_script(dataclasses.replace(TWO_NODES, time=text)))


class Stage:
    """A folder in which a script runs without SLURM: srun starts its command once, and each program notes its call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.program("srun", 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"')
        self.program("scontrol", 'if [ "$2" = hostnames ]; then echo n0; else echo "NodeAddr=10.0.0.1 X=1"; fi')
        self.program("tail", "exit 0")
        self.program("frameworm", f'printf "%s\\0" "$@" > {shlex.quote(str(folder))}/called; env -0 > {folder}/env')

    def program(self, name: str, body: str) -> None:
        (self.programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.programs / name).chmod(0o755)

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_CPUS_PER_TASK": "8",
            **variables,
        }
        return subprocess.run(
            ["bash"], input=script, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=100
        )

    def called(self) -> list[str]:
        return (self.folder / "called").read_text().split("\0")[:-1]

    def variables(self) -> dict[str, str]:
        entries = (self.folder / "env").read_text().split("\0")[:-1]
        return dict(entry.split("=", 1) for entry in entries)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    return Stage(tmp_path_factory.mktemp("stage"))


NASTY = st.text(st.sampled_from("ab/._- '\"`$(){}[];&|<>!#*?~\\%=@,:^\té雪"), min_size=1, max_size=24).filter(
    str.isprintable
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=NASTY, name=NASTY, settings_=st.lists(NASTY, max_size=2), module=NASTY, venv=NASTY)
@example("'; touch broken; '", "$(touch broken)", ["a=`touch broken`"], "x; touch broken", "$(touch broken)")
@example("a' b\"", "%j/../..", ["#SBATCH --x", "a=$HOME"], "!!", "~/x y")
def test_nothing_breaks_out(stage: Stage, config: str, name: str, settings_: list[str], module: str, venv: str) -> None:
    if module.startswith("-"):
        module = "m" + module
    command = ("frameworm", "slurm", config, *settings_)
    job = SlurmJob(config, name, nodes=2, modules=(module,), settings=tuple(settings_), command=command)
    script = batch_script(job)
    assert len(directives(script)) == 8
    assert all(re.fullmatch(r"[a-z-]+(=[A-Za-z0-9._:@%-]+)?", item) for item in directives(script))
    loaded = "module() { printf '%s\\0' \"$@\" > module-args; }\n"
    shebang, _, rest = script.partition("\n")
    done = stage.run(f"{shebang}\n{loaded}{rest}")
    assert (done.returncode, done.stderr) == (0, "")
    called = stage.called()
    assert called[:3] == ["train", "--config", config]
    expected = [part for setting in ("gpu.device=cpu", *settings_) for part in ("--set", setting)]
    assert called[3 : 3 + len(expected)] == expected
    assert (stage.folder / "module-args").read_text() == f"load\0{module}\0"
    assert not list(stage.folder.rglob("broken"))
    # A folder of any name may be the environment's; here there is none, and that is all that happens.
    done = stage.run(batch_script(dataclasses.replace(job, venv=venv, modules=())))
    assert done.returncode == 1
    assert "No such file" in done.stderr or "Not a directory" in done.stderr
    assert not list(stage.folder.rglob("broken"))


def test_variables_of_the_step(stage: Stage) -> None:
    stale = {"RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    assert stage.run(batch_script(TWO_NODES), **stale).returncode == 0
    variables = stage.variables()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(variables)
    assert variables["MASTER_ADDR"] == "10.0.0.1"
    assert int(variables["MASTER_PORT"]) == derived_port(7, 0)
    assert variables["OMP_NUM_THREADS"] == "2"  # 8 processors for 4 workers
    assert stage.called()[-5:] == ["--distributed", "--nproc-per-node", "4", "--stop-grace", "100"]
    assert "--resume" in stage.called()
    assert stage.run(batch_script(TWO_NODES), SLURM_RESTART_COUNT="2", OMP_NUM_THREADS="5").returncode == 0
    variables = stage.variables()
    assert (int(variables["MASTER_PORT"]), variables["OMP_NUM_THREADS"]) == (derived_port(7, 2), "5")
    assert (stage.folder / "logs/x-7/attempt-2").is_dir()


def test_a_port_in_use_is_passed_over(stage: Stage) -> None:
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", derived_port(8, 0)))
        taken.listen()
        assert stage.run(batch_script(TWO_NODES), SLURM_JOB_ID="8").returncode == 0
    assert int(stage.variables()["MASTER_PORT"]) == derived_port(8, 0) + 1


def test_neighbouring_jobs_meet_on_different_ports() -> None:
    ports = {derived_port(job, attempt) for job in range(1000, 1400) for attempt in range(3)}
    assert len(ports) == 1200


def test_the_environment_is_activated_and_missing_programs_are_told(stage: Stage) -> None:
    folder = stage.folder / "my venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "activate").write_text('echo "$UNSET_BY_NOW"; export ACTIVATED=yes\n')  # activate scripts are not strict
    job = dataclasses.replace(TWO_NODES, venv="my venv/")
    assert stage.run(batch_script(job)).returncode == 0
    assert stage.variables()["ACTIVATED"] == "yes"
    (stage.programs / "frameworm").rename(stage.programs / "away")
    try:
        done = stage.run(batch_script(TWO_NODES), PATH=f"{stage.programs}:/usr/bin:/bin")
    finally:
        (stage.programs / "away").rename(stage.programs / "frameworm")
    assert done.returncode == 2
    assert "--venv" in done.stderr


SHIPPED = {
    "run_agnews_single_gpu_optimized.sh": "ag_news_single_gpu_optimized --nodes 1 --gpus-per-node 1",
    "run_agnews_ddp_optimized.sh": "ag_news_ddp_4gpu_20ep_optimized --nodes 1 --gpus-per-node 4",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scripts_are_what_the_verb_writes(name: str) -> None:
    shipped = (REPOSITORY / "scripts" / name).read_text()
    config, _, rest = SHIPPED[name].partition(" ")
    command = ["frameworm", "slurm", "--config", f"configs/{config}.yaml", *rest.split(), "--time", "4:00:00"]
    job = SlurmJob(command[3], config, 1, int(command[-3]), time="4:00:00", command=tuple(command))
    assert shipped == batch_script(job), f"write it anew: {shlex.join(command)} --out scripts/{name}"
    assert os.access(REPOSITORY / "scripts" / name, os.X_OK)
