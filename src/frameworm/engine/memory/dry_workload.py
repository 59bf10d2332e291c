"""Model and batches of a config for a dry run; built-in workloads read no data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.config.schema import Config, GPTModelConfig, TextClassifierModelConfig
from frameworm.data.batches.packed import round_capacity, spare_sequences
from frameworm.data.corpora.generated import CLASS_NAMES
from frameworm.data.corpora.readers import AG_NEWS_CLASSES, IMDB_CLASSES
from frameworm.data.corpora.tokenizer import ByteTokenizer
from frameworm.data.steps import close_loader
from frameworm.errors import DataError
from frameworm.models.loaders import build_loader
from frameworm.models.workloads import VOCABULARY_MULTIPLE, build_workload, make_gpt, make_text_classifier
from frameworm.torch_private.tensors import tree_leaves, tree_map

_CLASSES = {"ag_news": len(AG_NEWS_CLASSES), "imdb": len(IMDB_CLASSES), "generated": len(CLASS_NAMES)}


@dataclass
class DryWorkload:
    """What a dry run needs of a workload.

    Attributes:
        model: On `meta`, or the user's own with its values.
        make_batch: Creates a training batch with a given number of samples of the greatest length, on `meta`.
        make_validation: The same for validation; None without validation.
        loss_fn: As for `Trainer`.
        notes: Assumptions that had to be made.
    """

    model: nn.Module
    make_batch: Callable[[int], Any]
    make_validation: Callable[[int], Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    notes: list[str] = field(default_factory=list)


def dry_workload(config: Config, tokens_per_sample: float | None = None) -> DryWorkload:
    """Build the workload of a resolved config.

    Args:
        config: The config. Built-in workloads open no data; a custom one is built as for training.
        tokens_per_sample: Mean length of the samples, for packed batches; None for the model's maximum.

    Raises:
        DataError: If a custom workload's data has no sample.
    """
    if isinstance(config.model, TextClassifierModelConfig):
        return _text_classifier(config, config.model, tokens_per_sample)
    if isinstance(config.model, GPTModelConfig):
        return _gpt(config, config.model)
    return _own(config)


def _text_classifier(config: Config, settings: TextClassifierModelConfig, mean: float | None) -> DryWorkload:
    notes: list[str] = []
    vocabulary, classes, length = settings.vocab_size, settings.num_classes, settings.max_seq_len
    if vocabulary == "auto":
        vocabulary = config.data.vocab_size
        notes.append(f"a vocabulary of {vocabulary:,} is assumed (data.vocab_size); the data is not read")
    if classes == "auto":
        classes = _CLASSES.get(config.data.dataset, 2)
    with torch.device("meta"):
        model = make_text_classifier(settings, int(vocabulary), int(classes), pad_id=0)

    def padded(samples: int) -> dict[str, Tensor]:
        return {"input_ids": _ids(samples, length), "lengths": _ids(samples), "labels": _ids(samples)}

    def packed(samples: int) -> dict[str, Tensor]:
        capacity = round_capacity(round(samples * (mean or length)))
        borders = samples + spare_sequences(capacity, length) + 1
        return {
            "labels": _ids(samples),
            "input_ids": _ids(capacity),
            "positions": _ids(capacity),
            "offsets": torch.empty(borders, dtype=torch.int32, device="meta"),
        }

    if config.data.batching != "packed":
        if config.data.pad_to != "max":
            notes.append(f"batches are planned at the greatest width, {length} tokens")
        return DryWorkload(model, padded, padded, notes=notes)
    if mean is None:
        notes.append(f"packed batches are planned as if every text had {length} tokens; give --tokens-per-sample")
    return DryWorkload(model, packed, padded, notes=notes)


def _gpt(config: Config, settings: GPTModelConfig) -> DryWorkload:
    notes: list[str] = []
    vocabulary, length = settings.vocab_size, settings.max_seq_len
    if vocabulary == "auto":
        vocabulary = ByteTokenizer.vocab_size
        if config.data.tokenizer not in ("auto", "bytes"):
            vocabulary = config.data.vocab_size
            notes.append(f"a vocabulary of {vocabulary:,} is assumed (data.vocab_size); set model.vocab_size")
        vocabulary = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    with torch.device("meta"):
        model = make_gpt(settings, int(vocabulary))

    def blocks(samples: int) -> dict[str, Tensor]:
        return {"input_ids": _ids(samples, length), "targets": _ids(samples, length)}

    return DryWorkload(model, blocks, blocks, notes=notes)


def _own(config: Config) -> DryWorkload:
    """Use one real batch, resized to other sizes along the first dimension of tensors that have one row per sample."""
    config = config.model_copy(deep=True)
    config.data.num_workers, config.data.pin_memory, config.data.resident = 0, False, False
    workload = build_workload(config)
    training = build_loader(config, workload, workload.train_data, evaluation=False)
    batch = next(itertools.islice(training, 1), None)
    close_loader(training)
    if batch is None:
        raise DataError(f"workload {config.workload}: its training data has no sample to plan with")
    samples = next((item.size(0) for item in tree_leaves(batch) if isinstance(item, Tensor) and item.dim()), 1)

    def stretched(wanted: int) -> Any:
        def one(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            follows = item.dim() and item.size(0) == samples
            return torch.empty((wanted, *item.shape[1:]) if follows else item.shape, dtype=item.dtype, device="meta")

        return tree_map(one, dict(batch) if hasattr(batch, "keys") else batch)

    notes = ["planned with the shapes of the first training batch"]
    validation = None if workload.val_data is None else stretched
    return DryWorkload(workload.model, stretched, validation, workload.loss_fn, notes)


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
