"""Run a config: the entry point for the command line, trials and sweeps."""

from __future__ import annotations

import functools
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from frameworm.config.checks import HUB_PREFIX, check_buildable
from frameworm.config.load import load_config_from_text, show_path
from frameworm.config.resolve import growing_batch_note
from frameworm.config.schema import Config
from frameworm.data.prefetch import CudaDataLoader
from frameworm.engine.checkpoint.load import check_same_model, load_newest
from frameworm.engine.export import Exported, chosen_weights, export_compiled, export_weights, open_for_export
from frameworm.engine.faults.out_of_memory import Advise, planned_advice
from frameworm.engine.gate import Gate
from frameworm.engine.job import Ingredients, build_job
from frameworm.engine.model.loss_parts import find_beside
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.engine.optim.schedule import AnySchedule, schedule_of
from frameworm.engine.pretrained import kept_shape, saves_itself
from frameworm.engine.session import run_job
from frameworm.engine.step.evaluation import Evaluation, evaluate
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.metrics import Metrics, check_metrics
from frameworm.engine.weight_formats import SAFETENSORS
from frameworm.errors import CheckpointError, ConfigError, DataError
from frameworm.hardware.devices import choose_device
from frameworm.hardware.resolve import resolve_here
from frameworm.launch.environment import detect, reported_by_launcher
from frameworm.launch.process_group import setup_ddp
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import TokenisingNotice, Workload, build_workload
from frameworm.observe.loggers.protocol import Logger
from frameworm.parallel.shards import loaded
from frameworm.parallel.strategy import Strategy
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")


def run(
    config: Config,
    *,
    out: str | Path | None = "auto",
    resume: str | Path | None = None,
    callbacks: Sequence[Listener] = (),
    loggers: Sequence[Logger] = (),
) -> RunRecord:
    """Train what a config describes, alone or as one of several processes, depending on the environment.

    Args:
        config: The config; its `auto` values are decided here.
        out: The run folder; `auto` for runs/<name>-<time>, None for none, or a URL to upload the run to.
        resume: As for `Trainer.train`.
        callbacks: Listeners in addition to those that the config asks for.
        loggers: Your own trackers in addition to those that the config names.
    """
    process = setup_ddp() if dist.is_initialized() else detect()
    note = growing_batch_note(config.training, process.world_size)
    # Our launcher has already checked the batch as strictly as needed.
    config = resolve_here(config, process.world_size, resized=resume is not None or reported_by_launcher())
    advise = functools.partial(planned_advice, config, process.world_size)
    workload = build_workload(config, TokenisingNotice())
    notes = [note] if note else []
    return train_workload(
        config, workload, out=out, resume=resume, callbacks=callbacks, loggers=loggers, advise=advise, notes=notes
    )


def train_workload(
    config: Config,
    workload: Workload,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence[Listener] = (),
    loggers: Sequence[Logger] = (),
    advise: Advise | None = None,
    gate: Gate | None = None,
    notes: Sequence[str] = (),
) -> RunRecord:
    """Train a workload by a resolved config; other arguments as for `run`.

    Args:
        config: The resolved config.
        workload: Model and data.
        out: As for `run`, but None by default.
        resume: As for `run`.
        callbacks: As for `run`.
        loggers: As for `run`.
        advise: Finds settings that fit when memory runs out; None to skip the search.
        gate: Called before every step.
        notes: Logged at the start and repeated in the summary.
    """
    beside = find_beside(workload.model, workload.loss_fn)
    optimizer = build_optimizer(workload.model, config, beside.parameters.values())
    training = config.training

    def make_schedule(total_steps: int | None) -> AnySchedule:
        if training.schedule_every == "epoch":
            raise ConfigError("training.schedule_every: training.schedule sets the rate of every step; leave it out")
        return schedule_of(optimizer, training, total_steps)

    loader = build_loader(config, workload, workload.train_data, evaluation=False)
    validation = None
    if workload.val_data is not None:
        validation = build_loader(config, workload, workload.val_data, evaluation=True)
    given = Ingredients(
        workload.model,
        optimizer,
        workload.loss_fn,
        make_schedule,
        loader,
        validation,
        callbacks=list(callbacks),
        loggers=list(loggers),
        run_dir=out,
        resume=resume,
        advise=advise,
        gate=gate,
        seed=config.seed,
        script=f"workload {config.workload}",
        notes=notes,
        metrics=check_metrics(workload.metrics),
        processing_class=workload.processing_class,
    )
    return run_job(build_job(config, given))


def check_trusted(config: Config, folder: RunFolder, overrides: Sequence[str]) -> None:
    """Refuse code or hub data that only an untrusted run folder names.

    Raises:
        ConfigError: If the workload is custom code, or the data set is on the hub, and the user has not named it.
    """
    named = {item.partition("=")[0].strip() for item in overrides}
    if ":" in config.workload and "workload" not in named:
        raise ConfigError(
            f"{folder.config} names code to run: workload {config.workload}. If you trust it, say so: --set "
            f"workload={shlex.quote(config.workload)}"
        )
    dataset = config.data.dataset
    if dataset.startswith(HUB_PREFIX) and "data.dataset" not in named:
        raise ConfigError(
            f"{folder.config} names a data set to download: data.dataset {dataset}. If you trust it, say so: --set "
            f"data.dataset={shlex.quote(dataset)}"
        )


def _for_inference(folder: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """Return a run's config without what makes training fast, which evaluation does not need and may not have."""
    alone = ("strategy=single", "compression=off", "sync_every=1", "offload_optimizer=false")
    plain = (
        *(f"parallel.{setting}" for setting in alone),
        "gpu.capture=off",
        "gpu.compile_model=false",
        "data.batching=padded",
        "data.resident=false",
    )
    config = load_config_from_text(folder.read_config(), show_path(folder.config), [*plain, *overrides])
    check_buildable(config, show_path(folder.config))
    check_trusted(config, folder, overrides)
    config = config.model_copy(deep=True)
    config.training.accumulation = "auto"
    config.training.micro_batch = "auto"
    return resolve_here(config, 1)


def export_run_compiled(
    path: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    which: str = "latest",
    metric: str = "val_loss",
    weights: str = "auto",
) -> Exported:
    """Like `export.export_compiled`, for a run whose config describes its model and data.

    Raises:
        DataError: If the workload has no data to take an example batch from.
        ConfigError: If its config names code that the user has not named.
    """
    config = _for_inference(open_for_export(path, which, metric), overrides)
    workload = build_workload(config)
    data = workload.train_data if workload.val_data is None else workload.val_data
    batch = next(iter(build_loader(config, workload, data, evaluation=True)), None)
    if batch is None:
        raise DataError(f"{path}: this workload has no data to take an example of its shapes from")
    device = config.gpu.device
    return export_compiled(path, out, workload, batch, which=which, metric=metric, device=device, weights=weights)


def export_run(
    path: str | Path, out: str | Path, overrides: Sequence[str] = (), *, form: str = "auto", **options: Any
) -> Exported:
    """Like `export.export_weights`, for a run whose config describes its model.

    Args:
        path: Run folder.
        out: The file, or a folder.
        overrides: Changes to the run's config; naming `workload` allows its code to be run to build the model.
        form: As for `export_weights`; `auto` lets a model write itself if it can and `out` is a folder, by the layout
            that the run has stored, or by its code if the workload is named.
        **options: As for `export_weights`.

    Raises:
        ConfigError: If its config names code that the user has not named, or the model cannot write itself.
    """
    named = any(item.partition("=")[0].strip() == "workload" for item in overrides)
    is_asked = form == "pretrained"
    if not is_asked and not (form == "auto" and Path(out).suffix != SAFETENSORS):
        return export_weights(path, out, form="safetensors" if form == "auto" else form, **options)
    folder = open_for_export(path, options.get("which", "latest"), options.get("metric", "val_loss"))
    shape = None if named else kept_shape(folder.path)
    if shape is not None:
        return export_weights(path, out, form="pretrained", shape=shape, **options)
    if not named and not is_asked:
        return export_weights(path, out, **options)
    workload = build_workload(_for_inference(folder, overrides))
    if saves_itself(workload.model):
        return export_weights(path, out, form="pretrained", workload=workload, **options)
    if is_asked:
        raise ConfigError(
            f"{type(workload.model).__name__} has no method save_pretrained, which would write its config; use the "
            "format safetensors"
        )
    return export_weights(path, out, **options)


def evaluate_run(
    path: str | Path, overrides: Sequence[str] = (), *, weights: str = "auto"
) -> tuple[int, Evaluation, bool]:
    """Evaluate the newest checkpoint of a run on its validation data.

    Args:
        path: Run folder, or URL of a run.
        overrides: Changes to the run's config.
        weights: As for `export.chosen_weights`.

    Returns:
        The checkpoint's step, the result, and whether averaged weights were used.

    Raises:
        RunFolderError: If there is no such run.
        CheckpointError: If it has no checkpoint that can be read.
        ConfigError: If its config names code that the user has not named.
    """
    folder = open_for_export(path, "latest", "val_loss")
    config = _for_inference(folder, overrides)
    workload = build_workload(config)
    if workload.val_data is None:
        raise DataError(f"{folder.path}: this workload has no validation data to score on")
    newest = load_newest(folder.checkpoints, log.warning)
    if newest is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet")
    stored, state = newest
    chosen, averaged = chosen_weights(state, weights, str(stored.path))
    check_same_model(chosen, workload.model, str(stored.path))
    workload.model.load_state_dict(loaded(chosen))
    device = choose_device(config.gpu.device, 0, config.gpu.device_ids)
    strategy = Strategy(device)
    beside = find_beside(workload.model, workload.loss_fn)
    if "loss" in state.shared:
        averages = state.shared["ema"] if averaged else {}
        beside.load_state_dict(loaded({name: averages.get(name, item) for name, item in state.shared["loss"].items()}))
    strategy.place_beside(beside)
    model: nn.Module = strategy.place(workload.model)
    loader = CudaDataLoader(build_loader(config, workload, workload.val_data, evaluation=True), device)
    precision = Precision(config.gpu.mixed_precision, device)
    loss_function = LossFunction(model, workload.loss_fn, config.training.accuracy)
    metrics = Metrics(check_metrics(workload.metrics), strategy)
    return stored.step, evaluate(model, loader, loss_function, precision, strategy, metrics), averaged
