"""The `observe` section: what is written down about a run, and what it is held against."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameworm.config.section import Auto, Count, OffNone, OffWord, Section, Share

Positive = Annotated[float, Field(gt=0)]


class TargetsConfig(Section):
    """What a run should reach; each is graded in the summary, and `frameworm guard --targets` fails on a miss."""

    gpu_busy: Annotated[Share | None, OffNone] = Field(
        default=0.85, description="Least share of the time in which a kernel runs; off does not grade it."
    )
    gpu_memory: Annotated[Share | None, OffNone] = Field(
        default=0.7, description="Least share of the GPU's memory in use at once."
    )
    cpu: Annotated[Share | None, OffNone] = Field(default=0.8, description="Most that the cores may be busy.")
    io_wait: Annotated[Share | None, OffNone] = Field(
        default=0.1, description="Most of the cores' time that may go by waiting for disks."
    )
    host_memory: Annotated[Share | None, OffNone] = Field(
        default=0.8, description="Most of the machine's memory that may be in use."
    )
    samples_per_s: Annotated[Positive | None, OffNone] = Field(
        default=1000.0, description="Least throughput, over all ranks."
    )
    mfu: Annotated[Share | None, OffNone] = Field(
        default=None, description="Least share of the GPU's peak that the model's own FLOPs reach."
    )
    checkpoint_save_s: Annotated[Positive | None, OffNone] = Field(
        default=1.0, description="Most seconds from asking for a checkpoint until it is durable."
    )
    checkpoint_stall_s: Annotated[Positive | None, OffNone] = Field(
        default=1.0, description="Most seconds that training may stand still for a checkpoint."
    )
    quality: Annotated[float | None, OffNone] = Field(
        default=None, description="Value of quality_metric that the training is to reach."
    )
    quality_metric: Literal["val_accuracy", "val_loss", "train_loss"] = Field(
        default="val_accuracy", description="What quality is a value of."
    )
    time_to_quality_s: Annotated[Positive | None, OffNone] = Field(
        default=None, description="Most seconds of training until quality is reached; off takes any time."
    )


class ObserveConfig(Section):
    """What is written down about a run."""

    sinks: list[Literal["jsonl", "tensorboard"]] = Field(default=["jsonl"], description="Where step records go.")
    trace: Annotated[Literal["off", "window"], OffWord] = Field(
        default="off",
        description="window: torch.profiler over a few steps, as trace-rank{r}.pt.trace.json.gz.",
    )
    trace_wait: int = Field(default=10, ge=0, description="Steps before each window that the profiler leaves alone.")
    trace_warmup: int = Field(
        default=2, ge=0, description="Steps with the profiler on that are thrown away: it slows the first ones most."
    )
    trace_active: Count = Field(default=5, description="Steps of a window that are recorded.")
    trace_repeat: Count = Field(default=1, description="Number of windows, each in a file of its own.")
    trace_operators: Count = Field(
        default=10, description="Operators and kernels in each list of the trace's summary, the largest first."
    )
    nvtx: bool = Field(
        default=False, description="NVTX ranges around epochs, steps and their phases, for Nsight Systems."
    )
    system_interval_s: Annotated[float | None, OffNone] = Field(
        default=1.0,
        gt=0,
        description="Seconds between two looks at GPU, cores, memory and network, shorter in the first seconds; off "
        "takes none.",
    )
    progress: bool | Auto = Field(default="auto", description="Progress line; auto draws it on terminals only.")
    targets: TargetsConfig = Field(default=TargetsConfig(), description="What the run should reach.")
