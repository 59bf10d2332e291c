"""What is trained: the models of the shipped fast configs, on real data if given, else on generated data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworm.config.load import dump_config, load_config_from_mapping
from frameworm.records.atomic import write_atomic

_CHECKPOINTS: Mapping[str, Any] = {"every_steps": 10_000, "keep": 1, "mode": "async"}
_TEXT_BYTES = 2**22


@dataclass(frozen=True)
class Training:
    """One config of the verification.

    Attributes:
        name: Its name.
        config: The config file.
        global_batch: Divides evenly among up to 16 ranks.
        steps: Steps of a timed run; the first ones warm up, compile and capture.
        data: Where its samples come from, as text.
    """

    name: str
    config: Path
    global_batch: int
    steps: int
    data: str


def write_trainings(folder: Path, data: Path | None, *, on_cpu: bool) -> list[Training]:
    """Write the configs, and a text for the language model, into a folder.

    Args:
        folder: The folder.
        data: Holds ag_news and imdb; if one of them is missing, texts are generated.
        on_cpu: Use small models without compiling, to try out the verification itself.
    """
    found = []
    shapes = {"ag_news": (128, 4, 2, 256, 128), "imdb": (256, 8, 4, 1024, 512)}
    for name, (width, heads, layers, inner, length) in list(shapes.items())[: 1 if on_cpu else None]:
        own = None if data is None else data / name
        real = own is not None and own.is_dir()
        model = {"d_model": width, "n_heads": heads, "num_layers": layers, "dim_feedforward": inner, "dropout": 0.1}
        content: dict[str, Any] = {
            "workload": "text_classifier",
            "model": {**model, "max_seq_len": length},
            "data": {"dataset": name, "root": str(own)} if real else {"dataset": "generated"},
            "training": {"global_batch": 64, "lr": 3.0e-4, "schedule": "onecycle"},
        }
        content["data"]["batching"] = "packed"
        found.append(_write(folder, name, content, 400, "its own texts" if real else "generated texts", on_cpu))
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    write_atomic(text / "text.txt", _words(_TEXT_BYTES // (16 if on_cpu else 1)))
    content = {
        "workload": "gpt",
        "model": {
            "d_model": 768,
            "n_heads": 12,
            "num_layers": 12,
            "max_seq_len": 1024,
            "dropout": 0.0,
            "residual": "half",
            "vocab_size": 50304,
        },
        "data": {"dataset": "text", "root": str(text), "tokenizer": "bytes"},
        "training": {"global_batch": 128, "micro_batch": 16, "lr": 6.0e-4, "schedule": "cosine", "warmup": 0.02},
    }
    found.append(_write(folder, "gpt2_124m", content, 30, "random words", on_cpu))
    return found


def _write(folder: Path, name: str, content: dict[str, Any], steps: int, data: str, on_cpu: bool) -> Training:
    content = {
        "name": name,
        "seed": 0,
        "checkpoint": dict(_CHECKPOINTS),
        "gpu": {"mixed_precision": "auto", "compile_model": not on_cpu, "device": "cpu" if on_cpu else "cuda"},
        "observe": {"progress": False},
        **content,
    }
    content["training"] |= {"optimizer": "adamw", "clip_norm": 1.0, "epochs": 1000, "max_steps": steps}
    if on_cpu:
        content["model"] |= {"d_model": 32, "n_heads": 2, "num_layers": 1, "max_seq_len": 32}
        content["model"].pop("residual", None)
        content["training"] |= {"global_batch": 16, "micro_batch": "auto"}
        if name.startswith("gpt"):
            content["model"]["vocab_size"] = "auto"
        content["training"]["max_steps"] = steps = 30
    config = load_config_from_mapping(content)
    path = folder / f"{name}.yaml"
    write_atomic(path, dump_config(config))
    return Training(name, path, content["training"]["global_batch"], steps, data)


def _words(size: int) -> str:
    """Random words with unequal probabilities, so that there is something to learn."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    return " ".join(draw.choices(words, weights, k=size // 7))
