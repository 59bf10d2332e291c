"""`frameworm watch` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from frameworm.cli.main import app
from frameworm.errors import MissingPackageError, RunFolderError


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(tmp_path / "none")])
    assert isinstance(result.exception, RunFolderError)
    assert "does not exist" in str(result.exception)


def test_without_its_packages_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("frameworm.watch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert isinstance(result.exception, MissingPackageError)
    assert "pip install 'frameworm[watch]'" in str(result.exception)


def test_it_prints_its_address_serves_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "frameworm", "watch", str(tmp_path), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert set(told) == {"url", "host", "port", "token", "root"}
        with urllib.request.urlopen(told["url"], timeout=120) as answer:
            assert b"frameworm watch" in answer.read()
            assert "server" not in answer.headers
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(told["url"].partition("?")[0], timeout=120)
        assert refused.value.code == 403
        refused.value.close()
        process.send_signal(signal.SIGINT)
        out, log = process.communicate(timeout=120)
        assert (process.returncode, out, log) == (0, "", "")
    finally:
        process.kill()
        process.wait()
