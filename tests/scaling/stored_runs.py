"""Run folders as the engine would have left them, from a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from frameworm.records.observations import Statistics
from frameworm.records.schema import Batch, Communication, EpochRecord, Phase, Quality, RunRecord, Throughput
from frameworm.records.store import RunFolder

SMALL_MODEL = {"d_model": 128, "n_heads": 4, "num_layers": 2, "dim_feedforward": 256, "max_seq_len": 128}
IMDB_MODEL = {"d_model": 256, "n_heads": 8, "num_layers": 4, "dim_feedforward": 1024, "max_seq_len": 512}


def store_run(
    path: Path,
    *,
    world_size: int = 1,
    epoch_s: float = 100.0,
    epochs: int = 3,
    first_epoch_s: float | None = None,
    samples: int = 120_000,
    global_batch: int = 32,
    dataset: str = "ag_news",
    name: str = "ag_news_single_gpu",
    status: str = "completed",
    model: dict[str, Any] | None = None,
    parameters: int | None = 4_200_000,
    compute_s: float | None = None,
    exposed_s: float | None = None,
    config: dict[str, dict[str, Any]] | None = None,
    device: str = "NVIDIA A100",
) -> RunFolder:
    """Store a run whose epochs take `epoch_s`, but for the first."""
    folder = RunFolder.create(path, name)
    step_s = epoch_s / (samples / global_batch)
    records = [
        EpochRecord(
            number,
            (first_epoch_s or 2 * epoch_s) if number == 1 else epoch_s,
            0.5,
            0.6,
            0.9,
            samples / ((first_epoch_s or 2 * epoch_s) if number == 1 else epoch_s),
        )
        for number in range(1, epochs + 1)
    ]
    phases = {}
    if compute_s is not None:
        exposed = exposed_s or 0.0
        parts = {"data_wait": 0.0, "forward": compute_s / 3, "backward": compute_s * 2 / 3}
        parts["communication_exposed"] = exposed
        phases = {key: Phase(value, value / step_s) for key, value in parts.items()}
    values: dict[str, Any] = {
        "name": name,
        "workload": "text_classifier",
        "model": SMALL_MODEL if model is None else model,
        "data": {"dataset": dataset},
        "gpu": {"mixed_precision": "bf16"},
        "parallel": {"strategy": "single" if world_size == 1 else "ddp", "compression": "off"},
    }
    for section, changes in (config or {}).items():
        values[section] = {**values.get(section, {}), **changes}
    folder.write_config(yaml.safe_dump(values))
    folder.write_epochs(records)
    folder.write_summary(
        RunRecord(
            name=name,
            status=status,
            environment={"device": device, "torch": "2.13.0"},
            batch=Batch(global_batch // world_size, 1, world_size, global_batch),
            steps=epochs * samples // global_batch,
            device=device,
            parameters=parameters,
            precision="bf16",
            throughput=Throughput(
                samples / epoch_s, None, Statistics(step_s, 0.0, step_s, step_s, step_s, step_s, step_s)
            ),
            phases=phases,
            communication=Communication(exposed_s, exposed_s, rank_wait_s=0.0 if exposed_s is not None else None),
            quality=Quality(0.5, 0.6, 0.9),
            epochs=records,
        )
    )
    return folder
