"""Readers of text data sets: files are located first and read only on demand.

Locating them costs a directory listing. If the tokens of a split are cached (`cache`), its texts are never read.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworm.data.corpora import generated
from frameworm.errors import ConfigError, DataError, MissingPackageError
from frameworm.records.reading import open_plain

READER_VERSION = 1
DATASETS = ("generated", "ag_news", "imdb", "text", "hf:NAME")

_HUB_VERSION = 4  # of the datasets package: the first that does not run scripts of a data set

AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
IMDB_CLASSES = ("neg", "pos")
_IMDB_LABELS = {"neg": 0, "negative": 0, "0": 0, "pos": 1, "positive": 1, "1": 1}

_GET_AG_NEWS = (
    "get the AG News CSV files of Zhang et al. (train.csv and test.csv, as torchtext downloads them) "
    "and set data.root to their folder"
)
_GET_IMDB = (
    "get the aclImdb archive of Maas et al. (aclImdb_v1.tar.gz), unpack it and set data.root to the aclImdb folder"
)
_GET_TEXT = "set data.root to a UTF-8 text file or to a folder of .txt files"


@dataclass(frozen=True)
class Samples:
    """The texts of a split; `labels` is None if it has none."""

    texts: list[str]
    labels: list[int] | None


@dataclass(frozen=True)
class Split:
    """One split of a corpus: its files, and how to read them."""

    read: Callable[[], Samples]
    files: tuple[Path, ...] = ()
    root: Path = Path()
    identity: str = ""  # identifies the content if there are no files


@dataclass(frozen=True)
class Corpus:
    """A data set that has been located but not read."""

    name: str
    train: Split
    val: Split | None
    class_names: tuple[str, ...] | None


def find_corpus(dataset: str, root: str | None, seed: int = 0) -> Corpus:
    """Locate a data set without reading it.

    Args:
        dataset: One of `DATASETS`.
        root: Folder that holds it (or a file, for `text`); not used by `generated` and `hf:`.
        seed: Seed of the generated data set.

    Raises:
        ConfigError: There is no data set of that name.
        DataError: Its files are missing.
    """
    if dataset == "generated":
        return _generated(seed)
    if dataset.startswith("hf:"):
        return _hub(dataset.removeprefix("hf:"))
    finders = {"ag_news": _ag_news, "imdb": _imdb, "text": _text}
    if dataset not in finders:
        nearest = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"data.dataset: {dataset!r} is not one of {', '.join(DATASETS)}{hint}")
    return finders[dataset](root)


def _generated(seed: int) -> Corpus:
    def train() -> Samples:
        return Samples(*generated.generate(seed, "train"))

    def val() -> Samples:
        return Samples(*generated.generate(seed, "val"))

    return Corpus(
        "generated",
        Split(train, identity=generated.identity(seed, "train")),
        Split(val, identity=generated.identity(seed, "val")),
        generated.CLASS_NAMES,
    )


def _ag_news(root: str | None) -> Corpus:
    folder = _folder("ag_news", root, _GET_AG_NEWS)
    train = _first_file(folder, "ag_news", ("train.csv", "train.csv.gz", "train_subset.csv.gz"), _GET_AG_NEWS)
    test = _first_file(folder, "ag_news", ("test.csv", "test.csv.gz"), _GET_AG_NEWS)
    return Corpus(
        "ag_news",
        Split(lambda: _read_ag_news(train), (train,), folder),
        Split(lambda: _read_ag_news(test), (test,), folder),
        AG_NEWS_CLASSES,
    )


def _read_ag_news(path: Path) -> Samples:
    texts: list[str] = []
    labels: list[int] = []
    for line, row in _rows(path):
        if line == 1 and row and row[0].strip().lower() == "class index":
            continue  # some copies on the web have a header
        if len(row) != 3:
            raise DataError(f"{path}:{line}: expected 3 columns (class,title,description), found {len(row)}")
        if row[0].strip() not in ("1", "2", "3", "4"):
            raise DataError(f"{path}:{line}: class {row[0][:40]!r} is not 1, 2, 3 or 4")
        labels.append(int(row[0]) - 1)
        texts.append(f"{row[1]} {row[2]}")
    return _not_empty(path, Samples(texts, labels))


def _imdb(root: str | None) -> Corpus:
    folder = _folder("imdb", root, _GET_IMDB)
    for candidate in (folder, folder / "aclImdb"):
        if (candidate / "train" / "pos").is_dir():
            train, test = (_review_split(candidate, split) for split in ("train", "test"))
            return Corpus("imdb", train, test, IMDB_CLASSES)
    looked_for = f"an aclImdb folder with train/pos; {_GET_IMDB}"
    train_table = _first_file(folder, "imdb", ("train.csv", "train.csv.gz"), looked_for)
    test_table = _first_file(folder, "imdb", ("test.csv", "test.csv.gz"), _GET_IMDB)
    return Corpus(
        "imdb",
        Split(lambda: _read_imdb_table(train_table), (train_table,), folder),
        Split(lambda: _read_imdb_table(test_table), (test_table,), folder),
        IMDB_CLASSES,
    )


def _read_imdb_table(path: Path) -> Samples:
    rows = _rows(path)
    _, header = next(rows, (1, []))
    names = [name.strip().lower() for name in header]
    if "review" not in names or "sentiment" not in names:
        found = ",".join(header)[:80] or "nothing"
        raise DataError(f"{path}:1: expected a header with the columns review and sentiment, found {found}")
    review, sentiment = names.index("review"), names.index("sentiment")
    texts: list[str] = []
    labels: list[int] = []
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}:{line}: expected {len(header)} columns ({','.join(names)}), found {len(row)}")
        label = _IMDB_LABELS.get(row[sentiment].strip().lower())
        if label is None:
            raise DataError(
                f"{path}:{line}: sentiment {row[sentiment][:40]!r} is not pos/neg, positive/negative or 1/0"
            )
        labels.append(label)
        texts.append(row[review])
    return _not_empty(path, Samples(texts, labels))


def _review_split(root: Path, name: str) -> Split:
    """The reviews of pos/ and neg/ ordered by number, so that every prefix is balanced."""
    files: list[Path] = []
    for class_name in IMDB_CLASSES:
        found = list((root / name / class_name).glob("*.txt"))
        if not found:
            raise DataError(f"imdb: no .txt files in {root / name / class_name}; {_GET_IMDB}")
        files.extend(found)

    def order(path: Path) -> tuple[int, str, str]:
        number = path.stem.split("_")[0]
        return (int(number) if number.isdecimal() else 2**63, path.parent.name, path.stem)

    files.sort(key=order)
    labels = [IMDB_CLASSES.index(path.parent.name) for path in files]
    return Split(lambda: Samples([_read_text(path) for path in files], labels), tuple(files), root)


def _text(root: str | None) -> Corpus:
    """Documents without labels; files named val*, valid* or test* form the validation split."""
    if root is None:
        raise DataError(f"text: data.root is not set; {_GET_TEXT}")
    path = Path(root).expanduser()
    if not path.exists():
        raise DataError(f"text: {path} does not exist; {_GET_TEXT}")
    if path.is_file():
        return Corpus("text", _documents((path,), path.parent), None, None)
    files = sorted(path.glob("*.txt"))
    held_out = tuple(file for file in files if file.name.lower().startswith(("val", "test")))
    train = tuple(file for file in files if file not in held_out)
    if not train:
        besides = f" besides {held_out[0].name}, which is for validation" if held_out else ""
        raise DataError(f"text: no .txt files in {path}{besides}; {_GET_TEXT}")
    return Corpus("text", _documents(train, path), _documents(held_out, path) if held_out else None, None)


def _documents(files: tuple[Path, ...], root: Path) -> Split:
    def read() -> Samples:
        return Samples([_not_blank(path, _read_text(path)) for path in files], None)

    return Split(read, files, root)


def _hub(name: str) -> Corpus:
    """A data set of the Hugging Face hub, loaded and cached by the `datasets` package."""
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            f"data.dataset hf:{name} needs the datasets package: pip install 'frameworm[hub]'"
        ) from None
    version = str(getattr(datasets, "__version__", _HUB_VERSION))
    if int(version.partition(".")[0]) < _HUB_VERSION:
        raise MissingPackageError(
            f"data.dataset hf:{name} needs datasets {_HUB_VERSION} or later, and {version} is installed: earlier ones "
            "can run scripts of a data set (pip install -U 'frameworm[hub]')"
        )
    try:
        found = datasets.load_dataset(name)
    except Exception as error:
        raise DataError(
            f"hf:{name}: could not be loaded ({_one_line(error)}); check the name and the network"
        ) from error
    if "train" not in found:
        raise DataError(f"hf:{name}: has no split named train, only {', '.join(found)}")
    train = found["train"]
    text = next((column for column in ("text", "content", "review", "sentence") if column in train.column_names), None)
    if text is None:
        columns = ", ".join(train.column_names)
        raise DataError(f"hf:{name}: none of the columns {columns} is named text, content, review or sentence")
    class_names: tuple[str, ...] | None = None
    if "label" in train.column_names:
        names = getattr(train.features["label"], "names", None) or sorted({str(label) for label in train["label"]})
        class_names = tuple(names)
    val = next((found[split] for split in ("validation", "test") if split in found), None)
    return Corpus(
        f"hf:{name}",
        _hub_split(name, train, text, class_names),
        _hub_split(name, val, text, class_names) if val is not None else None,
        class_names,
    )


def _hub_split(name: str, split: Any, text: str, class_names: tuple[str, ...] | None) -> Split:
    def read() -> Samples:
        texts = [str(item) for item in split[text]]
        if not texts:
            raise DataError(f"hf:{name}: holds no samples")
        if class_names is None:
            return Samples(texts, None)
        # A ClassLabel column holds indices, any other column the names themselves.
        indices = {label: index for index, label in enumerate(class_names)}
        if getattr(split.features["label"], "names", None):
            indices = {str(index): index for index in range(len(class_names))}
        labels: list[int] = []
        for row, label in enumerate(split["label"]):
            if str(label) not in indices:
                raise DataError(
                    f"hf:{name}: row {row} has the label {label!r}, which is not one of {', '.join(indices)}"
                )
            labels.append(indices[str(label)])
        return Samples(texts, labels)

    return Split(read, identity=f"hf:{name}:{split._fingerprint}:{text}:{class_names}")


def _folder(dataset: str, root: str | None, how_to_get: str) -> Path:
    if root is None:
        raise DataError(f"{dataset}: data.root is not set; {how_to_get}")
    folder = Path(root).expanduser()
    if not folder.exists():
        raise DataError(f"{dataset}: the folder {folder} does not exist; {how_to_get}")
    if not folder.is_dir():
        raise DataError(f"{dataset}: {folder} is a file, but data.root must be a folder; {how_to_get}")
    return folder


def _first_file(folder: Path, dataset: str, names: tuple[str, ...], how_to_get: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{dataset}: no {' or '.join(names)} in {folder}; {how_to_get}")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV file with the line they end on, without blank lines."""
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV ({error})") from error


def _read_text(path: Path) -> str:
    """Read a whole file, unpacking it if its name ends in .gz."""
    try:
        with open_plain(path) as file:
            content = file.read()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or not a gzip file ({_one_line(error)}); download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); convert it to UTF-8") from error


def _not_empty(path: Path, samples: Samples) -> Samples:
    if not samples.texts:
        raise DataError(f"{path}: is empty; download it again")
    return samples


def _not_blank(path: Path, text: str) -> str:
    if not text:
        raise DataError(f"{path}: is empty")
    return text


def _one_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
