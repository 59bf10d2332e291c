"""`frameworm kubernetes`: what it writes and refuses; tests/launch/test_launch_kubernetes.py checks the objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_line import CommandLine, command_line

CONFIGS = Path(__file__).parents[2] / "configs"
IMAGE = ("--image", "registry.example/frameworm:1")
QUICKSTART = ("kubernetes", "--config", CONFIGS / "quickstart.yaml", "--nodes", "2", "--gpus-per-node", "0", *IMAGE)
FOUR_GPUS = ("kubernetes", "--config", CONFIGS / "imdb_ddp_4gpu.yaml", "--gpus-per-node", "4", *IMAGE)


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data_cache_dir: Path
) -> Iterator[CommandLine]:
    with command_line(tmp_path / "work", data_cache_dir, monkeypatch, capfd) as run:
        yield run


def test_the_manifests_go_to_the_screen_or_to_a_file(here: CommandLine) -> None:
    shown = here(*QUICKSTART, "--name", "first try", "--set", "training.epochs=2")
    assert shown.code == 0
    config, job = yaml.safe_load_all(shown.stdout)
    assert (config["kind"], job["kind"], job["metadata"]["name"]) == ("ConfigMap", "TrainJob", "first-try")
    assert "training.epochs=2" in job["spec"]["trainer"]["args"]
    written = here(*FOUR_GPUS, "--nodes", "2", "--kind", "jobset", "--out", "job.yaml")
    assert "jobset imdb-ddp-4gpu, 8 ranks on 2 nodes, a GPU each" in written.stdout
    assert "kubectl apply -f job.yaml" in written.stdout
    text = (here.folder / "job.yaml").read_text()
    assert "--out job.yaml" not in text
    assert list(yaml.safe_load_all(text))[1]["kind"] == "JobSet"


def test_as_json(here: CommandLine) -> None:
    data = json.loads(here(*FOUR_GPUS, "--nodes", "2", "--json").stdout)
    assert (data["name"], data["nodes"], data["world_size"], data["file"]) == ("imdb-ddp-4gpu", 2, 8, None)
    assert [item["kind"] for item in data["manifests"]] == ["ConfigMap", "TrainJob"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*QUICKSTART, "--kind", "pytorchjob"), "--kind pytorchjob"),
        ((*QUICKSTART, "--pvc", "My Claim"), "--pvc"),
        ((*QUICKSTART, "--memory", "lots"), "--memory"),
        ((*QUICKSTART, "--set", "training.global_batch=33"), "training.global_batch"),
        ((*QUICKSTART, "--set", "training.epoch=3"), "epochs"),
        ((*QUICKSTART, "--out", "no/such/folder/job.yaml"), "no/such/folder/job.yaml"),
        ((*FOUR_GPUS, "--set", "gpu.device=cpu"), "would stand idle"),
        (("kubernetes", "--config", "missing.yaml", "--gpus-per-node", "1", *IMAGE), "missing.yaml"),
    ],
)
def test_what_would_fail_on_the_cluster_fails_here(
    here: CommandLine, arguments: tuple[str | Path, ...], said: str
) -> None:
    ended = here(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr
