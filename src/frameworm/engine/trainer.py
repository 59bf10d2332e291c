"""`Trainer`: the Python interface of the engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from frameworm.config.checks import check_parallel
from frameworm.config.schema import Config
from frameworm.engine.export import TYPES, WEIGHTS
from frameworm.engine.given import (
    check_callbacks,
    check_given,
    check_loader,
    check_loggers,
    check_loss_reduction,
    check_processing_class,
    check_subclass,
)
from frameworm.engine.inference import Inference, Trained
from frameworm.engine.job import Ingredients, build_job
from frameworm.engine.model.activations import find_layers
from frameworm.engine.model.precision import backend_flags_kept
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import (
    AnySchedule,
    ChosenRates,
    NoSchedule,
    Schedule,
    TorchSchedule,
    schedule_of,
    warmed_up,
)
from frameworm.engine.session import run_job
from frameworm.engine.settings import (
    Settings,
    api_defaults,
    apply_settings,
    as_python_run,
    check_settings,
    names_settings,
)
from frameworm.engine.step.metrics import check_metrics
from frameworm.engine.summary import why_failed
from frameworm.engine.weight_formats import MAX_SHARD_SIZE
from frameworm.errors import CheckpointError, ConfigError, StateError
from frameworm.launch.stopping import StopRequest
from frameworm.observe.loggers.protocol import Logger
from frameworm.parallel.replicated import DataParallelStrategy
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")


class Trainer:
    """Trains a model.

    Args:
        model: Any module. Layers in evaluation mode stay in it.
        optimizer: An optimizer for its parameters, and for those of `loss_fn` if it has any.
        loss_fn: `loss_fn(output, target)` for `(input, target)` batches, or `loss_fn(model, batch)` if its first
            parameter is named `model`. It returns the mean loss, or `(loss, count)` with the whole number that it is
            averaged over; anything else after the loss is ignored. Not needed for a model that returns its loss, or for
            class scores with integer targets (cross-entropy).
        scheduler: A torch scheduler, stepped once per step (`schedule_every="epoch"`: once per epoch), a function that
            creates one from the number of steps, or a schedule of `frameworm.engine.optim.schedule`. Without one, the
            keywords `schedule` and `warmup` choose a schedule that starts from the optimizer's own rates.
        config: All settings; the keywords below override it.
        callbacks: Listeners (`frameworm.Callback`, or objects with some of its methods), called for every batch, step,
            epoch and checkpoint, and at the end; they may call `stop()`.
        metrics: Validation metrics besides loss and accuracy, by name: functions of the outputs and targets of the
            whole validation set that return a number, or torchmetrics objects. `f1` is recorded as `val_f1`, which
            `early_stop`, `checkpoint.metric` and `schedule_metric` can watch.
        loggers: Trackers that rank 0 logs the run to: `tensorboard`, `wandb`, `mlflow`, `trackio`, `csv`, or objects
            that implement `frameworm.Logger`; None for those that the config names.
        processing_class: The model's tokenizer or processor; `export` writes it beside the model.
        run_dir: The run folder: a path, `auto` for `runs/<name>-<time>`, or None to write nothing.
        **settings: Config settings by name, e.g. `clip_norm=1.0`, `accumulation=4`, `seed=0`, `every_steps=100`, or a
            section, `gpu=GPUConfig(...)`; `help(frameworm.Trainer)` and editors list them.

    Examples:
        >>> trainer = Trainer(model, torch.optim.AdamW(model.parameters()))
        >>> record = trainer.train(train_loader, val_loader, epochs=3)
        >>> record.quality.val_accuracy
    """

    @names_settings(Settings)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        scheduler: Any = None,
        *,
        config: Config | None = None,
        callbacks: Sequence[object] | None = (),
        metrics: Mapping[str, Any] | None = None,
        loggers: Sequence[str | Logger] | None = None,
        processing_class: Any = None,
        run_dir: str | Path | None = "auto",
        **settings: Unpack[Settings],
    ) -> None:
        check_subclass(type(self), Trainer)
        check_given(model, optimizer, loss_fn, scheduler)
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._scheduler = scheduler
        given, mixed_precision = check_settings(settings)
        self._loggers: list[Logger] = []
        if loggers is not None:
            given["loggers"], self._loggers = check_loggers(loggers)
        self._config = apply_settings(api_defaults() if config is None else config, given)
        self._seed = self._config.seed if config is not None or "seed" in given else None
        # If no setting concerns the device, torch's global switches stay as the user has them.
        fields = type(self._config.gpu).model_fields
        self._sets_backend = config is not None or "gpu" in given or any(name in fields for name in given)
        self._callbacks = check_callbacks(callbacks)
        for item in self._callbacks:
            if isinstance(item, Listener):
                item.trainer = self
        self._metrics = check_metrics(metrics)
        self._trained: Trained | None = None
        self._running: StopRequest | None = None  # of the training in progress
        self._record: RunRecord | None = None
        self._processing_class = check_processing_class(processing_class)
        self._run_dir = run_dir
        self._began = False
        self._averages: AveragedWeights | None = None
        self._rates = ChosenRates(optimizer)
        if mixed_precision:
            self.enable_mixed_precision()

    @property
    def config(self) -> Config:
        """The settings, including changes by `enable_*`."""
        return self._config

    def enable_data_parallel(self, device_ids: list[int] | None = None) -> Trainer:
        """Use several GPUs in one process (DDP is faster; this is for scripts that cannot start several processes)."""
        self._before_training("enable_data_parallel")
        DataParallelStrategy(torch.device(self._device_kind()), device_ids)  # raises if a GPU is not there
        self._config.gpu.device_ids = device_ids
        self._config.parallel.strategy = "dp"
        return self

    def enable_mixed_precision(self, dtype: str = "auto") -> Trainer:
        """Use bf16 if the device supports it (CPUs do), else fp16 with a dynamic loss scale."""
        self._before_training("enable_mixed_precision")
        if dtype == "auto" and self._device_kind() == "cpu":
            dtype = "bf16"
        self._config = apply_settings(self._config, {"mixed_precision": dtype})
        return self

    def enable_compile(self, mode: str = "default") -> Trainer:
        """Compile the model with torch.compile at the first step."""
        self._before_training("enable_compile")
        self._config = apply_settings(self._config, {"compile_model": True, "compile_mode": mode})
        return self

    def enable_gradient_checkpointing(self, mode: str = "full", modules: Sequence[str | type] | None = None) -> Trainer:
        """Recompute activations in backward to save memory.

        Args:
            mode: `full` recomputes whole layers, `selective` everything but their matrix products and attention.
            modules: Classes of the layers, or their names; None for those that the model declares (`checkpoint_layers`,
                or a ModuleList `layers`), else the blocks that it repeats.
        """
        self._before_training("enable_gradient_checkpointing")
        names = None if modules is None else [item if isinstance(item, str) else item.__name__ for item in modules]
        find_layers(self.model, names)  # raises if there is nothing to recompute
        self._config = apply_settings(self._config, {"activation_checkpointing": mode, "checkpoint_modules": names})
        return self

    def train(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        epochs: int | None = None,
        *,
        resume: str | Path | None = None,
        restore_best: bool = False,
    ) -> RunRecord:
        """Train for a number of epochs, validating after each if there is a `val_loader`.

        Args:
            train_loader: A DataLoader, an `OptimizedDataLoader` or any iterable of batches that can be read once per
                epoch. In a distributed run a plain DataLoader is split over the ranks.
            val_loader: The same for validation, or a mapping from names to several: the metrics of each are recorded as
                `val_<name>_loss` and so on, and those of the first also as `val_loss` and so on.
            epochs: Number of epochs; None to keep the number of the previous call or setting, or else 1.
            resume: A run folder, to resume a run that stopped; or `auto` for the run in `run_dir`, else the newest
                unfinished one of the same name, or without a name, of the same model, data and script.
            restore_best: Whether to end with the weights of the best epoch instead of the last, by `checkpoint.metric`,
                or if that is not set, the metric that `early_stop` watches. The run's last checkpoint is still that of
                the last step.

        Returns:
            The record of the run.

        Raises:
            TrainingInterruptedError: On Ctrl-C, after the state was saved.
        """
        check_loader(train_loader, "train_loader")
        check_loader(val_loader, "val_loader", several=True)
        if epochs is not None:
            self._config = apply_settings(self._config, {"epochs": epochs})
        if restore_best and self._run_dir is None and resume is None:
            raise ConfigError("restore_best reads the best checkpoint, and run_dir=None leaves none; give a run_dir")
        if restore_best:
            self._keep_best()
        self._began = True
        check_parallel(self._config)
        self._rates.note()
        given = Ingredients(
            self.model,
            self.optimizer,
            self._loss_fn,
            self._make_schedule,
            train_loader,
            val_loader,
            callbacks=self._callbacks,
            run_dir=self._run_dir,
            resume=resume,
            seed=self._seed,
            sets_backend=self._sets_backend,
            metrics=self._metrics,
            trainer=self,
            loggers=self._loggers,
            processing_class=self._processing_class,
            notes=check_loss_reduction(self._loss_fn),
        )
        with backend_flags_kept() if self._sets_backend else contextlib.nullcontext():
            job = build_job(as_python_run(self._config, self.model), given)
            job.averages = self._averages
            self._running = job.request
            try:
                self._record = record = run_job(job)
            finally:
                self._running = None
                self._averages = job.averages
                self._rates.leave()
                if job.state is not None:
                    self._trained = Trained(job.config, job.strategy, job.precision, job.state)
        if record.status == "failed":
            log.error("%s", why_failed(record))
        elif restore_best:
            self.load("best")
        return record

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[nn.Module]:
        """Give the model its averaged weights (`ema=0.999`) inside the `with`, and its trained weights back afterwards.

        If the strategy shards the model or its optimizer, all ranks must enter the context.

        Raises:
            StateError: If there are no averaged weights.
        """
        if self._averages is None:
            raise StateError("there are no averaged weights: give ema=0.999 (or another decay) and call train() first")
        with self._with_averages():
            yield self.model

    def _with_averages(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._averages is None else self._averages.in_place()

    def stop(self) -> None:
        """Stop the current training from a callback on any rank: after a step or an epoch, with a final validation.

        The run counts as completed, as after an early stop. Several ranks first agree on a step, which may come some
        steps later.

        Raises:
            StateError: If no training is in progress.
        """
        if self._running is None:
            raise StateError("stop() ends a training, and none is running; call it in a callback")
        self._running.ask("stopped")

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model on a loader over all ranks, with its averaged weights if it has any, as validation does.

        Returns:
            `loss`, `accuracy` if the model classifies, and the trainer's metrics by name.
        """
        check_loader(loader, "loader")
        inference = self._inference("evaluate")
        with self._with_averages():
            found = inference.evaluate(loader, self._metrics)
        scores = {"loss": found.loss}
        if found.accuracy is not None:
            scores["accuracy"] = found.accuracy
        return {**scores, **found.metrics}

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return the model's outputs for all samples of a loader, in the order of the data set, on the host.

        Every rank gets all outputs, one per sample. A loader that shuffles is read in order. Targets in the batches are
        ignored. As in `evaluate`, averaged weights are used if there are any.

        Returns:
            Tensors joined along their first dimension, in tuples or mappings as the model returns them; its `logits` if
            it has any. If other dimensions differ, a list with a tensor per sample.

        Raises:
            DataError: If the loader's samples cannot be put in order; the message says why.
        """
        check_loader(loader, "loader")
        inference = self._inference("predict")
        with self._with_averages():
            return inference.predict(loader)

    def save(self, path: str | Path) -> None:
        """Write weights and optimizer as safetensors into a folder; all ranks must call it.

        Args:
            path: A new folder, or the folder of an earlier call, which is replaced. For a name that ends in
                `.safetensors`, only the weights are written, as one file.

        Raises:
            RunFolderError: If something else is there, or it cannot be written.
        """
        self._inference("save").save(Path(path))

    def export(
        self,
        path: str | Path,
        *,
        format: str = "auto",
        dtype: str | None = None,
        weights: str = "auto",
        max_shard_size: str | int = MAX_SHARD_SIZE,
    ) -> None:
        """Export the model for other programs to load; all ranks must call it.

        Args:
            path: A new folder, or a file that ends in `.safetensors`.
            format: `pretrained`: as the model's own `save_pretrained` writes it, with its config and
                `processing_class`. `safetensors`: its weights by name. `dcp`: a folder of torch.distributed.checkpoint,
                to which each rank writes its part. `auto`: `pretrained` for a folder and a model that has the method,
                else `safetensors`.
            dtype: `fp32`, `bf16` or `fp16`; None to keep that of training.
            weights: `trained`, `ema` (averaged), or `auto` (averaged if the training has averaged them).
            max_shard_size: Largest size of one safetensors file, such as `5GB`; larger weights are written as several
                files with an index.

        Raises:
            RunFolderError: If something is there, or it cannot be written.
            ConfigError: If there are no averaged weights, or an argument has another value.
            ModelError: If the model cannot write itself, or not these weights.
        """
        if dtype is not None and dtype not in TYPES:
            raise ConfigError(f"export takes the dtypes {', '.join(TYPES)}, not {dtype}")
        if weights not in WEIGHTS or (weights == "ema" and self._averages is None):
            raise ConfigError(
                f"export takes the weights {', '.join(WEIGHTS)}, not {weights}"
                if weights not in WEIGHTS
                else "export(weights='ema') needs averaged weights, and there are none: train with ema"
            )
        inference = self._inference("export")
        with contextlib.nullcontext() if weights == "trained" else self._with_averages():
            kind = None if dtype is None else TYPES[dtype]
            inference.export(Path(path), format, kind, self._processing_class, max_shard_size)

    def load(self, path: str | Path) -> int | None:
        """Load saved values into model and optimizer, whatever strategy and number of ranks saved them.

        Args:
            path: What `save` wrote, a run folder (its newest checkpoint), one checkpoint of a run, or weights alone: a
                .safetensors file, an index of several, or a folder with either or of torch.distributed.checkpoint.
                `best` and `latest` are checkpoints of this trainer's last run; for `best` train with `keep_best=1`. To
                resume a run as if it had not stopped, use `train(resume=...)`.

        Returns:
            The step after which the values were saved; None if unknown.

        Raises:
            CheckpointError: If there is nothing to load, or it belongs to another model or optimizer.
        """
        inference = self._inference("load")
        self._rates.note()
        if str(path) in ("best", "latest") and not Path(path).exists():
            run_dir = None if self._record is None else self._record.run_dir
            if run_dir is None:
                raise CheckpointError(f"load({str(path)!r}) reads this trainer's last run, and there is none on disk")
            step = inference.load_best(RunFolder(run_dir), str(path))
        else:
            step = inference.load(Path(path))
        self._averages = inference.averages
        self._rates.leave()
        return step

    def _inference(self, call: str) -> Inference:
        if self._running is not None:
            raise StateError(f"{call}() must wait until train() is over; in training, validation sets are evaluated")
        return Inference(
            self._config,
            self.model,
            self.optimizer,
            self._loss_fn,
            self._trained,
            self._averages if self._trained is None else None,
            sets_backend=self._sets_backend,
        )

    def _keep_best(self) -> None:
        """Keep the best checkpoint, by the metric that early stopping watches unless another is set."""
        section, stop = self._config.checkpoint, self._config.training.early_stop
        settings: dict[str, Any] = {} if section.keep_best else {"keep_best": 1}
        if stop is not None and "metric" not in section.model_fields_set:
            settings |= {"metric": stop.metric, "better": stop.better}
        self._config = apply_settings(self._config, settings)

    def _make_schedule(self, total_steps: int | None) -> AnySchedule:
        scheduler, training = self._scheduler, self._config.training
        every, warmup = training.schedule_every, training.warmup
        if callable(scheduler) and not hasattr(scheduler, "step") and not hasattr(scheduler, "before_step"):
            scheduler = scheduler(total_steps)
        if scheduler is not None and not hasattr(scheduler, "before_step"):
            schedule = TorchSchedule(scheduler, every, training.schedule_metric)
            return warmed_up(schedule, self.optimizer, warmup, total_steps)
        if training.schedule_metric is not None:
            raise ConfigError("schedule_metric is for a torch scheduler that takes a metric, and none is given")
        if every != "auto":
            raise ConfigError(f"schedule_every={every!r} is for a torch scheduler, and none is given")
        if scheduler is None:
            # The default schedule of a config must not change the optimizer's own rate; only a chosen one may.
            kind = training.schedule if "schedule" in training.model_fields_set else "constant"
            if kind != "constant" or warmup:
                self._rates.put_back()
                return schedule_of(self.optimizer, training, total_steps, kind)
            return NoSchedule()
        if warmup and isinstance(scheduler, Schedule):
            raise ConfigError("training.warmup: the schedule that is given has a warm-up of its own; set it there")
        return warmed_up(scheduler, self.optimizer, warmup, total_steps)

    def _device_kind(self) -> str:
        kind = self._config.gpu.device
        return ("cuda" if torch.cuda.is_available() else "cpu") if kind == "auto" else kind

    def _before_training(self, call: str) -> None:
        if self._began:
            raise StateError(f"{call}() comes too late: train() has begun; call it on a new Trainer")
