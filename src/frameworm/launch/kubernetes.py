"""Kubernetes manifests that train a config: pure functions of a typed request.

Every pod is a node with one container that starts its workers. All pods share one run folder, and a restarted pod
resumes from it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.plan import DEFAULT_PORT
from frameworm.launch.slurm import DEFAULT_CPUS_PER_WORKER, WorkersOnNodes

KubernetesKind = Literal["trainjob", "jobset"]

DEFAULT_GRACE_S = 120

_RUNS, _CONFIG = "/runs", "/etc/frameworm"
_CONFIG_FILE = "config.yaml"
_PREEMPTED = 75
_MARGIN_S = 30  # between the workers' last chance to save and the end of the pod
_LONGEST_NAME = 45  # leaves room for what controllers append, within 63
_MOST_CONFIG_BYTES = 2**20  # limit of a ConfigMap
# Name of the replicated job and of its container, as in Kubeflow's torch runtime.
_NODE = "node"
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i?|[mk])?")


@dataclass(frozen=True)
class KubernetesJob(WorkersOnNodes):
    """What a manifest should request and run.

    Attributes:
        config_text: The config, which goes into a ConfigMap.
        name: Name of the objects and of the run folder; lower-cased, with `-` for characters Kubernetes does not allow.
        image: Container image with frameworm installed.
        kind: `trainjob` for Kubeflow Trainer v2, `jobset` for JobSet alone.
        nodes: Number of pods.
        gpus_per_node: GPUs, and workers, per pod; with 0, one worker per pod runs on the CPU.
        namespace: Namespace; None for that of the user who applies the manifest.
        pvc: PersistentVolumeClaim for the run folder, mounted by all pods (ReadWriteMany if there are several).
        cpus: Processors per pod; None for 8 per worker.
        memory: Memory per pod, such as 64Gi; None for no limit.
        max_restarts: How often JobSet restarts all pods after a failure; preemptions do not count.
        runtime: The training runtime that a TrainJob refers to.
        grace_s: Seconds that a terminated pod gets to save.
        settings: `--set` options of the training.
        command: The command line that wrote the manifest, for its first line.
    """

    config_text: str
    name: str
    image: str
    kind: KubernetesKind = "trainjob"
    nodes: int = 1
    gpus_per_node: int = 0
    namespace: str | None = None
    pvc: str = "runs"
    cpus: int | None = None
    memory: str | None = None
    max_restarts: int = 10
    runtime: str = "torch-distributed"
    grace_s: int = DEFAULT_GRACE_S
    settings: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def safe_name(self) -> str:
        """The name in a form that Kubernetes accepts."""
        label = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).lstrip("-")
        if label and not label[0].isalpha():  # without its leading digits it could be another job's name, and run
            label = f"run-{label}"
        return label[:_LONGEST_NAME].rstrip("-") or "frameworm"


def manifests(job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the objects to apply, in order: the config, then the job.

    Raises:
        EnvironmentSetupError: A value is invalid or cannot be part of a manifest.
    """
    check(job)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.safe_name}-config"),
        "data": {_CONFIG_FILE: job.config_text},
    }
    return [config, _train_job(job) if job.kind == "trainjob" else _job_set(job)]


def as_yaml(job: KubernetesJob, objects: list[dict[str, Any]]) -> str:
    """Format the objects as one file."""
    made = f"# Written by: {shlex.join(job.command)}\n" if job.command else ""
    first = f"{made}# The claim {job.pvc} must exist. Apply it with: kubectl apply -f THIS_FILE\n"
    return first + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as literal blocks."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def check(job: KubernetesJob) -> None:
    """Refuse values that Kubernetes would reject or that would break the manifest.

    Raises:
        EnvironmentSetupError: Names the option.
    """
    texts = [("--image", job.image), *(("--set", item) for item in job.settings)]
    for option, text in [*texts, *(("the command line", part) for part in job.command)]:
        if not text.isprintable():
            raise EnvironmentSetupError(
                f"{option} {text!r} holds a character that cannot be printed, such as a line break"
            )
    if not job.image or " " in job.image:
        raise EnvironmentSetupError(f"--image {job.image!r} is not the name of a container image")
    for option, name in (("--namespace", job.namespace), ("--pvc", job.pvc), ("--runtime", job.runtime)):
        if name is not None and (not _LABEL.fullmatch(name) or len(name) > 63):
            raise EnvironmentSetupError(
                f"{option} {name!r} is not a name that Kubernetes takes: lower-case letters, digits and -, at most 63"
            )
    for option, count, least in (
        ("--nodes", job.nodes, 1),
        ("--gpus-per-node", job.gpus_per_node, 0),
        ("--cpus", job.cpus, 1),
        ("--max-restarts", job.max_restarts, 0),
        ("--grace", job.grace_s, 2 * _MARGIN_S),
    ):
        if count is not None and not least <= count < 2**16:
            raise EnvironmentSetupError(f"{option} must be from {least} to 65535, got {count}")
    if job.memory is not None and not _QUANTITY.fullmatch(job.memory):
        raise EnvironmentSetupError(f"--memory {job.memory!r} is not a quantity of Kubernetes, such as 64Gi")
    if len(job.config_text.encode()) > _MOST_CONFIG_BYTES:
        raise EnvironmentSetupError("--config is larger than the 1 MiB that a ConfigMap holds")


def _metadata(job: KubernetesJob, name: str) -> dict[str, Any]:
    place = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name, **place, "labels": {"app.kubernetes.io/name": "frameworm"}}


def _train_job(job: KubernetesJob) -> dict[str, Any]:
    """Kubeflow Trainer v2: its runtime creates a JobSet whose pods get PET_ variables, as torchrun expects them."""
    pod = {
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{"name": _NODE, "volumeMounts": _mounts()}],
        "volumes": _volumes(job),
    }
    job_template = {"spec": {"template": {"spec": pod}}}
    template = {"spec": {"replicatedJobs": [{"name": _NODE, "template": job_template}]}}
    meet = {name: f"$(PET_{name.upper().replace('-', '_')})" for name in ("nnodes", "nproc-per-node", "node-rank")}
    meet |= {"master-addr": "$(PET_MASTER_ADDR)", "master-port": "$(PET_MASTER_PORT)"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.safe_name),
        "spec": {
            "runtimeRef": {"name": job.runtime},
            "trainer": {
                "image": job.image,
                "command": ["frameworm"],
                "args": _arguments(job, meet),
                "numNodes": job.nodes,
                "numProcPerNode": job.workers_per_node,
                "resourcesPerNode": _resources(job),
            },
            "runtimePatches": [{"manager": "frameworm/cli", "trainingRuntimeSpec": {"template": template}}],
        },
    }


def _job_set(job: KubernetesJob) -> dict[str, Any]:
    """JobSet alone: one indexed Job, whose pods have host names and restart together."""
    name = job.safe_name
    environment: list[dict[str, Any]] = [
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _COMPLETION_INDEX}}},
        {"name": "MASTER_ADDR", "value": f"{name}-{_NODE}-0-0.{name}"},
        {"name": "MASTER_PORT", "value": str(DEFAULT_PORT)},
    ]
    meet = {"nnodes": str(job.nodes), "nproc-per-node": str(job.workers_per_node), "node-rank": "$(NODE_RANK)"}
    meet |= {"master-addr": "$(MASTER_ADDR)", "master-port": "$(MASTER_PORT)"}
    container = {
        "name": _NODE,
        "image": job.image,
        "command": ["frameworm"],
        "args": _arguments(job, meet),
        "env": environment,
        "ports": [{"containerPort": DEFAULT_PORT}],
        "resources": _resources(job),
        "volumeMounts": _mounts(),
    }
    # Exit code 75 (saved and stopped) or a lost node: only then does the Job fail for this reason.
    preempted = [
        {"action": "FailJob", "onExitCodes": {"containerName": _NODE, "operator": "In", "values": [_PREEMPTED]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    indexed = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,  # a single pod cannot continue without the others
        "podFailurePolicy": {"rules": preempted},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.grace_s,
                "containers": [container],
                "volumes": _volumes(job),
            }
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "restartStrategy": "BlockingRecreate",  # never two trainings in one run folder
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": indexed}}],
        },
    }


def _arguments(job: KubernetesJob, meet: dict[str, str]) -> list[str]:
    """The container's arguments; Kubernetes substitutes the variables in `$(NAME)`."""
    settings = (["gpu.device=cpu"] if job.gpus_per_node == 0 else []) + list(job.settings)
    found = ["train", "--config", f"{_CONFIG}/{_CONFIG_FILE}"]
    for setting in settings:
        found += ["--set", setting.replace("$", "$$")]
    found += ["--out", f"{_RUNS}/{job.safe_name}", "--resume", "auto", "--distributed"]
    for name, value in meet.items():
        found += [f"--{name}", value]
    return [*found, "--stop-grace", str(job.grace_s - _MARGIN_S)]


def _resources(job: KubernetesJob) -> dict[str, Any]:
    limits = {"cpu": str(job.cpus or DEFAULT_CPUS_PER_WORKER * job.workers_per_node)}
    if job.memory is not None:
        limits["memory"] = job.memory
    if job.gpus_per_node:
        limits["nvidia.com/gpu"] = str(job.gpus_per_node)
    return {"limits": limits, "requests": dict(limits)}


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "runs", "mountPath": _RUNS},
        {"name": "config", "mountPath": _CONFIG, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _volumes(job: KubernetesJob) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.pvc}},
        {"name": "config", "configMap": {"name": f"{job.safe_name}-config"}},
        # The default is 64 MB, too little for loader processes.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
