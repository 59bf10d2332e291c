"""Explains negative scaling (more devices, less speed): why it happens, and what would scale."""

from __future__ import annotations

import dataclasses
from typing import Any

from frameworm.records.estimate import OpenInterval
from frameworm.records.schema import ExpectedSpeedup, Finding, Remedy
from frameworm.scaling.enough_work import (
    LARGEST_FACTOR,
    LEAST_SPEEDUP,
    StepModel,
    describe_change,
    larger_model,
    model_step,
)
from frameworm.scaling.enough_work import Change as Change
from frameworm.scaling.enough_work import suggest_change as suggest_change
from frameworm.scaling.losses import Losses
from frameworm.scaling.network import bus_share
from frameworm.scaling.points import Point

SMALL_BATCH = 16  # samples per device; with fewer, a GPU waits for launches
SHORT_SEQUENCE = 256  # tokens
LARGE_GRADIENTS = 100e6  # bytes; such models are not small, so their network is slow
# A part of the loss is reported as a cause from this fraction of the whole loss on.
TOLD = 0.2
_TWIN_BATCH = 4
# Launches hardly matter for longer steps; and the factor above its ideal time from which a step is mostly launches.
_SHORT_STEP_S, _HARDLY_SHORTER = 0.05, 1.5
NO_CHANGE = f"; no batch up to {LARGEST_FACTOR} times as large is predicted to scale (modelled)"


def negative_scaling(
    base: Point, point: Point, speedup: OpenInterval, losses: Losses, serial: OpenInterval | None, change: Change | None
) -> Finding:
    """Build the finding for a world size that trains slower than its base.

    Args:
        base: The base.
        point: The larger world.
        speedup: Below 1.
        losses: Losses of `point`.
        serial: Amdahl's fraction over all world sizes.
        change: A change that is predicted to scale, if any.
    """
    assert speedup.value < 1.0, speedup
    model = model_step(base, point, speedup.value)
    causes = causes_of(base, point, losses, model)
    evidence: dict[str, Any] = {
        "cause": cause_in_words(base, point, model, causes, serial) + ("" if change is not None else NO_CHANGE),
        "causes": list(causes),
        "speedup": speedup.value,
        "world_size": point.world_size,
        "base_world_size": base.world_size,
        "base_step_s": model.base_step if model.in_seconds else None,
        "step_s": model.step if model.in_seconds else None,
        "compute_s": model.compute if model.in_seconds else None,
        "synchronisation_s": model.synchronisation if model.in_seconds else None,
        "synchronisation_basis": "measured" if model.measured else "modelled",
        "gradient_bytes": point.sent_bytes,
        "bus_bytes_per_s": _bus_bytes_per_s(point, model),
        "device_batch": point.device_batch,
        "base_device_batch": base.device_batch,
        "sequence_length": point.sequence_length,
        "parameters": point.parameters,
        "serial_fraction": None if serial is None else serial.value,
        "losses": losses.parts,
        "changed": None if change is None else dataclasses.asdict(change),
    }
    certain = speedup.value < 0.95 if speedup.high is None else speedup.high < 1.0
    expected = None
    if change is not None:
        expected = ExpectedSpeedup(change.gain, change.gain, change.gain_high, change.basis)
    return Finding(
        "negative_scaling",
        "critical" if certain else "warning",
        1.0 - speedup.value,
        evidence,
        _remedies(base, point, model, change),
        expected,
    )


def causes_of(base: Point, point: Point, losses: Losses, model: StepModel) -> dict[str, str]:
    """Return the causes of a world size's losses by name, each in words, the costliest first.

    If communication was not measured, everything that a step takes beyond its ideal compute counts as communication.
    """
    found: list[tuple[float, dict[str, str]]] = []
    if losses.stragglers is not None and _told(losses.stragglers, losses):
        text = f"ranks wait for the slowest one for {losses.stragglers:.0%} of the step"
        found.append((losses.stragglers, {"stragglers": text}))
    if losses.input is not None and _told(losses.input, losses):
        found.append((losses.input, {"input": f"batches come too late ({losses.input:.0%} of the step)"}))
    if model.shares_something and point.mean("compute_s") is not None and _told(losses.other, losses):
        if model.fewer_threads:
            text = (
                f"a process of the smaller world already computed on {base.threads} cores, each of these has "
                f"{point.threads}: they share {_shared(point)}"
            )
        else:
            text = (
                f"computing a part of the batch takes longer ({_time(model, model.compute)}) than the whole did "
                f"({_time(model, model.base_compute)}): the processes share {_shared(point)}"
            )
        found.append((losses.other, {"shared_device": text}))
    if losses.communication is None or _told(losses.communication, losses) or _told(losses.smaller_batch, losses):
        lost = losses.total if losses.communication is None else losses.communication + (losses.smaller_batch or 0.0)
        found.append((lost, _too_little_work(base, point, model)))
    if not found:
        return {"unexplained": "no phase explains it: the lost time is outside what was measured"}
    causes: dict[str, str] = {}
    for _, texts in sorted(found, key=lambda item: -item[0]):
        causes.update(texts)
    return causes


def _shared(point: Point) -> str:
    return f"{point.cpus} cores" if point.cpus else "a device or the host"


def _told(part: float | None, losses: Losses) -> bool:
    return part is not None and part >= TOLD * losses.total


def _too_little_work(base: Point, point: Point, model: StepModel) -> dict[str, str]:
    """Name what is small: compute per step is samples x tokens x parameters."""
    causes: dict[str, str] = {}
    sent = point.sent_bytes
    small_step = model.base_step < model.synchronisation
    if sent is not None and sent >= LARGE_GRADIENTS and small_step:
        causes["slow_network"] = f"network too slow for {_size(sent)} of gradients per step"
    elif small_step and point.parameters is not None:
        causes["model_too_small"] = (
            f"model too small ({_count(point.parameters)} parameters: a whole step on {_devices(base.world_size)} "
            f"takes {_time(model, model.base_step)}, synchronising it {_time(model, model.synchronisation)})"
        )
    batch, before = point.device_batch, base.device_batch
    if batch is not None and (batch <= SMALL_BATCH or (before is not None and batch < before)):
        of = f" of {point.global_batch}" if point.global_batch else ""
        causes["batch_too_small"] = f"batch too small ({batch} samples{of} per device and step)"
    length = point.sequence_length
    if length is not None and length <= SHORT_SEQUENCE:
        causes["sequences_too_short"] = f"sequences too short ({length} tokens)"
    if not causes:
        causes["slow_network"] = "network too slow for the compute between two synchronisations"
    return causes


def cause_in_words(
    base: Point, point: Point, model: StepModel, causes: dict[str, str], serial: OpenInterval | None
) -> str:
    """Explain in one paragraph: compute per step, gradient volume and bandwidth, then the causes."""
    sent, speed = point.sent_bytes, _bus_bytes_per_s(point, model)
    seen = "" if model.measured else "about "
    volume = "" if sent is None else f" of {_size(sent)} of gradients"
    rate = "" if speed is None else f" ({_size(speed)}/s on each link)"
    words = (
        f"{point.world_size} devices train at {model.ideal * model.growth * model.base_step / model.step:.2f} of the "
        f"speed of {base.world_size}: a step computes {_time(model, model.compute)} on each device and then waits "
        f"{seen}{_time(model, model.synchronisation)} for the synchronisation{volume}{rate}; "
    )
    words += "; ".join(causes.values())
    if serial is not None:
        if serial.value > 1:
            words += f"; Amdahl's law would need a serial part of {serial.value:.0%}, so no serial part alone does this"
        else:
            words += f"; serial part by Amdahl's law {serial.value:.0%}"
    return words


def _remedies(base: Point, point: Point, model: StepModel, change: Change | None) -> list[Remedy]:
    found = []
    if change is not None:
        knob, value = next(iter(change.settings.items()), ("", None))
        found.append(Remedy(knob, value, change.text))
    if point.launches_steps and _waits_for_launches(model):
        text = (
            f"replay the whole step, collectives included, as one CUDA graph: {point.device_batch} samples compute for "
            f"{_time(model, model.compute)} where a fair share of the larger batch takes "
            f"{_time(model, model.ideal * model.base_compute)}, so most of it waits for launches; only computing gets "
            "shorter by that, so try it on fewer devices too"
        )
        found.append(Remedy("gpu.capture", "step", text))
    if model.shares_something and point.mean("compute_s") is not None:
        found.append(
            Remedy("", None, f"give each process cores or a device of its own: now they share {_shared(point)}")
        )
    twin = larger_model(point)
    if twin is not None and point.global_batch is not None:
        settings, work, volume = twin
        settings["training.global_batch"] = _TWIN_BATCH * point.global_batch
        listed = ", ".join(f"{name} {value}" for name, value in settings.items())
        described = describe_change(model, point, settings, listed, batch=_TWIN_BATCH, work=work, volume=volume)
        if described.speedup >= LEAST_SPEEDUP:
            found.append(Remedy("model.d_model", settings["model.d_model"], described.text))
    found.append(Remedy("", None, f"train on {_devices(base.world_size)}: that was faster"))
    return found


def _waits_for_launches(model: StepModel) -> bool:
    """True if a step is short and a smaller batch hardly makes it shorter, so that the rest is the host's work."""
    fair = model.ideal * model.base_compute
    return model.in_seconds and model.compute < _SHORT_STEP_S and model.compute > _HARDLY_SHORTER * fair


def _bus_bytes_per_s(point: Point, model: StepModel) -> float | None:
    """Bandwidth of each link of a ring while the step waited for it; more data may have been sent while hidden."""
    total = point.mean("communication_s")
    seconds = total or (model.synchronisation if model.in_seconds else None)
    if not seconds or point.sent_bytes is None:
        return None
    return bus_share("all_reduce", point.world_size) * point.sent_bytes / seconds


def _time(model: StepModel, value: float) -> str:
    if not model.in_seconds:
        return f"{value:.2f} base steps"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _size(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _count(value: int) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e5 else f"{value:,}"


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"
