"""The bundle for a bug report: facts about a machine and a run that a maintainer needs, without secrets."""

from __future__ import annotations

import json
import platform
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from frameworm import __version__
from frameworm.errors import RunFolderError
from frameworm.records.atomic import replacing
from frameworm.records.reading import MOST_CONFIG_BYTES, read_tail, read_text
from frameworm.records.store import RunFolder
from frameworm.report.checks.secrets import Masker
from frameworm.report.kit.tables import data_size

# Variables that change how a training runs. Names of users, accounts and folders are not among them.
_VARIABLES = re.compile(
    r"(FRAMEWORM|NCCL|TORCH\w*|PYTORCH|GLOO|CUDA|CUBLAS|CUDNN|NVIDIA_VISIBLE|NVIDIA_TF32|OMP|MKL|KMP|OPENBLAS|NUMEXPR|"
    r"MALLOC|MIMALLOC|TRITON|TOKENIZERS|RAY_(?:USAGE|CHDIR)|ROCR|HIP)_\w+|"
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)|LD_PRELOAD|PYTHON\w+|"
    r"SLURM_(STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|GPUS_ON_NODE|MEM_PER_\w+|JOB_NUM_NODES|CPUS_PER_TASK|"
    r"STEP_NUM_TASKS|STEP_NUM_NODES|STEP_TASKS_PER_NODE)"
)
_PACKAGES = re.compile(
    r"frameworm|torch.*|triton.*|numpy|nvidia-.*|cuda-.*|pydantic.*|pyyaml|typer|click|rich|psutil|tokenizers|safetensors|"
    r"jinja2|transformers|accelerate|lightning|pytorch-lightning|peft|trl|datasets|webdataset|bitsandbytes|ray|wandb|"
    r"mlflow.*|tensorboard|trackio|schedulefree|s3fs|fsspec|zstandard|starlette|uvicorn|matplotlib|flash-attn|xformers|"
    r"deepspeed",
    re.IGNORECASE,
)
_WHOLE = {
    "config.yaml": "the resolved config",
    "begun.json": "what was known when the run began",
    "summary.json": "the record of the run",
    "epochs.csv": "losses and times by epoch",
    "tune.json": "the attempts of the search",
    "best.yaml": "the best config of the search",
    "tuned.yaml": "the settings found for a script",
}
_MOST_BYTES = 2**20
_TAIL_BYTES = 2**16
_MOST_TAILS = 8


@dataclass(frozen=True)
class BundledFile:
    """One file of a bundle.

    Attributes:
        name: Its path inside the bundle.
        about: What it holds, in a few words.
        text: Its content, secrets masked.
    """

    name: str
    about: str
    text: str


def collect_bundle(
    doctor: Mapping[str, Any],
    variables: Mapping[str, str],
    config: Path | None = None,
    run: Path | None = None,
    notes: str | None = None,
) -> list[BundledFile]:
    """Collect the files of a bug report, without writing anything.

    Args:
        doctor: The output of `frameworm doctor --json`.
        variables: The environment variables; the bundle includes those that affect training.
        config: The config file that the report is about.
        run: The folder of the run or search that it is about.
        notes: Problems while collecting.

    Raises:
        RunFolderError: There is no such run, or a file cannot be read.
    """
    if run is not None and not (run / "tune.json").is_file():
        RunFolder.open(run)
    found = [("doctor.json", "the machine, its checks and the checklist", json.dumps(doctor, indent=1))]
    found.append(("versions.json", "versions of Python, the system and packages", json.dumps(_versions(), indent=1)))
    if config is not None:
        found.append(("config.yaml", "the config that you gave", _read(config, MOST_CONFIG_BYTES)))
    if run is not None:
        found += _files_of(run)
    if notes is not None:
        found.append(("notes.txt", "what went wrong while this was gathered", notes))
    masker = Masker(variables)
    for name, _, text in found:
        if name.endswith(".yaml"):
            masker.learn_from_yaml(text)
        elif name.endswith((".json", ".jsonl")):
            for part in text.splitlines() if name.endswith(".jsonl") else (text,):
                masker.learn_from(_parsed(part))
    chosen = masker.chosen(variables, [name for name in variables if _VARIABLES.fullmatch(name)])
    files = [BundledFile(name, about, masker.text(text)) for name, about, text in found]
    about = "environment variables that matter, secrets masked"
    return [*files[:2], BundledFile("environment.json", about, json.dumps(chosen, indent=1)), *files[2:]]


def list_bundle(path: Path, files: list[BundledFile]) -> str:
    """A list of a bundle's files, shown before it is written."""
    wide = max(len(file.name) for file in files)
    lines = [f"  {file.name:<{wide}}  {data_size(len(file.text.encode())):>9}  {file.about}" for file in files]
    return "\n".join(
        [
            f"{path} gets {len(files)} files:",
            *lines,
            "Passwords, tokens and keys are masked. Paths, settings, figures and log lines are not: look through it "
            "before you attach it.",
        ]
    )


def refuse_existing(path: Path) -> None:
    """Raise if a bundle's path already exists.

    Raises:
        RunFolderError: It exists.
    """
    if path.exists() or path.is_symlink():
        raise RunFolderError(f"{path} exists already; give --bundle another name")


def write_bundle(path: Path, files: list[BundledFile]) -> None:
    """Write the files into a zip file if `path` ends in `.zip`, and else into a new folder.

    Raises:
        RunFolderError: There is something at `path`, or it cannot be written.
    """
    refuse_existing(path)
    try:
        if path.suffix == ".zip":
            with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for item in files:
                    archive.writestr(item.name, item.text)
            return
        for item in files:
            place = path / item.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(item.text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; give another --bundle") from error


def _files_of(run: Path) -> Iterator[tuple[str, str, str]]:
    for name, about in _WHOLE.items():
        if (run / name).is_file():
            yield f"run/{name}", about, _read(run / name, _MOST_BYTES)
    for pattern, about in (("*.log", "the last lines of a log"), ("*.jsonl", "the last lines of a record")):
        for path in sorted(run.glob(pattern))[:_MOST_TAILS]:
            yield f"run/{path.name}", about, _tail(path)


def _read(path: Path, most_bytes: int) -> str:
    """The whole file, or its end if it is too large or not UTF-8."""
    try:
        return read_text(path, most_bytes)
    except (OSError, ValueError):
        return _tail(path)


def _tail(path: Path) -> str:
    try:
        text = read_tail(path, _TAIL_BYTES)
        if path.stat().st_size > _TAIL_BYTES:
            text = text.partition("\n")[2]  # half a line could be half a secret
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from error
    return text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _versions() -> dict[str, Any]:
    packages = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and _PACKAGES.fullmatch(name):
            packages[name] = distribution.version
    return {
        "frameworm": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
