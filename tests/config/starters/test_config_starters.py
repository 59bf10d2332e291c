"""Starters: what they write is in order and never in the place of something else; scripts are read, not run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from frameworm.config.load import load_config
from frameworm.config.starters.script import check_script
from frameworm.config.starters.starter import Starter, start_with, start_with_script
from frameworm.errors import EnvironmentSetupError

ROOT = Path(__file__).parents[3]
TRAINS = "import torch\nloss = torch.zeros(1, requires_grad=True)\nloss.backward()\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(name: str, folder: Path) -> Starter:
    if name == "script":
        return start_with_script(folder)
    assert name == "quickstart" or name == "model"
    return start_with(name, folder)


STARTERS = pytest.mark.parametrize("name", ["quickstart", "model", "script"])


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_quickstart_is_the_config_of_the_repository() -> None:
    """But for where the file is: it also starts from the same line."""
    start_with("quickstart", Path())
    ours, shipped = (path.read_text() for path in (Path("quickstart.yaml"), ROOT / "configs" / "quickstart.yaml"))
    line = "#   frameworm train --config "
    assert f"{line}quickstart.yaml " in ours
    assert ours.split() == shipped.replace(f"{line}configs/", line).split()
    assert load_config("quickstart.yaml", environ={}) == load_config(ROOT / "configs" / "quickstart.yaml", environ={})


def test_the_script_is_the_example_of_the_repository() -> None:
    start_with_script(Path())
    assert Path("train.py").read_text() == (ROOT / "examples" / "plain_loop.py").read_text()


@STARTERS
def test_a_starter_says_what_it_wrote_and_does_it_once(name: str, tmp_path: Path) -> None:
    first = start(name, Path("new/place"))
    written = content(tmp_path / "new" / "place")
    assert set(first.files) == set(written)
    assert all(written.values())
    assert (first.unchanged, first.notes) == ([], [])
    assert first.next[0] == "cd new/place"
    again = start(name, Path("new/place"))
    assert again.unchanged == list(first.files)
    assert content(tmp_path) == {f"new/place/{file}": text for file, text in written.items()}
    assert start(name, Path()).next == first.next[1:]


@STARTERS
def test_a_missing_file_is_written_again(name: str) -> None:
    files = list(start(name, Path()).files)
    before = Path(files[0]).read_text()
    Path(files[0]).unlink()
    assert start(name, Path()).unchanged == files[1:]
    assert Path(files[0]).read_text() == before


@STARTERS
def test_a_file_of_the_users_stays_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    *_, before_last, last = start(name, Path("elsewhere")).files
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / last).write_text("mine")
    with pytest.raises(EnvironmentSetupError, match=f"^nothing was written, .*the file that you have: mine/{last}. "):
        start(name, Path("mine"))
    assert content(folder) == {last: "mine"}
    (folder / before_last).mkdir()
    with pytest.raises(EnvironmentSetupError, match=f"the files that you have: mine/{before_last}, mine/{last}. "):
        start(name, Path("mine"))
    assert content(folder) == {last: "mine"}


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    Path("quickstart.yaml").symlink_to(tmp_path / "target")
    with pytest.raises(EnvironmentSetupError, match="nothing was written"):
        start_with("quickstart", Path())
    assert content(tmp_path) == {}


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    Path("file").write_text("mine")
    for place, reason in (
        ("file", "file is a file; give the folder"),
        ("file/below", "cannot write file/below: Not a"),
    ):
        with pytest.raises(EnvironmentSetupError, match=reason):
            start_with("model", Path(place))
    assert content(tmp_path) == {"file": "mine"}


def test_configs_load_and_name_what_is_there() -> None:
    start_with("model", Path())
    config = load_config("my_model.yaml", environ={})
    assert config.workload == "my_model:build"
    assert "def build(config: Config) -> Workload:" in Path("my_model.py").read_text()


def test_python_files_are_in_order(tmp_path: Path) -> None:
    for name in ("model", "script"):
        start(name, Path())
    for command in ("check", "format --check"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
        done = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@STARTERS
def test_the_next_commands_are_in_the_page(name: str) -> None:
    starter = start(name, Path())
    page = Path(list(starter.files)[-1])
    assert page.suffix == ".md"
    lines = [line.partition("#")[0].strip() for line in page.read_text().splitlines()]
    for command in starter.next:
        assert any(line == command or line.startswith(f"{command} ") for line in lines), command


def test_pytest_is_installed_first_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert start_with("model", Path()).next[1:] == ["pip install pytest", "python -m pytest test_my_model.py"]


def test_the_commands_for_a_script(tmp_path: Path) -> None:
    script = tmp_path / "my code" / "fit it.py"
    script.parent.mkdir()
    script.write_text(TRAINS)
    starter = start_with_script(Path("my code/fit it.py"), ["--name", "a b"])
    assert list(starter.files) == ["frameworm-fit it.md"]
    assert starter.notes == []
    command = ["my code/fit it.py", "--name", "a b"]
    assert [shlex.split(line) for line in starter.next] == [
        ["frameworm", "profile", *command],
        ["frameworm", "tune", "--budget", "5m", *command],
    ]
    text = Path("frameworm-fit it.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("frameworm run"))
    assert shlex.split(line) == ["frameworm", "run", "--with", "tune/fit it/tuned.yaml", *command]
    assert "$" not in text
    assert script.read_text() == TRAINS
    assert sorted(content(tmp_path)) == ["frameworm-fit it.md", "my code/fit it.py"]


def test_a_script_is_not_run(tmp_path: Path) -> None:
    Path("train.py").write_text(f"{TRAINS}open('ran', 'w')\n")
    start_with_script(Path("train.py"))
    assert sorted(content(tmp_path)) == ["frameworm-train.md", "train.py"]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (TRAINS, None),
        ("from torch.nn import Linear\nfor _ in range(3):\n    accelerator.backward(loss)\n", None),
        ("import lightning as L\nL.Trainer().fit(model)\n", None),
        ("from transformers import Trainer\nTrainer(model).train()\n", None),
        ("from mine import main\nmain()\n", "does not import torch"),
        ("def f():\n    import torchvision\n", "does not import torch"),
        ("import torch\nmodel.eval()\n", "calls no backward"),
    ],
)
def test_doubts_about_a_script(text: str, note: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    notes = check_script(script)
    assert (notes == []) if note is None else (note in notes[0] and len(notes) == 1)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("trian.py", "trian.py does not exist; did you mean train.py?"),
        ("none/x.py", "none/x.py does not exist; give the Python file of your training script"),
        ("run.sh", "run.sh is not a Python script"),
        ("broken.py", "broken.py, line 2: Python cannot read this script: "),
        ("binary.py", "binary.py.*: Python cannot read this script: "),
        ("zeros.py", "zeros.py"),
        ("folder.py", "folder.py is not a Python script"),
    ],
)
def test_what_is_no_script_is_refused(given: str, reason: str, tmp_path: Path) -> None:
    Path("train.py").write_text(TRAINS)
    Path("run.sh").write_text("python train.py\n")
    Path("broken.py").write_text("import torch\nfor\n")
    Path("binary.py").write_bytes(b"import torch\n\xff\xfe\n")
    Path("zeros.py").write_bytes(bytes(9))
    Path("folder.py").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(EnvironmentSetupError, match=reason):
        start_with_script(Path(given))
    assert sorted(tmp_path.iterdir()) == before


def test_arguments_need_a_script() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"folder is not a Python script \(.py\), so it takes no arguments"):
        start_with_script(Path("folder"), ["--epochs", "3"])
    assert not Path("folder").exists()
