"""What a run leaves behind and takes in: nobody else can write to it, and it runs no code that only it names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from workbench import classification, mlp

from frameworm import Trainer
from frameworm.config.load import load_config_from_mapping
from frameworm.engine.run import check_trusted, evaluate_run
from frameworm.errors import ConfigError, RunFolderError
from frameworm.records.store import RunFolder

SOURCES = Path(__file__).parents[2] / "src/frameworm"


def test_nothing_of_a_run_can_be_written_by_everybody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        model = mlp()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "a/run", device="cpu")
        trainer.train(DataLoader(classification(20), 4), epochs=2)
    finally:
        assert os.umask(before) == 0, "the user's umask is as it was"
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(made) > 8
    open_to_all = [path for path in made if not path.is_symlink() and path.stat().st_mode & stat.S_IWOTH]
    assert open_to_all == []


@pytest.mark.parametrize("name", ["../up", "a/b", "/abs", ".hidden", "", "a\0b", "..", "x\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        load_config_from_mapping({"name": name}, environ={})
    if name != "x\n":
        with pytest.raises(RunFolderError):
            RunFolder.create(None, name, tmp_path / "runs")
    assert not list(tmp_path.rglob("*"))


def test_code_that_only_a_run_folder_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "executed"
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "hostile_workload.py").write_text(f"open({str(proof)!r}, 'w')\n")
    (run / "config.yaml").write_text("workload: hostile_workload:build\ngpu: {device: cpu}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--set workload=hostile_workload:build"):
        evaluate_run(run)
    assert not proof.exists()
    config = load_config_from_mapping({"workload": "a.b:c"}, environ={})
    check_trusted(config, RunFolder(run), ["workload=a.b:c"])
    with pytest.raises(ConfigError):
        check_trusted(config, RunFolder(run), ["seed=1"])


def test_nothing_is_unpickled_but_what_processes_of_our_own_hand_over() -> None:
    found = {}
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("weights_only=False", "pickle.load", "yaml.load(", "yaml.unsafe", "joblib", "torch.load("):
            if word in text:
                found.setdefault(str(path.relative_to(SOURCES)), set()).add(word)
    assert found == {
        "tune/processes/batch_trial.py": {"weights_only=False", "torch.load("},  # from a search to its trials
        "numerics/state.py": {"torch.load("},  # weights_only, in a private folder of one search
        "data/samples/worker_state.py": {"pickle.load"},  # from a loader's workers, in memory that nobody else has
    }
