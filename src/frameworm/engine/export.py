"""Export a run for inference: its weights in one of several forms, or a compiled model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.config.checkpoint_section import prefers_higher
from frameworm.config.load import load_config_from_text, show_path
from frameworm.data.batches.sizes import TARGET_KEYS
from frameworm.data.prefetch import move_batch
from frameworm.engine.checkpoint.commit import figure_of
from frameworm.engine.checkpoint.load import (
    SavedState,
    StoredCheckpoint,
    check_same_model,
    list_checkpoints,
    load_newest,
)
from frameworm.engine.pretrained import Shape, write_pretrained, write_shaped
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.upload.fetch import Choose, run_with_checkpoint
from frameworm.engine.weight_formats import (
    MAX_SHARD_SIZE,
    Outgoing,
    parse_size,
    refuse_url,
    write_dcp,
    write_safetensors,
)
from frameworm.errors import CheckpointError, ModelError, RunFolderError
from frameworm.hardware.devices import choose_device
from frameworm.models.workloads import Workload
from frameworm.parallel.shards import StoredTensor, loaded
from frameworm.records.objects.place import is_url
from frameworm.records.objects.runs import age_of, local_copy
from frameworm.records.store import RunFolder
from frameworm.torch_private.compiler import compile_package

log = logging.getLogger("frameworm")
PICKLED = (".pt", ".pth", ".pkl", ".bin", ".ckpt")  # files that people would read with torch.load
WEIGHTS = ("auto", "ema", "trained")
TYPES = {
    **{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
    **{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    step: int
    tensors: int
    parameters: int
    size_bytes: int
    compiled: bool = False
    averaged: bool = False


def choose_checkpoint(
    folder: RunFolder, which: str, metric: str = "val_loss", highest: bool | None = None
) -> StoredCheckpoint:
    """Choose a checkpoint of a run.

    Args:
        folder: The run.
        which: `latest`, `best` (by `metric`, among those saved at the end of an epoch), or the number of a step.
        metric: The metric for `best`.
        highest: Whether higher is better; None to decide by its name or the run's config.

    Raises:
        CheckpointError: If there is none.
    """
    if which == "latest":
        newest = load_newest(folder.checkpoints, log.warning)
        if newest is None:
            raise CheckpointError(f"{folder.path} has no checkpoint yet")
        return newest[0]
    stored = {item.path.name: item for item in list_checkpoints(folder.checkpoints)}
    choose = _chooser(folder, str(folder.path), which, metric, highest)
    return stored[choose(list(stored), lambda name: figure_of(stored[name].path, metric))]


def _chooser(folder: RunFolder, shown: str, which: str, metric: str, highest: bool | None = None) -> Choose:
    """Return a function that chooses among checkpoint names like `choose_checkpoint`; messages call the run `shown`."""

    def choose(names: Sequence[str], figure: Callable[[str], float | None]) -> str:
        if which == "best":
            figures = [(found, name) for name in names if (found := figure(name)) is not None]
            if not figures:
                raise CheckpointError(
                    f"{shown} has no checkpoint from the end of an epoch with a {metric}: train with "
                    "checkpoint.keep_best=1, or export the latest"
                )
            reverse = _prefers_higher(folder, metric) if highest is None else highest
            figures.sort(key=lambda pair: pair[0], reverse=reverse)
            return figures[0][1]
        if not which.isdecimal():
            raise CheckpointError(f"--checkpoint takes latest, best or the number of a step, not {which}")
        of_step = [name for name in names if age_of(name)[0] == int(which)]
        if not of_step:
            steps = ", ".join(str(age_of(name)[0]) for name in names) or "none"
            raise CheckpointError(f"{shown} has no checkpoint of step {which}; there are: {steps}")
        return of_step[-1]

    return choose


def open_for_export(run: str | Path, which: str, metric: str) -> RunFolder:
    """Open a run with the wanted checkpoint; from a URL, both are copied first.

    Raises:
        RunFolderError: If there is no such run; also StorageError.
        CheckpointError: If it has no such checkpoint.
    """
    choose = None
    if which != "latest" and is_url(run):
        choose = _chooser(RunFolder(local_copy(str(run))), str(run), which, metric)
    return RunFolder.open(run_with_checkpoint(run, log.warning, metric, choose))


def chosen_weights(saved: SavedState, weights: str, where: str) -> tuple[dict[str, Any], bool]:
    """Return the model's state in a checkpoint with the chosen weights, and whether these are averaged.

    Args:
        saved: The checkpoint's state.
        weights: `trained`, `ema` (averaged by training.ema), or `auto` (averaged if the run has averages).
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: If it has no averages, or their names differ from the model's state.
    """
    if weights not in WEIGHTS:
        raise CheckpointError(f"--weights takes {', '.join(WEIGHTS)}, not {weights}")
    state: dict[str, Any] = saved.shared["model"]
    averages: dict[str, Any] = saved.shared.get("ema") or {}
    if weights == "trained" or (weights == "auto" and not averages):
        return state, False
    if not averages:
        raise CheckpointError(f"{where} has no averaged weights: train with training.ema, or use --weights trained")
    beside = saved.shared.get("loss") or {}
    unknown = [name for name in averages if name not in state and name not in beside]
    if unknown:
        raise CheckpointError(
            f"{where} averages {unknown[0]}, which the model's state does not name; use --weights trained"
        )
    # Tied weights have one average, under the first of their names.
    of = {id(state[name]): name for name in averages if name in state}
    return {name: averages.get(of.get(id(item), ""), item) for name, item in state.items()}, True


def _prefers_higher(folder: RunFolder, metric: str) -> bool:
    """Whether a higher value of the metric is better, by its name or the run's config."""
    if metric.endswith(("loss", "accuracy")):
        return prefers_higher(metric)
    config = load_config_from_text(folder.read_config(), show_path(folder.config))
    for section in (config.checkpoint, config.training.early_stop):
        if section is not None and section.metric == metric and section.better != "auto":
            return section.prefers_higher
    raise CheckpointError(
        f"{folder.path} does not say which values of {metric} are better: train with checkpoint.metric={metric} and "
        "checkpoint.better, or choose a checkpoint by its step"
    )


def export_weights(
    run: str | Path,
    out: str | Path,
    *,
    which: str = "latest",
    metric: str = "val_loss",
    dtype: str | None = None,
    weights: str = "auto",
    form: str = "safetensors",
    max_shard_size: str | int = MAX_SHARD_SIZE,
    workload: Workload | None = None,
    shape: Shape | None = None,
) -> Exported:
    """Write the weights and buffers of a run, by their names in the model.

    Args:
        run: Run folder, or URL of a run in object storage.
        out: The file, or a folder.
        which: As for `choose_checkpoint`.
        metric: As for `choose_checkpoint`.
        dtype: Of floating-point tensors; None to keep that of training.
        weights: As for `chosen_weights`.
        form: `safetensors`, `pretrained` or `dcp`; see `weight_formats`.
        max_shard_size: Largest size of one safetensors file.
        workload: For `pretrained`: the model that the run's config describes, which writes itself.
        shape: For `pretrained`: the layout of what that model writes, if the run has stored it.

    Raises:
        CheckpointError: If there is no such checkpoint.
        RunFolderError: If there is no such run, or the file cannot be written.
    """
    target = _free(out)
    shard_bytes = parse_size(max_shard_size)
    if target.suffix in PICKLED:
        raise RunFolderError(
            f"weights are written as safetensors, and a {target.suffix} file is taken for a pickle: give --out "
            f"{target.with_suffix('.safetensors')}"
        )
    folder = open_for_export(run, which, metric)
    stored = choose_checkpoint(folder, which, metric)
    saved = stored.read()
    state, averaged = chosen_weights(saved, weights, str(stored.path))
    outgoing = _outgoing(state, saved.shared["model"], None if dtype is None else TYPES[dtype])
    if form == "pretrained" and shape is not None:
        outgoing = shape.take(outgoing)
        size = write_shaped(target, shape, outgoing, shard_bytes)
    elif form == "pretrained":
        assert workload is not None
        check_same_model(state, workload.model, str(stored.path))
        tensors = outgoing.all()
        workload.model.load_state_dict(tensors, assign=True)
        # The model's own tensors under all their names, so that it recognizes tied weights.
        tensors = {name: item for name, item in workload.model.state_dict().items() if name in tensors}
        size = write_pretrained(
            target, workload.model, tensors, workload.processing_class, max_shard_size, is_own_state=True
        )
    elif form == "dcp":
        size = write_dcp(target, outgoing.all())
    else:
        about = {"format": "pt", "step": str(stored.step), "run": folder.run_name() or ""}
        about["weights"] = "ema" if averaged else "trained"
        size = write_safetensors(target, outgoing, about, shard_bytes)
    return Exported(str(target), stored.step, len(outgoing.about), outgoing.numbers, size, averaged=averaged)


def _outgoing(state: Mapping[str, Any], trained: Mapping[str, Any], kind: torch.dtype | None) -> Outgoing:
    """Prepare a checkpoint's tensors for writing; each is read only when it is written."""
    about: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, item in state.items():
        if isinstance(item, StoredTensor) and isinstance(trained[name], StoredTensor):
            own = trained[name].dtype  # half-precision weights have averages in float32
            about[name] = item.shape, kind if kind is not None and own.is_floating_point else own
    read: dict[int, torch.Tensor] = {}
    places = [id(state[name]) for name in about]

    def tensor(name: str) -> torch.Tensor:
        item = state[name]
        if places.count(id(item)) == 1:
            return item.read().to(about[name][1])  # type: ignore[no-any-return]
        if id(item) not in read:  # tied weights stay tied in memory; a file holds a copy for each name
            read[id(item)] = item.read().to(about[name][1])
        return read[id(item)]

    return Outgoing(about, tensor)


def export_compiled(
    run: str | Path,
    out: str | Path,
    workload: Workload,
    batch: Any,
    *,
    which: str = "latest",
    metric: str = "val_loss",
    device: str = "auto",
    weights: str = "auto",
) -> Exported:
    """Compile the trained model ahead of time (torch.export, AOTInductor) into a package that runs without its code.

    Args:
        run: Run folder, or URL of a run in object storage.
        out: The package, a name that ends in .pt2.
        workload: The model that the run's config describes, and its loss.
        batch: A batch of its data, for the shapes to compile for; dimensions are dynamic where possible.
        which: As for `choose_checkpoint`.
        metric: As for `choose_checkpoint`.
        device: The device that the package will run on.
        weights: As for `chosen_weights`.

    Raises:
        ModelError: If the model cannot be exported or compiled here.
        CheckpointError: If there is no such checkpoint, or it belongs to another model.
    """
    target = _free(out)
    if target.suffix != ".pt2":
        raise RunFolderError(f"a compiled model is a .pt2 package: give --out {target.with_suffix('.pt2')}")
    stored = choose_checkpoint(open_for_export(run, which, metric), which, metric)
    state, averaged = chosen_weights(stored.read(), weights, str(stored.path))
    check_same_model(state, workload.model, str(stored.path))
    workload.model.load_state_dict(loaded(state))
    place = choose_device(device, 0, None)  # type: ignore[arg-type]
    model = workload.model.to(place).eval()
    arguments = _call_of(model, batch, workload, place)
    dynamic = {
        name: [torch.export.Dim.AUTO] * value.ndim if isinstance(value, torch.Tensor) else None
        for name, value in arguments.items()
    }
    try:
        with torch.no_grad():
            program = torch.export.export(model, (), arguments, dynamic_shapes=dynamic)
            target.parent.mkdir(parents=True, exist_ok=True)
            compile_package(program, str(target))
    except Exception as error:  # torch has no common base for these errors
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"torch {torch.__version__} cannot compile {type(model).__name__} ahead of time ({type(error).__name__}: "
            f"{reason}); export the weights instead (without --compiled)"
        ) from error
    count = sum(item.numel() for item in model.parameters())
    return Exported(
        str(target), stored.step, len(state), count, target.stat().st_size, compiled=True, averaged=averaged
    )


def _free(out: str | Path) -> Path:
    target = Path(out)
    refuse_url(target)
    if target.exists():
        raise RunFolderError(f"{target} exists; give another --out or remove it")
    return target


def _call_of(model: nn.Module, batch: Any, workload: Workload, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a forward call for a batch, without the target."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = model.register_forward_pre_hook(
        lambda _, positional, named: calls.append((positional, named)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            LossFunction(model, workload.loss_fn)(model, move_batch(batch, device))
    finally:
        handle.remove()
    positional, named = calls[0]
    bound = inspect.signature(model.forward).bind(*positional, **named)
    return {name: value for name, value in bound.arguments.items() if name not in TARGET_KEYS and value is not None}
