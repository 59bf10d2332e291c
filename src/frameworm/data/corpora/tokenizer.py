"""Tokenizers: from files, from bytes, or trained once on the training texts.

A plan comes first: it knows what the tokens will depend on (`identity`) without loading or training anything, so that
looking up cached tokens is cheap. No special tokens are put around a text: the classifier averages over its tokens and
has no use for [CLS] or [SEP]; language modelling puts one end-of-text token between documents.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from frameworm.data.corpora.cache import TokenCache, store_key
from frameworm.errors import DataError
from frameworm.records.atomic import replacing

Kind = Literal["classifier", "gpt"]

TRAINER_VERSION = 1
# Rarer characters become [UNK]; with both forms (word-initial or not) the rest take at most half the vocabulary.
_LARGEST_ALPHABET = 1_000
_PAIRS = {"encoder.json": "vocab.bpe", "vocab.json": "merges.txt"}
_ACCEPTED = (
    "a WordPiece vocab.txt, a tokenizers .json, encoder.json with vocab.bpe, vocab.json with merges.txt, bytes or auto"
)


class Tokenizer(Protocol):
    """Turns texts into token ids."""

    vocab_size: int
    pad_id: int
    end_id: int | None  # put between documents; None: documents are simply concatenated

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Tokens of each text; an empty text gets one token, for unknown text."""
        ...


@dataclass(frozen=True)
class TokenizerPlan:
    """Identifies the tokenizer that will be used, and can load it."""

    identity: str
    load: Callable[[], Tokenizer]


class ByteTokenizer:
    """UTF-8 bytes, and one end-of-text token that is also used for padding."""

    vocab_size = 257
    pad_id = 256
    end_id: int | None = 256

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The bytes of each text; an empty text gets the end-of-text token."""
        encoded = (np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts)
        return [tokens if len(tokens) else np.array([self.end_id], dtype=np.uint32) for tokens in encoded]


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` package, which encodes on all cores."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.backend = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.end_id: int | None = self._first_of("<|endoftext|>", "</s>", "[SEP]")
        padding = self._first_of("[PAD]", "<pad>", "<|endoftext|>")
        self.pad_id = 0 if padding is None else padding
        unknown = self._first_of("[UNK]", "<unk>")
        self._unknown_id = self.pad_id if unknown is None else unknown
        self._encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Tokens of each text; an empty text gets the unknown token."""
        encodings = self._encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids or [self._unknown_id], dtype=np.uint32) for encoding in encodings]

    def _first_of(self, *names: str) -> int | None:
        found = (self.backend.token_to_id(name) for name in names)
        return next((int(index) for index in found if index is not None), None)


def plan_tokenizer(
    spec: str,
    kind: Kind,
    *,
    training_identity: str,
    training_texts: Callable[[], Sequence[str]],
    vocab_size: int,
    cache: TokenCache,
) -> TokenizerPlan:
    """Decide which tokenizer `data.tokenizer` means.

    Args:
        spec: `auto`, `bytes`, a file, or a folder that holds the files of one tokenizer.
        kind: What the tokens are for; `auto` is WordPiece for a classifier and bytes for gpt.
        training_identity: Identifies the content of the training texts.
        training_texts: Reads them, if a vocabulary has to be trained.
        vocab_size: Size of a trained vocabulary.
        cache: Stores trained tokenizers and hashes of files.

    Raises:
        DataError: The file is missing or of no known kind. Its content is only read when the plan is loaded.
    """
    if spec == "bytes" or (spec == "auto" and kind == "gpt"):
        return TokenizerPlan("bytes:1", ByteTokenizer)
    if spec == "auto":
        # Another version of the package may train another vocabulary on the same texts.
        made_with = f"{TRAINER_VERSION}:{version('tokenizers')}"
        identity = f"wordpiece:{made_with}:{vocab_size}:{training_identity}"
        load = functools.partial(_trained, identity, training_texts, vocab_size, cache)
        return TokenizerPlan(identity, load)
    files = _tokenizer_files(Path(spec).expanduser())
    # The file name tells its kind, so the name is part of the identity.
    return TokenizerPlan(f"file:{cache.content_hash(files, files[0].parent)}", functools.partial(_from_files, files))


def load_tokenizer(
    spec: str, kind: Kind, training_texts: Sequence[str], vocab_size: int, cache_dir: str | Path = "auto"
) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` means, or train it on the given texts; see `plan_tokenizer`."""
    digest = hashlib.sha256()
    for text in training_texts:
        digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    return plan_tokenizer(
        spec,
        kind,
        training_identity=f"texts:{digest.hexdigest()}",
        training_texts=lambda: training_texts,
        vocab_size=vocab_size,
        cache=TokenCache(cache_dir),
    ).load()


def train_wordpiece(texts: Sequence[str], vocab_size: int) -> Any:
    """Train a lower-casing WordPiece tokenizer; the same texts give the same vocabulary.

    The package's trainer numbers its alphabet in the order of a randomly seeded hash map, and ties between equally
    frequent merges follow those numbers. So the alphabet is passed in a fixed order, as special tokens, and the
    tokenizer is rebuilt from the vocabulary, in which they are ordinary pieces.
    """
    from tokenizers import trainers

    blank = _wordpiece({"[UNK]": 0})
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(blank.normalizer.normalize_str(text))
    room = max(1, min(_LARGEST_ALPHABET, vocab_size // 4))
    frequent = sorted(characters.items(), key=lambda item: (-item[1], item[0]))
    alphabet = sorted([character for character, _ in frequent if not character.isspace()][:room])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=["[PAD]", "[UNK]", *alphabet, *(f"##{character}" for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=2,
        show_progress=False,
    )
    blank.train_from_iterator(texts, trainer)
    return _wordpiece(blank.get_vocab())


def _trained(
    identity: str, training_texts: Callable[[], Sequence[str]], vocab_size: int, cache: TokenCache
) -> Tokenizer:
    """The trained tokenizer from the cache; if it is not there, train and store it."""
    from tokenizers import Tokenizer as Backend

    path = cache.folder / f"{store_key(identity)}.tokenizer.json"

    def cached() -> Tokenizer | None:
        with contextlib.suppress(Exception):  # missing or damaged: train again
            return SubwordTokenizer(Backend.from_file(str(path)))
        return None

    try:
        found = cached()
        if found is None:
            with cache.lock(f"{store_key(identity)}.tokenizer"):
                found = cached()  # another process may have trained it while this one waited
                if found is None:
                    backend = train_wordpiece(training_texts(), vocab_size)
                    with replacing(path) as file:
                        file.write(backend.to_str().encode())
                    found = SubwordTokenizer(backend)
    except OSError as error:
        raise DataError(
            f"the token cache {cache.folder} cannot be written ({error.strerror or error}); set data.cache_dir to a "
            "folder that you may write to"
        ) from error
    return found


def _tokenizer_files(path: Path) -> tuple[Path, ...]:
    """Find the files of the tokenizer at a path by their names."""
    if path.is_dir():
        candidates = [*path.glob("*tokenizer.json"), *path.glob("*vocab.txt")]
        for vocabulary, merges in _PAIRS.items():
            candidates += [file for file in path.glob(f"*{vocabulary}") if _beside(file, vocabulary, merges).is_file()]
        if len(candidates) > 1:
            names = ", ".join(sorted(file.name for file in candidates))
            raise DataError(f"data.tokenizer: {path} holds several tokenizers ({names}); name one of these files")
        if not candidates:
            raise DataError(f"data.tokenizer: no tokenizer in the folder {path}; expected {_ACCEPTED}")
        path = candidates[0]
    if not path.is_file():
        raise DataError(f"data.tokenizer: {path} does not exist; expected {_ACCEPTED}")
    if path.suffix not in (".txt", ".json"):
        raise DataError(f"data.tokenizer: {path} is of no known kind; expected {_ACCEPTED}")
    for vocabulary, merges in _PAIRS.items():
        if path.name.endswith(vocabulary):
            partner = _beside(path, vocabulary, merges)
            if not partner.is_file():
                raise DataError(f"data.tokenizer: {path} needs its merges in {partner}, which does not exist")
            return path, partner
    return (path,)


def _beside(path: Path, vocabulary: str, merges: str) -> Path:
    """The merges file of a vocabulary file: gpt2-vocab.bpe for gpt2-encoder.json."""
    return path.with_name(path.name.removesuffix(vocabulary) + merges)


def _from_files(files: tuple[Path, ...]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    path = files[0]
    try:
        if len(files) == 2:
            backend = Backend(models.BPE.from_file(str(path), str(files[1])))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
        elif path.suffix == ".txt":
            backend = _wordpiece(_read_vocabulary(path))
        else:
            backend = Backend.from_file(str(path))
        return SubwordTokenizer(backend)
    except DataError:
        raise
    except Exception as error:  # the package raises plain Exception for anything it cannot parse
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"data.tokenizer: {' and '.join(map(str, files))} cannot be read as a tokenizer ({reason})"
        ) from error


def _read_vocabulary(path: Path) -> dict[str, int]:
    pieces = path.read_text(encoding="utf-8").split("\n")
    if pieces[-1] == "":
        pieces.pop()
    vocabulary = {piece.rstrip("\r"): index for index, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        repeated = next(piece for piece, count in Counter(pieces).items() if count > 1)
        raise DataError(f"data.tokenizer: {path} holds {repeated[:40]!r} more than once; expected one piece per line")
    if "[UNK]" not in vocabulary:
        raise DataError(f"data.tokenizer: {path} has no line [UNK]; expected a BERT vocabulary, one piece per line")
    return vocabulary


def _wordpiece(vocabulary: dict[str, int]) -> Any:
    """BERT's lower-casing tokenizer over a vocabulary."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend
