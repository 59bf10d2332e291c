"""The configs in configs/ load, say how to start them and fit their machine; the docs are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from frameworm.config.checks import NOT_YET
from frameworm.config.docs import markdown
from frameworm.config.keys import dotted, key_tree
from frameworm.config.load import dump_config, load_config
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config, EarlyStopConfig, TextClassifierModelConfig

ROOT = Path(__file__).resolve().parents[2]

SMALL = {"d_model": 128, "n_heads": 4, "num_layers": 2, "dim_feedforward": 256, "max_seq_len": 128}
LARGE = {"d_model": 256, "n_heads": 8, "num_layers": 4, "dim_feedforward": 1024, "max_seq_len": 256}
LONG = {"d_model": 256, "max_seq_len": 512}
GPT2 = {"d_model": 768, "n_heads": 12, "num_layers": 12, "max_seq_len": 1024}

SHIPPED: list[tuple[str, int, Literal["cpu", "cuda"], int, dict[str, Any]]] = [
    ("quickstart", 2, "cpu", 64, {"dropout": 0.0}),
    ("ag_news_single_gpu", 1, "cuda", 32, SMALL),
    ("ag_news_ddp_4gpu_20ep", 4, "cuda", 32, SMALL),
    ("ag_news_single_gpu_optimized", 1, "cuda", 128, LARGE),
    ("ag_news_ddp_4gpu_20ep_optimized", 4, "cuda", 128, LARGE),
    ("imdb_single_gpu", 1, "cuda", 32, LONG),
    ("imdb_ddp_4gpu", 4, "cuda", 32, LONG),
    ("gpt2_124m", 4, "cuda", 512, GPT2),
    ("ag_news_single_gpu_fast", 1, "cuda", 32, SMALL),
    ("ag_news_ddp_4gpu_20ep_fast", 4, "cuda", 32, SMALL),
    ("ag_news_single_gpu_optimized_fast", 1, "cuda", 128, LARGE),
    ("ag_news_ddp_4gpu_20ep_optimized_fast", 4, "cuda", 128, LARGE),
    ("imdb_single_gpu_fast", 1, "cuda", 32, LONG),
    ("imdb_ddp_4gpu_fast", 4, "cuda", 32, LONG),
    ("gpt2_124m_fast", 1, "cuda", 512, GPT2),
    ("gpt2_1p5b", 1, "cuda", 512, {"d_model": 1600, "n_heads": 25, "num_layers": 48, "max_seq_len": 1024}),
]
FAST = [name for name, *_ in SHIPPED if name.endswith("_fast")]

# What may differ between a config and its fast twin: settings that change how fast a step is, not what it learns.
SPEED_SETTINGS = {
    "gpu.use_flash_attention",
    "model.residual",  # rounding, as bf16 is
    "name",
    "data.batching",
    "data.resident",
    "training.micro_batch",
    "gpu.compile_model",
    "gpu.combine_kernels",
    "gpu.capture",
}


def test_all_shipped_configs_are_known_here() -> None:
    assert {file.stem for file in (ROOT / "configs").iterdir()} == {name for name, *_ in SHIPPED}


@pytest.mark.parametrize(("name", "world_size", "device", "global_batch", "model"), SHIPPED)
def test_shipped_config(
    name: str, world_size: int, device: Literal["cpu", "cuda"], global_batch: int, model: dict[str, Any], tmp_path: Path
) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    first, second = file.read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert f"frameworm train --config configs/{name}.yaml" in second
    assert ("--nproc-per-node 4" in second) or world_size != 4
    config = load_config(file, environ={})
    assert config.name == name
    assert model.items() <= config.model.model_dump().items()
    done = resolve(config, world_size=world_size, device="cuda", bf16=True)
    assert done.gpu.device == device
    assert done.training.global_batch == global_batch
    anywhere = load_config(file, ["gpu.capture=off"], environ={})
    assert resolve(anywhere, world_size=1, device="cpu", bf16=False).training.global_batch == global_batch
    (tmp_path / "config.yaml").write_text(dump_config(done))
    assert load_config(tmp_path / "config.yaml", environ={}) == done


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@pytest.mark.parametrize("name", FAST)
def test_a_fast_config_differs_from_its_twin_in_speed_only(name: str) -> None:
    fast, twin = (
        _flat(load_config(ROOT / "configs" / f"{stem}.yaml", environ={}).model_dump())
        for stem in (name, name.removesuffix("_fast"))
    )
    assert fast.keys() == twin.keys()
    differing = {key for key in fast if fast[key] != twin[key]}
    assert differing <= SPEED_SETTINGS
    assert fast["gpu.compile_model"] is True
    assert fast["gpu.mixed_precision"] == "auto"
    assert fast["gpu.capture"] == "step"
    assert fast["data.batching"] == ("padded" if name.startswith("gpt2") else "packed")


def test_every_config_for_a_gpu_has_a_fast_twin() -> None:
    # The 1.5B one shows what fits; how fast it can be is not its subject.
    plain = {name for name, _, device, *_ in SHIPPED if device == "cuda"} - set(FAST) - {"gpt2_1p5b"}
    assert {f"{name}_fast" for name in plain} == set(FAST)


def test_the_20_epochs_are_20() -> None:
    for file in (ROOT / "configs").glob("*20ep*"):
        assert load_config(file, environ={}).training.epochs == 20


def test_the_docs_are_what_the_schema_says() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "frameworm.config.docs"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert shown == markdown()
    assert (ROOT / "docs" / "config.md").read_text() == shown, "run: python -m frameworm.config.docs > docs/config.md"


def test_every_setting_is_documented_with_a_sentence() -> None:
    page = markdown()
    for path, field in {**key_tree(Config, TextClassifierModelConfig), **key_tree(EarlyStopConfig)}.items():
        assert field.description, dotted(path)
        assert field.description.endswith("."), dotted(path)
        assert len(path) == 1 or f"| `{dotted(path[1:])}` |" in page
    assert "| `num_workers` | auto, measure or a whole number, 0 or more | `auto` |" in page
    assert "| `optimizer` | one of adamw, sgd, muon, adamw8bit, schedulefree | `adamw` |" in page
    assert "| `pin_memory` | auto, true or false | `auto` |" in page


def test_what_is_not_there_yet_is_in_the_schema() -> None:
    tree = key_tree(Config)
    for name, (values, _) in NOT_YET.items():
        annotation = str(tree[tuple(name.split("."))].annotation)
        assert all(f"'{value}'" in annotation for value in values)
