"""`frameworm slurm`: what it writes, what it refuses; and that the guide to clusters gives commands that work."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_line import CommandLine, command_line

from frameworm.launch.plan import plan_launch

CONFIGS = Path(__file__).parents[2] / "configs"
GUIDE = Path(__file__).parents[2] / "docs" / "clusters.md"
QUICKSTART = ("slurm", "--config", CONFIGS / "quickstart.yaml", "--nodes", "2", "--gpus-per-node", "0")
FOUR_GPUS = ("slurm", "--config", CONFIGS / "imdb_ddp_4gpu.yaml", "--gpus-per-node", "4")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


def test_the_script_goes_to_the_screen_or_to_a_file(here: CommandLine) -> None:
    shown = here(*QUICKSTART, "--set", "training.epochs=2", "--module", "cuda/12.8", "--venv", "/opt/my venv")
    assert shown.code == 0
    assert shown.stdout.startswith("#!/bin/bash\n# Written by: frameworm slurm --config ")
    for part in ("#SBATCH --nodes=2\n", "module load cuda/12.8\n", "source '/opt/my venv/bin/activate'\n"):
        assert part in shown.stdout
    written = here(*QUICKSTART, "--set", "training.epochs=2", "--out", "job.sh")
    assert "2 ranks on 2 nodes, on the CPU" in written.stdout
    assert "sbatch job.sh" in written.stdout
    script = here.folder / "job.sh"
    assert os.access(script, os.X_OK)
    assert "--out job.sh" not in script.read_text()
    assert "--set training.epochs=2" in script.read_text()
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_as_json(here: CommandLine) -> None:
    data = json.loads(here(*FOUR_GPUS, "--nodes", "2", "--launcher", "srun", "--json").stdout)
    assert (data["nodes"], data["tasks_per_node"], data["world_size"], data["file"]) == (2, 4, 8, None)
    assert "#SBATCH --gpus-per-node=4\n" in data["script"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*QUICKSTART, "--launcher", "mpirun"), "--launcher mpirun"),
        ((*QUICKSTART, "--time", "soon"), "--time 'soon'"),
        ((*QUICKSTART, "--set", "training.global_batch=33"), "training.global_batch"),
        ((*QUICKSTART, "--set", "training.epoch=3"), "epochs"),
        ((*QUICKSTART, "--set", "data.root=a\nb"), "line break"),
        ((*QUICKSTART, "--out", "no/such/folder/job.sh"), "no/such/folder/job.sh"),
        (("slurm", "--config", CONFIGS / "quickstart.yaml", "--gpus-per-node", "2"), "gpu.device"),
        ((*FOUR_GPUS, "--set", "parallel.strategy=single"), "parallel.strategy"),
        (("slurm", "--config", "missing.yaml", "--gpus-per-node", "1"), "missing.yaml"),
    ],
)
def test_what_would_fail_on_the_cluster_fails_here(
    here: CommandLine, arguments: tuple[str | Path, ...], said: str
) -> None:
    ended = here(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr


def test_without_slurm_submitting_says_where_to_go(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here.folder))
    ended = here(*QUICKSTART, "--submit")
    assert ended.code == 2
    assert "login node" in ended.stderr


def test_help_has_an_example(here: CommandLine) -> None:
    assert "Example: frameworm slurm" in here("slurm", "--help").stdout


@pytest.mark.parametrize("world_size", [2, 8])  # older operators count pods, newer ones their workers
@pytest.mark.parametrize("pod", [0, 1])
def test_the_manifest_of_the_guide_starts_each_pods_workers(tmp_path: Path, pod: int, world_size: int) -> None:
    text = re.search(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert text is not None
    replicas = yaml.safe_load(text.group(1))["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Master" if pod == 0 else "Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    stub = tmp_path / "frameworm"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"; env | grep -E "^(RANK|WORLD_SIZE)=" >&2\n')
    stub.chmod(0o755)
    given = {"MASTER_ADDR": "imdb-master-0", "MASTER_PORT": "23456", "RANK": str(pod), "WORLD_SIZE": str(world_size)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    done = subprocess.run(container["command"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    arguments = done.stdout.splitlines()
    options = {name.removeprefix("--"): value for name, value in itertools.pairwise(arguments) if name[:2] == "--"}
    plan = plan_launch(
        "--distributed" in arguments,
        int(options["nproc-per-node"]),
        options["nnodes"],
        int(options["node-rank"]),
        options["master-addr"],
        int(options["master-port"]),
        environ={name: value for name, value in given.items() if name.startswith("MASTER")},
    )
    assert (plan.action, plan.max_nodes, plan.nproc_per_node, plan.node_rank) == ("launch", 2, 4, pod)
    assert (plan.master_address, plan.master_port, plan.rendezvous) == ("imdb-master-0", 23456, "static")


def test_options_in_the_guide_exist(here: CommandLine) -> None:
    helps = {verb: here(verb, "--help").stdout for verb in ("slurm", "train", "network", "ray", "kubernetes")}
    for block in re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("'", ""), comments=True)
            for place, word in enumerate(words[:-1]):
                if word == "frameworm" and words[place + 1] in helps:
                    options = {item for item in words[place + 2 :] if item.startswith("--")}
                    assert all(option in helps[words[place + 1]] for option in options), line
