"""Texts as token batches: from a config to data sets over the token cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frameworm.config.schema import DataConfig
from frameworm.data.corpora.cache import TokenCache, TokenStore, TokenWriter, store_key, write_store
from frameworm.data.corpora.readers import READER_VERSION, Corpus, Samples, Split, find_corpus
from frameworm.data.corpora.token_sets import TextDataset, TokenBlocks
from frameworm.data.corpora.tokenizer import Kind, Tokenizer, TokenizerPlan, plan_tokenizer
from frameworm.errors import DataError

__all__ = [
    "LanguageData",
    "Progress",
    "TextData",
    "TextDataset",
    "TokenBlocks",
    "load_language_modelling",
    "load_text_classification",
]

Progress = Callable[[int, int], None]

_TEXTS_PER_CALL = 1_024
_CHUNKS_PER_CALL = 64
_CHARACTERS_PER_CHUNK = 2**16
# A line break between two words: cutting there does not change the tokens on either side.
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


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
        train=TextDataset(train, max_seq_len, "max" if data.pad_to == "max" else "longest", data.limit),
        val=TextDataset(val, max_seq_len, "max" if data.pad_to == "max" else "longest") if val is not None else None,
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
    """The stores of both splits; texts and tokenizer are loaded only for a store that is missing."""
    cache = TokenCache(data.cache_dir)
    # Training a vocabulary and tokenising both need the training texts, which are read only once.
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
    """Read, tokenise and write one split."""
    samples = split.read()
    progress = progress or _silent
    # Report progress before loading the tokenizer, which may have to be trained first.
    progress(0, _amount(samples, kind))
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
    write_store(folder, meta, lambda writer: tokenise(samples, tokenizer, writer, progress))


def _amount(samples: Samples, kind: Kind) -> int:
    """The total that progress counts to: texts for a classifier, characters for language modelling."""
    return len(samples.texts) if kind == "classifier" else sum(len(text) for text in samples.texts)


def _tokenise_samples(samples: Samples, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress) -> None:
    assert samples.labels is not None
    total = _amount(samples, "classifier")
    for start in range(0, total, _TEXTS_PER_CALL):
        part = slice(start, start + _TEXTS_PER_CALL)
        writer.append(tokenizer.encode(samples.texts[part]), samples.labels[part])
        progress(min(start + _TEXTS_PER_CALL, total), total)


def _tokenise_documents(samples: Samples, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress) -> None:
    """Tokenise documents, ending each with the end-of-text token if the tokenizer has one."""
    total = _amount(samples, "gpt")
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
    """Split a document into pieces, so that a huge file is not encoded at once; True marks the last piece."""
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
