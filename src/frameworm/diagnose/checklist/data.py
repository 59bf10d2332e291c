"""Checklist items for the input pipeline."""

from __future__ import annotations

from frameworm.config.schema import CustomModelConfig, GPTModelConfig
from frameworm.diagnose.checklist.known_gains import batching_gain, unmeasured
from frameworm.diagnose.checklist.subject import Subject, no_matter
from frameworm.records.machine import ChecklistItem


def data_items(subject: Subject) -> list[ChecklistItem]:
    """Return the items on padding, on where the data is kept, and on who prepares batches."""
    return [item(subject) for item in (_batching, _resident, _workers, _pinning)]


def _batching(subject: Subject) -> ChecklistItem:
    name, data, model = "no padding", subject.resolved.data, subject.resolved.model
    if isinstance(model, GPTModelConfig):
        return no_matter(name, "every gpt sample fills the context: there is no padding")
    if data.batching != "padded":
        return ChecklistItem(name, "done", f"data.batching: {data.batching}", finding="padding_waste")
    if isinstance(model, CustomModelConfig):
        reason = "whether samples of your own have lengths is known when they are built; padding_waste in a run tells"
        return no_matter(name, reason)
    if not data.shuffle:
        return no_matter(name, "data.shuffle is off, and other batching takes other samples per step")
    best = "packed" if subject.on_gpu else "bucketed"
    batch = subject.resolved.training.global_batch or 0
    gain = batching_gain(data.dataset, model.max_seq_len, batch, best)
    reason = "each batch is as wide as its longest text"
    if best == "bucketed":
        reason += "; tune also tries packed, which keeps each step's samples"
    return ChecklistItem(name, "not done", reason, (f"data.batching={best}",), gain, "batching", "padding_waste")


def _resident(subject: Subject) -> ChecklistItem:
    name, data, model = "data kept on the GPU", subject.resolved.data, subject.resolved.model
    if not subject.on_gpu:
        return no_matter(name, "there is no GPU to keep it on")
    if data.batching != "packed" and data.resident is not True:
        if isinstance(model, CustomModelConfig):
            reason = "whether samples of your own are tensors of one shape is known when they are built; tune tries it"
            return no_matter(name, reason)
        return no_matter(name, "texts of unequal length have to be packed for that (data.batching: packed)")
    if data.resident is False:
        settings = ("data.resident=auto",)
        return ChecklistItem(
            name, "not done", "switched off", settings, unmeasured("resident"), "resident", "transfer_bound"
        )
    return ChecklistItem(name, "done", f"data.resident: {str(data.resident).lower()}, if it fits")


def _workers(subject: Subject) -> ChecklistItem:
    name, workers = "loader processes", subject.resolved.data.num_workers
    usable = subject.facts.cpus_usable
    most = None if usable is None else max(0, usable // subject.intent.processes - 1)
    own = isinstance(subject.resolved.model, CustomModelConfig)
    if isinstance(workers, str):
        return ChecklistItem(name, "done", f"data.num_workers: {workers}", finding="input_bound")
    if most is not None and workers > max(1, 2 * most):
        reason = f"{workers} for each rank, and the cores allow {most}"
        settings = (f"data.num_workers={most}",)
        return ChecklistItem(name, "not done", reason, settings, unmeasured("workers"), "workers", "cpu_oversubscribed")
    if workers == 0 and not own:
        return ChecklistItem(name, "done", "none: built-in text data makes whole batches without them")
    if workers == 0 and most:
        reason = "the loop prepares its batches itself, and the step waits meanwhile"
        settings = ("data.num_workers=measure",)
        return ChecklistItem(name, "not done", reason, settings, unmeasured("workers"), "workers", "input_bound")
    return ChecklistItem(name, "done", f"{workers}" if workers else "none: there is no core for one")


def _pinning(subject: Subject) -> ChecklistItem:
    name = "pinned batches"
    if not subject.on_gpu:
        return no_matter(name, "a CPU copies nothing to a device")
    if subject.resolved.data.pin_memory:
        return ChecklistItem(name, "done", "the GPU fetches batches beside computing")
    settings = ("data.pin_memory=auto",)
    return ChecklistItem(
        name, "not done", "copies keep the host busy", settings, unmeasured("pinning"), "pinning", "transfer_bound"
    )
