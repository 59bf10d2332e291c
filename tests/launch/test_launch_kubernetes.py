"""Kubernetes manifests: of the published schemas, and with a command that trains when it runs as Kubernetes runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import kill_tree
from frameworm.errors import EnvironmentSetupError
from frameworm.launch.kubernetes import KubernetesJob, as_yaml, manifests

POD_S = 280.0  # a deadline, for a busy machine
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
JOB = KubernetesJob(
    config_text=QUICKSTART.read_text(),
    name="AG News_4gpu",
    image="registry.example/frameworm:1",
    nodes=2,
    gpus_per_node=4,
    namespace="research",
    memory="256Gi",
    settings=("data.root=/runs/data", "name=it's $(HOME)"),
)
# What the descriptions in the published schemas say of values that their types leave open.
RESTART_STRATEGIES = {"Recreate", "BlockingRecreate", "InPlaceRestart"}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"}


def published(name: str) -> Any:
    """A model of the published API."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(models, name)


def check_schema(found: dict[str, Any]) -> None:
    """Every field is one that the published schema has, of its type, and none that it demands is missing."""
    name = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}[found["kind"]]
    known = published(name).from_dict(json.loads(json.dumps(found))).to_dict()
    assert list(_lost(found, known, found["kind"])) == []


def _lost(found: Any, known: Any, place: str) -> Iterator[str]:
    """What a model has dropped because it does not know it; defaults that it has added are no matter."""
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            yield from _lost(value, known.get(name), f"{place}.{name}")
    elif isinstance(found, list) and isinstance(known, list) and len(found) == len(known):
        for number, (one, other) in enumerate(zip(found, known)):
            yield from _lost(one, other, f"{place}[{number}]")
    elif found != known:
        yield f"{place}: {found} became {known}"


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("change", [{}, {"nodes": 1, "gpus_per_node": 0, "memory": None, "namespace": None}])
def test_the_objects_follow_the_published_schemas(kind: str, change: dict[str, Any]) -> None:
    config, job = manifests(dataclasses.replace(JOB, kind=kind, **change))
    assert config["data"] == {"config.yaml": QUICKSTART.read_text()}
    check_schema(job)
    assert (
        job["apiVersion"] == {"trainjob": "trainer.kubeflow.org/v1alpha1", "jobset": "jobset.x-k8s.io/v1alpha2"}[kind]
    )
    for pod in _pods(job):
        published("IoK8sApiCoreV1PodSpec").from_dict(pod)
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} == {"runs", "config", "shared-memory"}
        (named,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        assert named == config["metadata"]["name"]


def test_a_field_that_is_not_published_is_found() -> None:
    _, job = manifests(dataclasses.replace(JOB, kind="jobset"))
    job["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 3
    with pytest.raises(AssertionError, match="backoffLimits: 3 became None"):
        check_schema(job)
    _, job = manifests(JOB)
    job["spec"]["trainer"]["numNodes"] = "2"
    with pytest.raises(ValueError, match="numNodes"):
        check_schema(job)


def test_a_preempted_job_set_starts_again_and_does_not_count_it() -> None:
    _, job = manifests(dataclasses.replace(JOB, kind="jobset", max_restarts=4))
    policy = job["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert policy["maxRestarts"] == 4
    assert policy["restartStrategy"] in RESTART_STRATEGIES
    assert rule["action"] in ACTIONS
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    fails = [item for item in spec["podFailurePolicy"]["rules"] if item["action"] == "FailJob"]
    assert [item["onExitCodes"]["values"] for item in fails if "onExitCodes" in item] == [[75]]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    # Kubernetes takes such a policy for pods only that it does not start again in place.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    address = {item["name"]: item.get("value") for item in spec["template"]["spec"]["containers"][0]["env"]}
    assert address["MASTER_ADDR"] == "ag-news-4gpu-node-0-0.ag-news-4gpu"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("AG News_4gpu", "ag-news-4gpu"),
        ("124m", "run-124m"),
        ("7b", "run-7b"),
        ("___", "frameworm"),
        ("x" * 44 + "_" + "y" * 20, "x" * 44),
        ("1" * 60, "run-" + "1" * 41),
        ("café", "caf"),
    ],
)
def test_names_become_labels(name: str, label: str) -> None:
    job = dataclasses.replace(JOB, name=name)
    assert job.safe_name == label
    # What the controllers make of it: a job, and a pod of it.
    assert len(f"{label}-node-0-1023") <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", label)


def test_the_file_reads_back_as_the_objects() -> None:
    objects = manifests(JOB)
    text = as_yaml(dataclasses.replace(JOB, command=("frameworm", "kubernetes", "--image", "a b")), objects)
    assert list(yaml.safe_load_all(text)) == objects
    assert text.startswith("# Written by: frameworm kubernetes --image 'a b'\n")
    assert "config.yaml: |" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": "two words"}, "--image"),
        ({"image": ""}, "--image"),
        ({"pvc": "Runs"}, "--pvc 'Runs'"),
        ({"namespace": "a" * 64}, "--namespace"),
        ({"runtime": "torch_distributed"}, "--runtime"),
        ({"memory": "64 GB"}, "--memory"),
        ({"grace_s": 10}, "--grace"),
        ({"nodes": 0}, "--nodes"),
        ({"settings": ("name=a\nb",)}, "line break"),
        ({"config_text": "x" * (2**20 + 1)}, "ConfigMap"),
    ],
)
def test_what_kubernetes_would_refuse(change: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=said):
        manifests(dataclasses.replace(JOB, **change))


def test_dollars_of_the_user_reach_the_command() -> None:
    for kind in ("trainjob", "jobset"):
        command, environment = _container(dataclasses.replace(JOB, kind=kind), index=1, address="h", port=1)
        words = _expanded(command, environment)
        assert "name=it's $(HOME)" in words


def _pods(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod specs in an object; a patch of one in a TrainJob."""
    spec = job["spec"]
    if job["kind"] == "TrainJob":
        spec = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    for item in spec["replicatedJobs"]:
        yield item["template"]["spec"]["template"]["spec"]


def _container(job: KubernetesJob, *, index: int, address: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a pod's container, as the controllers make them; pods meet at the address here."""
    _, found = manifests(job)
    if found["kind"] == "TrainJob":
        trainer = found["spec"]["trainer"]
        given = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": address,
            "PET_MASTER_PORT": str(port),
        }
        return [*trainer["command"], *trainer["args"]], given
    (pod,) = _pods(found)
    (container,) = pod["containers"]
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
    given = {}
    for item in container["env"]:
        given[item["name"]] = item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
    given |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "JOB_COMPLETION_INDEX": str(index)}
    return [*container["command"], *container["args"]], given


def _expanded(command: list[str], environment: dict[str, str]) -> list[str]:
    """Words as Kubernetes expands them: $(NAME) by the container's variables, $$ to $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, word) for word in command]


@contextmanager
def _pod(words: list[str], environment: dict[str, str], folders: dict[str, Path]) -> Iterator[subprocess.Popen[str]]:
    """A container's process; what is mounted in the container is elsewhere here."""
    assert words[0] == "frameworm"
    for mounted, place in folders.items():
        words = [re.sub(rf"^{mounted}(?=/)", str(place), word) for word in words]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "frameworm", *words[1:]],
        env={**inherited, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        kill_tree(process.pid)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(3 * POD_S)
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_two_pods_train_the_config_together(kind: str, tmp_path: Path, free_port: int) -> None:
    job = dataclasses.replace(
        JOB, kind=kind, gpus_per_node=0, settings=("training.max_steps=6", f"data.cache_dir={tmp_path}/cache")
    )
    config, _ = manifests(job)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "runs").mkdir()
    folders = {"/etc/frameworm": tmp_path, "/runs": tmp_path / "runs"}
    pods = [_container(job, index=index, address="127.0.0.1", port=free_port) for index in range(2)]
    with (
        _pod(_expanded(*pods[0]), pods[0][1], folders) as first,
        _pod(_expanded(*pods[1]), pods[1][1], folders) as second,
    ):
        ended = [process.communicate(timeout=POD_S) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ended
    summary = json.loads((tmp_path / "runs" / "ag-news-4gpu" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["batch"]["world_size"]) == ("completed", 6, 2)


@pytest.mark.slow
@pytest.mark.timeout(3 * POD_S)
@pytest.mark.long
def test_a_pod_that_has_to_go_saves_and_the_next_one_goes_on(tmp_path: Path, free_port: int) -> None:
    job = dataclasses.replace(
        JOB,
        kind="jobset",
        nodes=1,
        gpus_per_node=0,
        settings=(f"data.cache_dir={tmp_path}/cache", "training.max_steps=150", "checkpoint.every_steps=10"),
    )
    config, _ = manifests(job)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "runs").mkdir()
    folders = {"/etc/frameworm": tmp_path, "/runs": tmp_path / "runs"}
    command, environment = _container(job, index=0, address="127.0.0.1", port=free_port)
    run = tmp_path / "runs" / "ag-news-4gpu"
    with _pod(_expanded(command, environment), environment, folders) as pod:
        _until_it_trains(pod, run)
        pod.terminate()  # as a node that is drained does it
        said = pod.communicate(timeout=POD_S)
        assert pod.returncode == 75, said
    with _pod(_expanded(command, environment), environment, folders) as pod:
        said = pod.communicate(timeout=POD_S)
        assert pod.returncode == 0, said
    assert "resumed" in said[1]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 150)


def _until_it_trains(pod: subprocess.Popen[str], run: Path) -> None:
    """Until there is a checkpoint; 140 steps are to come."""
    deadline = time.monotonic() + POD_S
    while not (run / "checkpoints" / "latest").exists():
        assert pod.poll() is None, pod.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
