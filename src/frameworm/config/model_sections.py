"""The `model` sections of the built-in workloads and of custom ones."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from frameworm.config.problems import combination_error
from frameworm.config.section import Auto, Count, OffNone, Section


def _check_heads(d_model: int, n_heads: int) -> None:
    """Check that every head gets an equal part of the width."""
    if d_model % n_heads:
        fits = [heads for heads in range(1, min(d_model, 4096) + 1) if d_model % heads == 0]
        below = [heads for heads in fits if heads < n_heads][-1:]
        above = [heads for heads in fits if heads > n_heads][:1]
        close = " or ".join(str(heads) for heads in below + above)
        raise combination_error(
            ("n_heads", "d_model"),
            f"n_heads {n_heads} does not divide d_model {d_model}; nearest n_heads that do: {close}",
        )


Residual = Annotated[
    Literal["fp32", "half"],
    Field(
        description="Precision of the residual stream; half: that of gpu.mixed_precision, which takes half the memory "
        "and rounds at every layer."
    ),
]


class TextClassifierModelConfig(Section):
    """The transformer encoder that classifies texts."""

    d_model: int = Field(default=128, ge=1, description="Width of the token vectors.")
    n_heads: int = Field(default=4, ge=1, description="Attention heads per layer; must divide d_model.")
    num_layers: int = Field(default=2, ge=1, description="Number of encoder layers.")
    dim_feedforward: int = Field(default=256, ge=1, description="Width of the feed-forward part of each layer.")
    max_seq_len: int = Field(default=128, ge=1, description="Longest text in tokens; longer ones are cut.")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="Dropout after embeddings, attention and feed-forward.")
    residual: Residual = "fp32"
    num_classes: Count | Auto = Field(default="auto", description="Number of classes; auto takes it from the data set.")
    vocab_size: Count | Auto = Field(
        default="auto", description="Rows of the embedding; auto takes the tokenizer's size."
    )
    init_from: Annotated[str | None, OffNone] = Field(
        default=None,
        description="Weights to start from: a safetensors file, an index of several, a save_pretrained or DCP folder.",
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TextClassifierModelConfig:
        _check_heads(self.d_model, self.n_heads)
        return self


class GPTModelConfig(Section):
    """The decoder that predicts the next token."""

    d_model: int = Field(default=768, ge=1, description="Width of the token vectors.")
    n_heads: int = Field(default=12, ge=1, description="Attention heads per layer; must divide d_model.")
    num_layers: int = Field(default=12, ge=1, description="Number of decoder layers.")
    max_seq_len: int = Field(default=1024, ge=2, description="Context length in tokens.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout after embeddings, attention and feed-forward.")
    vocab_size: Count | Auto = Field(
        default="auto",
        description="Rows of the embedding; auto takes the tokenizer's size, rounded up to a multiple of 64 for the "
        "matrix units (the added rows are never targets).",
    )
    fused_loss: bool | Auto = Field(
        default="auto",
        description="Compute the loss for a chunk of tokens at a time, so that the full logits are never in memory; "
        "auto: on a GPU, if the vocabulary has at least 8,192 entries.",
    )
    residual: Residual = "fp32"
    init_from: Annotated[str | None, OffNone] = Field(
        default=None,
        description="Weights to start from: a safetensors file, an index of several, a save_pretrained or DCP folder.",
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GPTModelConfig:
        _check_heads(self.d_model, self.n_heads)
        return self


class CustomModelConfig(Section):
    """Settings of your own workload: any keys, passed to your function unchanged."""

    model_config = ConfigDict(extra="allow")

    init_from: Annotated[str | None, OffNone] = Field(
        default=None,
        description="Weights to start from: a safetensors file, an index of several, a save_pretrained or DCP folder.",
    )


class PythonModelConfig(CustomModelConfig):
    """The model of a run of the Python API. It is only for the record: nothing can be built from it."""

    model_config = ConfigDict(extra="forbid")

    script: str | None = Field(default=None, description="The script that made the model; not known in a notebook.")
    class_name: str = Field(default="", description="Class of the model, with its module.")


PYTHON_WORKLOAD = "python"
MODEL_SECTIONS: dict[str, type[Section]] = {
    "text_classifier": TextClassifierModelConfig,
    "gpt": GPTModelConfig,
}
OWN_WORKLOAD = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def model_section_of(workload: object) -> type[Section] | None:
    """Return the class of the `model` section for a workload; None if there is no such workload."""
    if not isinstance(workload, str):
        return None
    if workload == PYTHON_WORKLOAD:
        return PythonModelConfig
    return CustomModelConfig if OWN_WORKLOAD.match(workload) else MODEL_SECTIONS.get(workload)
