"""From a config to a model and its data: the built-in workloads, or a user's function."""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from frameworm.config.checks import check_buildable
from frameworm.config.schema import Config, GPTModelConfig, TextClassifierModelConfig
from frameworm.data.corpora.text import Progress, load_language_modelling, load_text_classification
from frameworm.errors import ConfigError
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.models.weight_files import load_weights

log = logging.getLogger("frameworm")
VOCABULARY_MULTIPLE = 64  # rows of GPT's head, for matrix units
_EXPECTED = (
    "a Workload(model, train_data, val_data, loss_fn, collate_fn) or a tuple (model, train_data, val_data[, loss_fn])"
)


@dataclass
class Workload:
    """A model and the data that it learns from.

    Attributes:
        model: A torch module.
        train_data: A map-style data set, an iterable one, or a ready loader.
        val_data: The same for validation; None for no validation.
        loss_fn: As for `Trainer`; None if the model returns its loss or targets are integers.
        collate_fn: Collates samples into a batch; None for torch's own.
        metrics: As for `Trainer`.
        processing_class: As for `Trainer`: the tokenizer or processor exported with the model.
    """

    model: nn.Module
    train_data: Any
    val_data: Any = None
    loss_fn: Callable[..., Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Any] | None = None
    processing_class: Any = None


class TokenisingNotice:
    """Logs that texts are being tokenised, with occasional progress; logs nothing for a cached data set."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Log progress; called while texts are tokenised."""
        now = monotonic()
        if now >= self._next and done < total:
            once = " (once: the result is cached)" if self._next == 0.0 else ""
            log.info("tokenising: %d of %d%s", done, total, once)
            self._next = now + self._every_s


def build_workload(config: Config, progress: Progress | None = None, *, weights_seed: int | None = None) -> Workload:
    """Build the model and open the data that a config asks for.

    Weights depend only on the seed, not on random numbers drawn while preparing the data.

    Args:
        config: A whole run; `workload` decides what is built.
        progress: Called with (done, total) while texts are tokenised.
        weights_seed: Seed of the weights; None for `config.seed`.

    Raises:
        ConfigError: If the workload does not exist or returns something else, or a size contradicts the data.
        CheckpointError: If `model.init_from` holds weights of another model.
    """
    check_buildable(config, "config")
    padded: dict[str, int] = {}
    seed = config.seed if weights_seed is None else weights_seed
    # The config has checked that the workload is one of these and that `model` belongs to it.
    if isinstance(config.model, TextClassifierModelConfig):
        workload = _text_classifier(config, config.model, progress, seed)
    elif isinstance(config.model, GPTModelConfig):
        workload, padded = _gpt(config, config.model, progress, seed)
    else:
        workload = _own_workload(config, seed)
    if config.data.batching == "packed":
        _check_packable(workload.model)
    if config.model.init_from is not None:
        load_weights(workload.model, config.model.init_from, padded)
    return workload


def _text_classifier(
    config: Config, settings: TextClassifierModelConfig, progress: Progress | None, seed: int
) -> Workload:
    data = load_text_classification(config.data, max_seq_len=settings.max_seq_len, seed=config.seed, progress=progress)
    vocab_size = _at_least("vocab_size", settings.vocab_size, data.vocab_size, "tokens of the tokenizer")
    num_classes = _at_least("num_classes", settings.num_classes, data.num_classes, "classes of the data set")
    model = _seeded(seed, lambda: make_text_classifier(settings, vocab_size, num_classes, data.pad_id))
    return Workload(model, data.train, data.val)


def _gpt(
    config: Config, settings: GPTModelConfig, progress: Progress | None, seed: int
) -> tuple[Workload, dict[str, int]]:
    """Build the workload; also return the number of rows in use for weights that have more."""
    if config.data.batching == "packed":
        _check_packable(GPT)  # before the texts are tokenised
    data = load_language_modelling(config.data, max_seq_len=settings.max_seq_len, seed=config.seed, progress=progress)
    vocab_size = _at_least("vocab_size", settings.vocab_size, data.vocab_size, "tokens of the tokenizer")
    if settings.vocab_size == "auto":
        vocab_size = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    model = _seeded(seed, lambda: make_gpt(settings, vocab_size))
    return Workload(model, data.train, data.val), {"token_embedding.weight": data.vocab_size}


def make_text_classifier(
    settings: TextClassifierModelConfig, vocab_size: int, num_classes: int, pad_id: int
) -> TextClassifier:
    """Build the classifier of a config with its `auto` sizes resolved."""
    return TextClassifier(
        vocab_size=vocab_size,
        num_classes=num_classes,
        d_model=settings.d_model,
        n_heads=settings.n_heads,
        num_layers=settings.num_layers,
        dim_feedforward=settings.dim_feedforward,
        max_seq_len=settings.max_seq_len,
        dropout=settings.dropout,
        pad_id=pad_id,
        residual=settings.residual,
    )


def make_gpt(settings: GPTModelConfig, vocab_size: int) -> GPT:
    """Build the decoder of a config with its `auto` size resolved."""
    return GPT(
        vocab_size=vocab_size,
        d_model=settings.d_model,
        n_heads=settings.n_heads,
        num_layers=settings.num_layers,
        max_seq_len=settings.max_seq_len,
        dropout=settings.dropout,
        fused_loss=settings.fused_loss,
        residual=settings.residual,
    )


def _check_packable(model: nn.Module | type[nn.Module]) -> None:
    if not getattr(model, "accepts_packed", False):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(
            f"data.batching: {name} does not take packed batches; use bucketed, or padded where all samples are of one "
            "length. A model of your own that takes input_ids, offsets and positions says so with the class attribute "
            "accepts_packed = True"
        )


def _own_workload(config: Config, seed: int) -> Workload:
    """Call `package.module:function`; its exceptions reach the user unchanged."""
    function = _find_function(config.workload)
    result = _seeded(seed, lambda: function(config))
    if isinstance(result, tuple) and len(result) in (3, 4):
        result = Workload(*result)
    if not isinstance(result, Workload):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ConfigError(f"workload: {config.workload} returned {what}; expected {_EXPECTED}")
    model: Any = result.model
    if not isinstance(model, nn.Module):
        what = type(model).__name__
        raise ConfigError(f"workload: {config.workload} returned a {what} as the model; expected {_EXPECTED}")
    if not (hasattr(result.train_data, "__getitem__") or hasattr(result.train_data, "__iter__")):
        what = type(result.train_data).__name__
        raise ConfigError(
            f"workload: {config.workload} returned a {what} as train_data, which is neither a data set nor a loader; "
            f"expected {_EXPECTED}"
        )
    return result


def _find_function(workload: str) -> Callable[[Config], Any]:
    module_name, _, name = workload.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise ConfigError(
            f"workload: there is no module {error.name} for {workload}; it is looked for in {folder} and among the "
            "installed packages"
        ) from None
    if not hasattr(module, name):
        known = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"workload: {module_name} ({module.__file__}) has no function {name}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(
            f"workload: {workload} is a {type(function).__name__}, not a function that takes the config and returns "
            f"{_EXPECTED}"
        )
    return function  # type: ignore[no-any-return]


def _seeded(seed: int, build: Callable[[], Any]) -> Any:
    """Build under the seed and restore the random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def _at_least(key: str, wanted: int | str, needed: int, what: str) -> int:
    """Resolve a size that the user may set, but not below what the data needs."""
    if wanted == "auto":
        return needed
    size = int(wanted)
    if size < needed:
        raise ConfigError(f"model.{key}: {size} is less than the {needed} {what}; use auto or at least {needed}")
    return size
