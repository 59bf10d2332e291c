"""Texts as token batches: data sets over the token cache, and the way from a config to them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from frameworm.config.schema import DataConfig
from frameworm.data.cache import TokenCache, TokenStore, TokenWriter, store_key, write_store
from frameworm.data.corpora import READER_VERSION, Corpus, Samples, Split, find_corpus
from frameworm.data.tokenizer import Kind, Tokenizer, TokenizerPlan, plan_tokenizer
from frameworm.errors import DataError

Progress = Callable[[int, int], None]

_TEXTS_PER_CALL = 1_024
_CHUNKS_PER_CALL = 64
_CHARACTERS_PER_CHUNK = 2**16
# A line break between two words: cutting there changes neither side's tokens.
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


class TextDataset(Dataset[dict[str, Tensor]]):
    """Labelled texts, put together to batches without a Python loop over the samples.

    Args:
        store: Tokens and labels.
        max_seq_len: Longer texts are cut.
        pad_to: A batch is as wide as its longest text, or always `max_seq_len`.
        limit: Only the first n samples.
    """

    assembles_batches = True

    def __init__(
        self,
        store: TokenStore,
        max_seq_len: int,
        pad_to: Literal["longest", "max"] = "longest",
        limit: int | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.pad_to = pad_to
        self.num_classes = int(store.meta["num_classes"])
        self.pad_id = int(store.meta["pad_id"])
        self.token_lengths = np.minimum(np.diff(store.offsets), max_seq_len)[:limit]
        self.labels = store.labels[:limit]
        self._store = store
        self._columns = np.arange(max_seq_len)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: its tokens without padding, its length and its label."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        length = int(self.token_lengths[index])
        start = int(self._store.offsets[index])
        return {
            "input_ids": torch.from_numpy(self._store.tokens[start : start + length].astype(np.int64)),
            "lengths": torch.tensor(length),
            "labels": torch.tensor(int(self.labels[index])),
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A finished batch: `input_ids` [batch, width], `lengths` [batch], `labels` [batch], all int64."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.token_lengths[chosen]
        # Where each real token of the batch lies in the stream, all samples one after another.
        ends = np.cumsum(lengths)
        places = np.repeat(self._store.offsets[chosen] - ends + lengths, lengths)
        places += np.arange(len(places))
        width = self.padded_length(lengths)
        input_ids = np.full((len(chosen), width), self.pad_id, dtype=np.int64)
        input_ids[self._columns[:width] < lengths[:, None]] = self._store.tokens[places]
        return {
            "input_ids": torch.from_numpy(input_ids),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(self.labels[chosen]),
        }

    def padded_length(self, lengths: NDArray[Any]) -> int:
        """Width of a batch of texts of these lengths."""
        return self.max_seq_len if self.pad_to == "max" else int(lengths.max(initial=1))


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """A stretch of a token stream, cut into blocks with their next-token targets.

    Args:
        store: The stream.
        max_seq_len: Tokens per block.
        start: First token of the stretch.
        stop: End of the stretch; its last token is a target only.
        limit: Only the first n blocks.
    """

    assembles_batches = True

    def __init__(
        self, store: TokenStore, max_seq_len: int, start: int = 0, stop: int | None = None, limit: int | None = None
    ) -> None:
        stop = len(store.tokens) if stop is None else stop
        blocks = max(0, stop - start - 1) // max_seq_len
        self.max_seq_len = max_seq_len
        self.vocab_size = int(store.meta["vocab_size"])
        self.token_lengths = np.full(blocks if limit is None else min(blocks, limit), max_seq_len, dtype=np.int64)
        self._store = store
        self._start = start
        self._columns = np.arange(max_seq_len + 1)

    def __len__(self) -> int:
        return len(self.token_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One block."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.__getitems__([index % len(self)]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A finished batch: `input_ids` and `targets`, both [batch, max_seq_len] int64."""
        starts = self._start + np.asarray(indices, dtype=np.int64) * self.max_seq_len
        block = self._store.tokens[starts[:, None] + self._columns].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(block[:, :-1])),
            "targets": torch.from_numpy(np.ascontiguousarray(block[:, 1:])),
        }

    def padded_length(self, lengths: NDArray[Any]) -> int:
        """Blocks are full."""
        return self.max_seq_len


@dataclass(frozen=True)
class TextData:
    """A labelled text data set, ready for batches."""

    train: TextDataset
    val: TextDataset | None
    num_classes: int
    vocab_size: int
    pad_id: int
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class LanguageData:
    """A token stream, ready for batches."""

    train: TokenBlocks
    val: TokenBlocks
    vocab_size: int


def load_text_classification(
    data: DataConfig, *, max_seq_len: int, seed: int, progress: Progress | None = None
) -> TextData:
    """Gives a labelled data set, from the token cache where it is there.

    Args:
        data: Which data set, where, and with which tokenizer.
        max_seq_len: Longer texts are cut.
        seed: Seed of the generated data set.
        progress: Called with (done, total) texts while a split is tokenised.

    Raises:
        DataError: The data set is missing, malformed or without labels.
    """
    corpus = find_corpus(data.dataset, data.root, seed)
    if corpus.class_names is None:
        raise DataError(
            f"data.dataset {data.dataset}: has no labels, so a text_classifier cannot learn from it; use workload gpt, "
            "or a labelled data set (generated, ag_news, imdb, hf:NAME)"
        )
    train, val = _token_stores(corpus, data, "classifier", progress)
    return TextData(
        train=TextDataset(train, max_seq_len, data.pad_to, data.limit),
        val=TextDataset(val, max_seq_len, data.pad_to) if val is not None else None,
        num_classes=len(corpus.class_names),
        vocab_size=int(train.meta["vocab_size"]),
        pad_id=int(train.meta["pad_id"]),
        class_names=corpus.class_names,
    )


def load_language_modelling(
    data: DataConfig, *, max_seq_len: int, seed: int, progress: Progress | None = None
) -> LanguageData:
    """Gives a token stream in blocks, from the token cache where it is there.

    Labelled data sets do too; their texts are then documents. Without a validation part of its own the last tenth of
    the tokens, but at least one block, is held out.

    Args:
        data: Which data set, where, and with which tokenizer.
        max_seq_len: Tokens per block.
        seed: Seed of the generated data set.
        progress: Called with (done, total) characters while a split is tokenised.

    Raises:
        DataError: The data set is missing, malformed or shorter than a block.
    """
    corpus = find_corpus(data.dataset, data.root, seed)
    train, val = _token_stores(corpus, data, "gpt", progress)
    block = max_seq_len + 1
    if val is None:
        _check_tokens(data, "training", len(train.tokens), 2 * block, max_seq_len)
        cut = len(train.tokens) - max(len(train.tokens) // 10, block)
        held_out = TokenBlocks(train, max_seq_len, cut)
    else:
        _check_tokens(data, "training", len(train.tokens), block, max_seq_len)
        _check_tokens(data, "validation", len(val.tokens), block, max_seq_len)
        cut = len(train.tokens)
        held_out = TokenBlocks(val, max_seq_len)
    blocks = TokenBlocks(train, max_seq_len, 0, cut, data.limit)
    return LanguageData(blocks, held_out, int(train.meta["vocab_size"]))


def _check_tokens(data: DataConfig, part: str, tokens: int, needed: int, max_seq_len: int) -> None:
    if tokens < needed:
        raise DataError(
            f"data.dataset {data.dataset}: the {part} text has {tokens} tokens, at least {needed} are needed for "
            f"model.max_seq_len {max_seq_len}; give more text or a smaller max_seq_len"
        )


def _token_stores(
    corpus: Corpus, data: DataConfig, kind: Kind, progress: Progress | None
) -> tuple[TokenStore, TokenStore | None]:
    """The stores of both splits; texts are read and a tokenizer loaded only for a store that is not there."""
    cache = TokenCache(data.cache_dir)
    # Training a vocabulary and tokenising both need the training texts: one reading serves them.
    training = dataclasses.replace(corpus.train, read=functools.cache(corpus.train.read))
    training_identity = _identity(training, cache)
    plan = plan_tokenizer(
        data.tokenizer,
        kind,
        training_identity=training_identity,
        training_texts=lambda: training.read().texts,
        vocab_size=data.vocab_size,
        cache=cache,
    )

    def store(split: Split, identity: str) -> TokenStore:
        key = store_key(corpus.name, identity, plan.identity, kind, str(READER_VERSION))
        return cache.get_or_build(key, lambda folder: _build(folder, corpus, split, plan, kind, progress))

    train = store(training, training_identity)
    return train, store(corpus.val, _identity(corpus.val, cache)) if corpus.val is not None else None


def _identity(split: Split, cache: TokenCache) -> str:
    return cache.content_hash(split.files, split.root) if split.files else split.identity


def _build(
    folder: Path, corpus: Corpus, split: Split, plan: TokenizerPlan, kind: Kind, progress: Progress | None
) -> None:
    """Reads, tokenises and writes one split."""
    samples = split.read()
    tokenizer = plan.load()
    meta = {
        "dataset": corpus.name,
        "tokenizer": plan.identity,
        "reader_version": READER_VERSION,
        "num_classes": len(corpus.class_names or ()),
        "class_names": list(corpus.class_names or ()),
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
    }
    tokenise = _tokenise_samples if kind == "classifier" else _tokenise_documents
    write_store(folder, meta, lambda writer: tokenise(samples, tokenizer, writer, progress or _silent))


def _tokenise_samples(samples: Samples, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress) -> None:
    assert samples.labels is not None
    total = len(samples.texts)
    for start in range(0, total, _TEXTS_PER_CALL):
        part = slice(start, start + _TEXTS_PER_CALL)
        writer.append(tokenizer.encode(samples.texts[part]), samples.labels[part])
        progress(min(start + _TEXTS_PER_CALL, total), total)


def _tokenise_documents(samples: Samples, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress) -> None:
    """Every document ends with the end-of-text token, where the tokenizer has one."""
    total = sum(len(text) for text in samples.texts)
    done = 0
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=np.uint32)
    pieces = (piece for text in samples.texts for piece in _chunks(text))
    while group := list(itertools.islice(pieces, _CHUNKS_PER_CALL)):
        encoded = tokenizer.encode([chunk for chunk, _ in group])
        writer.append(
            [
                np.concatenate([tokens, end]) if last else tokens
                for tokens, (_, last) in zip(encoded, group, strict=True)
            ]
        )
        done += sum(len(chunk) for chunk, _ in group)
        progress(done, total)


def _chunks(text: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces, so that a huge file is not encoded in one go; true with the last one."""
    start = 0
    while len(text) - start > _CHARACTERS_PER_CHUNK:
        cut = _CUT.search(text, start + _CHARACTERS_PER_CHUNK)
        if cut is None:
            break
        yield text[start : cut.end()], False
        start = cut.end()
    yield text[start:], True


def _silent(done: int, total: int) -> None:
    pass
