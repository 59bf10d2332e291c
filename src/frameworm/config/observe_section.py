"""The sections on what is saved and written down about a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameworm.config.section import Auto, OffNone, OffWord, Section


class CheckpointConfig(Section):
    """When the state of a run is saved."""

    every_steps: Annotated[int | None, OffNone] = Field(
        default=500, ge=1, description="Steps between checkpoints; off saves at the end and on interruption only."
    )
    every_minutes: Annotated[float | None, OffNone] = Field(
        default=None, gt=0, description="Minutes between checkpoints, beside those of every_steps."
    )
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay on disk.")
    keep_best: int = Field(
        default=0, ge=0, description="How many of the best stay beside them; each epoch that is one of them is saved."
    )
    metric: Literal["val_loss", "val_accuracy", "train_loss"] = Field(
        default="val_loss", description="What makes a checkpoint the best: the figure of its epoch."
    )
    mode: Literal["async", "sync"] = Field(
        default="async", description="Write in a process beside training, or pause for it."
    )
    dir: Annotated[str | None, OffNone] = Field(
        default=None,
        description="A folder on faster storage (may be in memory) that files are written to before they are moved to "
        "the run folder; not set writes to the run folder at once.",
    )
    compression: Annotated[Literal["off", "zstd", "auto"], OffWord] = Field(
        default="off",
        description="Compress the files; auto does where a trial with a part of the state says that it saves time.",
    )


class ObserveConfig(Section):
    """What is written down about a run."""

    sinks: list[Literal["jsonl", "tensorboard"]] = Field(default=["jsonl"], description="Where step records go.")
    trace: Annotated[Literal["off", "window"], OffWord] = Field(
        default="off",
        description="window: torch.profiler over five steps after the first twelve, as trace-rank{r}.json.gz.",
    )
    nvtx: bool = Field(default=False, description="NVTX ranges around the phases of each step, for Nsight Systems.")
    system_interval_s: Annotated[float | None, OffNone] = Field(
        default=1.0,
        gt=0,
        description="Seconds between two looks at GPU, cores, memory and network, shorter in the first seconds; off "
        "takes none.",
    )
    progress: bool | Auto = Field(default="auto", description="Progress line; auto draws it on terminals only.")
