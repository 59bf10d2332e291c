"""Steps of many passes are tried with fewer of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live_workloads import tricky_config

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.tune.knobs.context import Context, apply_changes
from frameworm.tune.trials import short_steps
from frameworm.tune.trials.outcomes import TrialRequest
from frameworm.tune.trials.runner import TrialRunner
from frameworm.tune.trials.short_steps import FILE_NAME, ShortSteps
from frameworm.tune.trials.windows import Effort


def config_of(**training: Any) -> Config:
    return load_config_from_mapping({"training": training}, environ={})


def short_of(folder: Path, config: Config) -> ShortSteps:
    return ShortSteps(folder, Context(config).resolve, config)


@pytest.mark.parametrize(
    ("step_s", "factor"), [(0.1, 1), (0.5, 1), (0.7, 2), (1.7, 4), (3.3, 8), (100.0, 16), (None, 1)]
)
def test_the_factor_follows_from_the_time_of_a_step(tmp_path: Path, step_s: float | None, factor: int) -> None:
    config = config_of(global_batch=512, micro_batch=16)
    short = short_of(tmp_path, config)
    assert short.factor is None
    short.decide(step_s)
    assert short.factor == factor
    cut = Context(short.cut(config)).resolved.training
    assert (cut.global_batch, cut.micro_batch, cut.accumulation) == (512 // factor, 16, 32 // factor)


def test_the_factor_divides_the_passes(tmp_path: Path) -> None:
    short = short_of(tmp_path, config_of(batch_size=4, accumulation=15))
    short.decide(4 * 0.4)
    assert short.factor == 5
    assert Context(short.cut(config_of(batch_size=4, accumulation=15))).resolved.training.global_batch == 12


def test_a_step_of_few_passes_is_never_cut(tmp_path: Path) -> None:
    config = config_of(global_batch=32, micro_batch=16)
    short = short_of(tmp_path, config)
    assert short.factor == 1
    assert short.cut(config) is config


def test_a_search_that_goes_on_cuts_as_before(tmp_path: Path) -> None:
    config = config_of(global_batch=512, micro_batch=16)
    short_of(tmp_path, config).decide(1.7)
    assert short_of(tmp_path, config).factor == 4
    (tmp_path / FILE_NAME).write_text("{", encoding="utf-8")
    assert short_of(tmp_path, config).factor is None


def test_what_is_compared_is_cut_alike(tmp_path: Path) -> None:
    config = config_of(global_batch=512, micro_batch=16)
    short = short_of(tmp_path, config)
    short.decide(1.7)
    larger = config_of(global_batch=512, micro_batch=128)
    too_large = config_of(global_batch=512, micro_batch=256)
    assert [Context(item).global_batch for item in short.cut_alike([config, larger])] == [128, 128]
    assert short.cut_alike([config, too_large]) == [config, too_large]


@pytest.mark.timing
@pytest.mark.slow
def test_a_trial_of_long_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight passes of 60 ms make a step that counts as long here: half of them are left out."""
    monkeypatch.setattr(short_steps, "STEP_S", 0.24)
    config = apply_changes(tricky_config(pause_s=0.03), {"training.micro_batch": 2, "training.global_batch": 16})
    effort = Effort(window_s=0.1, windows=5, pairs=6, more_pairs=0, warm_windows=1)
    runner = TrialRunner(tmp_path, effort=effort, short_steps=short_of(tmp_path, config))
    trial = runner.run_trial(TrialRequest("one", config, "as it is"))
    assert trial.failure is None, trial.failure
    assert json.loads((tmp_path / FILE_NAME).read_text(encoding="utf-8"))["factor"] == 2
    assert trial.details["steps_cut_by"] == 2
    assert trial.details["step_s"] == pytest.approx(4 * 0.06, rel=0.1)
    assert trial.sample_s == pytest.approx(0.03, rel=0.1)
