"""README and tutorials: every command and every snippet runs, in the order of its page, in a folder of its own.

Commands run as they stand but for `SHORTER`, and on less data (`limit` in the copy of configs/quickstart.yaml).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from frameworm.attach.isolation import why_not
from frameworm.attach.trial.fingerprint import fingerprint_of
from frameworm.tune.scripts.patch import write_changes
from frameworm.tune.scripts.source import as_diff

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
DEADLINE_S = 300
SHORTER = {  # in a command -> what runs instead
    "--budget 3m examples": "--budget 45s examples",
    "--budget 3m": "--budget 3m --trials 2",
    "--budget 5": "--budget 1",
    "MASTER_ADDR=host0 MASTER_PORT=29500": "MASTER_ADDR=127.0.0.1 MASTER_PORT={port}",
}
NOT_HERE = {  # the beginning of a command -> who runs it
    "make test": "is what runs this test",
    "pip install": "changes the environment; CI installs the package and its extras",
    "frameworm ray": "tests/engine/test_engine_ray.py runs it on a cluster; here its options are checked",
}
CODES = {  # runs of a few steps may be too noisy for a verdict, and this machine may have problems
    "frameworm guard": {0, 3},
    "frameworm doctor": {0, 1},
}


@dataclass
class Folder:
    """A user's folder: the repository's configs and examples, and `frameworm` on the path."""

    path: Path
    environment: dict[str, str]
    printed: list[str] = field(default_factory=list)

    def run(self, command: str) -> None:
        """Run one command of a page."""
        reason = next((reason for start, reason in NOT_HERE.items() if command.startswith(start)), None)
        if reason is not None:
            self.check_options(command)
        elif command.startswith("make demo"):
            for line in recipe("demo"):
                self.run(line)
        elif command.startswith("frameworm watch"):
            self.serve(command)
        else:
            if command.startswith("git apply"):
                subprocess.run(["git", "init", "-q", "."], cwd=self.path, check=True)
            self.finish(command, self.start(command))
            if command.startswith("frameworm tune") and "plain_loop" in command and "--dry-run" not in command:
                self.write_tuned()

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command, shortened."""
        for long, short in SHORTER.items():
            command = command.replace(long, short.format(port=self.environment["PORT"]))
        return subprocess.Popen(
            ["bash", "-ec", command],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, command: str, process: subprocess.Popen[str]) -> None:
        """Wait for a command, which must succeed."""
        try:
            printed, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        allowed = next((codes for start, codes in CODES.items() if command.startswith(start)), {0})
        assert process.returncode in allowed, f"{command}\n{printed}"
        self.printed.append(printed)

    def serve(self, command: str) -> None:
        """Start a server, wait for its address, and press Ctrl-C."""
        process = self.start(f"exec {command} --port 0")
        try:
            assert process.stdout is not None
            assert any("http://127.0.0.1:" in line for line in process.stdout), command
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) in (0, 130)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def check_options(self, command: str) -> None:
        """Of a command that does not run here: its options exist."""
        words = shlex.split(command, comments=True)
        if words[:2] == ["pip", "install"]:
            extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            assert all(f"\n{name} = [" in extras for name in re.findall(r"\[(\w+)\]", command))
        elif words[0] == "frameworm":
            printed = subprocess.check_output(["frameworm", words[1], "--help"], env=self.environment, text=True)
            assert [word for word in words if word.startswith("--") and word not in printed] == []

    def write_tuned(self) -> None:
        """What `tune` finds in the time it has here is left to chance; a fused optimizer it may always find."""
        script, changes = self.path / "examples" / "plain_loop.py", {"fused_optimizer": True}
        text = script.read_text(encoding="utf-8")
        line = next(number for number, line in enumerate(text.splitlines(), 1) if "AdamW(" in line)
        facts = {
            "parameters": 82_946,
            "half": False,
            "device": "cpu",
            "tf32": False,
            "places": [("optimizer", line, "")],
        }
        bound_to = {**fingerprint_of(script, ["--epochs", "40"]), "device": "CPU"}
        folder = self.path / "tune" / "plain_loop"
        settings = {"version": 1, "switches": changes, "fingerprint": bound_to, "facts": facts}
        (folder / "tuned.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        diff = as_diff(
            text, write_changes(text, changes, {"places": [("optimizer", line, "")]}).text, "examples/plain_loop.py"
        )
        (folder / "tuned.patch").write_text(diff, encoding="utf-8")


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").partition(f"\n{target}: ")[2].splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("\t"))
    commands = [line.removeprefix("\t").lstrip("@") for line in lines[:end]]
    return [line.replace("$(BIN)/", "").replace("$$", "$") for line in commands if line != "echo"]


def commands_of(page: Path) -> list[str]:
    """The commands of a page."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [command for language, block in blocks if language == "bash" for command in commands(block)]


def commands(block: str) -> list[str]:
    """The commands of a block; a backslash continues one in the next line."""
    lines = block.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"\s+# .*", "", line) for line in lines)
    return [" ".join(line.split()) for line in stripped if line and not line.startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, data_cache_dir: Path) -> Folder:
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    quickstart = tmp_path / "configs" / "quickstart.yaml"
    quickstart.write_text(quickstart.read_text(encoding="utf-8").replace("data:\n", "data:\n  limit: 512\n"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {"frameworm": "frameworm", "torchrun": "torch.distributed.run"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return Folder(
        tmp_path,
        {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir),
            "PORT": port,
        },
    )


LEFT_BEHIND = {
    "README.md": ["runs/quickstart-*/report.html"],
    "first_run.md": ["runs/first/report.html", "runs/tuned/summary.json", "model.safetensors", "perf.json"],
    "own_script.md": ["runs/profile-plain_loop-*/summary.json", "runs/profile-ddp_example-*/steps-rank1.jsonl"],
    "several_gpus.md": ["runs/two/steps-rank1.jsonl", "scaling/quickstart/report.html"],
    "cluster.md": ["job.sh", "job.yaml", "runs/hosts/steps-rank3.jsonl", "network.json"],
}
REFUSED = why_not()


def test_every_tutorial_is_run() -> None:
    elsewhere = {"own_model.md"}  # test_own_model_page.py
    assert {path.name for path in TUTORIALS.glob("*.md")} == {*LEFT_BEHIND, *elsewhere} - {"README.md"}


@pytest.mark.slow(cases="all")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_the_page_runs(name: str, folder: Folder) -> None:
    page = (ROOT if name == "README.md" else TUTORIALS) / name
    text = page.read_text(encoding="utf-8")
    if "frameworm tune" in text and "examples/plain_loop.py" in text and REFUSED is not None:
        pytest.skip(f"trials cannot be kept apart here: {REFUSED}")
    tutorials = {command for path in TUTORIALS.glob("*.md") for command in commands_of(path)}
    for language, block in BLOCK.findall(text):
        if language == "python":
            first = block.partition("\n")[0]
            script = folder.path / (first[2:] if re.fullmatch(r"# \w+\.py", first) else "snippet.py")
            script.write_text(block, encoding="utf-8")
            folder.run(f"python {script.name}")
        elif language == "bash" and "MASTER_ADDR" in block:
            hosts = [(command, folder.start(command)) for command in commands(block)]
            for command, process in hosts:
                folder.finish(command, process)
        elif language == "bash":
            for command in commands(block):
                if name != "README.md" or command not in tutorials:
                    folder.run(command)
        else:
            assert language == "text", f"{name}: a block of {language or 'nothing'} is not run"
    for pattern in LEFT_BEHIND[name]:
        assert list(folder.path.glob(pattern)), f"{name}: {pattern}"
