"""Trainings with loggers: by name and as objects, on rank 0, refused before they begin where a package is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from workbench import StopAfter, classification, make_optimizer, mlp, parameters

from frameworm import Trainer, load_config, run
from frameworm.config.load import dump_config
from frameworm.config.schema import Config
from frameworm.errors import ConfigError, MissingPackageError, TrainingInterruptedError
from frameworm.guard.run_metrics import read_settings
from frameworm.observe.loggers.protocol import LoggedRun
from frameworm.records.store import RunFolder
from frameworm.tune.sweep.plan import SweepPlan


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[LoggedRun] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        self.ends: list[tuple[str, dict[str, Any]]] = []

    def start(self, run: LoggedRun) -> str | None:
        self.runs.append(run)
        return None

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.points.append((step, dict(values)))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        self.ends.append((status, dict(summary)))


class Broken(Recorder):
    def log(self, values: Mapping[str, float], step: int) -> None:
        raise OSError(28, "No space left on device")


def train(loggers: Any, epochs: int = 2, callbacks: Any = (), **settings: Any) -> Any:
    model = mlp()
    settings = {"run_dir": None, "device": "cpu", "log_interval_s": 0, **settings}
    trainer = Trainer(model, make_optimizer("sgd", model), callbacks=callbacks, loggers=loggers, **settings)
    data = classification(32)
    return trainer.train(DataLoader(data, 8), DataLoader(data, 16), epochs=epochs), parameters(model)


def test_an_object_is_told_of_the_whole_run() -> None:
    logger = Recorder()
    record, _ = train([logger], clip_norm=1.0)
    (run,) = logger.runs
    assert run.config["training"]["epochs"] == 2
    assert run.config["gpu"]["device"] == "cpu"
    assert [step for step, values in logger.points if "train/loss" in values] == list(range(1, 9))
    assert {"train/lr", "train/grad_norm", "time/samples_per_s", "memory/peak_bytes"} <= set(logger.points[0][1])
    ended = [(step, values) for step, values in logger.points if "epoch/val_accuracy" in values]
    assert [step for step, _ in ended] == [4, 8]
    assert ended[1][1]["epoch/val_loss"] == record.quality.val_loss
    ((status, summary),) = logger.ends
    assert status == "completed"
    assert summary["quality.val_accuracy"] == record.quality.val_accuracy
    assert record.notes == [note for note in record.notes if "logger" not in note]


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    logger = Recorder()
    with pytest.raises(TrainingInterruptedError):
        train([logger], callbacks=[StopAfter(3)], run_dir=tmp_path / "run")
    assert [status for status, _ in logger.ends] == ["interrupted"]


def test_a_logger_that_fails_does_not_change_what_is_trained(tmp_path: Path) -> None:
    whole = Recorder()
    record, trained = train([Broken(), whole], run_dir=tmp_path / "run")
    assert record.status == "completed"
    assert "logger Broken was left out: OSError: [Errno 28] No space left on device" in record.notes
    assert len(whole.ends) == 1
    _, alone = train([])
    assert trained.equal(alone)


def test_two_objects_of_a_class_are_told_apart() -> None:
    record, _ = train([Broken(), Broken()])
    notes = [note.partition(" was left out")[0] for note in record.notes if "left out" in note]
    assert notes == ["logger Broken", "logger Broken-2"]


@pytest.mark.slow
def test_names_work_as_keyword_and_in_a_config(tmp_path: Path) -> None:
    train("csv", run_dir=tmp_path / "one")
    assert (tmp_path / "one" / "metrics.csv").exists()
    config = Config(observe={"loggers": ["csv"], "csv": {"file": str(tmp_path / "table.csv")}})  # type: ignore[arg-type]
    train(None, config=config)
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 11
    (tmp_path / "c.yaml").write_text("observe:\n  loggers: [wandb]\n  wandb: {project: mine, offline: on}\n")
    observe = load_config(tmp_path / "c.yaml", ["observe.mlflow.uri=sqlite:///a.db"]).observe
    assert (observe.loggers, observe.wandb.project, observe.wandb.offline) == (["wandb"], "mine", True)
    assert observe.mlflow.uri == "sqlite:///a.db"


@pytest.mark.slow
def test_a_run_of_a_config_tells_loggers_too(tmp_path: Path, data_cache_dir: Path) -> None:
    logger = Recorder()
    config = load_config(
        Path(__file__).parents[3] / "configs" / "quickstart.yaml",
        ["training.max_steps=2", "data.limit=64", f"data.cache_dir={data_cache_dir}", "observe.loggers=[csv]"],
    )
    run(config, out=tmp_path / "run", loggers=[logger])
    assert logger.runs[0].name == "run"
    assert logger.runs[0].config["workload"] == "text_classifier"
    assert (tmp_path / "run" / "metrics.csv").exists()


def test_the_sink_of_that_name_is_the_logger(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'frameworm[tensorboard]'")
    train(None, sinks=["tensorboard"], run_dir=tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["wandbb"], "wandb"),
        ([Recorder], "give an object of it, Recorder()"),
        ([object()], "it needs the methods start(run), log(values, step) and finish(status, summary)"),
        ({"wandb": {}}, "must be a list of names or loggers"),
        (3, "must be a list of names or loggers"),
        (["csv"], "csv writes to the run folder, and this run has none; set observe.csv.file"),
    ],
)
def test_what_is_no_logger_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(given)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_before_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    extra = "tensorboard" if name == "tensorboard" else "loggers"
    with pytest.raises(MissingPackageError, match=rf"observe.loggers: {name} needs .*'frameworm\[{extra}\]'"):
        train([name], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def one_of_two(rank: int, world_size: int, folder: str, missing: bool) -> tuple[int, str]:
    logger = Recorder()
    if missing and rank == 0:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        train([logger, *(["wandb"] if missing else [])], epochs=1, run_dir=folder)
    except MissingPackageError as error:
        return len(logger.runs), str(error)
    return len(logger.runs), ""


@pytest.mark.slow
def test_only_rank_0_tells_its_loggers(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run_ranks(one_of_two, args=(str(tmp_path / "run"), False)) == [(1, ""), (0, "")]


def test_all_ranks_hear_of_a_missing_package(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_ranks(one_of_two, args=(str(tmp_path / "run"), True))
    assert first == second
    assert "pip install" in first[1]


def test_loggers_make_no_other_work_of_a_sweep_or_a_baseline(tmp_path: Path) -> None:
    told = Config(observe={"loggers": ["csv"], "wandb": {"project": "mine"}})  # type: ignore[arg-type]
    plain = Config()
    plans = [SweepPlan(config, (1, 2)) for config in (told, plain)]
    assert plans[0].fingerprint == plans[1].fingerprint
    (tmp_path / "config.yaml").write_text(dump_config(told))
    settings = read_settings(RunFolder(tmp_path))
    assert not [name for name in settings if name.startswith(("observe.log", "observe.wandb", "observe.csv"))]
    assert "observe.sinks" in settings
