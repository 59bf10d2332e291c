"""The token cache: found by content, whole or not there, built once by many processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from frameworm.data.corpora.cache import TokenCache, TokenStore, TokenWriter, store_key, write_store
from frameworm.errors import DataError


def fill(writer: TokenWriter) -> None:
    writer.append([np.array([1, 2, 3]), np.array([4])], [0, 1])
    writer.append([])
    writer.append([np.array([5, 6])], [1])


def build(folder: Path) -> None:
    write_store(folder, {"vocab_size": 100, "pad_id": 0}, fill)


def check(store: TokenStore) -> None:
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert store.offsets.tolist() == [0, 3, 4, 6]
    assert store.labels.tolist() == [0, 1, 1]


def never(folder: Path) -> None:
    raise AssertionError("built again")


def test_builds_once_and_maps_afterwards(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "new" / "cache")
    assert cache.get("key") is None
    check(cache.get_or_build("key", build))
    store = cache.get_or_build("key", never)
    check(store)
    assert store.tokens.dtype == np.uint16
    assert not store.tokens.flags.writeable
    assert store.meta["samples"] == 3
    assert store.meta["tokens"] == 6
    check(pickle.loads(pickle.dumps(store)))
    assert not list(cache.folder.glob("tmp-*"))


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    def large(folder: Path) -> None:
        write_store(folder, {"vocab_size": 70_000}, lambda writer: writer.append([np.array([69_999])]))

    store = TokenCache(tmp_path).get_or_build("key", large)
    assert store.tokens.tolist() == [69_999]
    assert len(store.labels) == 0


@pytest.mark.parametrize("damage", ["tokens.bin", "offsets.npy", "labels.npy", "meta.json", "gone", "no-meta", "sizes"])
def test_damaged_store_is_built_again(tmp_path: Path, damage: str) -> None:
    cache = TokenCache(tmp_path)
    folder = cache.get_or_build("key", build).folder
    if damage == "gone":
        (folder / "tokens.bin").unlink()
    elif damage == "no-meta":
        (folder / "meta.json").write_text("[]")
    elif damage == "sizes":
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, "tokens": 5}))
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:-3])
    assert cache.get("key") is None
    check(cache.get_or_build("key", build))


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)

    def fails(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        raise DataError("bad row")

    with pytest.raises(DataError, match="bad row"):
        cache.get_or_build("key", fails)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    check(cache.get_or_build("key", build))


def _killed_build(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(b"half")
    os._exit(9)


def _start_killed_build(cache_dir: Path) -> None:
    TokenCache(cache_dir).get_or_build("key", _killed_build)


def _slow_build(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.5)
    build(folder)


def _build_slowly(cache_dir: Path) -> None:
    check(TokenCache(cache_dir).get_or_build("key", _slow_build))


def _run(target: object, cache_dir: Path, count: int) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(cache_dir,)) for _ in range(count)]  # type: ignore[arg-type]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(150)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)


def test_killed_build_is_no_cache_and_is_cleared_away(tmp_path: Path) -> None:
    assert _run(_start_killed_build, tmp_path, 1) == [9]
    assert list(tmp_path.glob("tmp-key-*"))
    assert TokenCache(tmp_path).get("key") is None
    check(TokenCache(tmp_path).get_or_build("key", build))
    assert not list(tmp_path.glob("tmp-*"))


def test_of_two_processes_one_builds_and_one_waits(tmp_path: Path) -> None:
    assert _run(_build_slowly, tmp_path, 2) == [0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_unwritable_folder_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written \(.+\); set data\.cache_dir"):
        TokenCache(tmp_path / "file" / "cache").get_or_build("key", build)


def test_content_hash_reads_unchanged_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenCache(tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    files = [data / "a", data / "b"]
    for file in files:
        file.write_text(file.name)
    before = cache.content_hash(files, data)
    assert cache.content_hash(files[:1], data) != before
    with monkeypatch.context() as patch:
        patch.setattr("frameworm.data.corpora.cache.hash_files", never)
        assert cache.content_hash(files, data) == before
    files[1].write_text("changed")
    after = cache.content_hash(files, data)
    assert after != before
    data.rename(tmp_path / "moved")
    assert cache.content_hash([tmp_path / "moved" / file.name for file in files], tmp_path / "moved") == after
    (cache.folder / "index.json").write_text("{broken")
    assert cache.content_hash([tmp_path / "moved" / file.name for file in files], tmp_path / "moved") == after


def test_content_hash_without_a_writable_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert len(TokenCache(file / "cache").content_hash([file], tmp_path)) == 64
    with pytest.raises(DataError, match="gone: cannot be read"):
        TokenCache(tmp_path).content_hash([tmp_path / "gone"], tmp_path)


def test_key_depends_on_every_part() -> None:
    assert len({store_key("a", "b"), store_key("ab", ""), store_key("b", "a"), store_key("a", "b", "")}) == 4
