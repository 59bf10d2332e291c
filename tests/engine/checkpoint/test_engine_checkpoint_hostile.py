"""Damaged and forged checkpoints: each is refused in words, nothing is executed, nothing outside the folder is read."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import fill, values

from frameworm.engine.checkpoint.load import list_checkpoints, load_newest
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import loaded

SHARD = "rank-00000.safetensors"


def _forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and make its checksum fit again."""
    file = path / "manifest.json"
    content = json.loads(file.read_text())["content"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}))


def _rename_file(content: dict[str, Any], name: str) -> None:
    content["files"] = {name: next(iter(content["files"].values()))}
    for tensor in content["tensors"].values():
        for part in tensor["parts"]:
            part[0] = name


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: (path / SHARD).unlink(), f"{SHARD} cannot be read: No such file"),
    "truncated": (lambda path: os.truncate(path / SHARD, 100), f"{SHARD} is truncated: 100 of"),
    "longer": (lambda path: os.truncate(path / SHARD, 10**6), f"{SHARD} is truncated: 1000000 of"),
    "bit flip": (lambda path: _flip(path / SHARD), f"{SHARD} is corrupt"),
    "link": (lambda path: _link(path / SHARD), f"{SHARD} cannot be read"),
    "pipe": (lambda path: _pipe(path / SHARD), f"{SHARD} is not a regular file"),
    "manifest torn": (lambda path: os.truncate(path / "manifest.json", 300), "only half of one"),
    "manifest empty": (lambda path: (path / "manifest.json").write_text(""), "only half of one"),
    "manifest not text": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "it is not text"),
    "manifest deep": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "not the manifest"),
    "manifest of a list": (lambda path: (path / "manifest.json").write_text("[]"), "not the manifest"),
    "manifest link": (lambda path: _link(path / "manifest.json"), "not a regular file"),
    "manifest changed": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"step": 3', '"step": 4')
        ),
        "manifest.json is corrupt",
    ),
}
FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "path upwards": (lambda content: _rename_file(content, "../outside.safetensors"), "'../outside.safetensors'"),
    "absolute path": (lambda content: _rename_file(content, "/etc/passwd"), "'/etc/passwd'"),
    "file not listed": (
        lambda content: content["tensors"]["model/large"]["parts"][0].__setitem__(0, "rank-00009.safetensors"),
        "which it does not list",
    ),
    "absurd rows": (
        lambda content: content["tensors"]["model/large"]["parts"][0].__setitem__(2, 10**15),
        "do not make up",
    ),
    "negative row": (
        lambda content: content["tensors"]["model/large"]["parts"][0].__setitem__(1, -5),
        "not the manifest",
    ),
    "rows twice": (
        lambda content: content["tensors"]["model/large"]["parts"].append([SHARD, 0, 1000]),
        "do not make up",
    ),
    "no parts": (lambda content: content["tensors"]["model/large"].update(parts=[]), "do not make up"),
    "beyond counting": (
        lambda content: content["tensors"]["model/large"].update(shape=[1000, 2**62]),
        "not the manifest",
    ),
    "another step": (lambda content: content.update(step=9), "holds the checkpoint of step 9"),
    "another format": (lambda content: content.update(format=4), "is of format 4, and this version reads 3"),
    "no ranks": (lambda content: content.update(ranks=None), "not the manifest"),
    "size as text": (lambda content: content["files"][SHARD].update(bytes="many"), "not the manifest"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path, (1, 2, 3))
    return tmp_path


def _falls_back(folder: Path, message: str) -> None:
    said: list[str] = []
    found = load_newest(folder, said.append)
    assert found is not None
    assert found[0].step == 2
    model = loaded(found[1].shared["model"])
    assert all(torch.equal(model[name], expected) for name, expected in values(2).items())
    assert len(said) == 1
    assert said[0].startswith("step-00000003")
    assert message in said[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_falls_back_and_says_so(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder / "step-00000003")
    _falls_back(folder, message)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest_is_refused(folder: Path, forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = FORGERIES[forgery]
    _forge(folder / "step-00000003", change)
    opened: list[Path] = []
    for module, name in ((os, "open"), (builtins, "open")):
        original = getattr(module, name)

        def spy(path: Any, *args: Any, original: Any = original, **more: Any) -> Any:
            if isinstance(path, (str, Path)):
                opened.append(Path(path))
            return original(path, *args, **more)

        monkeypatch.setattr(module, name, spy)
    _falls_back(folder, message)
    assert opened
    assert all(path.resolve().is_relative_to(folder) for path in opened), opened


INSIDE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other shape": (
        lambda content: content["tensors"]["model/large"].update(shape=[1000, 10**12]),
        "another model/large than its manifest says",
    ),
    "other type": (
        lambda content: content["tensors"]["model/large"].update(dtype="F64"),
        "another model/large than its manifest says",
    ),
    "unknown type": (lambda content: content["tensors"]["model/large"].update(dtype="pickle"), "no tensor model/large"),
    "unknown tensor": (
        lambda content: content["shared"]["model"].update(large={"$tensor": "rank-0/gone"}),
        "no tensor rank-0/gone",
    ),
    "not in the file": (
        lambda content: (
            content["tensors"].update(gone=content["tensors"]["model/small"]),
            content["shared"]["model"].update(large={"$tensor": "gone"}),
        ),
        "gone cannot be read",
    ),
    "no model": (lambda content: content["shared"].pop("model"), "has no model"),
    "odd object": (
        lambda content: content["shared"].update(model={"$call": "os.system"}),
        "a $call has invalid content",
    ),
    "odd dtype": (lambda content: content["shared"].update(model={"$dtype": "load"}), "a $dtype has invalid content"),
    "ranks of text": (lambda content: content.update(ranks=["x"]), "no state of the ranks"),
}


@pytest.mark.parametrize("forgery", INSIDE)
def test_what_files_do_not_hold_is_refused_before_memory_is_asked_for(folder: Path, forgery: str) -> None:
    change, message = INSIDE[forgery]
    _forge(folder / "step-00000003", change)
    with pytest.raises(CheckpointError, match=message.replace("$", r"\$")):
        loaded(list_checkpoints(folder)[-1].read().shared)


def test_a_shard_with_absurd_offsets_is_refused(folder: Path) -> None:
    """A safetensors file that lies about itself, with a checksum that fits."""
    path = folder / "step-00000003" / SHARD
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in header:
        header[name]["data_offsets"] = [10**15, 10**15 + 12_000]
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    _forge(path.parent, lambda manifest: manifest["files"][SHARD].update(bytes=size, sha256=[sha256]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded(list_checkpoints(folder)[-1].read().shared)


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_a_pickle_with_a_payload_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / "step-00000003" / SHARD
    path.write_bytes(pickle.dumps(Payload()))
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    _forge(path.parent, lambda manifest: manifest["files"][SHARD].update(bytes=size, sha256=[sha256]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded(list_checkpoints(folder)[-1].read().shared)
    assert not (folder / "pwned").exists()


def test_all_damaged_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    assert load_newest(tmp_path, lambda text: None) is None
    fill(tmp_path, (1,))
    _flip(tmp_path / "step-00000001" / SHARD)
    with pytest.raises(CheckpointError, match="start afresh"):
        load_newest(tmp_path, lambda text: None)


def test_an_earlier_format_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.pt").write_bytes(b"data")
    (tmp_path / "step-00000001.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-\*\.pt are of an earlier version"):
        load_newest(tmp_path, lambda text: None)
