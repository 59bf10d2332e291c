"""`Trainer`: the Python front of the engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.config.checks import check_parallel
from frameworm.config.schema import Config
from frameworm.engine.export import TYPES, WEIGHTS
from frameworm.engine.given import check_callbacks, check_given, check_loader, check_loggers, check_subclass
from frameworm.engine.inference import Inference, Trained
from frameworm.engine.job import Ingredients, backend_of, build_job
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
from frameworm.engine.pretrained import saves_itself
from frameworm.engine.session import run_job
from frameworm.engine.settings import api_defaults, apply_settings, as_python_run
from frameworm.engine.step.metrics import check_metrics
from frameworm.engine.summary import why_failed
from frameworm.engine.weight_formats import MAX_SHARD_SIZE
from frameworm.errors import CheckpointError, ConfigError, StateError
from frameworm.launch.process_group import cleanup, setup_ddp
from frameworm.launch.stopping import StopRequest
from frameworm.observe.loggers.protocol import Logger
from frameworm.parallel.replicated import DataParallelStrategy
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")
_SUMS = (
    "loss_fn adds up its batch (reduction='sum') and is taken for a mean: recorded losses are means over batches of "
    "such sums, and micro-batches and ranks are weighted by their samples; reduction='mean' is what they are meant for"
)


class Trainer:
    """Trains a model.

    Args:
        model: Any module. Layers that are in evaluation mode stay in it.
        optimizer: An optimizer over its parameters, and over those of `loss_fn` if that learns.
        loss_fn: `loss_fn(output, target)` for `(input, target)` batches, or `loss_fn(model, batch)` if its first
            parameter is named `model`. It returns the mean loss, or `(loss, count)` with the whole number that it is
            the mean over; anything else after the loss is ignored. Not needed for a model that returns its loss, or for
            class scores with integer targets (cross-entropy).
        scheduler: A torch scheduler, stepped once per step (`schedule_every="epoch"`: once per epoch), a function that
            makes one from the number of steps, or a schedule of `frameworm.engine.optim.schedule`. Without one the
            keywords `schedule` and `warmup` name a course from the optimizer's own rates.
        config: Settings as a whole; keywords below win over it.
        callbacks: Listeners (`frameworm.Callback`, or objects with some of its methods) that are told of every batch,
            step, epoch, checkpoint and the end; they may call `stop()`.
        metrics: What validation computes beside loss and accuracy, by name: functions of the outputs and targets of the
            whole validation set that return a number, or metrics of torchmetrics. `f1` is recorded as `val_f1`, which
            `early_stop`, `checkpoint.metric` and `schedule_metric` can watch.
        loggers: Trackers that rank 0 tells of the run: `tensorboard`, `wandb`, `mlflow`, `trackio`, `csv`, or objects
            that follow `frameworm.Logger`; None for those that the config names.
        processing_class: The tokenizer or processor that the model goes with; `export` writes it beside the model.
        run_dir: Where the run is written down: a folder, `auto` for `runs/<name>-<time>`, or None for nowhere.
        **settings: Fields of the config by name, e.g. `clip_norm=1.0`, `accumulation=4`, `seed=0`, `every_steps=100`,
            or a section, `gpu=GPUConfig(...)`.

    Example:
        >>> trainer = Trainer(model, torch.optim.AdamW(model.parameters()))
        >>> record = trainer.train(train_loader, val_loader, epochs=3)
        >>> record.quality.val_accuracy
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        scheduler: Any = None,
        *,
        config: Config | None = None,
        callbacks: Sequence[Listener] | None = (),
        metrics: Mapping[str, Any] | None = None,
        loggers: Sequence[str | Logger] | None = None,
        processing_class: Any = None,
        run_dir: str | Path | None = "auto",
        **settings: Any,
    ) -> None:
        check_subclass(type(self), Trainer)
        check_given(model, optimizer, loss_fn, scheduler)
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._scheduler = scheduler
        mixed = [settings.pop(name, False) for name in ("use_amp", "enable_mixed_precision")]  # names of other trainers
        self._loggers: list[Logger] = []
        if loggers is not None:
            settings["loggers"], self._loggers = check_loggers(loggers)
        self._config = apply_settings(api_defaults() if config is None else config, settings)
        self._seed = self._config.seed if config is not None or "seed" in settings else None
        # Without a word about the device, torch's own switches stay as the user has them.
        fields = type(self._config.gpu).model_fields
        self._sets_backend = config is not None or "gpu" in settings or any(name in fields for name in settings)
        self._callbacks = check_callbacks(callbacks)
        for item in self._callbacks:
            if isinstance(item, Listener):
                item.trainer = self
        self._metrics = check_metrics(metrics)
        self._trained: Trained | None = None
        self._running: StopRequest | None = None  # of the training that runs
        self._record: RunRecord | None = None
        if processing_class is not None and not saves_itself(processing_class):
            raise ConfigError(
                f"processing_class is a {type(processing_class).__name__}, which has no method save_pretrained to be "
                "exported with; give a tokenizer or processor of the model's library"
            )
        self._processing_class = processing_class
        self._run_dir = run_dir
        self._began = False
        self._averages: AveragedWeights | None = None
        self._rates = ChosenRates(optimizer)
        if any(mixed):
            self.enable_mixed_precision()

    @property
    def config(self) -> Config:
        """The settings, with everything `enable_*` has changed."""
        return self._config

    def enable_data_parallel(self, device_ids: list[int] | None = None) -> Trainer:
        """One process, many GPUs (DDP is faster; this is for scripts that cannot start several processes)."""
        self._before_training("enable_data_parallel")
        DataParallelStrategy(torch.device(self._device_kind()), device_ids)  # raises if a GPU is not there
        self._config.gpu.device_ids = device_ids
        self._config.parallel.strategy = "dp"
        return self

    def enable_mixed_precision(self, dtype: str = "auto") -> Trainer:
        """bf16 where the device has it (CPU too), else fp16 with a loss scale that adapts."""
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
            mode: `full` recomputes whole layers, `selective` all but their matrix products and attention.
            modules: Classes of the layers, or their names; None: what the model declares (`checkpoint_layers`, or a
                ModuleList `layers`), else the blocks that it repeats.
        """
        self._before_training("enable_gradient_checkpointing")
        names = None if modules is None else [item if isinstance(item, str) else item.__name__ for item in modules]
        find_layers(self.model, names)  # raises if there is nothing to recompute
        self._config = apply_settings(self._config, {"activation_checkpointing": mode, "checkpoint_modules": names})
        return self

    def train(
        self,
        train_loader: Any,
        val_loader: Any = None,
        epochs: int | None = None,
        *,
        resume: str | Path | None = None,
        restore_best: bool = False,
    ) -> RunRecord:
        """Train for a number of epochs, validating after each if there is a `val_loader`.

        Args:
            train_loader: A DataLoader, an `OptimizedDataLoader` or any iterable of batches that can be read once per
                epoch. In a distributed run a plain DataLoader is split over the ranks.
            val_loader: The same for validation, or a mapping from names to several: the figures of each are recorded as
                `val_<name>_loss` and so on, and those of the first also as `val_loss` and so on.
            epochs: As in the call before, or as set otherwise, unless given; else 1.
            resume: A run folder, to go on with a run that stopped; or `auto` for the run in `run_dir`, else the newest
                unfinished one of the same name, and without a name of the same model, data and script.
            restore_best: Leave the model with the weights of the best epoch instead of the last. `checkpoint.metric`
                says which is best, or unless that is set, the metric that `early_stop` watches. The run's last
                checkpoint is that of the last step all the same.

        Raises:
            TrainingInterruptedError: Ctrl-C, after the state was saved.
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
            notes=[_SUMS] if getattr(self._loss_fn, "reduction", None) == "sum" else [],
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
        """The model with its averaged weights (`ema=0.999`) inside the `with`, and as it was trained after it.

        Under a strategy that divides the model or its optimizer all ranks must enter it.

        Raises:
            StateError: No weights were averaged.
        """
        if self._averages is None:
            raise StateError("there are no averaged weights: give ema=0.999 (or another decay) and call train() first")
        with self._with_averages():
            yield self.model

    def _with_averages(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._averages is None else self._averages.in_place()

    def stop(self) -> None:
        """End the training that runs, from a callback on any rank: after a step, or an epoch, with a last validation.

        The run is completed, as after an early stop. Several ranks first agree on the step, which may be some later.

        Raises:
            StateError: No training runs.
        """
        if self._running is None:
            raise StateError("stop() ends a training, and none is running; call it in a callback")
        self._running.ask("stopped")

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Score the model on a loader, over all ranks; with its averaged weights, if it has some, as validation does.

        Returns:
            `loss`, `accuracy` where the model classifies, and the trainer's metrics by their names.
        """
        check_loader(loader, "loader")
        inference = self._inference("evaluate")
        with self._with_averages():
            found = inference.evaluate(loader, self._metrics)
        scores = {"loss": found.loss}
        if found.accuracy is not None:
            scores["accuracy"] = found.accuracy
        return {**scores, **found.metrics}

    def predict(self, loader: Any) -> Any:
        """The model's outputs for all samples of a loader, in the order of the data set, on the host.

        Every rank gets all of them, each sample once. A loader that shuffles is read in order. Targets in the batches
        are left out. As in `evaluate`, a model with averaged weights answers with these.

        Returns:
            Tensors joined along their first dimension, in tuples or mappings as the model returns them; its `logits` if
            it has some. Where other dimensions differ, a list with a tensor per sample.

        Raises:
            DataError: The loader's samples cannot be put in order; the message says why.
        """
        check_loader(loader, "loader")
        inference = self._inference("predict")
        with self._with_averages():
            return inference.predict(loader)

    def save(self, path: str | Path) -> None:
        """Write weights and optimizer as safetensors into a folder; all ranks must call it.

        Args:
            path: A new folder, or one of an earlier call, which is replaced. With a name that ends in `.safetensors`
                the weights alone are written, as one file.

        Raises:
            RunFolderError: Something else is there, or it cannot be written.
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
        """Write the model for others to load; all ranks must call it.

        Args:
            path: A new folder, or a file that ends in `.safetensors`.
            format: `pretrained`: as the model's own `save_pretrained` writes it, with its config, and with
                `processing_class` beside it. `safetensors`: its weights by their names. `dcp`: a folder of
                torch.distributed.checkpoint, of which each rank writes its part. `auto`: the first for a folder and a
                model that has the method, else the second.
            dtype: `fp32`, `bf16` or `fp16`; None: as the model was trained.
            weights: `trained`, `ema` (averaged ones), or `auto`: averaged if the training has averaged them.
            max_shard_size: Most bytes of one safetensors file, such as `5GB`; more are several files with an index.

        Raises:
            RunFolderError: Something is there, or it cannot be written.
            ConfigError: There are no averaged weights, or an argument is none of these.
            ModelError: The model cannot write itself, or not these weights.
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
        """Give model and optimizer the values that were saved, under any strategy and number of ranks.

        Args:
            path: What `save` wrote, a run folder (its newest checkpoint), one checkpoint of a run, or weights alone: a
                .safetensors file, an index of several, or a folder with either or of torch.distributed.checkpoint.
                `best` and `latest` are checkpoints of this trainer's last run; for `best` train with `keep_best=1`. To
                go on with a run as if it had not stopped, use `train(resume=...)`.

        Returns:
            The step after which the values were saved; None where that is not known.

        Raises:
            CheckpointError: There is nothing to load, or it is of another model or optimizer.
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
        """Keep the best checkpoint: by the metric that early stopping watches, unless another is set."""
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
            # What nobody has chosen is not what the optimizer's own rate should follow.
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


class DistributedTrainer(Trainer):
    """`Trainer` with the strategy chosen from the environment; with one process it is a plain trainer.

    Args:
        backend: `nccl`, `gloo`, or auto by device.
        use_amp: Mixed precision, as `enable_mixed_precision()`.
        gradient_accumulation_steps: Micro-batches per step.
        find_unused_parameters: Let DDP look for parameters a step did not use.
        **more: As for `Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        backend: str = "auto",
        use_amp: bool = False,
        gradient_accumulation_steps: int = 1,
        find_unused_parameters: bool = False,
        **more: Any,
    ) -> None:
        named: dict[str, Any] = {}  # what is left at its default is the config's
        if backend != "auto":
            named["backend"] = backend
        if gradient_accumulation_steps != 1:
            named["accumulation"] = gradient_accumulation_steps
        if find_unused_parameters:
            named["find_unused_parameters"] = True
        super().__init__(model, optimizer, **named, **more)
        if use_amp:
            self.enable_mixed_precision()

    def cleanup(self) -> None:
        """Leave the process group."""
        cleanup()


class DDPTrainer(DistributedTrainer):
    """`Trainer` fixed to DDP, for processes that know their rank, such as those of torch.multiprocessing.spawn.

    Args:
        rank: This process.
        world_size: How many there are.
        **more: As for `DistributedTrainer`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, **more: Any
    ) -> None:
        super().__init__(model, optimizer, strategy="ddp", **more)
        setup_ddp(rank, world_size, backend=backend_of(self._config), timeout_s=self._config.parallel.timeout_s)
