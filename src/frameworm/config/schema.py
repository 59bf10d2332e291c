"""What a run is told to do: one typed section per concern, a sentence on each field.

No torch here: a config is checked on a laptop, before any process starts. Values that depend on the machine or on the
number of processes are written `auto`; `config.resolve` turns them into numbers once, and the run folder keeps those.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Auto = Literal["auto"]


def _off_is_a_word(value: Any) -> Any:
    """YAML reads a bare `off` as false; settings whose values are words take it back as the word."""
    return "off" if value is False else value


def _off_is_none(value: Any) -> Any:
    return None if value is False or value in ("off", "none") else value


def _on_is_auto(value: Any) -> Any:
    """`true` and `false` are older spellings of `auto` and `off`."""
    return "auto" if value is True else _off_is_a_word(value)


OffWord = BeforeValidator(_off_is_a_word)
OffNone = BeforeValidator(_off_is_none)
OnAuto = BeforeValidator(_on_is_auto)


class Section(BaseModel):
    """A part of the config; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, values: Any) -> Any:
        """`epochs: true` is a slip, not one epoch."""
        if isinstance(values, dict):
            for name, field in cls.model_fields.items():
                kinds = {field.annotation, *get_args(field.annotation)}
                if isinstance(values.get(name), bool) and kinds & {int, float} and bool not in kinds:
                    takes_off = any(isinstance(item, BeforeValidator) for item in field.metadata)
                    if not (takes_off and values[name] is False):
                        raise ValueError(f"{name}: expected a number, got {str(values[name]).lower()}")
        return values


class TextClassifierModelConfig(Section):
    """The transformer encoder that classifies texts."""

    d_model: int = Field(128, ge=1, description="Width of the token vectors.")
    n_heads: int = Field(4, ge=1, description="Attention heads per layer; must divide d_model.")
    num_layers: int = Field(2, ge=1, description="Number of encoder layers.")
    dim_feedforward: int = Field(256, ge=1, description="Width of the feed-forward part of each layer.")
    max_seq_len: int = Field(128, ge=1, description="Longest text in tokens; longer ones are cut.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout after embeddings, attention and feed-forward.")
    num_classes: int | Auto = Field("auto", description="Number of classes; auto takes it from the data set.")
    vocab_size: int | Auto = Field("auto", description="Rows of the embedding; auto takes the tokenizer's size.")
    init_from: str | None = Field(None, description="Safetensors file with weights to start from.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TextClassifierModelConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads: {self.n_heads} does not divide d_model {self.d_model}")
        return self


class GPTModelConfig(Section):
    """The decoder that predicts the next token."""

    d_model: int = Field(768, ge=1, description="Width of the token vectors.")
    n_heads: int = Field(12, ge=1, description="Attention heads per layer; must divide d_model.")
    num_layers: int = Field(12, ge=1, description="Number of decoder layers.")
    max_seq_len: int = Field(1024, ge=2, description="Context length in tokens.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout after embeddings, attention and feed-forward.")
    vocab_size: int | Auto = Field("auto", description="Rows of the embedding; auto takes the tokenizer's size.")
    init_from: str | None = Field(None, description="Safetensors file with weights to start from.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GPTModelConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads: {self.n_heads} does not divide d_model {self.d_model}")
        return self


class CustomModelConfig(Section):
    """Settings of your own workload: any keys, handed to your function as they are."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    init_from: str | None = Field(None, description="Safetensors file with weights to start from.")


class DataConfig(Section):
    """Where the samples come from and how they become batches."""

    dataset: str = Field(
        "generated", description="generated, ag_news, imdb, text (files for gpt), or hf:NAME from the hub."
    )
    root: str | None = Field(None, description="Folder (or file, for text) that holds the data set.")
    tokenizer: str = Field(
        "auto",
        description="A tokenizers .json file, a WordPiece vocab.txt, `bytes`, or auto: WordPiece trained once on the "
        "training texts (gpt: bytes).",
    )
    vocab_size: int = Field(8192, ge=64, description="Size of a vocabulary that is trained here.")
    cache_dir: str = Field("auto", description="Folder of the token cache; auto is the user's cache folder.")
    limit: Annotated[int | None, OffNone] = Field(
        None, ge=1, description="Use only the first n training samples, for a quick look."
    )
    num_workers: int | Literal["auto", "measure"] = Field(
        "auto", description="Loader processes; auto respects CPU affinity and quota, measure times a few counts."
    )
    pin_memory: bool | Auto = Field("auto", description="Page-locked batches; auto pins when training on a GPU.")
    prefetch_factor: int = Field(2, ge=1, description="Batches each worker prepares ahead.")
    persistent_workers: bool | Auto = Field("auto", description="Keep workers alive between epochs.")
    batching: Literal["padded", "bucketed", "packed"] = Field("padded", description="How texts of unequal length meet.")
    pad_to: Literal["longest", "max"] = Field(
        "longest", description="padded: up to the longest text of the batch, or always to max_seq_len."
    )
    shuffle: bool = Field(True, description="A new order of the training samples in every epoch.")
    drop_last: bool = Field(False, description="Leave out the last, short step of an epoch.")

    @field_validator("num_workers")
    @classmethod
    def _workers_not_negative(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be 0 or more")
        return value


class EarlyStopConfig(Section):
    """Stop when a metric no longer gets better."""

    metric: Literal["val_loss", "val_accuracy", "train_loss"] = Field("val_loss", description="What is watched.")
    patience: int = Field(3, ge=1, description="Epochs without improvement before training stops.")
    min_delta: float = Field(0.0, ge=0, description="Smallest change that counts as an improvement.")


class TrainingConfig(Section):
    """How the model learns."""

    epochs: int = Field(1, ge=1, description="Passes over the training samples.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many steps, whatever the epochs say.")
    global_batch: int | None = Field(
        None, ge=1, description="Samples per step over all processes = micro-batch x accumulation x world size."
    )
    micro_batch: int | Auto = Field("auto", description="Samples per forward pass on one device.")
    batch_size: int | None = Field(
        None, ge=1, description="Older spelling: the micro-batch per device; the global batch then grows with the world."
    )
    accumulation: int | Auto = Field("auto", description="Micro-batches per step on one device.")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="Update rule.")
    lr: float = Field(3.0e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled decay (adamw) or L2 penalty (sgd).")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's averaging factors.")
    eps: float = Field(1e-8, gt=0, description="AdamW's term against division by zero.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    schedule: Literal["onecycle", "cosine", "linear", "constant"] = Field(
        "onecycle", description="Course of the learning rate over the run, per step."
    )
    warmup: float = Field(0.0, ge=0, lt=1, description="Share of the steps that climb to lr (onecycle: 0.3 unless set).")
    clip_norm: Annotated[float | None, OffNone] = Field(
        1.0, gt=0, description="Largest gradient norm; off leaves gradients alone."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="Grow lr with global_batch / base_batch, or its root."
    )
    base_batch: int | None = Field(None, ge=1, description="Global batch for which lr was chosen.")
    early_stop: Annotated[EarlyStopConfig | None, OffNone] = Field(None, description="Stop when a metric stalls.")

    @field_validator("micro_batch", "accumulation")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 1 or more")
        return value

    @field_validator("lr_scaling", mode="before")
    @classmethod
    def _none_is_a_word(cls, value: Any) -> Any:
        return "none" if value is None or value is False or value == "off" else value

    @model_validator(mode="after")
    def _batches_agree(self) -> TrainingConfig:
        if self.batch_size is not None and self.micro_batch not in ("auto", self.batch_size):
            raise ValueError(
                f"batch_size: {self.batch_size} contradicts micro_batch {self.micro_batch}; both mean the samples per "
                "forward pass on one device, so keep one of them"
            )
        if self.lr_scaling != "none" and self.base_batch is None:
            raise ValueError(f"base_batch: lr_scaling {self.lr_scaling} needs the global batch that lr was chosen for")
        return self


class GPUConfig(Section):
    """How the device is used."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU when there is one.")
    device_ids: list[int] | None = Field(None, description="GPUs of the dp strategy, or the one GPU to use.")
    memory_fraction: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory this process may take.")
    mixed_precision: Annotated[Literal["auto", "bf16", "fp16", "off"], OnAuto] = Field(
        "auto", description="auto: bf16 on GPUs that have it, else fp16; off on CPU."
    )
    compile_model: bool = Field(False, description="Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="Mode handed to torch.compile."
    )
    use_flash_attention: bool | Auto = Field("auto", description="false keeps attention off the flash kernels.")
    benchmark: bool = Field(True, description="Let cuDNN time its algorithms; off in deterministic mode.")
    deterministic: bool = Field(False, description="Same seed, same bits; wins over every faster choice.")
    capture: Annotated[Literal["off", "step", "auto"], OffWord] = Field(
        "off", description="Replay the whole step as one CUDA graph."
    )
    tf32: bool = Field(True, description="TensorFloat-32 for fp32 matrix products.")
    fused_optimizer: bool | Auto = Field("auto", description="One kernel for the whole update where torch has one.")


class MemoryConfig(Section):
    """Limits on memory."""

    activation_checkpointing: Annotated[Literal["off", "full", "selective"], OffWord] = Field(
        "off", description="Recompute activations in backward to save memory."
    )
    max_memory_percent: float = Field(85.0, gt=0, le=100, description="Share of memory beyond which a run is unsafe.")
    gc_threshold: float = Field(70.0, ge=0, le=100, description="Share of memory at which garbage is collected.")
    monitoring_interval: float = Field(30.0, gt=0, description="Seconds between two looks at the memory.")
    enable_automatic_gc: bool = Field(True, description="Collect garbage between steps instead of at random.")
    cache_size_limit: int = Field(2**30, ge=0, description="Bytes of device cache kept between steps.")


class ParallelConfig(Section):
    """How one model runs on many devices."""

    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "zero2", "zero3"] = Field(
        "auto", description="auto: single with one process, ddp with several."
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, gloo on CPU.")
    compression: Annotated[Literal["off", "auto", "fp16", "bf16", "int8", "int4", "topk", "powersgd"], OffWord] = Field(
        "off", description="Compress gradients on the wire."
    )
    bucket_cap_mb: float = Field(25.0, gt=0, description="Size of DDP's gradient buckets.")
    static_graph: bool | Auto = Field("auto", description="Promise DDP that every step uses the same parameters.")
    find_unused_parameters: bool = Field(False, description="Let DDP look for parameters a step did not use.")
    timeout_s: float = Field(600.0, gt=0, description="Longest a collective may take; NCCL_TIMEOUT overrides it.")


class CheckpointConfig(Section):
    """When the state of a run is saved."""

    every_steps: Annotated[int | None, OffNone] = Field(
        500, ge=1, description="Steps between checkpoints; off saves at the end and on interruption only."
    )
    keep: int = Field(3, ge=1, description="How many checkpoints stay on disk.")
    mode: Literal["async", "sync"] = Field("async", description="Write beside training, or pause for it.")


class ObserveConfig(Section):
    """What is written down about a run."""

    sinks: list[Literal["jsonl", "tensorboard"]] = Field(["jsonl"], description="Where step records go.")
    trace: Annotated[Literal["off", "window"], OffWord] = Field("off", description="Record torch.profiler windows.")
    progress: bool | Auto = Field("auto", description="Progress line; auto draws it on terminals only.")


MODEL_SECTIONS: dict[str, type[Section]] = {
    "text_classifier": TextClassifierModelConfig,
    "gpt": GPTModelConfig,
}


class Config(Section):
    """A whole run."""

    name: str = Field("run", description="Name of the run; part of its folder's name.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")
    workload: str = Field(
        "text_classifier", description="text_classifier, gpt, or package.module:function for your own model and data."
    )
    model: TextClassifierModelConfig | GPTModelConfig | CustomModelConfig = Field(
        default_factory=TextClassifierModelConfig, description="The model; its keys depend on the workload."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="The samples and batches.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="How the model learns.")
    gpu: GPUConfig = Field(default_factory=GPUConfig, description="How the device is used.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="Limits on memory.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Many devices.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="Writing down what happens.")

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not value or value.startswith(".") or any(not (c.isalnum() or c in "._-") for c in value):
            raise ValueError(f"{value!r} must consist of letters, digits, '.', '_' and '-' and not begin with a dot")
        return value

    @model_validator(mode="before")
    @classmethod
    def _model_section_of_the_workload(cls, values: Any) -> Any:
        """The workload decides which keys `model` has."""
        if isinstance(values, dict) and isinstance(values.get("model", {}), dict):
            workload = values.get("workload", "text_classifier")
            section = MODEL_SECTIONS.get(workload) if isinstance(workload, str) else None
            if section is None and isinstance(workload, str) and ":" in workload:
                section = CustomModelConfig
            if section is not None:
                values = {**values, "model": section.model_validate(values.get("model") or {})}
        return values
