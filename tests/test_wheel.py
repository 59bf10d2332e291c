"""The wheel: what is in it, and that someone who has only that can train, tune, report and watch."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import psutil
import pytest

import frameworm
from frameworm.records.store import RunFolder

pytest.importorskip("hatchling", reason="builds the wheel")

ROOT = Path(__file__).parents[1]
DEADLINE_S = 500.0  # for all of it; about 30 s on an idle machine


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=200)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """All files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked(folder: str) -> set[str]:
    """Files below a folder of the repository that are not ignored, as paths from that folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=ROOT / folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / folder / name).exists()}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs to know what is ignored")
def test_it_holds_the_package_and_nothing_else(names: set[str]) -> None:
    about = f"frameworm-{frameworm.__version__}.dist-info"
    package = {f"frameworm/{name}" for name in tracked("src/frameworm")}
    assert {name for name in names if not name.startswith(f"{about}/")} == package
    assert f"{about}/licenses/LICENSE" in names
    for needed in (
        "frameworm/py.typed",
        "frameworm/config/starters/files/quickstart.yaml",
        "frameworm/report/kit/templates/report.html.j2",
        "frameworm/watch/static/index.html",
        "frameworm/watch/static/uplot/LICENSE",
    ):
        assert needed in names


def test_its_metadata(wheel: Path) -> None:
    about = f"frameworm-{frameworm.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"{about}/METADATA"))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(f"{about}/entry_points.txt").decode())
    assert metadata["Version"] == frameworm.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [item for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert [item for item in required if item.startswith("torch>=")]
    assert not [item for item in required if re.match("starlette|uvicorn|matplotlib|pytest|hatchling", item)]
    assert {"gpu", "plots", "watch", "loggers", "hub", "s3", "ray", "dev"} <= set(
        metadata.get_all("Provides-Extra", [])
    )
    assert dict(entries["console_scripts"]) == {"frameworm": "frameworm.cli.main:main"}
    assert dict(entries["pytest11"]) == {"frameworm.pytest_plugin": "frameworm.pytest_plugin"}


class Installed:
    """A new environment with the wheel; torch and the other packages are those of the tests, seen after it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self._deadline = time.monotonic() + DEADLINE_S
        environment = folder / "environment"
        self._ended([sys.executable, "-m", "venv", "--without-pip", str(environment)])
        self.python = environment / "bin" / "python"
        install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
        self._ended([sys.executable, "-m", "pip", "--python", str(self.python), *install])
        (packages,) = environment.glob("lib/python*/site-packages")
        # A path in a .pth file comes last, and no .pth file there is read: this working tree stays out of sight.
        others = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
        (packages / "others.pth").write_text("".join(f"{path}\n" for path in sorted(others)))
        kept = ("PYTHONPATH", "PYTEST_", "FRAMEWORM_")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(kept)}
        self.environ |= {
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "FRAMEWORM_DATA_CACHE_DIR": str(folder / "cache"),
            "COLUMNS": "120",
            "TERM": "dumb",
        }

    def __call__(self, *command: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command in the working folder; what it printed."""
        return self._ended(list(command), codes, cwd=self.folder, env=self.environ)

    def left_s(self) -> float:
        """Time to the deadline."""
        return max(1.0, self._deadline - time.monotonic())

    def _ended(self, command: list[str], codes: tuple[int, ...] = (0,), **settings: Any) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=self.left_s(), **settings)
        assert done.returncode in codes, f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return str(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_alone_trains_tunes_reports_and_watches(wheel: Path, tmp_path: Path) -> None:
    run = Installed(tmp_path, wheel)
    place = run(str(run.python), "-c", "import frameworm; print(frameworm.__file__)").strip()
    assert Path(place).is_relative_to(tmp_path), place
    train, tune = json.loads(run("frameworm", "init", "quickstart", "--json"))["next"]
    run(*shlex.split(train), "--out", "runs/first", "--set", "training.max_steps=4", "--set", "training.epochs=1")
    assert RunFolder.open(run.folder / "runs" / "first").read_summary().status == "completed"
    run(*shlex.split(tune), "--trials", "1", "--set", "training.max_steps=60")
    tuned = json.loads((run.folder / "tune" / "quickstart" / "tune.json").read_text())
    assert all(time_s > 0 for time_s in tuned["baseline"]["seconds_per_sample"])
    run("frameworm", "report", "--root", "runs", "--out", "plots", codes=(3,))  # inconclusive: one world size only
    for page in ("runs/first/report.html", "tune/quickstart/report.html", "plots/report.html"):
        assert "</html>" in (run.folder / page).read_text(encoding="utf-8")
    page, runs = watched(run)
    assert "</html>" in page
    assert [item["name"] for item in runs] == ["first"]


def watched(run: Installed) -> tuple[str, list[dict[str, Any]]]:
    """The live page, and the runs that it shows."""
    server = subprocess.Popen(
        ["frameworm", "watch", "--port", "0", "--json"],
        cwd=run.folder,
        env=run.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        facts = json.loads(server.stdout.readline())
        page, runs = (
            urllib.request.urlopen(
                f"http://127.0.0.1:{facts['port']}{path}?token={facts['token']}", timeout=run.left_s()
            )
            for path in ("/", "/api/runs")
        )
        with page, runs:
            return page.read().decode(), json.load(runs)["runs"]
    finally:
        server.terminate()
        server.wait(120)
        assert server.stdout is not None
        server.stdout.close()
        assert not psutil.pid_exists(server.pid)
