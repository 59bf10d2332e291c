"""The keys of the config file, each set to another value than its default and read back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from contract_entries import CONFIG_KEYS, covers

from frameworm.config.load import load_config
from frameworm.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "configs"
PLAIN_KEYS = [key for key in CONFIG_KEYS if "." in key or key in ("name", "seed", "workload")]
VALUES = {
    "name": "other",
    "seed": 3,
    "workload": "gpt",
    "model.d_model": 96,
    "model.n_heads": 3,
    "model.num_layers": 5,
    "model.dim_feedforward": 77,
    "model.max_seq_len": 33,
    "model.dropout": 0.25,
    "model.init_from": "weights.safetensors",
    "data.dataset": "imdb",
    "data.root": "elsewhere",
    "data.num_workers": 3,
    "data.batching": "bucketed",
    "data.tokenizer": "vocab.txt",
    "training.epochs": 7,
    "training.global_batch": 64,
    "training.micro_batch": 16,
    "training.batch_size": 16,
    "training.optimizer": "sgd",
    "training.lr": 0.5,
    "training.schedule": "cosine",
    "training.clip_norm": 2.5,
    "training.lr_scaling": "sqrt",
    "training.early_stop": {"metric": "val_loss", "patience": 2},
    "gpu.mixed_precision": "bf16",
    "gpu.compile_model": True,
    "gpu.use_flash_attention": False,
    "gpu.benchmark": False,
    "gpu.deterministic": True,
    "gpu.memory_fraction": 0.5,
    "gpu.capture": "step",
    "gpu.tf32": False,
    "memory.activation_checkpointing": "full",
    "memory.max_memory_percent": 66,
    "memory.gc_threshold": 55,
    "memory.monitoring_interval": 5,
    "memory.enable_automatic_gc": False,
    "memory.cache_size_limit": 1000,
    "parallel.strategy": "zero1",
    "parallel.backend": "gloo",
    "parallel.compression": "int8",
    "parallel.bucket_cap_mb": 5,
    "parallel.static_graph": True,
    "checkpoint.every_steps": 11,
    "checkpoint.keep": 9,
    "checkpoint.mode": "sync",
    "observe.sinks": ["jsonl", "tensorboard"],
    "observe.trace": "window",
}


# Keys that make sense only beside another.
BESIDE = {
    "workload": {"data": {"dataset": "text", "root": "texts"}},
    "model.n_heads": {"model": {"d_model": 96}},
    "data.dataset": {"data": {"root": "reviews"}},
    "training.lr_scaling": {"training": {"base_batch": 32}},
}


def written(tmp_path: Path, key: str, value: object) -> Path:
    section, _, field = key.rpartition(".")
    content: dict[str, Any] = {name: dict(values) for name, values in BESIDE.get(key, {}).items()}
    if section:
        content.setdefault(section, {})[field] = value
    else:
        content[key] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@covers(*PLAIN_KEYS)
@pytest.mark.parametrize("key", PLAIN_KEYS)
def test_a_key_is_read(tmp_path: Path, key: str) -> None:
    value = VALUES[key]
    config = load_config(written(tmp_path, key, value))
    found = config
    for name in key.split("."):
        found = getattr(found, name)
    if key == "training.early_stop":
        assert (found.metric, found.patience) == ("val_loss", 2)
    else:
        assert found == value or str(found) == str(value)


@covers("FRAMEWORM_*")
def test_variables_win_over_the_file_and_options_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "training.epochs", 2)
    monkeypatch.setenv("FRAMEWORM_TRAINING_EPOCHS", "5")
    assert load_config(path).training.epochs == 5
    assert load_config(path, ["training.epochs=6"]).training.epochs == 6


@covers("unknown-key", "wrong-type", "impossible-combination")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: {epoch: 3}", ["training.epoch", "epochs"]),
        ("training: {epochs: many}", ["training.epochs"]),
        ("model: {d_model: 10, n_heads: 3}", ["n_heads", "d_model"]),
        ("parallel: {strategy: zero3, compression: int8}", ["compression", "zero3"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"name: x\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "2" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "ag_news_single_gpu",
        "ag_news_ddp_4gpu_20ep",
        "ag_news_single_gpu_optimized",
        "ag_news_ddp_4gpu_20ep_optimized",
        "imdb_single_gpu",
        "imdb_ddp_4gpu",
        "gpt2_124m",
    ],
)
def test_shipped_configs_load(name: str) -> None:
    load_config(SHIPPED / f"{name}.yaml")
