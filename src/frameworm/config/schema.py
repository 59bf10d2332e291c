"""The settings of a run: one typed section per concern, with a sentence on each field.

No torch here: a config is checked on a laptop, before any process starts. Values that depend on the machine or on the
number of processes are written `auto`; `config.resolve` replaces them once, and the run folder stores the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from frameworm.config.checkpoint_section import CheckpointConfig, EarlyStopConfig, StorageConfig
from frameworm.config.describe import nearest, section_of, show, suggest
from frameworm.config.model_sections import (
    MODEL_SECTIONS,
    CustomModelConfig,
    GPTModelConfig,
    PythonModelConfig,
    TextClassifierModelConfig,
    model_section_of,
)
from frameworm.config.observe_section import ObserveConfig, TargetsConfig
from frameworm.config.problems import Origins
from frameworm.config.section import Auto, Count, OffNone, OffWord, OnAuto, Section
from frameworm.config.training_section import TrainingConfig


class ParallelConfig(Section):
    """How one model runs on many devices."""

    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "zero2", "zero3"] = Field(
        default="auto",
        description="auto: single with one process, ddp with several. zero1 divides the optimizer's state among the "
        "ranks, zero2 and zero3 gradients and parameters too; zero3 gathers one layer at a time.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="With zero2 or zero3: keep each rank's part of parameters, gradients and optimizer state in host "
        "memory and update there; slower, and the GPU has room for activations only.",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(default="auto", description="auto: nccl on GPUs, gloo on CPU.")
    compression: Annotated[Literal["off", "auto", "fp16", "bf16", "int8", "int4", "topk", "powersgd"], OffWord] = Field(
        default="off",
        description="Compress gradients on the wire; auto measures the network and takes what is fastest, or nothing.",
    )
    allow_approximate: bool = Field(
        default=False,
        description="Let auto also take topk and powersgd, which send far less but need more steps to learn the same; "
        "without it auto takes what only rounds (bf16, int8, int4).",
    )
    compression_ratio: float = Field(
        default=0.01, gt=0, le=0.5, description="Fraction of the values that topk sends in each step."
    )
    powersgd_rank: int = Field(default=1, ge=1, le=64, description="Rank of powersgd's matrices.")
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="How int8 and int4 round; stochastic is right on average in every step."
    )
    error_feedback: bool = Field(
        default=True, description="Add what compression lost in this step to the next one; off only for comparisons."
    )
    sync_every: int = Field(
        default=1,
        ge=1,
        description="Steps between averages of the models; 1 averages the gradients in every step instead. Above 1 "
        "(local SGD) this changes numerics, not only speed.",
    )
    check_replicas: Annotated[int | None, OffNone] = Field(
        default=None, ge=1, description="Compare all ranks' parameters bit by bit every this many steps, for debugging."
    )
    bucket_cap_mb: float = Field(default=25.0, gt=0, description="Size of DDP's gradient buckets.")
    first_bucket_mb: float = Field(
        default=1.0,
        gt=0,
        description="Size of DDP's first bucket; a small one is sent early. Before torch 2.13 it only takes effect "
        "with the default bucket_cap_mb.",
    )
    gradient_as_bucket_view: bool = Field(
        default=True, description="Let gradients live in DDP's buckets, which saves a copy of them."
    )
    static_graph: bool | Auto = Field(
        default="auto", description="Promise DDP that every step uses the same parameters."
    )
    find_unused_parameters: bool = Field(default=False, description="Let DDP look for parameters a step did not use.")
    timeout_s: float = Field(
        default=600.0, gt=0, description="Longest a collective may take; NCCL_TIMEOUT overrides it."
    )
    watchdog_s: Annotated[float | None, OffNone] = Field(
        default=300.0,
        gt=0,
        description="Seconds without a new step or collective on any rank after which all ranks are stopped and the "
        "missing ones named (twice that in the first step); off waits for timeout_s.",
    )


__all__ = [
    "MODEL_SECTIONS",
    "CheckpointConfig",
    "Config",
    "CustomModelConfig",
    "DataConfig",
    "EarlyStopConfig",
    "GPTModelConfig",
    "GPUConfig",
    "MemoryConfig",
    "ObserveConfig",
    "ParallelConfig",
    "Section",
    "StorageConfig",
    "TargetsConfig",
    "TextClassifierModelConfig",
    "TrainingConfig",
    "model_section_of",
]


class DataConfig(Section):
    """Where the samples come from and how they become batches."""

    dataset: str = Field(
        default="generated", description="generated, ag_news, imdb, text (files for gpt), or hf:NAME from the hub."
    )
    root: Annotated[str | None, OffNone] = Field(
        default=None, description="Folder (or file, for text) that holds the data set."
    )
    tokenizer: str = Field(
        default="auto",
        description="A tokenizers .json file, a WordPiece vocab.txt, `bytes`, or auto: WordPiece trained once on the "
        "training texts (gpt: bytes).",
    )
    vocab_size: int = Field(default=8192, ge=64, description="Size of a vocabulary that is trained here.")
    cache_dir: str = Field(default="auto", description="Folder of the token cache; auto is the user's cache folder.")
    limit: Annotated[Count | None, OffNone] = Field(
        default=None, description="Use only the first n training samples, for a quick test."
    )
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto", "measure"] = Field(
        default="auto",
        description="Loader processes; auto respects CPU affinity and quota, measure times a few counts.",
    )
    pin_memory: bool | Auto = Field(
        default="auto", description="Page-locked batches; auto pins when training on a GPU."
    )
    prefetch_factor: int = Field(default=2, ge=1, description="Batches each worker prepares ahead.")
    persistent_workers: bool | Auto = Field(default="auto", description="Keep workers alive between epochs.")
    batching: Literal["padded", "bucketed", "packed"] = Field(
        default="padded",
        description="padded: each batch as wide as its longest text; bucketed: texts of like length share a forward "
        "pass, and each step has one of short and one of long texts (lengths are declared, or found with a collate "
        "function that pads); packed: texts end to end, without padding, for models with accepts_packed.",
    )
    balance: bool | Auto = Field(
        default="auto", description="Steps, ranks and micro-batches of nearly equal token counts; auto: for packed."
    )
    resident: bool | Auto = Field(
        default="auto",
        description="Keep the training set on the device and put batches together there: packed ones on a GPU, or any "
        "map-style data set whose samples are tensors of fixed shapes; auto: packed, below 1 GiB and 5% of its memory.",
    )
    eval_batch: Count | Auto = Field(
        default="auto",
        description="Samples per validation batch on one device; auto: micro_batch, text_classifier: at least 256.",
    )
    pad_to: Literal["longest", "few", "max"] = Field(
        default="longest",
        description="padded: up to the longest text of the batch, on to one of a few widths (for captured steps, where "
        "batches have an attention_mask), or always to max_seq_len.",
    )
    shuffle: bool = Field(default=True, description="A new order of the training samples in every epoch.")
    drop_last: bool = Field(default=False, description="Leave out the last, short step of an epoch.")
    on_error: Literal["raise", "skip"] = Field(
        default="raise",
        description="If a sample cannot be read: stop, or use the next one instead and name it in the summary.",
    )


class GPUConfig(Section):
    """How the device is used."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes a GPU when there is one.")
    device_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, OffNone] = Field(
        default=None, description="GPUs of the dp strategy, or the one GPU to use."
    )
    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Fraction of the GPU's memory this process may use."
    )
    mixed_precision: Annotated[Literal["auto", "bf16", "fp16", "off"], OnAuto] = Field(
        default="auto", description="auto: bf16 on GPUs that have it, else fp16; off on CPU."
    )
    compile_model: bool = Field(default=False, description="Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default", description="Mode handed to torch.compile."
    )
    compile_scope: Literal["model", "blocks"] = Field(
        default="model",
        description="model compiles the model as a whole; blocks compiles each kind of block that the model repeats "
        "once for all its instances, so that deep models start sooner.",
    )
    combine_kernels: bool = Field(
        default=False, description="Let the compiler launch small independent kernels together."
    )
    use_flash_attention: bool | Literal["auto", "cudnn"] = Field(
        default="auto",
        description="false keeps attention off the flash kernels and off our own; cudnn asks for cuDNN's, fast on "
        "Hopper but slow to plan each new shape.",
    )
    benchmark: bool = Field(default=True, description="Let cuDNN and cuBLAS time algorithms; not if deterministic.")
    deterministic: bool = Field(default=False, description="Same seed, same bits; wins over every faster choice.")
    capture: Annotated[Literal["off", "step", "auto", "rehearse"], OffWord] = Field(
        default="off",
        description="Replay the whole step as one CUDA graph per batch shape; auto first tests whether that matches "
        "the eager step and is faster; rehearse runs the code that step would record, without a graph, so that the "
        "two can be compared bit by bit.",
    )
    padding_free: bool = Field(
        default=False,
        description="Remove padding, as given by the batch's attention_mask, between the first and the last block of a "
        "Hugging Face model; the samples of a step stay the same.",
    )
    tf32: bool = Field(default=True, description="TensorFloat-32 for fp32 matrix products.")
    channels_last: bool | Auto = Field(
        default="auto",
        description="Channels-last memory format for images; auto: for convolutions in half precision on a GPU, unless "
        "the model is compiled, because then the compiler chooses.",
    )
    fused_optimizer: bool | Auto = Field(
        default="auto", description="One kernel for the whole update where torch has one."
    )


class MemoryConfig(Section):
    """Limits on memory."""

    activation_checkpointing: Annotated[Literal["off", "full", "selective"], OffWord] = Field(
        default="off", description="Recompute layers in backward to save memory: entirely, or all but costly products."
    )
    checkpoint_modules: Annotated[list[str] | None, OffNone] = Field(
        default=None,
        description="Class names of the modules to recompute; by default the blocks that the model repeats.",
    )
    max_memory_percent: float = Field(
        default=85.0,
        gt=0,
        le=100,
        description="A run that grows beyond this percentage of its memory (GPU or host) saves its state and stops.",
    )
    gc_threshold: float = Field(
        default=70.0,
        ge=0,
        le=100,
        description="A run that grows beyond this percentage collects garbage, trims the device's cache, and warns.",
    )
    monitoring_interval: float = Field(
        default=30.0, gt=0, description="Seconds between memory checks, which happen between steps."
    )
    enable_automatic_gc: bool = Field(
        default=True,
        description="Keep garbage collections short, and between steps (several ranks, GPU); off: as Python decides.",
    )
    cache_size_limit: int = Field(default=2**30, ge=0, description="Most bytes of unused device cache to keep.")
    on_oom: Literal["stop", "halve_micro_batch"] = Field(
        default="stop",
        description="When memory runs out: stop with advice, or continue with half the micro-batch and twice the "
        "accumulation.",
    )


LONGEST_NAME = 100


class Config(Section):
    """A whole run."""

    name: str = Field(default="run", description="Name of the run; part of its folder's name.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")
    workload: str = Field(
        default="text_classifier",
        description="text_classifier, gpt, or package.module:function for your own model and data.",
    )
    model: TextClassifierModelConfig | GPTModelConfig | CustomModelConfig | PythonModelConfig = Field(
        default_factory=TextClassifierModelConfig, description="The model; its keys depend on the workload."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="The samples and batches.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="How the model learns.")
    gpu: GPUConfig = Field(default_factory=GPUConfig, description="How the device is used.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="Limits on memory.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Many devices.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="A copy in object storage.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="Recording what happens.")

    # The origin of each value, so that problems found later can still name the line.
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @classmethod
    def model_section_in(cls, values: Mapping[str, Any]) -> type[Section] | None:
        """See `Section.model_section_in`."""
        return model_section_of(values.get("workload", "text_classifier"))

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not value or value.startswith(".") or any(not (c.isalnum() or c in "._-") for c in value):
            raise ValueError(
                f"{show(value)} must consist of letters, digits, '.', '_' and '-' and not begin with a dot"
            )
        if len(value) > LONGEST_NAME:
            raise ValueError(f"{len(value)} characters are too many for a folder's name; use at most {LONGEST_NAME}")
        return value

    @field_validator("workload")
    @classmethod
    def _workload_exists(cls, value: str) -> str:
        if model_section_of(value) is None:
            if ":" in value:
                raise ValueError(f"{show(value)} is not of the form package.module:function")
            name, alike = nearest(value, list(MODEL_SECTIONS))
            words = ", ".join(MODEL_SECTIONS)
            raise ValueError(
                f"expected one of {words} or package.module:function, got {show(value)}{suggest(name, alike)}"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _sections_may_be_empty(cls, values: Any) -> Any:
        """Treat `training:` with nothing below it, or a missing `model`, as an empty section."""
        if not isinstance(values, dict):
            return values
        sections = [
            "model",
            *(name for name in values if name in cls.model_fields and section_of(cls.model_fields[name])),
        ]
        return {**values, **{name: {} for name in sections if values.get(name) is None}}

    @field_validator("model", mode="before")
    @classmethod
    def _model_section_of_the_workload(cls, value: Any, info: ValidationInfo) -> Any:
        """Choose the keys of `model` by the workload; if the workload is wrong, only that is reported."""
        section = model_section_of(info.data.get("workload"))
        if section is None:
            return CustomModelConfig()
        if isinstance(value, Section) and not isinstance(value, section):
            raise ValueError(
                f"{type(value).__name__} does not belong to workload {info.data['workload']}, which takes a "
                f"{section.__name__}"
            )
        return section.model_validate(value)
