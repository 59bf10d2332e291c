"""The section `training`: how the model learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from frameworm.config.checkpoint_section import EarlyStopConfig, Metric
from frameworm.config.problems import combination_error
from frameworm.config.section import Auto, Count, OffNone, OffWord, Section, Share


class TrainingConfig(Section):
    """How the model learns."""

    epochs: int = Field(default=1, ge=1, description="Passes over the training samples.")
    max_steps: Annotated[Count | None, OffNone] = Field(
        default=None, description="Stop after this many steps, regardless of epochs."
    )
    global_batch: Annotated[Count | None, OffNone] = Field(
        default=None,
        description="Samples per step over all processes = micro-batch x accumulation x world size; 32 when no batch "
        "is given.",
    )
    micro_batch: Count | Auto = Field(default="auto", description="Samples per forward pass on one device.")
    batch_size: Annotated[Count | None, OffNone] = Field(
        default=None,
        description="The micro-batch per device, as in the Python API; the global batch then grows with the world "
        "size, and a note says so.",
    )
    accumulation: Count | Auto = Field(default="auto", description="Micro-batches per step on one device.")
    optimizer: Literal["adamw", "sgd", "muon", "adamw8bit", "schedulefree"] = Field(
        default="adamw",
        description="Update rule; muon: torch's Muon for the matrices of hidden layers, AdamW for all else; adamw8bit: "
        "AdamW of bitsandbytes, whose state takes 2 bytes per parameter instead of 8; schedulefree: AdamW of the "
        "package schedulefree, with schedule: constant.",
    )
    lr: float = Field(default=3.0e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled decay, or L2 penalty (sgd).")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="AdamW's averaging factors.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's term against division by zero.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's momentum.")
    schedule: Literal["onecycle", "cosine", "linear", "constant", "wsd"] = Field(
        default="onecycle",
        description="Course of the learning rate over the run, per step; wsd: warm-up, stable, decay.",
    )
    schedule_every: Literal["auto", "step", "epoch"] = Field(
        default="auto",
        description="How often a torch scheduler given to Trainer is stepped; auto: every step, or every epoch if it "
        "takes a metric.",
    )
    schedule_metric: Annotated[Metric | None, OffNone] = Field(
        default=None,
        description="What a torch scheduler that takes a metric is given: val_loss, val_accuracy, train_loss, or "
        "val_NAME of a metric given to Trainer; not set: val_loss, or val_accuracy if it wants a maximum.",
    )
    warmup: float = Field(
        default=0.0,
        ge=0,
        description="Warm-up steps up to lr: a fraction of all steps (below 1) or their number; with every schedule, "
        "even a torch scheduler given to Trainer (onecycle: 0.3 unless set).",
    )
    decay: float = Field(
        default=0.2, gt=0, description="For wsd: the last steps, which fall to zero; a fraction or their number."
    )
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        default="linear", description="For wsd: shape of the decay; sqrt: 1 - sqrt(fraction of the decay)."
    )
    clip_norm: Annotated[float | None, OffNone] = Field(
        default=1.0, gt=0, description="Largest gradient norm; off leaves gradients alone."
    )
    ema: Annotated[float | None, OffNone] = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of a moving average of the weights (0.999 averages about the last 1,000 steps); validation "
        "and export use the average, training does not.",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="Grow lr with global_batch / base_batch, or its root."
    )
    base_batch: Annotated[Count | None, OffNone] = Field(default=None, description="Global batch lr was chosen for.")
    max_bad_steps: Annotated[Count | None, OffNone] = Field(
        default=10, description="Stop after this many consecutive steps with a non-finite loss or gradients."
    )
    on_spike: Annotated[Literal["off", "warn", "rollback"], OffWord] = Field(
        default="off",
        description="If the loss jumps up and stays there: warn, or go back to the last checkpoint's model.",
    )
    early_stop: Annotated[EarlyStopConfig | None, OffNone] = Field(default=None, description="Stop if a metric stalls.")
    accuracy: bool | Auto = Field(
        default="auto",
        description="Measure accuracy in validation; auto: if the loss takes integer class targets, one per sample.",
    )
    fused_loss: bool = Field(
        default=False,
        description="Compute the last layer and its cross-entropy for a chunk of tokens at a time, so that the full "
        "logits are never in memory; for any model with an nn.Linear of 4,096 outputs or more (gpt has its own: "
        "model.fused_loss).",
    )
    cpu_threads: Count | Auto = Field(
        default="auto", description="Threads torch computes with on the host; auto leaves torch's own choice."
    )
    cpu_interop_threads: Count | Auto = Field(
        default="auto",
        description="Threads torch runs independent operations with (torch.jit.fork); auto leaves torch's own choice.",
    )
    cpu_affinity: bool = Field(
        default=False, description="Bind each process of a machine to an equal part of its cores (Linux)."
    )
    cpu_onednn: bool | Literal["except_linear"] = Field(
        default=True, description="Let oneDNN compute on the host; except_linear: all but linear layers."
    )
    cpu_gelu: Literal["torch", "keep_slope"] = Field(
        default="torch",
        description="keep_slope: nn.GELU on the host computes its derivative in forward, not in backward.",
    )

    @field_validator("warmup", "decay")
    @classmethod
    def _share_or_steps(cls, value: float) -> float:
        if value >= 1 and value % 1:
            raise ValueError(f"{value:g} is neither a share (below 1) nor a whole number of steps")
        return value

    @field_validator("lr_scaling", mode="before")
    @classmethod
    def _none_is_a_word(cls, value: Any) -> Any:
        return "none" if value is None or value is False or value == "off" else value

    @model_validator(mode="after")
    def _values_agree(self) -> TrainingConfig:
        if self.batch_size is not None and self.micro_batch not in ("auto", self.batch_size):
            raise combination_error(
                ("batch_size", "micro_batch"),
                f"batch_size {self.batch_size} contradicts micro_batch {self.micro_batch}; both mean the samples per "
                "forward pass on one device, so keep one of them",
            )
        if self.schedule == "wsd" and self.warmup < 1 and self.decay < 1 and self.warmup + self.decay > 1:
            raise combination_error(
                ("warmup", "decay"),
                f"warmup {self.warmup:g} and decay {self.decay:g} are more than the whole run; make one shorter",
            )
        if self.lr_scaling != "none" and self.base_batch is None:
            raise combination_error(
                ("lr_scaling",),
                f"{self.lr_scaling} needs training.base_batch, the global batch that lr was chosen for",
            )
        return self
