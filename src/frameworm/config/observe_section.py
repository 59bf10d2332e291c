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
    keep: int = Field(default=3, ge=1, description="How many checkpoints stay on disk.")
    mode: Literal["async", "sync"] = Field(default="async", description="Write beside training, or pause for it.")


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
