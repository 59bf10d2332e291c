"""Tokenizers from files, bytes and training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frameworm.data.corpora.cache import TokenCache
from frameworm.data.corpora.tokenizer import ByteTokenizer, SubwordTokenizer, load_tokenizer, train_wordpiece
from frameworm.errors import DataError

TEXTS = ["The cat sat on the mat.", "The dog sat on the log!", "Cats and dogs, mats and logs; caf\u00e9s."] * 3


def real_file(name: str) -> str:
    path = Path(os.environ.get("FRAMEWORM_DATA", "")) / "vocab" / name
    if "FRAMEWORM_DATA" not in os.environ or not path.is_file():
        pytest.skip(f"FRAMEWORM_DATA does not name a folder that holds vocab/{name}")
    return str(path)


def write_vocabulary(path: Path, *pieces: str) -> str:
    path.write_text("".join(f"{piece}\n" for piece in ("[PAD]", "[UNK]", *pieces)))
    return str(path)


def write_byte_pairs(folder: Path, vocabulary: str = "encoder.json", merges: str = "vocab.bpe") -> Path:
    folder.mkdir(exist_ok=True)
    pieces = ["a", "b", "c", "ab", "abc", "<|endoftext|>"]
    (folder / vocabulary).write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (folder / merges).write_text("#version: 0.2\na b\nab c\n")
    return folder


def encode(spec: str, text: str, cache_dir: Path) -> list[int]:
    return load_tokenizer(spec, "classifier", [], 100, cache_dir).encode([text])[0].tolist()


def test_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("auto", "gpt", [], 100, tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert [tokens.tolist() for tokens in tokenizer.encode(["a\u00e9", ""])] == [[97, 0xC3, 0xA9], [256]]
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    assert not list(tmp_path.iterdir())


def test_wordpiece_vocabulary(tmp_path: Path) -> None:
    spec = write_vocabulary(tmp_path / "vocab.txt", "play", "##ing", "cafe", ".")
    assert encode(spec, "PLAYING caf\u00e9 xyz.", tmp_path) == [2, 3, 4, 1, 5]
    assert encode(spec, "", tmp_path) == [1]
    tokenizer = load_tokenizer(spec, "classifier", [], 100, tmp_path)
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (6, 0)


def test_byte_pairs_by_file_and_by_folder(tmp_path: Path) -> None:
    folder = write_byte_pairs(tmp_path / "gpt2", "gpt2-encoder.json", "gpt2-vocab.bpe")
    assert encode(str(folder / "gpt2-encoder.json"), "abcab", tmp_path) == [4, 3]
    assert encode(str(folder), "abcab", tmp_path) == [4, 3]
    other = write_byte_pairs(tmp_path / "other", "vocab.json", "merges.txt")
    assert encode(str(other), "cab", tmp_path) == [2, 3]
    assert load_tokenizer(str(other), "gpt", [], 100, tmp_path).end_id == 5


def test_tokenizers_json_ignores_its_own_padding_and_special_tokens(tmp_path: Path) -> None:
    backend = train_wordpiece(TEXTS, 100)
    backend.enable_padding(length=50)
    backend.enable_truncation(2)
    path = tmp_path / "my.json"
    backend.save(str(path))
    assert (
        encode(str(path), TEXTS[0], tmp_path) == SubwordTokenizer(train_wordpiece(TEXTS, 100)).encode(TEXTS)[0].tolist()
    )


def test_training_is_kept_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer("auto", "classifier", TEXTS, 100, tmp_path)
    assert first.vocab_size <= 100
    assert first.encode(["the cat"])[0].size == 2

    def never(*args: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr("frameworm.data.corpora.tokenizer.train_wordpiece", never)
        again = load_tokenizer("auto", "classifier", TEXTS, 100, tmp_path)
        with pytest.raises(AssertionError, match="trained again"):
            load_tokenizer("auto", "classifier", TEXTS[1:], 100, tmp_path)
    for before, after in zip(first.encode(TEXTS), again.encode(TEXTS), strict=True):
        assert np.array_equal(before, after)
    saved = next(tmp_path.glob("*.tokenizer.json"))
    saved.write_text(saved.read_text()[:100])
    repaired = load_tokenizer("auto", "classifier", TEXTS, 100, tmp_path)
    assert np.array_equal(repaired.encode(TEXTS)[0], first.encode(TEXTS)[0])


@pytest.mark.slow
def test_training_is_the_same_in_every_process() -> None:
    """The package's own training is not: it depends on a hash seed drawn at start."""
    code = (
        "import hashlib; from frameworm.data.corpora.generated import generate;"
        "from frameworm.data.corpora.tokenizer import train_wordpiece;"
        "texts = generate(0, 'val')[0][:200];"
        "print(hashlib.sha256(train_wordpiece(texts, 600).to_str().encode()).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90).stdout
        for _ in range(3)
    }
    assert len(digests) == 1


def test_rare_characters_leave_room_for_words() -> None:
    tokenizer = SubwordTokenizer(train_wordpiece(["word word " + "".join(map(chr, range(0x4E00, 0x4F00)))] * 2, 64))
    assert tokenizer.vocab_size <= 64
    assert tokenizer.encode(["word"])[0].size < 4


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
        load_tokenizer("auto", "classifier", TEXTS, 100, tmp_path / "file" / "cache")


def test_broken_files(tmp_path: Path) -> None:
    def fails(spec: Path, says: str) -> None:
        with pytest.raises(DataError) as caught:
            load_tokenizer(str(spec), "classifier", [], 100, tmp_path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    fails(tmp_path / "gone.json", "gone.json does not exist; expected a WordPiece vocab.txt")
    (tmp_path / "model.bin").touch()
    fails(tmp_path / "model.bin", "is of no known kind")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    fails(tmp_path / "bad.json", "bad.json cannot be read as a tokenizer")
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    fails(tmp_path / "words.txt", "has no line [UNK]")
    (tmp_path / "words.txt").write_text("[UNK]\ntwo\ntwo\n")
    fails(tmp_path / "words.txt", "holds 'two' more than once")
    (tmp_path / "words.txt").write_bytes(b"[UNK]\n\xff\n")
    fails(tmp_path / "words.txt", "cannot be read as a tokenizer")
    folder = write_byte_pairs(tmp_path / "pair")
    (folder / "vocab.bpe").write_text("#version: 0.2\nq r\n")
    fails(folder, "cannot be read as a tokenizer")
    (folder / "vocab.bpe").unlink()
    fails(folder / "encoder.json", "needs its merges in")
    fails(folder, "no tokenizer in the folder")
    write_byte_pairs(folder)
    write_vocabulary(folder / "vocab.txt")
    fails(folder, "holds several tokenizers (encoder.json, vocab.txt)")


def test_identity_follows_the_file(tmp_path: Path) -> None:
    spec = write_vocabulary(tmp_path / "vocab.txt", "a")
    assert encode(spec, "b", tmp_path) == [1]
    write_vocabulary(tmp_path / "vocab.txt", "a", "b")
    assert encode(spec, "b", tmp_path) == [3]
    assert TokenCache(tmp_path).folder == tmp_path


def test_real_vocabularies(tmp_path: Path) -> None:
    bert = load_tokenizer(real_file("bert-base-uncased-vocab.txt"), "classifier", [], 100, tmp_path)
    assert bert.encode(["Hello, unaffable WORLD!"])[0].tolist() == [7592, 1010, 14477, 20961, 3468, 2088, 999]
    gpt2 = load_tokenizer(real_file("gpt2-encoder.json"), "gpt", [], 100, tmp_path)
    assert gpt2.encode(["Hello world\n\n I'm"])[0].tolist() == [15496, 995, 628, 314, 1101]
    assert (gpt2.vocab_size, gpt2.end_id) == (50_257, 50_256)
