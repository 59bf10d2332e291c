"""The server of the trials imports what the workload needs, and nothing of the user's own."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from frameworm.tune.processes.forkserver import libraries_since

SCRIPT = """
import json, sys
from frameworm.tune.processes.forkserver import warm_up

def tell(link):
    link.send([name in sys.modules for name in ("xmlrpc.client", "no.such.module")])

if __name__ == "__main__":
    server = warm_up(libraries=["no.such.module", "xmlrpc.client"])
    link, other = server.Pipe()
    process = server.Process(target=tell, args=(other,))
    process.start()
    print(json.dumps(link.recv()))
    process.join()
"""


@pytest.mark.slow
def test_processes_find_the_libraries_imported(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(SCRIPT, encoding="utf-8")
    told = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert told.stdout.strip() == "[true, false]", told.stderr


def test_only_installed_modules_count(monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(sys.modules)
    pytest_origin = pytest.__spec__.origin
    for name, origin in (("installed_one", pytest_origin), ("users_own", "/home/someone/train.py"), ("built_in", None)):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(origin=origin)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    assert libraries_since(known) == ["installed_one"]
    assert "pytest" in libraries_since(())
