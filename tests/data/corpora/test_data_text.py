"""From a config to token batches, and the batches themselves."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

from frameworm.config.schema import DataConfig
from frameworm.data.corpora import text as text_module
from frameworm.data.corpora.text import (
    LanguageData,
    TextData,
    TextDataset,
    TokenBlocks,
    load_language_modelling,
    load_text_classification,
)
from frameworm.errors import DataError


def ag_news(root: Path, rows: list[tuple[int, str]]) -> Path:
    root.mkdir(exist_ok=True)
    lines = "".join(f'"{label}","{text}",""\n' for label, text in rows)
    (root / "train.csv").write_text(lines)
    (root / "test.csv").write_text(lines)
    return root


ROWS = [(1, "one two three four five"), (2, "six"), (3, ""), (4, "two two six")] * 5


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    root = ag_news(tmp_path / "data", ROWS)
    return DataConfig(dataset="ag_news", root=str(root), cache_dir=str(tmp_path / "cache"), vocab_size=64)


@pytest.fixture
def data(config: DataConfig) -> TextData:
    return load_text_classification(config, max_seq_len=4, seed=0)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("text was read")


def test_describes_the_data_set(data: TextData) -> None:
    assert data.num_classes == 4
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert data.vocab_size <= 64
    assert data.val is not None
    assert len(data.train) == len(data.val) == 20
    assert data.train.num_classes == 4


def test_batch_is_the_samples_padded(data: TextData) -> None:
    indices = [1, 0, 3, 2]
    batch = data.train.__getitems__(indices)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert batch["labels"].tolist() == [1, 0, 3, 2]
    assert batch["lengths"].tolist() == data.train.token_lengths[indices].tolist()
    assert batch["input_ids"].shape == (4, 4)
    for row, index in enumerate(indices):
        sample = data.train[index]
        length = int(sample["lengths"])
        assert torch.equal(batch["input_ids"][row, :length], sample["input_ids"])
        assert (batch["input_ids"][row, length:] == data.pad_id).all()
        assert int(sample["labels"]) == int(batch["labels"][row])


def test_long_texts_are_cut_and_empty_ones_have_a_token(data: TextData, config: DataConfig) -> None:
    assert data.train.token_lengths[:3].tolist()[0] == 4
    assert data.train.token_lengths[2] == 1
    longer = load_text_classification(config, max_seq_len=50, seed=0)
    assert longer.train.token_lengths[0] > 4
    assert torch.equal(longer.train[0]["input_ids"][:4], data.train[0]["input_ids"])


def test_width_of_a_batch(data: TextData, config: DataConfig) -> None:
    short = [2, 6, 10]
    assert data.train.__getitems__(short)["input_ids"].shape == (3, 1)
    assert data.train.padded_length(np.array([2, 3])) == 3
    wide = load_text_classification(config.model_copy(update={"pad_to": "max"}), max_seq_len=9, seed=0).train
    assert wide.padded_length(np.array([2, 3])) == 9
    assert wide.__getitems__(short)["input_ids"].shape == (3, 9)
    assert data.train.__getitems__([])["input_ids"].shape[0] == 0


def test_index_errors(data: TextData) -> None:
    assert torch.equal(data.train[-1]["input_ids"], data.train[19]["input_ids"])
    with pytest.raises(IndexError):
        data.train[20]


def test_limit_keeps_the_first_training_samples(config: DataConfig) -> None:
    few = load_text_classification(config.model_copy(update={"limit": 3}), max_seq_len=4, seed=0)
    assert len(few.train) == len(few.train.token_lengths) == 3
    assert few.val is not None
    assert len(few.val) == 20


def test_second_start_reads_no_text(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_text_classification(config, max_seq_len=4, seed=0)
    monkeypatch.setattr("frameworm.data.corpora.readers._read_text", refuse)
    monkeypatch.setattr("frameworm.data.corpora.cache.hash_files", refuse)
    monkeypatch.setattr("frameworm.data.corpora.tokenizer._trained", refuse)
    second = load_text_classification(config, max_seq_len=4, seed=0)
    for name, tensor in first.train.__getitems__(range(20)).items():
        assert torch.equal(tensor, second.train.__getitems__(range(20))[name])


def test_changed_text_is_read_again(config: DataConfig, tmp_path: Path) -> None:
    load_text_classification(config, max_seq_len=4, seed=0)
    ag_news(tmp_path / "data", ROWS[:8])
    assert len(load_text_classification(config, max_seq_len=4, seed=0).train) == 8


def test_texts_are_read_once_for_vocabulary_and_tokens(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = text_module.find_corpus.__globals__["_read_text"]
    monkeypatch.setattr(
        "frameworm.data.corpora.readers._read_text", lambda path: (read.append(path.name), original(path))[1]
    )
    load_text_classification(config, max_seq_len=4, seed=0)
    assert read == ["train.csv", "test.csv"]


def test_progress_is_told(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_TEXTS_PER_CALL", 8)
    seen: list[tuple[int, int]] = []
    load_text_classification(config, max_seq_len=4, seed=0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 20), (8, 20), (16, 20), (20, 20)] * 2


def test_broken_rows_leave_no_cache(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "data" / "train.csv").write_text('"9","a","b"\n')
    with pytest.raises(DataError, match=r"train\.csv:1"):
        load_text_classification(config, max_seq_len=4, seed=0)
    ag_news(tmp_path / "data", ROWS)
    assert len(load_text_classification(config, max_seq_len=4, seed=0).train) == 20


@pytest.mark.slow
def test_survives_pickling_and_loader_workers(data: TextData) -> None:
    copy = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(copy[0]["input_ids"], data.train[0]["input_ids"])
    loader: DataLoader[Any] = DataLoader(
        data.train, batch_size=8, num_workers=1, collate_fn=as_it_is, multiprocessing_context="spawn"
    )
    batches = list(loader)
    assert sum(len(batch["labels"]) for batch in batches) == 20
    assert torch.equal(batches[0]["input_ids"], data.train.__getitems__(range(8))["input_ids"])


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.slow
def test_generated_set_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(cache_dir=str(tmp_path))
    first = load_text_classification(config, max_seq_len=64, seed=0)
    assert (len(first.train), first.num_classes) == (6_000, 4)
    assert first.val is not None
    assert len(first.val) == 1_000
    monkeypatch.setattr("frameworm.data.corpora.generated.generate", refuse)
    again = load_text_classification(config, max_seq_len=64, seed=0)
    assert torch.equal(first.train[7]["input_ids"], again.train[7]["input_ids"])
    with pytest.raises(AssertionError, match="text was read"):
        load_text_classification(config, max_seq_len=64, seed=1)


def test_text_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    config = DataConfig(dataset="text", root=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="has no labels"):
        load_text_classification(config, max_seq_len=4, seed=0)


def language(root: Path, max_seq_len: int = 4, **settings: Any) -> LanguageData:
    config = DataConfig(dataset="text", root=str(root), cache_dir=str(root.parent / "cache"), **settings)
    return load_language_modelling(config, max_seq_len=max_seq_len, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    root.mkdir()
    return root


def stream(blocks: TokenBlocks) -> list[int]:
    return blocks.__getitems__(range(len(blocks)))["input_ids"].flatten().tolist()


def test_blocks_and_targets(folder: Path) -> None:
    (folder / "b.txt").write_text("fghi")
    (folder / "a.txt").write_text("abcde")
    (folder / "val.txt").write_text("uvwxyz")
    data = language(folder)
    tokens = [*b"abcde", 256, *b"fghi", 256]
    assert len(data.train) == 2
    batch = data.train.__getitems__([1, 0])
    assert batch["input_ids"].tolist() == [tokens[4:8], tokens[0:4]]
    assert batch["targets"].tolist() == [tokens[5:9], tokens[1:5]]
    assert data.train[0]["targets"].tolist() == tokens[1:5]
    assert data.val.__getitems__([0])["input_ids"].tolist() == [[*b"uvwx"]]
    assert data.vocab_size == 257
    assert data.train.token_lengths.tolist() == [4, 4]
    assert torch.equal(pickle.loads(pickle.dumps(data.train))[1]["input_ids"], batch["input_ids"][0])
    with pytest.raises(IndexError):
        data.train[2]


def test_last_tenth_is_held_out(folder: Path) -> None:
    (folder / "a.txt").write_bytes(bytes(range(65, 91)) * 4)
    data = language(folder)
    whole = [*(bytes(range(65, 91)) * 4), 256]
    cut = len(whole) - len(whole) // 10
    assert stream(data.val) == whole[cut : cut + 4 * len(data.val)]
    assert stream(data.train) == whole[: 4 * len(data.train)]
    assert 4 * len(data.train) < cut
    one_block = language(folder, max_seq_len=30)
    assert (len(one_block.train), len(one_block.val)) == (2, 1)
    assert len(language(folder, limit=2).train) == 2


def test_too_little_text(folder: Path) -> None:
    (folder / "a.txt").write_text("abcdefgh")
    with pytest.raises(DataError, match=r"training text has 9 tokens, at least 10 are needed"):
        language(folder)
    (folder / "val.txt").write_text("abc")
    with pytest.raises(DataError, match=r"validation text has 4 tokens, at least 5"):
        language(folder)


def test_long_documents_are_cut_where_it_does_not_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "one two\n\n three\nfour  five\nsix\n \nseven\n" * 20
    (folder / "a.txt").write_text(lines)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's, which joins blanks and words
    backend.train_from_iterator([lines], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    tokenizer = str(folder.parent / "bpe.json")
    backend.save(tokenizer)
    whole = stream(language(folder, tokenizer=tokenizer, max_seq_len=1).train)
    monkeypatch.setattr(text_module, "_CHARACTERS_PER_CHUNK", 16)
    monkeypatch.setattr(text_module, "_CHUNKS_PER_CALL", 3)
    pieces = list(text_module._chunks(lines))
    assert len(pieces) > 10
    assert "".join(piece for piece, _ in pieces) == lines
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    other = folder.parent / "other"
    other.mkdir()
    (other / "b.txt").write_text(lines)
    assert stream(language(other, tokenizer=tokenizer, max_seq_len=1).train) == whole


def test_labelled_texts_are_documents_too(config: DataConfig) -> None:
    data = load_language_modelling(config, max_seq_len=8, seed=0)
    assert stream(data.train)[:6] == [*b"one tw"]
    assert 256 in stream(data.train)


def real_data(name: str) -> Path:
    root = os.environ.get("FRAMEWORM_DATA")
    if root is None or not (Path(root) / name).exists():
        pytest.skip(f"FRAMEWORM_DATA does not name a folder that holds {name}")
    return Path(root) / name


@pytest.mark.slow
def test_real_imdb_slice_with_berts_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, vocabulary = real_data("imdb"), real_data("vocab/bert-base-uncased-vocab.txt")
    original = text_module.find_corpus

    def slice_of(*args: Any) -> Any:
        corpus = original(*args)

        def first(split: Any) -> Any:
            def read() -> Any:
                samples = split.read()
                return dataclasses.replace(samples, texts=samples.texts[:300], labels=samples.labels[:300])

            return dataclasses.replace(split, read=read)

        return dataclasses.replace(corpus, train=first(corpus.train), val=first(corpus.val))

    monkeypatch.setattr(text_module, "find_corpus", slice_of)
    config = DataConfig(dataset="imdb", root=str(root), tokenizer=str(vocabulary), cache_dir=str(tmp_path))
    data = load_text_classification(config, max_seq_len=512, seed=0)
    assert data.vocab_size == 30_522
    assert isinstance(data.train, TextDataset)
    assert data.train.labels.tolist()[:4] == [0, 1, 0, 1]
    assert 150 < float(np.median(data.train.token_lengths)) < 300
    assert data.train.token_lengths.max() == 512


def test_real_text_with_gpt2s_vocabulary(tmp_path: Path) -> None:
    config = DataConfig(
        dataset="text",
        root=str(real_data("tinyshakespeare") / "input.txt"),
        tokenizer=str(real_data("vocab/gpt2-encoder.json")),
        cache_dir=str(tmp_path),
    )
    data = load_language_modelling(config, max_seq_len=256, seed=0)
    # nanoGPT's preparation of this file counts 301,966 + 36,059 tokens.
    assert data.train._store.meta["tokens"] == 301_966 + 36_059 + 1
