"""The tuner's benchmark: its arithmetic, its simulated machines, and the models it brings along."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from frameworm.config.load import load_config_from_mapping

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("tuner", "tuner_regret", "own_models", "peers", "live", "contenders", "harness")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tuner

    yield tuner
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_goal_is_met_missed_open_or_failed(tuner: ModuleType) -> None:
    race = {"times_as_fast": {"best/start": {"value": 2.0, "low": 1.8, "high": 2.2}}}
    assert tuner.judged(race, "best", "start", 1.5)["verdict"] == "met"
    assert tuner.judged(race, "best", "start", 2.1)["verdict"] == "open"
    assert tuner.judged(race, "best", "start", 3.0)["verdict"] == "missed"
    assert tuner.judged(race, "best", "fast", 0.95)["verdict"] == "failed"


@pytest.mark.slow
def test_the_search_is_held_against_the_best_of_everything(tuner: ModuleType) -> None:
    found = tuner.tuner_regret.simulated(3)
    assert found["space"] == 2**6 * 4
    assert 0 <= found["regret_median"] <= found["regret_most"] <= 0.2
    assert 5 <= found["trials_median"] <= 0.2 * found["space"]


def test_every_case_has_its_configs(tuner: ModuleType) -> None:
    for case in tuner.SHIPPED.values():
        assert (tuner.CONFIGS / f"{case.config}.yaml").exists()
        assert (tuner.CONFIGS / f"{case.config}_fast.yaml").exists()


def test_all_combinations_keep_the_batch_and_leave_out_what_is_approximate(tuner: ModuleType) -> None:
    from frameworm.tune.knobs.context import Context, TrialMachine, WorkloadFacts
    from frameworm.tune.knobs.registry import all_knobs

    regret = tuner.tuner_regret
    config = load_config_from_mapping({"name": "a"}, list(regret.REAL_SETTINGS), environ={})
    machine = TrialMachine("cpu", bf16=True, cpus_usable=2, torch_threads=2)
    context = Context(config, machine, WorkloadFacts(accepts_packed=True, many_widths=True))
    knobs = [regret.exact(knob) for knob in all_knobs() if knob.name in regret.REAL_KNOBS]
    space = regret.combinations_of(config, context, knobs)
    assert len(space) == 2 * 2 * 2 * 5 * 3
    assert {context.resolve(item).training.global_batch for item in space} == {256}
    assert {item.data.batching for item in space} == {"padded", "packed"}


def test_the_convolutional_model_learns_from_its_images(tuner: ModuleType) -> None:
    values = {"workload": "own_models:cnn", "model": {"width": 4, "size": 16, "samples": 8}}
    workload = tuner.own_models.cnn(load_config_from_mapping(values, environ={}))
    images, labels = zip(*(workload.train_data[index] for index in range(4)))
    import torch

    logits = workload.model(torch.stack(images))
    assert logits.shape == (4, tuner.own_models.CLASSES)
    assert all(0 <= int(label) < tuner.own_models.CLASSES for label in labels)


def test_its_sentences_tell_their_class(tuner: ModuleType) -> None:
    data = tuner.own_models.Sentences(16, 8, 100)
    samples = [data[index] for index in range(len(data))]
    assert len({int(sample["labels"]) for sample in samples}) == 2
    assert all(sample["input_ids"][0] == 10 + sample["labels"] for sample in samples)


def test_a_search_that_ended_is_not_repeated(
    tuner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "trials": 3,
        "stopped": "all tried",
        "changes": {},
        "speedup": None,
        "run_s_before": 2.0,
        "run_s_after": 1.0,
    }
    calls = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        (out / "tune.json").write_text(json.dumps({**told, "attempts": []}))
        (out / tuner.JOURNAL_NAME).write_text("")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(tuner.subprocess, "run", run)
    session = tuner.Session(argparse.Namespace(trials=None, limit=9.0), tmp_path)
    first = session.tune(Path("plain.yaml"), (), "60s", "case")
    assert first["run_s_after"] == 1.0
    assert session.tune(Path("plain.yaml"), (), "60s", "case") == first
    session.tune(Path("plain.yaml"), (), "60s", "another")
    assert len(calls) == 2
