"""Readers of text data sets: the formats as they come, and every way in which they can be broken."""

from __future__ import annotations

import gzip
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from frameworm.data.corpora.readers import AG_NEWS_CLASSES, Corpus, Samples, find_corpus
from frameworm.errors import ConfigError, DataError, MissingPackageError

AG_ROW = '"3","Shares up","Stocks rose, ""sharply"", on Monday."\n'
IMDB_HEADER = "sentiment,rating,id,review\n"


def real_data(name: str) -> Path:
    root = os.environ.get("FRAMEWORM_DATA")
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"FRAMEWORM_DATA does not name a folder that holds {name}")
    return Path(root) / name


def write_ag_news(root: Path, train: str = AG_ROW, test: str = AG_ROW) -> Path:
    root.mkdir(exist_ok=True)
    (root / "train.csv").write_text(train, encoding="utf-8")
    (root / "test.csv").write_text(test, encoding="utf-8")
    return root


def write_imdb(root: Path, train: str, test: str = IMDB_HEADER + "pos,9,0,Good.\n") -> Path:
    root.mkdir(exist_ok=True)
    (root / "train.csv.gz").write_bytes(gzip.compress(train.encode()))
    (root / "test.csv.gz").write_bytes(gzip.compress(test.encode()))
    return root


def write_acl_imdb(root: Path) -> Path:
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in (0, 2, 10):
                (folder / f"{number}_{9 if label == 'pos' else 2}.txt").write_text(f"{split} {label} {number}")
    return root


def read(corpus: Corpus) -> tuple[Samples, Samples]:
    assert corpus.val is not None
    return corpus.train.read(), corpus.val.read()


def message(call: Any) -> str:
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_ag_news_joins_title_and_description(tmp_path: Path) -> None:
    train, test = read(find_corpus("ag_news", str(write_ag_news(tmp_path, AG_ROW + '"1","",""\n'))))
    assert train.texts == ['Shares up Stocks rose, "sharply", on Monday.', " "]
    assert train.labels == [2, 0]
    assert len(test.texts) == 1


def test_ag_news_subset_and_gzip_are_found(tmp_path: Path) -> None:
    (tmp_path / "train_subset.csv.gz").write_bytes(gzip.compress(AG_ROW.encode()))
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(AG_ROW.encode()))
    corpus = find_corpus("ag_news", str(tmp_path))
    assert corpus.train.files == (tmp_path / "train_subset.csv.gz",)
    assert read(corpus)[0] == read(corpus)[1]
    assert corpus.class_names == AG_NEWS_CLASSES


def test_ag_news_with_a_header_and_a_byte_order_mark(tmp_path: Path) -> None:
    root = write_ag_news(tmp_path, '\ufeff"Class Index","Title","Description"\n' + AG_ROW)
    assert read(find_corpus("ag_news", str(root)))[0].labels == [2]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (AG_ROW + '"1","only a title"\n', "train.csv:2: expected 3 columns (class,title,description), found 2"),
        (AG_ROW + '"5","a","b"\n', "train.csv:2: class '5' is not 1, 2, 3 or 4"),
        ('"x","a","b"\n', "train.csv:1: class 'x' is not"),
        ('"1","a","never closed\n', "not valid CSV"),
        ("", "train.csv: is empty"),
        ("\n\n", "train.csv: is empty"),
    ],
)
def test_ag_news_broken_rows(tmp_path: Path, rows: str, says: str) -> None:
    corpus = find_corpus("ag_news", str(write_ag_news(tmp_path, rows)))
    assert says in message(corpus.train.read)


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    root = write_ag_news(tmp_path)
    (root / "train.csv").write_bytes(AG_ROW.encode() + '"1","caf\u00e9","x"\n'.encode("latin-1"))
    assert "train.csv:2: not UTF-8 (byte 0xe9)" in message(find_corpus("ag_news", str(root)).train.read)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(AG_ROW.encode() * 200, mtime=0)[:-20], "truncated or not a gzip file"),
        (b"no gzip at all", "truncated or not a gzip file"),
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_broken_gzip(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "train.csv.gz").write_bytes(content)
    (tmp_path / "test.csv").write_text(AG_ROW)
    assert says in message(find_corpus("ag_news", str(tmp_path)).train.read)


@pytest.mark.parametrize(("dataset", "archive"), [("ag_news", "Zhang"), ("imdb", "aclImdb_v1.tar.gz")])
def test_missing_data_says_where_and_how_to_get_it(tmp_path: Path, dataset: str, archive: str) -> None:
    file = tmp_path / "file"
    file.touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for root, says in (
        (None, "data.root is not set"),
        (tmp_path / "gone", f"{tmp_path / 'gone'} does not exist"),
        (file, f"{file} is a file"),
        (empty, f"no train.csv or train.csv.gz{' or train_subset.csv.gz' * (dataset == 'ag_news')} in {empty}"),
    ):
        text = message(lambda root=root: find_corpus(dataset, None if root is None else str(root)))
        assert says in text
        assert archive in text


def test_missing_test_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(AG_ROW)
    assert "no test.csv or test.csv.gz" in message(lambda: find_corpus("ag_news", str(tmp_path)))


@pytest.mark.parametrize(("negative", "positive"), [("neg", "pos"), ("Negative", "positive"), ("0", "1")])
def test_imdb_table(tmp_path: Path, negative: str, positive: str) -> None:
    table = f'Review,sentiment\n"Bad, <br />\nvery bad.",{negative}\n"",{positive}\n'
    train, test = read(find_corpus("imdb", str(write_imdb(tmp_path, table))))
    assert train == Samples(["Bad, <br />\nvery bad.", ""], [0, 1])
    assert test.labels == [1]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "text,label\nGood,pos\n",
            "train.csv.gz:1: expected a header with the columns review and sentiment, found text",
        ),
        (IMDB_HEADER + "pos,9,0\n", "train.csv.gz:2: expected 4 columns"),
        (IMDB_HEADER + "meh,9,0,Good\n", "train.csv.gz:2: sentiment 'meh' is not"),
        (IMDB_HEADER, "is empty"),
        ("", "train.csv.gz:1: expected a header"),
    ],
)
def test_imdb_broken_tables(tmp_path: Path, table: str, says: str) -> None:
    assert says in message(find_corpus("imdb", str(write_imdb(tmp_path, table))).train.read)


def test_acl_imdb_folders_from_the_folder_or_its_parent(tmp_path: Path) -> None:
    inner = write_acl_imdb(tmp_path / "aclImdb")
    train, test = read(find_corpus("imdb", str(inner)))
    assert train.texts == [f"train {label} {number}" for number in (0, 2, 10) for label in ("neg", "pos")]
    assert train.labels == [0, 1, 0, 1, 0, 1]
    assert test.texts[0] == "test neg 0"
    assert read(find_corpus("imdb", str(tmp_path))) == (train, test)


def test_acl_imdb_with_a_folder_missing(tmp_path: Path) -> None:
    root = write_acl_imdb(tmp_path / "aclImdb")
    for file in (root / "test" / "neg").iterdir():
        file.unlink()
    assert f"no .txt files in {root / 'test' / 'neg'}" in message(lambda: find_corpus("imdb", str(root)))


def test_text_file_and_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "valid.txt", "test-1.txt", "note.md"):
        (tmp_path / name).write_text(f"text of {name}\r\n")
    single = find_corpus("text", str(tmp_path / "note.md"))
    assert single.val is None
    assert single.class_names is None
    (tmp_path / "b.txt").write_bytes(b"text of b.txt\r\n")
    corpus = find_corpus("text", str(tmp_path))
    train, val = read(corpus)
    assert train.texts[1] == "text of b.txt\r\n"
    assert [path.name for path in corpus.train.files] == ["a.txt", "b.txt"]
    assert len(val.texts) == 2
    assert val.labels is None


def test_text_that_is_not_there(tmp_path: Path) -> None:
    assert "data.root is not set" in message(lambda: find_corpus("text", None))
    assert "does not exist" in message(lambda: find_corpus("text", str(tmp_path / "x")))
    assert "no .txt files" in message(lambda: find_corpus("text", str(tmp_path)))
    (tmp_path / "val.txt").write_text("x")
    assert "besides val.txt, which is for validation" in message(lambda: find_corpus("text", str(tmp_path)))
    (tmp_path / "a.txt").touch()
    assert "a.txt: is empty" in message(find_corpus("text", str(tmp_path)).train.read)


def test_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'agnews' is not one of .*did you mean ag_news"):
        find_corpus("agnews", None)


class HubSplit:
    def __init__(self, names: list[str] | None, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {"label": types.SimpleNamespace(names=names) if names else object()}
        self._fingerprint = "f00d"

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]


def hub(monkeypatch: pytest.MonkeyPatch, **splits: HubSplit) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name: splits))


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(
        monkeypatch,
        train=HubSplit(["no", "yes"], content=["a", "b"], label=[1, 0]),
        test=HubSplit(["no", "yes"], content=["c"], label=[1]),
    )
    corpus = find_corpus("hf:org/name", None)
    assert read(corpus) == (Samples(["a", "b"], [1, 0]), Samples(["c"], [1]))
    assert corpus.class_names == ("no", "yes")
    assert "f00d" in corpus.train.identity


def test_hub_labels_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, train=HubSplit(None, text=["a", "b"], label=["x", "w"]))
    corpus = find_corpus("hf:name", None)
    assert corpus.class_names == ("w", "x")
    assert corpus.val is None
    assert corpus.train.read().labels == [1, 0]


def test_hub_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, test=HubSplit(None, text=["a"]))
    assert "no split named train" in message(lambda: find_corpus("hf:name", None))
    hub(monkeypatch, train=HubSplit(None, words=["a"]))
    assert "none of the columns words" in message(lambda: find_corpus("hf:name", None))
    hub(monkeypatch, train=HubSplit(["no", "yes"], text=["a"], label=[-1]))
    assert "row 0 has the label -1" in message(find_corpus("hf:name", None).train.read)

    def unreachable(name: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    assert "could not be loaded (no route)" in message(lambda: find_corpus("hf:name", None))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[hub\]'"):
        find_corpus("hf:name", None)


def test_real_ag_news() -> None:
    train, test = read(find_corpus("ag_news", str(real_data("ag_news"))))
    assert len(test.texts) == 7_600
    assert test.labels is not None
    assert [test.labels.count(label) for label in range(4)] == [1_900] * 4
    assert test.texts[0].startswith("Fears for T N pension after talks Unions representing")
    assert len(train.texts) >= 40_000


@pytest.mark.slow
def test_real_imdb() -> None:
    for samples in read(find_corpus("imdb", str(real_data("imdb")))):
        assert len(samples.texts) == 25_000
        assert samples.labels is not None
        assert sum(samples.labels) == 12_500
        assert min(len(text) for text in samples.texts) > 10
