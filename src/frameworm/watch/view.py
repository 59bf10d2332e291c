"""One run as the page shows it: values and findings as in the report, checkpoints, events and logs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frameworm.records.schema import RunRecord, json_ready
from frameworm.report.kit import tables
from frameworm.report.run.charts import outliers
from frameworm.report.run.network_text import communication_text
from frameworm.watch.catalogue import RUNNING, Catalogue, model_of
from frameworm.watch.files import Inside
from frameworm.watch.run import Event, WatchedRun

LOG_BYTES = 2**15
MOST_LOGS = 64
MOST_CHECKPOINTS = 50
_MOST_EVENTS = 100
_LOG_NAME = re.compile(r".+\.(log|out|err)|(stdout|stderr)(\..+)?")
_CHECKPOINT_NAME = re.compile(r"step-(\d{1,18})")


def head_of(catalogue: Catalogue, run_id: str) -> dict[str, Any] | None:
    """The result of `head` for a run of a catalogue; None if there is no such run (any more)."""
    run, found = catalogue.find(run_id), catalogue.record(run_id)
    if run is None or found is None:
        return None
    status, record = found
    with run.lock:
        return head(run_id, catalogue.name_of(run_id), status, record, run)


def head(run_id: str, name: str, status: str, record: RunRecord, run: WatchedRun) -> dict[str, Any]:
    """Everything about a run except its curves, as JSON-ready data."""
    first = run.first()
    latest = None if first is None else first.latest
    saved = checkpoints(run.folder.path)
    found = {
        "id": run_id,
        "name": name,
        "title": tables.plain(record.name),
        "status": status,
        "version": run.version,
        "progress": round(run.progress(), 3),
        "about": [part for part in _about(record) if part],
        "figures": _figures(status, record, latest),
        "verdict": (tables.verdict_text(record) or "").replace("_", " "),
        "findings": [
            {
                "code": row.code,
                "severity": row.severity,
                "share": "" if row.share == tables.UNKNOWN else row.share,
                "evidence": row.evidence,
                "remedies": row.remedies,
                "expected": row.expected,
            }
            for row in tables.finding_rows(record)
        ],
        "notes": [tables.plain(note) for note in record.notes],
        "facts": _facts(record),
        "epochs": {"header": tables.EPOCH_HEADER, "rows": tables.epoch_rows(record.epochs)},
        "validation": _validation(record, run),
        "flops": _flops(record),
        "ranks": len(run.ranks),
        "steps": record.steps if latest is None else max(record.steps, latest.step),
        "time": None if latest is None else latest.time,
        "checkpoints": saved,
        "events": [_event(event) for event in _events(record, run, saved)],
        "logs": [path.name for path in log_files(run.folder.path)],
    }
    return dict(json_ready(found))


def _about(record: RunRecord) -> list[str | None]:
    model = model_of(record)
    parts = tables.title_parts(record)[2:]
    world = record.batch.world_size
    return [None if model is None else tables.plain(model), *parts, f"{world} ranks" if world > 1 else None]


def _figures(status: str, record: RunRecord, latest: Any) -> list[dict[str, str]]:
    figures = [*tables.run_figures(record), *tables.quality_figures(record), *tables.speed_figures(record)]
    if status == RUNNING and latest is not None:
        figures = [item for item in figures if item.label != "train loss"]
        figures.insert(1, tables.Figure("loss now", tables.number(latest.loss)))
        if latest.lr is not None:
            figures.append(tables.Figure("learning rate", tables.number(latest.lr)))
    memory = record.memory
    if memory.peak_bytes is not None:
        figures.append(tables.Figure("peak memory", tables.data_size(memory.peak_bytes)))
    return [{"label": item.label, "value": item.value} for item in figures if item.value != tables.UNKNOWN]


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [("batch", tables.batch_text(record.batch))]
    if record.memory.peak_bytes is not None:
        facts.append(("memory", tables.memory_text(record)))
    communication = communication_text(record)
    if communication is not None:
        facts.append(("communication", communication))
    if record.checkpoint.count:
        facts.append(("checkpoints", tables.checkpoint_text(record)))
    graded = [row for row in tables.target_rows(record) if row.value != tables.UNKNOWN]
    facts += [(f"target: {row.name}", f"{row.goal}, {row.grade} ({row.value})") for row in graded]
    return facts


def _validation(record: RunRecord, run: WatchedRun) -> list[dict[str, Any]]:
    """Validations at the last steps of their epochs, as far as these are known."""
    first = run.first()
    ends = {} if first is None else first.epoch_ends
    return [
        {"step": ends[epoch.epoch], "loss": epoch.val_loss, "accuracy": epoch.val_accuracy}
        for epoch in record.epochs
        if epoch.epoch in ends and (epoch.val_loss is not None or epoch.val_accuracy is not None)
    ]


def _flops(record: RunRecord) -> dict[str, Any] | None:
    """What is needed to compute MFU: the device's peak, and FLOPs by the content of a step or of the mean step."""
    flops = record.flops
    if flops is None or not flops.per_step or not flops.peak_per_s:
        return None
    model = None if flops.model is None else asdict(flops.model)
    return {"per_step": flops.per_step, "peak_per_s": flops.peak_per_s, "model": model}


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The durable checkpoints, newest first, with size and the time each was completed."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder / "checkpoints") as entries:
        for entry in entries:
            match = _CHECKPOINT_NAME.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    written = os.lstat(Path(entry.path, "manifest.json")).st_mtime
                    found.append((int(match[1]), written, Path(entry.path)))
    newest = sorted(found, reverse=True)[:MOST_CHECKPOINTS]
    return [{"step": step, "time": written, "size": tables.data_size(_size(path))} for step, written, path in newest]


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            size += entry.stat(follow_symlinks=False).st_size
    return size


def _events(record: RunRecord, run: WatchedRun, saved: list[dict[str, Any]]) -> list[Event]:
    """Events, newest first: noticed in the steps, slow steps, checkpoints, throttling."""
    found = list(run.events)
    times = {step.step: step.time for step in record.slow_steps}
    for item in outliers(record):
        text = f"took {tables.seconds(item.step_s)}: {item.causes}"
        found.append(Event(times.get(item.step), item.step, "slow", text))
    for one in saved:
        found.append(Event(one["time"], one["step"], "checkpoint", f"checkpoint written, {one['size']}"))
    for rank, index in sorted(run.system.items()):
        if index.latest is not None and index.latest.throttle_reasons:
            reasons = ", ".join(tables.plain(reason) for reason in index.latest.throttle_reasons)
            found.append(Event(index.latest.time, None, "throttled", f"GPU of rank {rank} is throttled: {reasons}"))
    return sorted(found, key=lambda event: (event.time or 0.0, event.step or 0), reverse=True)[:_MOST_EVENTS]


def _event(event: Event) -> dict[str, Any]:
    return {"time": event.time, "step": event.step, "kind": event.kind, "text": event.text}


def log_files(folder: Path) -> list[Path]:
    """Logs of a run: in its folder, in `logs/` there, and next to it under its name."""
    return list(_find_logs(folder))[:MOST_LOGS]


def _find_logs(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / "logs"):
        with contextlib.suppress(OSError):
            for path in sorted(place.iterdir()):
                if _LOG_NAME.fullmatch(path.name) and path.is_file():
                    yield path
    beside = folder.with_name(folder.name + ".log")
    if beside.is_file():
        yield beside


def log_tail(run: WatchedRun, inside: Inside, name: str) -> str | None:
    """The end of one of the run's logs by its name; None if there is none, or it is outside the folder."""
    for path in log_files(run.folder.path):
        if path.name == name:
            with contextlib.suppress(OSError):
                return inside.tail(path, LOG_BYTES)
    return None
