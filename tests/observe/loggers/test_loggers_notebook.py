"""The example notebook runs, and shows progress that can be read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
EPOCHS = 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that only this test uses
def test_the_notebook_runs_and_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'frameworm[examples]'")
    import nbformat
    from nbclient import NotebookClient

    kernel = tmp_path / "jupyter" / "kernels" / "here"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, kernel_name="here", timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [
        "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")
        for cell in notebook.cells
    ]
    errors = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"]
    assert errors == []
    training = next(text for text in shown if "epoch 1/3" in text)
    assert len(re.findall(r"^epoch \d/3  loss \S+  val loss \S+  accuracy ", training, re.MULTILINE)) == EPOCHS
    assert "\x1b" not in training
    assert any(text.startswith("36 steps, loss") for text in shown)
