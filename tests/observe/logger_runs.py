"""A training that fails and is resumed, told to one tracker; run as a script, because trackers leave threads behind.

`python logger_runs.py TRACKER FOLDER` prints what the tracker has of it: the steps of the loss in order, the ids, the
learning rate in the config, the names of all values, the epochs' accuracies and the status.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Callback, Trainer
from frameworm.records.schema import StepRecord

STEPS_PER_EPOCH = 4
FAILS_AFTER = 6
SAVED_AFTER = 4


class Fail(Callback):
    """Fails two steps after the checkpoint, so that two steps are taken and logged again."""

    def on_step(self, step: StepRecord) -> None:
        if step.step == FAILS_AFTER:
            raise RuntimeError("power cut")


def train(folder: Path, *, fails: bool, **settings: Any) -> Trainer:
    """Train two epochs, or fail in the second; without `fails` a run that the folder holds is resumed."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4 * STEPS_PER_EPOCH, 6), torch.randint(3, (4 * STEPS_PER_EPOCH,)))
    model = nn.Linear(6, 3)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.125),
        callbacks=[Fail()] if fails else [],
        run_dir=folder / "run",
        device="cpu",
        name="lab",
        clip_norm=1.0,
        checkpoint={"every_steps": SAVED_AFTER, "mode": "sync"},
        log_interval_s=0,
        **settings,
    )
    try:
        trainer.train(DataLoader(data, 4), DataLoader(data, 8), epochs=2, resume=None if fails else "auto")
    except RuntimeError:
        assert fails
    return trainer


def twice(tracker: str, folder: Path, **options: Any) -> list[str | None]:
    """The run, failed and resumed; returns the tracker's id after each."""
    ids = []
    for fails in (True, False):
        train(folder, fails=fails, loggers=[tracker], **{tracker: options} if options else {})
        path = folder / "run" / "loggers.json"
        ids.append(json.loads(path.read_text()).get(tracker) if path.exists() else None)
    return ids


def run_wandb(folder: Path) -> dict[str, Any]:
    ids = twice("wandb", folder, offline=True, project="tests")
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    rows: list[dict[str, Any]] = []
    for record in records:
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({**items, "_step": record.history.step.num})
    runs = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    return {
        "ids": ids,
        "stored_ids": [run.run_id for run in runs],
        "project": runs[0].project,
        "steps": [row["_step"] for row in rows if "train/loss" in row],
        "config": config["observe"]["loggers"],
        "names": sorted({name for row in rows for name in row}),
        "epochs": [row["epoch"] for row in rows if "epoch/val_accuracy" in row],
        "status": [record.exit.exit_code for record in records if record.HasField("exit")],
    }


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: blocks of 32 KiB with records, or parts of them, as LevelDB's logs have them."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def run_mlflow(folder: Path) -> dict[str, Any]:
    import mlflow

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    ids = twice("mlflow", folder, uri=uri)
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    (run,) = found
    return {
        "ids": ids,
        "stored_ids": [item.info.run_id for item in found],
        "steps": [item.step for item in client.get_metric_history(run.info.run_id, "train/loss")],
        "config": json.loads(run.data.params["observe.loggers"].replace("'", '"')),
        "names": sorted(run.data.metrics),
        "epochs": [item.value for item in client.get_metric_history(run.info.run_id, "epoch")],
        "status": [run.info.status],
    }


def run_trackio(folder: Path) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    ids = twice("trackio", folder, project="tests")
    runs = SQLiteStorage.get_runs("tests")
    rows = SQLiteStorage.get_logs("tests", runs[0])
    return {
        "ids": ids,
        "stored_ids": runs,
        "steps": [row["step"] for row in rows if "train/loss" in row],
        "config": SQLiteStorage.get_run_config("tests", runs[0])["observe"]["loggers"],
        "names": sorted({name for row in rows for name in row}),
        "epochs": [row["epoch"] for row in rows if "epoch/val_accuracy" in row],
        "status": [row["summary/status"] for row in rows if "summary/status" in row],
    }


TRACKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "wandb": run_wandb,
    "mlflow": run_mlflow,
    "trackio": run_trackio,
}

if __name__ == "__main__":
    print(json.dumps(TRACKERS[sys.argv[1]](Path(sys.argv[2]))))
