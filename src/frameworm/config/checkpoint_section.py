"""Sections about what is saved and where, and about the metrics that pick the best checkpoint or stop a run early."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from frameworm.config.describe import show
from frameworm.config.section import OffNone, OffWord, Section

USUAL_METRICS = ("val_loss", "val_accuracy", "train_loss")
BETTER = "Which values are better; auto: as the metric defines, else higher for accuracies and lower for losses."


def _is_metric(value: str) -> str:
    if value in USUAL_METRICS or (value.startswith("val_") and len(value) > len("val_")):
        return value
    meant = f" (val_{value}?)" if value.isidentifier() and len(value) < 40 else ""
    usual = ", ".join(USUAL_METRICS)
    raise ValueError(f"expected one of {usual}, or val_NAME of a metric given to Trainer{meant}, got {show(value)}")


Metric = Annotated[str, AfterValidator(_is_metric)]
Better = Literal["auto", "lower", "higher"]


def prefers_higher(metric: str, better: str = "auto") -> bool:
    """True if a higher value of a metric is better, by its name unless `better` decides."""
    return better == "higher" or (better == "auto" and metric.endswith("accuracy"))


class CheckpointConfig(Section):
    """When the state of a run is saved."""

    every_steps: Annotated[int | None, OffNone] = Field(
        default=500, ge=1, description="Steps between checkpoints; off saves at the end and on interruption only."
    )
    every_minutes: Annotated[float | None, OffNone] = Field(
        default=None, gt=0, description="Minutes between checkpoints, in addition to every_steps."
    )
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay on disk.")
    keep_best: int = Field(
        default=0, ge=0, description="How many of the best to keep as well; an epoch among the best is always saved."
    )
    metric: Metric = Field(
        default="val_loss",
        description="What makes a checkpoint the best: val_loss, val_accuracy, train_loss, or val_NAME of a metric "
        "given to Trainer.",
    )
    better: Better = Field(default="auto", description=BETTER)
    mode: Literal["async", "sync"] = Field(
        default="async", description="Write in a separate process during training, or pause training for it."
    )
    when_busy: Literal["skip", "wait"] = Field(
        default="skip",
        description="If a save is due before the last one is durable: postpone it until then, or wait.",
    )
    dir: Annotated[str | None, OffNone] = Field(
        default=None,
        description="A folder on faster storage (may be in memory) that files are written to before they are moved to "
        "the run folder; not set: write directly to the run folder.",
    )
    compression: Annotated[Literal["off", "zstd", "auto"], OffWord] = Field(
        default="off",
        description="Compress the files; auto compresses if a trial with part of the state shows that it saves time.",
    )

    @field_validator("dir")
    @classmethod
    def _dir_is_a_folder(cls, value: str | None) -> str | None:
        if value == "auto":
            raise ValueError(
                "auto is not offered: leave dir out to write to the run folder at once, or name a folder on faster "
                "storage"
            )
        return value

    @property
    def prefers_higher(self) -> bool:
        """True if the checkpoint with the highest metric is the best."""
        return prefers_higher(self.metric, self.better)


class StorageConfig(Section):
    """A copy of the run in object storage, uploaded during training."""

    url: Annotated[str | None, OffNone] = Field(
        default=None,
        description="Upload each run to URL/<name of the run folder>, such as s3://bucket/runs; train --out URL gives "
        "the whole URL of one run instead.",
    )
    records_every_s: float = Field(
        default=30.0,
        gt=0,
        description="Least seconds between uploads of records; checkpoints are uploaded as soon as they are written.",
    )
    wait_s: float = Field(
        default=300.0, ge=0, description="Most seconds that the end of a run waits for pending uploads."
    )
    preempted_wait_s: float = Field(
        default=300.0,
        ge=0,
        description="The same after SIGTERM, counted from the signal; --distributed workers also obey --stop-grace.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_a_url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"{show(value)} is not a URL such as s3://bucket/runs; a local folder is given with --out")
        return value


class EarlyStopConfig(Section):
    """Stop when a metric no longer gets better."""

    metric: Metric = Field(
        default="val_loss",
        description="Metric to watch: val_loss, val_accuracy, train_loss, or val_NAME of a metric given to Trainer.",
    )
    patience: int = Field(default=3, ge=1, description="Epochs without improvement before training stops.")
    min_delta: float = Field(default=0.0, ge=0, description="Smallest change that counts as an improvement.")
    better: Better = Field(default="auto", description=BETTER)

    @property
    def prefers_higher(self) -> bool:
        """True if a higher metric is an improvement."""
        return prefers_higher(self.metric, self.better)
