"""The section on many devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameworm.config.section import Auto, OffNone, OffWord, Section


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
        default=0.01, gt=0, le=0.5, description="Share of the values that topk sends in each step."
    )
    powersgd_rank: int = Field(default=1, ge=1, le=64, description="Rank of powersgd's matrices.")
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="How int8 and int4 round; stochastic is right on average in every step."
    )
    error_feedback: bool = Field(
        default=True, description="Send in the next step what compression lost in this one; off only to see the damage."
    )
    sync_every: int = Field(
        default=1,
        ge=1,
        description="Average the models after so many steps instead of the gradients in each (local SGD); above 1 the "
        "mathematics are others, not only the speed.",
    )
    check_replicas: Annotated[int | None, OffNone] = Field(
        default=None, ge=1, description="Compare the parameters of all ranks bit by bit after so many steps; to debug."
    )
    bucket_cap_mb: float = Field(default=25.0, gt=0, description="Size of DDP's gradient buckets.")
    first_bucket_mb: float = Field(
        default=1.0,
        gt=0,
        description="Size of DDP's first bucket; a small one is on its way early. Before torch 2.13 it counts only "
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
        description="End all ranks, naming those that did not arrive, when no rank has come to another step or "
        "collective for so many seconds (twice that in the first step); off waits for timeout_s.",
    )
