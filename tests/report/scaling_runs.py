"""Folders of runs as trainings on several world sizes leave them, with times that are known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from frameworm.records.schema import (
    Batch,
    Communication,
    EpochRecord,
    Phase,
    Quality,
    RunRecord,
    Statistics,
    Throughput,
)
from frameworm.records.store import RunFolder

SAMPLES = 24_000
# What was published of two models on one and four GPUs: seconds of an epoch.
PUBLISHED = {"imdb": {1: 100.0, 4: 100.0 / 3.49}, "ag_news": {1: 46.0, 4: 100.0}}
MODELS: dict[str, dict[str, Any]] = {
    "imdb": {"d_model": 256, "n_heads": 8, "num_layers": 4, "dim_feedforward": 1024, "max_seq_len": 512},
    "ag_news": {"d_model": 128, "n_heads": 4, "num_layers": 2, "dim_feedforward": 256, "max_seq_len": 128},
}


def store_run(
    path: Path,
    dataset: str,
    world_size: int,
    epoch_times_s: list[float],
    *,
    name: str | None = None,
    global_batch: int = 32,
    accuracy: float | None = 0.9,
    status: str = "completed",
    exposed: float = 0.0,
    settings: dict[str, dict[str, Any]] | None = None,
) -> RunFolder:
    """One run; its accuracy grows by a hundredth from epoch to epoch up to `accuracy`.

    Args:
        exposed: Share of the step in which it waits for communication.
    """
    path.mkdir(parents=True)
    folder = RunFolder(path)
    name = name or f"{dataset}_{'single_gpu' if world_size == 1 else f'ddp_{world_size}gpu'}"
    config: dict[str, Any] = {
        "name": name,
        "workload": "text_classifier",
        "model": MODELS.get(dataset, MODELS["ag_news"]),
        "data": {"dataset": dataset, "batching": "padded"},
        "training": {"global_batch": global_batch, "optimizer": "adamw"},
        "gpu": {"mixed_precision": "bf16"},
        "parallel": {"strategy": "single" if world_size == 1 else "ddp"},
    }
    for section, values in (settings or {}).items():
        config[section] = {**config.get(section, {}), **values}
    folder.write_config(yaml.safe_dump(config))
    last = len(epoch_times_s)
    epochs = [
        EpochRecord(
            epoch,
            time_s,
            1.0 / epoch,
            1.1 / epoch,
            None if accuracy is None else accuracy - 0.01 * (last - epoch),
            SAMPLES / time_s,
        )
        for epoch, time_s in enumerate(epoch_times_s, start=1)
    ]
    step_s = (epoch_times_s[-1] if epoch_times_s else 1.0) * global_batch / SAMPLES
    waits = exposed * step_s
    record = RunRecord(
        name,
        status,
        {"device": "NVIDIA H200", "torch": "2.13.0"},
        Batch(global_batch // world_size, 1, world_size, global_batch),
    )
    record.device, record.strategy, record.precision = "cuda:0", config["parallel"]["strategy"], "bf16"
    record.parameters = 3_400_000
    record.throughput = Throughput(
        SAMPLES / (step_s * SAMPLES / global_batch), None, Statistics(step_s, 0, step_s, step_s, step_s, step_s, step_s)
    )
    record.phases = {
        "forward": Phase((step_s - waits) / 3, 0.3),
        "backward": Phase((step_s - waits) * 2 / 3, 0.6),
        "communication_exposed": Phase(waits, waits / step_s),
    }
    record.communication = Communication(waits, waits, 4 * record.parameters, 0.0)
    record.epochs = epochs
    if epochs:
        record.quality = Quality(epochs[-1].train_loss, epochs[-1].val_loss, epochs[-1].val_accuracy)
    folder.write_summary(record)
    folder.write_epochs(epochs)
    return folder


def store_published(root: Path, repeats: int = 1) -> None:
    """The two published cases; a slow first epoch, then three that scatter by a percent."""
    for dataset, times in PUBLISHED.items():
        for world_size, time_s in times.items():
            for repeat in range(repeats):
                factor = 1 + 0.004 * (repeat - (repeats - 1) / 2)
                epochs = [3 * time_s, *(time_s * factor * share for share in (0.99, 1.0, 1.01))]
                lost = 1 - times[1] / world_size / time_s
                folder = root / dataset / f"world{world_size}-{repeat}"
                store_run(folder, dataset, world_size, epochs, exposed=0.9 * lost)
