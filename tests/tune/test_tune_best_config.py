from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from frameworm.config.load import load_config, load_config_from_mapping
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.guard.gain import Speedup
from frameworm.guard.proof import NumericsEffect, Proof
from frameworm.tune.best_config import render_best
from frameworm.tune.knobs.base import Candidate
from frameworm.tune.knobs.context import Context, TrialMachine, WorkloadFacts, apply_changes, setting_of
from frameworm.tune.knobs.registry import all_knobs
from frameworm.tune.search.result import Accepted, Attempt, TuneResult
from frameworm.tune.trials.outcomes import TrialResult

CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.yaml"))
GPU = TrialMachine("cuda", bf16=True, capability=9.0, gpus=4, cpus_usable=16, torch_threads=16)
CPU = TrialMachine("cpu", bf16=True, cpus_usable=4, torch_threads=4)
RICH = WorkloadFacts(accepts_packed=True, many_widths=True, has_convolutions=True, samples_per_epoch=10_000)


def searched(start: Config, *steps: tuple[Mapping[str, Any], NumericsEffect]) -> TuneResult:
    """A search that accepted these changes."""
    trial = TrialResult([1e-3], 1.0)
    result = TuneResult(start, start, trial, trial)
    for number, (changes, numerics_effect) in enumerate(steps):
        candidate = Candidate(f"knob{number}", changes, numerics_effect)
        before = {key: setting_of(result.best, key) for key in changes}
        proof = Proof("accepted", "", Speedup(1.5 + number, 1.4 + number, 1.6 + number, 6))
        attempt = Attempt(candidate.knob, candidate.label, dict(changes), "accepted", "", "host_bound", proof=proof)
        result.best = apply_changes(result.best, changes)
        result.accepted.append(Accepted(candidate, before, result.best, trial, "id", attempt))
    result.total = Proof("accepted", "", Speedup(3.0, 2.9, 3.1, 6)) if len(steps) > 1 else None
    return result


def reread(text: str, folder: Path) -> Config:
    path = folder / "best.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ={})


def candidates_for(config: Config) -> Iterator[Candidate]:
    """What the knobs would try, here and as if they all applied."""
    device = CPU if config.gpu.device == "cpu" else GPU
    world_size = 4 if config.parallel.strategy == "ddp" else 1
    context = Context(config, device, RICH, world_size)
    for knob in all_knobs():
        if knob.why_not(context) is None:
            yield from (item for item in knob.candidates(context) if context.why_not(item.changes) is None)


def assert_is_best(text: str, result: TuneResult, folder: Path) -> None:
    found = reread(text, folder)
    assert found.model_dump() == result.best.model_dump()
    for key in result.changes:
        name = key.rpartition(".")[2]
        lines = text.splitlines()
        places = [index for index, line in enumerate(lines) if name in line]
        told = [" ".join(lines[max(0, index - 3) : index + 1]) for index in places]
        assert any("tune: " in item and "because of host bound" in item for item in told), (key, text)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_with_any_changes_of_the_knobs(path: Path, tmp_path: Path) -> None:
    original = path.read_text(encoding="utf-8")
    start = load_config(path, environ={})
    comments = [line.strip() for line in original.splitlines() if line.strip().startswith("#")]
    draw = random.Random(path.stem)
    for _ in range(4):
        steps: list[tuple[Mapping[str, Any], NumericsEffect]] = []
        best = start
        for _ in range(draw.randint(1, 5)):
            possible = list(candidates_for(best))
            if not possible:
                break
            chosen = draw.choice(possible)
            steps.append((chosen.changes, chosen.numerics_effect))
            best = apply_changes(best, chosen.changes)
        result = searched(start, *steps)
        text = render_best(result, original)
        assert_is_best(text, result, tmp_path)
        assert all(comment in text for comment in comments)
        world_size = 4 if start.parallel.strategy == "ddp" else 1
        device = "cpu" if start.gpu.device == "cpu" else "cuda"
        before, after = (
            resolve(config, world_size=world_size, device=device, bf16=True)
            for config in (start, reread(text, tmp_path))
        )
        assert before.training.global_batch == after.training.global_batch


def test_lines_are_changed_in_place_and_others_left_as_they_are(tmp_path: Path) -> None:
    original = CONFIGS[[path.stem for path in CONFIGS].index("quickstart")].read_text(encoding="utf-8")
    start = load_config_from_mapping(yaml.safe_load(original), environ={})
    result = searched(start, ({"data.batching": "bucketed"}, "rounding"), ({"training.cpu_threads": 2}, "nothing"))
    text = render_best(result, original)
    assert_is_best(text, result, tmp_path)
    added = [line for line in text.splitlines() if line not in original.splitlines()]
    assert [line.split("#")[0].strip() for line in added] == ["", "batching: bucketed", "cpu_threads: 2"]
    assert "3.00x (2.90 to 3.10) as fast" in added[0]
    assert "1.50x (1.40 to 1.60), because of host bound, rounding only, was padded" in added[1]
    assert "2.50x (2.40 to 2.60), because of host bound, the same numbers" in added[2]
    kept = [line for line in text.splitlines() if line in original.splitlines()]
    assert kept == original.splitlines()


SHAPES = {
    "flow": "name: a\ngpu: {mixed_precision: off, capture: off}\ntraining: {global_batch: 64}\n",
    "flow over lines": "name: a\ngpu: {mixed_precision: off,\n      # why\n      capture: off}\n",
    "trailing comma": "name: a\ngpu: {mixed_precision: off,}\n",
    "empty flow": "name: a\ngpu: {}\n",
    "empty section": "name: a\ngpu:\ndata:\n",
    "own comment": "gpu:\n  mixed_precision: off   # mine\n\n  # stays\nname: a\n",
    "no newline": "gpu:\n  mixed_precision: off",
    "deep": "gpu:\n    mixed_precision: off\n    device_ids:\n      - 0\n\n\n# end\n",
    "quoted": "'gpu':\n  \"mixed_precision\": 'off'\n",
    "windows": "name: a\r\ngpu:\r\n  mixed_precision: off\r\n  tf32: true\r\n",
    "mark": "\ufeffname: a\n",
    "document": "---\nname: a\n...\n",
    "all flow": "{name: a, gpu: {mixed_precision: off}}\n",
    "tag": "gpu:\n  mixed_precision: !!str off\n",
    "anchor": "gpu:\n  mixed_precision: &word bf16\n  capture: off\nparallel:\n  compression: *word\n",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_however_the_file_is_written(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(SHAPES[shape], encoding="utf-8", newline="")
    start = load_config(path, environ={})
    changes = {"gpu.mixed_precision": "fp16", "gpu.capture": "step", "data.batching": "bucketed"}
    result = searched(start, *(({key: value}, "rounding") for key, value in changes.items()))
    text = render_best(result, SHAPES[shape])
    assert_is_best(text, result, tmp_path)
    for comment in ("# mine", "# stays", "# why", "# end"):
        assert (comment in text) == (comment in SHAPES[shape])


def test_without_a_file_the_whole_config_is_written_with_comments(tmp_path: Path) -> None:
    start = load_config_from_mapping({"name": "a"}, environ={})
    result = searched(start, ({"gpu.mixed_precision": "bf16"}, "rounding"), ({"gpu.capture": "step"}, "more"))
    text = render_best(result, None)
    assert_is_best(text, result, tmp_path)
    assert "approximate" in text


def test_what_overrides_had_set_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "start.yaml"
    path.write_text("name: a\n", encoding="utf-8")
    overrides = ["training.lr=0.5", "name=b", "training.betas=[0.8, 0.9]", "data.root=x, [y]"]
    start = load_config(path, overrides, environ={"XDG_CACHE_HOME": "/somewhere"})
    result = searched(start, ({"data.batching": "bucketed"}, "rounding"))
    text = render_best(result, "name: a\n")
    assert_is_best(text, result, tmp_path)
    assert text.count("on the command line") == 5


def test_a_change_of_several_settings_and_one_taken_back(tmp_path: Path) -> None:
    original = "training:\n  batch_size: 64\ngpu:\n  capture: off\n"
    (tmp_path / "start.yaml").write_text(original, encoding="utf-8")
    start = load_config(tmp_path / "start.yaml", environ={})
    together = {"training.micro_batch": 32, "training.batch_size": None, "training.global_batch": 64}
    result = searched(
        start, ({"gpu.capture": "step"}, "rounding"), (together, "rounding"), ({"gpu.capture": "off"}, "rounding")
    )
    text = render_best(result, original)
    assert_is_best(text, result, tmp_path)
    assert "  capture: off\n" in text
    assert "one change with training.batch_size and training.global_batch" in " ".join(text.replace("#", "").split())


@pytest.mark.slow
def test_settings_of_an_own_workload_keep_their_kinds(tmp_path: Path) -> None:
    values = {"workload": "a.b:c", "model": {"x": True, "word": "on", "deep": {"y": [1, 2.5, "no"]}}}
    start = load_config_from_mapping(values, environ={})
    for new in (1, 1.0, "off", "true", None, "3", "a, b", [1, "off"], {"z": "y: {x}"}, "#", "ä: b"):
        result = searched(start, ({"model.x": new}, "rounding"))
        for original in (yaml.safe_dump(values), yaml.safe_dump(values, default_flow_style=None), None):
            found = reread(render_best(result, original), tmp_path)
            assert found.model_dump() == result.best.model_dump()
            assert type(found.model_dump()["model"]["x"]) is type(new)


def test_nothing_changed_leaves_the_file_and_says_so(tmp_path: Path) -> None:
    start = load_config_from_mapping({"name": "a"}, environ={})
    text = render_best(searched(start), "name: a  # mine\n")
    assert text.endswith("\nname: a  # mine\n")
    assert "nothing was found" in text


def test_another_precision_is_not_called_rounding_only(tmp_path: Path) -> None:
    original = "name: a\ngpu:\n  mixed_precision: off\n"
    result = searched(reread(original, tmp_path), ({"gpu.mixed_precision": "bf16"}, "rounding"))
    assert "rounding only" in render_best(result, original)
    attempt = result.accepted[0].attempt
    assert attempt.proof is not None
    attempt.proof = replace(attempt.proof, change="precision")
    assert "another precision" in render_best(result, original)
