"""What the trackers' own readers find of a run that failed and was resumed."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import logger_runs
import pytest

from frameworm import RunRecord
from frameworm.observe.loggers.csv_file import CsvLogger
from frameworm.observe.loggers.protocol import LoggedRun
from frameworm.observe.loggers.tensorboard import TensorBoardLogger

VALUES = {
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "time/step_s",
    "time/samples_per_s",
    "memory/peak_bytes",
    "epoch",
    "epoch/train_loss",
    "epoch/val_loss",
    "epoch/val_accuracy",
}
STATUS = {"wandb": [1, 0], "mlflow": ["FINISHED"], "trackio": ["failed", "completed"]}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", sorted(logger_runs.TRACKERS))
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tracker: str, tmp_path: Path) -> None:
    for package in (tracker, *(("sqlalchemy", "alembic") if tracker == "mlflow" else ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'frameworm[loggers]'")
    done = subprocess.run(
        [sys.executable, logger_runs.__file__, tracker, str(tmp_path)],
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_API_KEY": "",
            "OMP_NUM_THREADS": "1",
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # and nothing but that: what trackers print is no result
    assert "left out" not in done.stderr
    assert found["ids"][0] == found["ids"][1]
    assert set(found["stored_ids"]) == {found["ids"][0]}
    assert found["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["epochs"] == [1, 2]
    assert found["config"] == [tracker]
    assert set(found["names"]) >= VALUES
    assert found["status"] == STATUS[tracker]


NOBODY_LISTENS = "http://127.0.0.1:9"
AWAY = """
import sys, time
from pathlib import Path
import logger_runs
began = time.monotonic()
options = {"mlflow": {"uri": sys.argv[3]}} if sys.argv[1] == "mlflow" else {}
trainer = logger_runs.train(Path(sys.argv[2]), fails=False, loggers=[sys.argv[1], "csv"], log_close_s=5.0, **options)
print(time.monotonic() - began)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_server_that_is_away_costs_a_line(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install 'frameworm[loggers]'")
    done = subprocess.run(
        [sys.executable, "-c", AWAY, tracker, str(tmp_path), NOBODY_LISTENS],
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": NOBODY_LISTENS,
            "PYTHONPATH": os.pathsep.join([str(Path(logger_runs.__file__).parent), os.environ.get("PYTHONPATH", "")]),
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stderr.splitlines() if "is left out" in line]) == 1, done.stderr
    assert f"logger {tracker} is left out" in done.stderr
    assert [row["step"] for row in steps_of_table(tmp_path / "run" / "metrics.csv") if row["train/loss"]][-1] == "8"


def steps_of_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_table(tmp_path: Path) -> None:
    logger_runs.train(tmp_path, fails=True, loggers=["csv"])
    failed = steps_of_table(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in failed if row["train/loss"]] == ["1", "2", "3", "4", "5", "6"]
    logger_runs.train(tmp_path, fails=False, loggers=["csv"])
    rows = steps_of_table(tmp_path / "run" / "metrics.csv")
    losses = [row["train/loss"] for row in rows if row["train/loss"]]
    assert [row["step"] for row in rows if row["train/loss"]] == [str(number) for number in range(1, 9)]
    assert losses[:4] == [row["train/loss"] for row in failed if row["train/loss"]][:4]
    assert [row["epoch"] for row in rows if row["epoch/val_accuracy"]][-1] == "2.0"
    assert set(rows[0]) >= VALUES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_goes_on_in_its_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'frameworm[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger_runs.train(tmp_path, fails=True, loggers=["tensorboard"])
    logger_runs.train(tmp_path, fails=False, loggers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [item.step for item in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [item.value for item in events.Scalars("train/lr")] == [0.125] * 8
    assert events.Scalars("epoch/val_accuracy")[-1].step == 8
    assert set(events.Tags()["scalars"]) >= VALUES
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "clip_norm: 1.0" in text
    summary = events.Tensors("summary/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "status: completed" in summary


def test_a_name_that_comes_late_gets_a_column(tmp_path: Path) -> None:
    logger = CsvLogger(str(tmp_path / "deep" / "table.csv"))
    assert logger.start(LoggedRun("run", {})) is None
    logger.log({"b": 1.5}, 1)
    logger.log({"a": 2.0, "with, comma": 3.0}, 2)
    logger.log({"b": 4.0}, 3)
    logger.finish("completed", {})
    assert steps_of_table(tmp_path / "deep" / "table.csv") == [
        {"step": "1", "b": "1.5", "a": "", "with, comma": ""},
        {"step": "2", "b": "", "a": "2.0", "with, comma": "3.0"},
        {"step": "3", "b": "4.0", "a": "", "with, comma": ""},
    ]


def test_a_row_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,a\n1,0.5\n2,0.25\n3,0.1")
    logger = CsvLogger()
    logger.start(LoggedRun("run", {}, tmp_path, step=2))
    logger.log({"a": 0.125}, 3)
    assert (tmp_path / "metrics.csv").read_text() == "step,a\n1,0.5\n2,0.25\n3,0.125\n"


def test_runs_in_a_shared_folder_have_folders_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'frameworm[tensorboard]'")
    for name in ("one", "two"):
        logger = TensorBoardLogger(str(tmp_path))
        logger.start(LoggedRun(name, {}))
        logger.finish("completed", {"status": "completed"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


class Wandb:
    """As much of wandb as a script has that opened a run of its own."""

    def __init__(self) -> None:
        self.run = self
        self.id = "theirs"
        self.rows: list[Mapping[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: Any = self
        self.defined: list[str] = []

    def update(self, values: Mapping[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append(name)

    def log(self, values: Mapping[str, Any]) -> None:
        self.rows.append(values)

    def finish(self, exit_code: int) -> None:
        raise AssertionError("it is the script's to close")


def test_a_run_that_the_script_opened_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from frameworm.observe.loggers.wandb import WandbLogger

    theirs = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", theirs)  # type: ignore[arg-type]
    logger = WandbLogger(project="ignored")
    assert logger.start(LoggedRun("run", {"seed": 1})) == "theirs"
    logger.log({"train/loss": 1.0}, 7)
    logger.finish("completed", {"steps": 7})
    assert theirs.rows == [{"train/loss": 1.0, "trainer/step": 7}]
    assert "train/*" in theirs.defined
    assert theirs.summary == {"summary/steps": 7}


def test_loggers_follow_their_protocol() -> None:
    from frameworm import Logger

    assert isinstance(CsvLogger(), Logger)
    assert not isinstance(RunRecord, Logger)
