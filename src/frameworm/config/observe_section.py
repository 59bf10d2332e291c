"""The `observe` section: what is recorded about a run, and which targets it should reach."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameworm.config.section import Auto, Count, OffNone, OffWord, Section, Share

# Settings of loggers; they do not affect training itself.
LOGGER_SETTINGS = (
    "loggers",
    "log_interval_s",
    "log_close_s",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "csv",
)
Positive = Annotated[float, Field(gt=0)]


class TargetsConfig(Section):
    """What a run should reach. The summary grades each target, and `frameworm guard --targets` fails on a miss."""

    gpu_busy: Annotated[Share | None, OffNone] = Field(
        default=0.85, description="Least fraction of the time in which a kernel runs; off does not grade it."
    )
    gpu_memory: Annotated[Share | None, OffNone] = Field(
        default=0.7, description="Least fraction of the GPU's memory in use at the peak."
    )
    cpu: Annotated[Share | None, OffNone] = Field(default=0.8, description="Largest busy fraction of the cores.")
    io_wait: Annotated[Share | None, OffNone] = Field(
        default=0.1, description="Largest fraction of the cores' time spent waiting for disks."
    )
    host_memory: Annotated[Share | None, OffNone] = Field(
        default=0.8, description="Largest fraction of the machine's memory in use."
    )
    samples_per_s: Annotated[Positive | None, OffNone] = Field(
        default=1000.0, description="Least throughput over all ranks."
    )
    mfu: Annotated[Share | None, OffNone] = Field(
        default=None, description="Least fraction of the GPU's peak that the model's own FLOPs reach."
    )
    checkpoint_save_s: Annotated[Positive | None, OffNone] = Field(
        default=1.0, description="Most seconds from asking for a checkpoint until it is durable."
    )
    checkpoint_stall_s: Annotated[Positive | None, OffNone] = Field(
        default=1.0, description="Most seconds that training may stand still for a checkpoint."
    )
    quality: Annotated[float | None, OffNone] = Field(
        default=None, description="Value of quality_metric that training should reach."
    )
    quality_metric: Literal["val_accuracy", "val_loss", "train_loss"] = Field(
        default="val_accuracy", description="Metric that quality refers to."
    )
    time_to_quality_s: Annotated[Positive | None, OffNone] = Field(
        default=None, description="Most seconds of training until quality is reached; off takes any time."
    )


class TensorBoardConfig(Section):
    """Where TensorBoard's event files go."""

    folder: Annotated[str | None, OffNone] = Field(
        default=None,
        description="A folder for many runs, each in a folder of its name; not set: `tensorboard` in the run folder.",
    )


class WandbConfig(Section):
    """The run on Weights & Biases; log in with `wandb login` or WANDB_API_KEY."""

    project: Annotated[str | None, OffNone] = Field(
        default=None, description="Project; not set: from W&B's own settings."
    )
    entity: Annotated[str | None, OffNone] = Field(default=None, description="User or team; not set: the default one.")
    folder: Annotated[str | None, OffNone] = Field(
        default=None, description="Where W&B keeps its files; not set: the run folder."
    )
    offline: bool = Field(default=False, description="Write files only; `wandb sync` sends them later.")


class MlflowConfig(Section):
    """The run in MLflow."""

    uri: Annotated[str | None, OffNone] = Field(
        default=None,
        description="Server or database, such as sqlite:///mlflow.db; not set: MLFLOW_TRACKING_URI, else "
        "MLflow's default.",
    )
    experiment: Annotated[str | None, OffNone] = Field(
        default=None, description="Experiment; not set: MLFLOW_EXPERIMENT_NAME, else the name of the run."
    )


class TrackioConfig(Section):
    """The run in trackio, whose files are in TRACKIO_DIR."""

    project: Annotated[str | None, OffNone] = Field(default=None, description="Project; not set: the name of the run.")
    space: Annotated[str | None, OffNone] = Field(
        default=None, description="Hugging Face Space to log to; not set: this machine only."
    )


class CsvConfig(Section):
    """The table of the csv logger."""

    file: Annotated[str | None, OffNone] = Field(
        default=None, description="The table; not set: metrics.csv in the run folder."
    )


class ObserveConfig(Section):
    """What is recorded about a run."""

    sinks: list[Literal["jsonl", "tensorboard"]] = Field(
        default=["jsonl"], description="Where step records go; tensorboard is the logger of that name."
    )
    loggers: list[Literal["csv", "mlflow", "tensorboard", "trackio", "wandb"]] = Field(
        default=[],
        description="Trackers that rank 0 sends config, curves and summary to; `pip install "
        "'frameworm[loggers]'` installs their packages.",
    )
    log_interval_s: float = Field(
        default=1.0, ge=0, description="Seconds between two points of the loggers' step curves; 0 logs every step."
    )
    log_close_s: float = Field(
        default=60.0, ge=0, description="Most seconds that the end of a run waits for its loggers."
    )
    tensorboard: TensorBoardConfig = Field(default=TensorBoardConfig(), description="Options of that logger.")
    wandb: WandbConfig = Field(default=WandbConfig(), description="Options of that logger.")
    mlflow: MlflowConfig = Field(default=MlflowConfig(), description="Options of that logger.")
    trackio: TrackioConfig = Field(default=TrackioConfig(), description="Options of that logger.")
    csv: CsvConfig = Field(default=CsvConfig(), description="Options of that logger.")
    trace: Annotated[Literal["off", "window"], OffWord] = Field(
        default="off",
        description="window: torch.profiler over a few steps, as trace-rank{r}.pt.trace.json.gz.",
    )
    trace_wait: int = Field(default=10, ge=0, description="Steps before each window without the profiler.")
    trace_warmup: int = Field(
        default=2,
        ge=0,
        description="Steps with the profiler on that are discarded, because it slows the first ones most.",
    )
    trace_active: Count = Field(default=5, description="Steps of a window that are recorded.")
    trace_repeat: Count = Field(default=1, description="Number of windows, each in its own file.")
    trace_operators: Count = Field(
        default=10, description="Operators and kernels in each list of the trace's summary, the largest first."
    )
    nvtx: bool = Field(
        default=False, description="NVTX ranges around epochs, steps and their phases, for Nsight Systems."
    )
    system_interval_s: Annotated[float | None, OffNone] = Field(
        default=1.0,
        gt=0,
        description="Seconds between samples of GPU, cores, memory and network, shorter in the first seconds; off "
        "takes no samples.",
    )
    progress: bool | Auto = Field(
        default="auto", description="Progress line; auto shows it on terminals and in notebooks."
    )
    targets: TargetsConfig = Field(default=TargetsConfig(), description="What the run should reach.")
