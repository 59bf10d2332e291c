"""A bundle holds what a maintainer needs, and none of the secrets that lie around it."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from frameworm import __version__
from frameworm.errors import RunFolderError
from frameworm.report.checks.bundle import collect_bundle, list_bundle, write_bundle

STORED = Path(__file__).parents[2] / "golden/stored/runs/single"
SECRETS = {
    "environment": "plainword1",
    "url": "hunter2222",
    "config": "cfgsecret3",
    "block": "block secret four",
    "log": "logsecret55",
    "summary": "sumsecret6",
    "steps": "stepsecret7",
    "begin": "begsecret8",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A real run with a secret in each of its files."""
    folder = tmp_path / "run"
    shutil.copytree(STORED, folder)
    with (folder / "config.yaml").open("a") as file:
        file.write(f"# was: --api-key {SECRETS['config']}\nextra:\n  storage_password: |\n    {SECRETS['block']}\n")
    lines = [f"12:00:{number % 60:02} step {number}\n" for number in range(6000)]
    lines[0] = f"12:00:00 --hub-token {SECRETS['begin']}\n"
    lines[-2] = (
        f"logging in with token={SECRETS['log']}; {SECRETS['environment']}; {SECRETS['block']}; "
        f"s3://me:{SECRETS['url']}@bucket/x\n"
    )
    (folder / "train.log").write_text("".join(lines))
    summary = json.loads((folder / "summary.json").read_text())
    summary["notes"] = [f"uploaded with secret_access_key={SECRETS['summary']}"]
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "steps-rank0.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "api_token": SECRETS["steps"]}) + "\n")
    (folder / "report.html").write_text("<p>not for the bundle</p>")
    return folder


def _collected(run: Path, config: Path | None = None) -> dict[str, str]:
    variables = {
        "WANDB_API_KEY": SECRETS["environment"],
        "DATABASE": f"postgres://me:{SECRETS['url']}@db/runs",
        "FRAMEWORM_TRAINING__EPOCHS": "3",
        "NCCL_DEBUG": "INFO",
        "RANK": "0",
        "USER": "somebody",
        "SLURM_JOB_USER": "somebody",
        "NCCL_AUTH_TOKEN": SECRETS["environment"],
    }
    doctor = {"schema_version": 1, "checks": [{"text": f"reading {SECRETS['environment']}"}]}
    files = collect_bundle(doctor, variables, config, run, notes=f"password: {SECRETS['config']}")
    return {item.name: item.text for item in files}


def test_no_secret_is_in_the_bundle(run: Path) -> None:
    files = _collected(run, config=run / "config.yaml")
    for place, secret in SECRETS.items():
        inside = [name for name, text in files.items() if secret in text]
        assert not inside, f"the secret of the {place}"
    assert "somebody" not in "".join(files.values())


def test_the_rest_is(run: Path) -> None:
    files = _collected(run)
    assert set(files) == {
        *("doctor.json", "versions.json", "environment.json", "notes.txt"),
        *("run/config.yaml", "run/summary.json", "run/epochs.csv", "run/train.log"),
        *("run/steps-rank0.jsonl", "run/system-rank0.jsonl"),
    }
    masked = "<masked>"
    assert json.loads(files["environment.json"]) == {
        "FRAMEWORM_TRAINING__EPOCHS": "3",
        "NCCL_AUTH_TOKEN": masked,
        "NCCL_DEBUG": "INFO",
        "RANK": "0",
    }
    versions = json.loads(files["versions.json"])
    assert versions["frameworm"] == __version__
    assert {"torch", "numpy", "pydantic"} <= set(versions["packages"])
    stored, summary = json.loads((STORED / "summary.json").read_text()), json.loads(files["run/summary.json"])
    assert {name for name in stored if stored[name] != summary[name]} == {"notes"}
    assert files["run/config.yaml"].startswith((STORED / "config.yaml").read_text())
    lines = files["run/train.log"].splitlines()
    assert lines[-1] == "12:00:59 step 5999"
    assert lines[0].startswith("12:00:")
    assert 1000 < len(lines) < 6000
    last = json.loads(files["run/steps-rank0.jsonl"].splitlines()[-1])
    assert last == {"step": 7, "api_token": masked}


@pytest.mark.parametrize("name", ["bundle.zip", "bundle"])
def test_a_bundle_holds_what_its_list_says(run: Path, tmp_path: Path, name: str) -> None:
    files = collect_bundle({}, {}, None, run)
    path = tmp_path / name
    listed = list_bundle(path, files)
    assert not path.exists()
    write_bundle(path, files)
    held: dict[str, Any]
    if name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            held = {item: archive.read(item).decode() for item in archive.namelist()}
    else:
        held = {item.relative_to(path).as_posix(): item.read_text() for item in path.rglob("*") if item.is_file()}
    assert held == {item.name: item.text for item in files}
    for item in held:
        assert f"  {item} " in listed
    with pytest.raises(RunFolderError, match="exists already"):
        write_bundle(path, files)


def test_a_search_and_damaged_files_are_bundled_too(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text('{"speedup": 1.5')
    (tmp_path / "journal.jsonl").write_bytes(b'\xff\xfe{"trial": 1}\n')
    names = {item.name for item in collect_bundle({}, {}, None, tmp_path)}
    assert {"run/tune.json", "run/journal.jsonl"} <= names
    with pytest.raises(RunFolderError, match="is not a run"):
        collect_bundle({}, {}, None, tmp_path.parent)
