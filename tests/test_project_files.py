"""What a release, a pull request and a results file rely on: one version, workflows that name what there is."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import frameworm

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# What a hosted runner has, beside make and what a step has installed itself.
TOOLS = {"cd", "cp", "gh", "git", "grep", "mkdir", "python", "test"}


def _project() -> dict[str, Any]:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    loaded: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def test_the_version_is_written_in_one_place() -> None:
    project = _project()
    assert "version" not in project["project"]
    assert "version" in project["project"]["dynamic"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    # The pattern by which hatch finds a version.
    found = re.findall(r"(?m)^__version__ *= *(['\"])v?(.+?)\1", source)
    assert [version for _, version in found] == [frameworm.__version__]
    others = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "src").rglob("*.py"))
        if re.search(rf"(?<![\d.]){re.escape(frameworm.__version__)}(?![\d.])", path.read_text())
    ]
    assert others == [Path("src/frameworm/__init__.py")]


def test_the_quick_check_runs_tests_of_every_floor() -> None:
    listed = re.search(r"OF_EVERY_FLOOR := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    assert listed is not None
    files = [Path(name) for name in listed[1].replace("\\\n", " ").split()]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    floors = {path.name for path in (ROOT / "src/frameworm").iterdir() if (path / "__init__.py").exists()}
    assert floors - {name.parts[1] for name in files} == set()


def _workflow(path: Path) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text())
    return loaded


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in _workflow(path)["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets_and_plain_tools(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for step in _steps(path):
        for line in step.get("run", "").splitlines():
            # Expressions hold blanks.
            words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "value", line))
            if words[0] == "make":
                assert words[1] in targets, line
            else:
                assert words[0] in TOOLS or "venv/bin/" in words[0], line
    text = path.read_text()
    assert "index-url" not in text
    assert "password" not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_limits_and_few_rights(path: Path) -> None:
    workflow = _workflow(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 120
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
    for step in _steps(path):
        assert ("run" in step) != ("uses" in step)
        assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1")), step


def test_the_tests_run_on_every_python_and_the_oldest_torch_that_we_promise() -> None:
    matrix = _workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    project = _project()["project"]
    promised = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert matrix["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"
    oldest = next(item for item in project["dependencies"] if item.startswith("torch")).partition(">=")[2]
    assert matrix["torch"][0] == f"{oldest}.0"
    default = re.search(r"(?m)^TORCH \?= (.+)$", (ROOT / "Makefile").read_text())
    assert default is not None
    assert matrix["torch"][-1] == default[1]


def test_hooks_before_a_commit_are_local_and_of_the_tools_we_install() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    tools = {Path(hook["entry"].split()[0]).name for hook in config["repos"][0]["hooks"]}
    installed = {re.split(r"[^\w-]", item)[0] for item in _project()["project"]["optional-dependencies"]["dev"]}
    assert tools == {"mypy", "ruff"} <= installed


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_forms_have_what_a_form_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert {"name", "description", "body"} <= set(form)
    ids = [item["id"] for item in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(item["attributes"]["label"] for item in form["body"])
