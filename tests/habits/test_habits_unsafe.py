"""Folders and files of others are data: they run no code, lead nowhere else, and end no command.

The tests marked as expected failures pin known defects: each asserts the correct behaviour.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from message_cases import (
    CommandLine,
    OverdueError,
    arguments_of,
    batches,
    change_summary,
    deadline,
    make_run,
    nobody_reads,
    refusal,
    run_main,
    small_model,
    trainer,
)

from frameworm import Config
from frameworm.distributed import cleanup, setup_ddp
from frameworm.errors import FramewormError
from frameworm.launch.environment import own_command

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 48  # of a stored run: two epochs of 24


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    return CommandLine(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    make_run(root / "before")
    make_run(root / "after", every_steps=16, keep=3)
    return root


@pytest.fixture
def runs(stored_runs: Path, tmp_path: Path) -> Path:
    """Two good runs of one kind, `before` and `after`, to be spoiled."""
    shutil.copytree(stored_runs, tmp_path / "runs")
    return tmp_path / "runs"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# The folder of a search

RECORDING_WORKLOAD = """
import multiprocessing
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from frameworm import Workload


def build(config):
    if multiprocessing.parent_process() is not None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        Path({seen!r}).write_text(str(Path(cache_dir()).resolve()))
        raise RuntimeError("this trial fails")
    return Workload(nn.Linear(6, 3), TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,))))
"""


@pytest.fixture(scope="module")
def hostile_search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a search whose trial has failed; its `compiled` was a link to the folder `elsewhere`."""
    place = tmp_path_factory.mktemp("search")
    seen = place / "cache-of-the-trial"
    (place / "recording_workload.py").write_text(RECORDING_WORKLOAD.format(seen=str(seen)))
    (place / "own.yaml").write_text(
        "workload: recording_workload:build\ngpu: {device: cpu}\ntraining: {global_batch: 8, optimizer: sgd}\n"
    )
    (place / "elsewhere").mkdir()
    precious = place / "elsewhere" / "precious"
    precious.write_text("three weeks of work\n")
    later = time.time() + 3600  # newer than the trial, as a file that is being written
    os.utime(precious, (later, later))
    (place / "search").mkdir()
    (place / "search" / "compiled").symlink_to(place / "elsewhere")
    with pytest.MonkeyPatch.context() as patch, deadline(240):
        patch.chdir(place)
        patch.setattr(sys, "path", [str(place), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        arguments = ["tune", "--config", "own.yaml", "--out", "search", "--trials", "1", "--budget", "200s"]
        patch.setattr(sys, "argv", ["frameworm", *arguments])
        code = run_main()
    sys.modules.pop("recording_workload", None)
    # Not an assertion: the tests are expected to fail by one of theirs.
    if code != 1 or not seen.exists():
        raise RuntimeError(f"the only trial did not fail as it should: exit code {code}")
    return place


def test_the_compiler_of_a_trial_has_a_cache_outside_of_the_folder_of_the_search(hostile_search: Path) -> None:
    cache = Path((hostile_search / "cache-of-the-trial").read_text())
    assert not cache.is_relative_to(hostile_search), "what is unpickled from there would be somebody else's"


def test_a_failed_trial_deletes_nothing_behind_a_link(hostile_search: Path) -> None:
    assert (hostile_search / "elsewhere" / "precious").exists()


# Notes by which processes find each other


def _join(rank: int, folder: str, out: str) -> None:
    """One of two processes of a spawn."""
    tempfile.tempdir = folder
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    try:
        setup_ddp(rank, 2, backend="gloo", timeout_s=4)
        Path(out).write_text("joined")
        cleanup()
    except FramewormError as error:
        Path(out).write_text(f"refused: {error}")


def _in_the_shared_folder(note: Path, shared: Path) -> Path:
    """What another user could put a link in the place of: the note, or the folder that it is in."""
    return shared / note.relative_to(shared).parts[0]


@pytest.mark.slow
def test_a_process_does_not_follow_a_link_in_the_place_of_a_note(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    context = request.getfixturevalue("_rank_context")
    notes, answer = tmp_path / "notes", tmp_path / "answer"
    notes.mkdir()
    first = context.Process(target=_join, args=(0, str(notes), str(tmp_path / "first")))
    second = context.Process(target=_join, args=(1, str(notes), str(answer)))
    first.start()
    try:
        while not (found := [path for path in notes.rglob("*") if path.is_file() and not path.suffix]):
            if not first.is_alive():
                return  # there is no note that another user could replace
            time.sleep(0.005)
        (note,) = found
        place = _in_the_shared_folder(note, notes)
        place.rename(tmp_path / "real-note")
        place.symlink_to(tmp_path / "real-note")  # as another user could, to something of the victim's
        second.start()
        second.join(120)
        first.join(120)
    finally:
        for process in (first, second):
            if process.pid is not None and process.is_alive():
                process.kill()
    assert answer.exists()
    assert answer.read_text() != "joined"


def test_a_rank_of_profile_does_not_follow_a_link_in_the_place_of_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frameworm.attach.ranks import SharedFolder
    from frameworm.launch.environment import ProcessInfo

    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "notes"))
    SharedFolder(ProcessInfo(rank=0, world_size=2), tmp_path / "run", "run")
    (note,) = (path for path in (tmp_path / "notes").rglob("*") if path.is_file())
    note.write_text(str(tmp_path / "elsewhere"))
    place = _in_the_shared_folder(note, tmp_path / "notes")
    place.rename(tmp_path / "planted")
    place.symlink_to(tmp_path / "planted")
    found = None
    with contextlib.suppress(OverdueError, FramewormError), deadline(1.0):
        # Which may wait for a note of rank 0.
        found = SharedFolder(ProcessInfo(rank=1, world_size=2, local_rank=1), None, "run").find().path
    assert found != tmp_path / "elsewhere"


# The folder that a command is started in


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--distributed", "--nproc-per-node", "1", "--out", "run"],
        ["scale", "--world-sizes", "1", "--repeats", "1", "--out", "sweep"],
    ],
    ids=["train", "scale"],
)
def test_workers_import_nothing_from_the_working_folder(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data_cache_dir: Path, arguments: list[str]
) -> None:
    monkeypatch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(data_cache_dir))
    (tmp_path / "typer.py").write_text("import os\n\nopen('imported', 'w').close()\nos._exit(3)\n")
    few = ["--set", "training.max_steps=2", "--set", "gpu.device=cpu", "--set", "data.num_workers=0"]
    ended = command(*arguments, "--config", QUICKSTART, *few, limit_s=240)
    assert not (tmp_path / "imported").exists(), "a typer.py of the working folder was run"
    assert ended.code == 0, ended.stderr


HOSTILE = "import os\n\nopen('imported', 'w').close()\nos._exit(3)\n"
SHOW_PATH = """
import sys

from frameworm import Workload


def build(config):
    open("path-of-the-workload", "w").write("\\n".join(sys.path))
    raise ValueError("far enough")
"""


@pytest.mark.parametrize("start", [["-m", "frameworm"], own_command()[1:]], ids=["-m", "worker"])
def test_the_command_line_imports_nothing_from_the_working_folder(tmp_path: Path, start: list[str]) -> None:
    for name in ("typer", "rich", "yaml", "torch"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    ended = subprocess.run([sys.executable, *start, "runs"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert not (tmp_path / "imported").exists()
    assert (ended.returncode, ended.stdout) == (0, "no runs in runs\n")


@pytest.mark.slow
def test_a_worker_finds_a_workload_in_the_working_folder_and_no_module_of_the_package_by_its_bare_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "own_workload.py").write_text(SHOW_PATH)
    (tmp_path / "own.yaml").write_text("workload: own_workload:build\ngpu: {device: cpu}\n")
    command = own_command("train", "--config", "own.yaml", "--out", "run")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "far enough" in ended.stderr
    path = (tmp_path / "path-of-the-workload").read_text().splitlines()
    assert path[0] == str(tmp_path)
    assert str(Path(command[1]).parent) not in path, "`import data` would be frameworm.data"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot start multiprocessing otherwise")
@pytest.mark.long
def test_a_search_imports_nothing_from_the_working_folder(tmp_path: Path, data_cache_dir: Path) -> None:
    for name in ("signal", "multiprocessing", "selectors"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    few = ["--set", "training.global_batch=8", "--set", "gpu.device=cpu", "--set", "data.num_workers=0"]
    command = own_command("tune", "--config", str(QUICKSTART), *few, "--trials", "1", "--budget", "40s", "--out", "t")
    variables = {**os.environ, "FRAMEWORM_DATA_CACHE_DIR": str(data_cache_dir)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=variables)
    assert not (tmp_path / "imported").exists()
    assert ended.returncode in (0, 1, 3), ended.stderr
    assert "Traceback" not in ended.stderr


# Data sets that only a stored config names


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were asked of the hub, which has none of them."""
    asked: list[str] = []

    def load_dataset(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        raise FileNotFoundError(name)

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    package.__version__ = "4.0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def _run_on_hub_data(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "workload: text_classifier\ndata: {dataset: 'hf:somebody/else'}\ngpu: {device: cpu}\n"
    )
    return folder


def test_evaluate_loads_no_hub_data_that_only_the_run_folder_names(
    command: CommandLine, tmp_path: Path, hub: list[str]
) -> None:
    message = command.refuses("evaluate", _run_on_hub_data(tmp_path / "run"))
    assert hub == []
    assert "data.dataset" in message


def test_evaluate_loads_hub_data_that_the_user_names(command: CommandLine, tmp_path: Path, hub: list[str]) -> None:
    run = _run_on_hub_data(tmp_path / "run")
    command.refuses("evaluate", run, "--set", "data.dataset=hf:somebody/else")
    assert hub == ["somebody/else"]


def test_a_compiled_export_loads_no_hub_data_that_only_the_run_folder_names(
    command: CommandLine, tmp_path: Path, hub: list[str]
) -> None:
    message = command.refuses("export", _run_on_hub_data(tmp_path / "run"), "--compiled", "--out", "model.pt2")
    assert hub == []
    assert "data.dataset" in message


def test_a_datasets_package_that_runs_scripts_is_refused(
    command: CommandLine, tmp_path: Path, hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["datasets"], "__version__", "3.6.0")
    run = _run_on_hub_data(tmp_path / "run")
    message = command.refuses("evaluate", run, "--set", "data.dataset=hf:somebody/else")
    assert hub == []
    assert "pip install -U" in message


# Links in a folder that a run goes on in


def _go_on(run: Path, **settings: Any) -> None:
    """Train the stored run for one more epoch."""
    settings = {"every_steps": 500, "keep": 3, "mode": "sync", **settings}
    trainer(small_model(), run_dir=run, seed=0, **settings).train(batches(96), batches(8), epochs=3, resume="auto")


def _go_on_or_refuse(run: Path, **settings: Any) -> None:
    with contextlib.suppress(FramewormError):
        _go_on(run, **settings)


@pytest.mark.slow
def test_a_run_without_links_goes_on(runs: Path) -> None:
    """What the tests below spoil is good before."""
    _go_on(runs / "after", keep=1)
    assert _names(runs / "after" / "checkpoints") == ["latest", f"step-{STEPS + 24:08d}"]


@pytest.fixture
def linked(runs: Path) -> Path:
    """A run whose checkpoints are a link to those of another run."""
    (runs / "linked").mkdir()
    for path in (runs / "after").iterdir():
        if path.is_file():
            shutil.copy(path, runs / "linked")
    (runs / "linked" / "checkpoints").symlink_to(runs / "after" / "checkpoints")
    return runs / "linked"


def test_checkpoints_of_another_run_behind_a_link_stay(linked: Path, runs: Path) -> None:
    before = _names(runs / "after" / "checkpoints")
    _go_on_or_refuse(linked, keep=1)
    assert _names(runs / "after" / "checkpoints") == before


def test_a_link_in_the_place_of_the_checkpoints_is_refused(linked: Path) -> None:
    assert "link" in refusal(lambda: _go_on(linked))


def test_a_link_in_the_place_of_a_checkpoint_to_be_is_not_followed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("words\n")
    (runs / "after" / "checkpoints" / f".step-{STEPS + 24:08d}.tmp").symlink_to(tmp_path / "elsewhere")
    _go_on_or_refuse(runs / "after")
    assert _names(tmp_path / "elsewhere") == ["thesis.tex"]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that a link leads to."""
    path = tmp_path / "victim"
    path.write_text("words\n")
    return path


def test_weights_are_not_written_through_a_link(runs: Path, victim: Path) -> None:
    draft = runs / "after" / "checkpoints" / f".step-{STEPS + 24:08d}.tmp"
    draft.mkdir()
    (draft / "rank-00000.safetensors").symlink_to(victim)
    _go_on_or_refuse(runs / "after")
    assert victim.read_bytes() == b"words\n"


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "checkpoints/latest"])
def test_temporary_files_are_not_written_through_a_link(runs: Path, victim: Path, name: str) -> None:
    file = runs / "after" / name
    file.with_name(f".{file.name}.{os.getpid()}.tmp").symlink_to(victim)
    _go_on_or_refuse(runs / "after")
    assert victim.read_bytes() == b"words\n"


def test_samples_of_the_machine_are_not_appended_through_a_link(runs: Path, victim: Path) -> None:
    file = runs / "after" / "system-rank0.jsonl"
    file.unlink()
    file.symlink_to(victim)
    _go_on_or_refuse(runs / "after")
    assert victim.read_bytes() == b"words\n"


# What stored files can do to a terminal, a page and a spreadsheet

ESCAPE = "\x1b[31mred\x07"


@pytest.mark.parametrize(
    ("verb", "place"),
    [
        ("runs", "status"),
        ("baseline", "status"),
        ("guard", "parameters"),
        ("diagnose", "batch.global"),
        ("diagnose", "checkpoint.count"),
    ],
)
def test_no_word_of_a_summary_steers_the_terminal(command: CommandLine, runs: Path, verb: str, place: str) -> None:
    change_summary(runs / "after", place, ESCAPE)
    ended = command(*arguments_of(verb, runs))
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\x07" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("verb", "place"),
    [
        ("diagnose", "name"),
        ("diagnose", "status"),
        ("diagnose", "environment.torch"),
        ("compare", "name"),
        ("compare", "status"),
        ("compare", "environment.torch"),
        ("guard", "status"),
        ("report", "status"),
    ],
)
def test_words_of_a_summary_are_printed_without_control_characters(
    command: CommandLine, runs: Path, verb: str, place: str
) -> None:
    if verb == "report":
        shutil.rmtree(runs / "before")
    change_summary(runs / "after", place, f"{ESCAPE}[bold]")
    ended = command(*arguments_of(verb, runs))
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\x07" not in ended.stdout + ended.stderr


def test_no_name_of_a_folder_steers_the_terminal(command: CommandLine, runs: Path) -> None:
    (runs / "after").rename(runs / f"after{ESCAPE}")
    ended = command("runs", runs)
    assert "before" in ended.stdout
    assert "\x1b" not in ended.stdout


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("reason", ["[/red] slower", "[red]slower"], ids=["closing", "opening"])
def test_markup_in_the_reasons_of_a_search_is_shown_as_it_stands(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    from frameworm.report.tune.progress import TuneProgress

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    attempt = {"status": "failed", "label": "bf16", "reason": reason}
    try:
        with TuneProgress(60.0, stream=terminal) as shown:
            shown.tell("trying", {"attempts": [attempt]})
    except Exception as error:
        raise AssertionError(f"the table fails with {type(error).__name__}: {error}") from error
    assert reason in terminal.getvalue()


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)


def test_no_rank_of_a_summary_becomes_markup_in_the_page() -> None:
    from frameworm import RunRecord
    from frameworm.report.run.html import render_html

    phases = {"forward": 0.1, "backward": 0.2}
    ranks = [{"rank": f"{number}</text><script>alert(1)</script>", "phases": phases} for number in range(2)]
    batch = {"micro": 1, "accumulation": 1, "world_size": 2, "global": 2}
    stored = {"name": "run", "status": "completed", "environment": {}, "batch": batch, "ranks": ranks}
    try:
        page = render_html(RunRecord.from_dict(stored))
    except (FramewormError, ValueError, TypeError):
        return  # refused as no rank, which is right too
    assert "script" not in _Tags(page).found


def _report_cells(command: CommandLine, runs: Path, patch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    patch.setitem(sys.modules, "matplotlib", None)  # the tables are written without the figures
    command(*arguments_of("report", runs))
    with (runs.parent / "plots" / "comprehensive_summary.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_no_name_becomes_a_formula_in_a_table_of_the_report(
    command: CommandLine, runs: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    shutil.rmtree(runs / "before")
    config = runs / "after" / "config.yaml"
    named = config.read_text().replace("name: run", f"name: '{sign}cmd()'")
    config.write_text(named.replace("workload: python", "workload: 'own:build'"))
    (runs / "after").rename(runs / f"{sign}after")
    (row,) = _report_cells(command, runs, monkeypatch)
    assert "cmd" in row["dataset"]
    assert "after" in row["run_folders"]
    assert not row["dataset"].startswith(sign)
    assert not row["run_folders"].startswith(sign)


# Files that no run writes


def _answers(command: CommandLine, *args: str | Path, limit_s: float = 120.0) -> None:
    """In time and without a traceback; one line where the command is refused."""
    ended = command(*args, limit_s=limit_s)
    if ended.code == 2:
        assert len(ended.stderr.splitlines()) == 1, ended.stderr


def _only(verb: str, runs: Path) -> None:
    """Leave out the good run where it would be drawn."""
    if verb == "report":
        shutil.rmtree(runs / "before")


@pytest.mark.parametrize("verb", ["diagnose", "guard", "baseline", "compare", "runs", "report"])
def test_a_deeply_nested_summary_is_answered_in_words(command: CommandLine, runs: Path, verb: str) -> None:
    _only(verb, runs)
    (runs / "after" / "summary.json").write_text("[" * 100_000 + "]" * 100_000)
    _answers(command, *arguments_of(verb, runs))


PIPES = [
    *((verb, "summary.json") for verb in ("diagnose", "guard", "baseline", "compare", "runs", "report")),
    ("diagnose", "config.yaml"),
    ("compare", "steps-rank0.jsonl"),
    ("report", "epochs.csv"),
]


@pytest.mark.parametrize(("verb", "name"), PIPES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    command: CommandLine, runs: Path, verb: str, name: str
) -> None:
    _only(verb, runs)
    (runs / "after" / name).unlink()
    with nobody_reads(runs / "after" / name):
        _answers(command, *arguments_of(verb, runs))


def test_a_pipe_in_the_place_of_a_baseline_is_not_waited_for(command: CommandLine, runs: Path) -> None:
    with nobody_reads(runs / "baseline.json"):
        _answers(command, "guard", runs / "after", "--baseline", runs / "baseline.json")


def _nested_merges(levels: int) -> str:
    """A few hundred bytes of YAML whose merge keys stand for 9 ** levels settings."""
    lines = ["level0: &level0 {a: 1, b: 2}"]
    for level in range(1, levels + 1):
        above = ", ".join([f"*level{level - 1}"] * 9)
        lines += [f"level{level}: &level{level}", f"  <<: [{above}]"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("verb", ["diagnose", "guard", "compare", "runs", "report"])
def test_merge_keys_in_a_stored_config_are_not_expanded(command: CommandLine, runs: Path, verb: str) -> None:
    change_summary(runs / "before", "status", "failed")  # for the report: listed, and not drawn
    change_summary(runs / "after", "status", "failed")
    command(*arguments_of(verb, runs))  # so that imports do not count
    (runs / "after" / "config.yaml").write_text(_nested_merges(8))
    _answers(command, *arguments_of(verb, runs), limit_s=15.0)  # to expand them takes minutes


# Further ways of the same kinds


def test_a_run_goes_on_where_only_its_folder_or_latest_is_a_link(runs: Path) -> None:
    """As users set them: the run on another disk, and `latest` as other tools have it."""
    (runs / "linked").symlink_to(runs / "after")
    latest = runs / "after" / "checkpoints" / "latest"
    name = latest.read_text().strip()
    latest.unlink()
    latest.symlink_to(name)
    _go_on(runs / "linked", keep=1)
    assert _names(runs / "after" / "checkpoints") == ["latest", f"step-{STEPS + 24:08d}"]
    assert latest.read_text() == f"step-{STEPS + 24:08d}\n"


def test_a_folder_in_a_draft_does_not_keep_a_checkpoint_from_being_made(runs: Path) -> None:
    (runs / "after" / "checkpoints" / f".step-{STEPS + 24:08d}.tmp" / "in the way").mkdir(parents=True)
    _go_on(runs / "after", keep=1)
    assert _names(runs / "after" / "checkpoints") == ["latest", f"step-{STEPS + 24:08d}"]


@pytest.mark.parametrize("name", ["steps-rank0.jsonl", "epochs.csv", "tensorboard", "checkpoints/.step-00000099.tmp"])
def test_a_run_with_a_link_in_the_place_of_its_files_is_refused(runs: Path, victim: Path, name: str) -> None:
    path = runs / "after" / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    assert f"{path.name} is a link" in refusal(lambda: _go_on(runs / "after"))
    assert victim.read_bytes() == b"words\n"


@pytest.mark.parametrize("linked", ["runs", "runs/ws0001-run01"])
def test_a_sweep_removes_nothing_behind_a_link(command: CommandLine, tmp_path: Path, linked: str) -> None:
    few = ["--set", "gpu.device=cpu", "--world-sizes", "1", "--repeats", "1", "--out", "sweep"]
    precious = tmp_path / "elsewhere" / "ws0001-run01" / "checkpoints" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("three weeks of work\n")
    (tmp_path / "sweep" / linked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "sweep" / linked).symlink_to(tmp_path / "elsewhere")
    ended = command("scale", "--config", QUICKSTART, *few)
    assert ended.code == 2
    assert "is a link" in ended.stderr
    assert precious.exists()


def test_a_search_writes_nothing_through_links_in_its_folder(tmp_path: Path) -> None:
    from frameworm.tune.search.journal import Journal
    from frameworm.tune.trials.runner import TrialRunner

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "victim").write_text("words\n")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "journal.jsonl").symlink_to(tmp_path / "victim")
    assert "journal.jsonl" in refusal(lambda: Journal(tmp_path / "search", "start").begin("trial", "1", "as it is"))
    (tmp_path / "search" / "trials").symlink_to(tmp_path / "elsewhere")
    runner = TrialRunner(tmp_path / "search")
    assert "trials is a link" in refusal(
        lambda: runner._live(Config(), tmp_path / "search" / "trials" / "1", deadline=0.0)
    )
    assert (tmp_path / "victim").read_text() == "words\n"
    assert _names(tmp_path / "elsewhere") == []


def test_a_token_cache_of_others_leads_nowhere_and_holds_no_addresses(tmp_path: Path, victim: Path) -> None:
    import numpy as np

    from frameworm.data.corpora.cache import TokenCache, open_store, write_store

    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), TokenCache(tmp_path / "cache").lock("index"):
        pass
    assert victim.read_bytes() == b"words\n"
    store = tmp_path / "store"
    store.mkdir()
    write_store(store, {"vocab_size": 9}, lambda writer: writer.append([np.arange(8)]))
    (store / "meta.json").write_text((store / "meta.json").read_text().replace('"uint16"', '"object"'))
    with pytest.raises(ValueError, match="does not describe a token store"):
        open_store(store)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(command: CommandLine, runs: Path, name: str) -> None:
    for step in (runs / "after" / "checkpoints").glob("step-*"):
        (step / name).unlink()
        os.mkfifo(step / name)
    assert command("export", runs / "after", "--out", "model.safetensors").code == 2


def test_a_deeply_nested_trace_is_answered_in_words(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [' + "[" * 100_000)
    command.refuses("diagnose", tmp_path / "trace.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 5_000, "a: &a [*a, *a]\n", "!!python/object/apply:os.abort []"]
)
def test_a_hostile_config_in_a_run_ends_no_command(command: CommandLine, runs: Path, text: str) -> None:
    (runs / "after" / "config.yaml").write_text(text)
    for verb in ("diagnose", "guard", "compare", "runs", "report"):
        _answers(command, *arguments_of(verb, runs))
    assert command("evaluate", runs / "after").code == 2


@pytest.mark.parametrize("verb", ["diagnose", "guard", "compare", "runs", "report"])
def test_numbers_that_no_float_can_hold_end_no_command(command: CommandLine, runs: Path, verb: str) -> None:
    _only(verb, runs)
    summary = runs / "after" / "summary.json"
    summary.write_text(summary.read_text().replace(f'"steps": {STEPS}', f'"steps": {"9" * 400}'))
    _answers(command, *arguments_of(verb, runs))


def test_a_name_with_a_dollar_sign_is_drawn_as_it_stands(command: CommandLine, runs: Path) -> None:
    pytest.importorskip("matplotlib")
    shutil.rmtree(runs / "before")
    config = runs / "after" / "config.yaml"
    text = config.read_text().replace("name: run", "name: '$\\frac{'")
    config.write_text(text.replace("workload: text_classifier", "workload: 'own:build'"))
    ended = command(*arguments_of("report", runs))
    assert "Traceback" not in ended.stderr
    assert list((runs.parent / "plots").glob("*.png"))
