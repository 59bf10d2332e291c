"""Export formats of weights: safetensors in one file or several, or folders of other libraries."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from frameworm.engine.checkpoint.shard_reader import type_name
from frameworm.errors import CheckpointError, ConfigError, RunFolderError
from frameworm.records.atomic import replacing, write_atomic

FORMATS = ("auto", "safetensors", "pretrained", "dcp")
SAFETENSORS = ".safetensors"
MAX_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str | int) -> int:
    """Parse a size such as 5GB or 500MB (powers of ten, like `save_pretrained`) or 2GiB into bytes.

    Raises:
        ConfigError: If it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigError(f"max_shard_size is {text}; give a size such as 5GB, 500MB or 2GiB")
    return int(float(match[1]) * unit)


def refuse_url(target: Path) -> None:
    """Refuse a path made from a URL, which would be a local folder called `s3:`.

    Raises:
        RunFolderError: If it is one.
    """
    scheme = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):", next(iter(target.parts), ""))
    if scheme and len(target.parts) > 1:
        raise RunFolderError(
            f"{scheme[1]}://{'/'.join(target.parts[1:])} is a URL; give a path, and copy what it holds"
        )


class Outgoing:
    """Tensors to be written, one at a time.

    Args:
        about: Shape and dtype in which each is written, by name.
        read: Returns one by its name, in host memory and that dtype; called once for each.
    """

    def __init__(
        self, about: Mapping[str, tuple[torch.Size, torch.dtype]], read: Callable[[str], torch.Tensor]
    ) -> None:
        self.about = about
        self.read = read

    @property
    def numbers(self) -> int:
        """Number of elements of all tensors."""
        return sum(shape.numel() for shape, _ in self.about.values())

    def size_of(self, name: str) -> int:
        """Bytes of a tensor."""
        shape, dtype = self.about[name]
        return shape.numel() * dtype.itemsize

    def all(self) -> dict[str, torch.Tensor]:
        """Read all tensors into memory at once."""
        return {name: self.read(name) for name in self.about}


def write_safetensors(target: Path, tensors: Outgoing, about: Mapping[str, str], max_shard_bytes: int) -> int:
    """Write tensors one by one, holding no more than one in memory; return the bytes written.

    Args:
        target: A file that ends in .safetensors, or a folder for a file model.safetensors.
        tensors: What to write.
        about: Metadata for the file headers.
        max_shard_bytes: If the total is larger, write several files of at most this size (unless a single tensor is
            larger), and an index of which tensor is in which file.

    Raises:
        RunFolderError: If they cannot be written.
        CheckpointError: If a tensor has a dtype that safetensors cannot hold.
    """
    first = target if target.suffix == SAFETENSORS else target / f"model{SAFETENSORS}"
    shards = _shards(tensors, max_shard_bytes)
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        if len(shards) == 1:
            return _write_file(first, tensors, shards[0], about)
        places: dict[str, str] = {}
        written = 0
        for number, names in enumerate(shards, start=1):
            path = first.with_name(f"{first.stem}-{number:05d}-of-{len(shards):05d}{SAFETENSORS}")
            written += _write_file(path, tensors, names, about)
            places |= dict.fromkeys(names, path.name)
        index = {"metadata": {**about, "total_size": sum(map(tensors.size_of, tensors.about))}, "weight_map": places}
        write_atomic(first.with_name(f"{first.name}.index.json"), json.dumps(index, indent=2) + "\n")
        return written
    except OSError as error:
        raise RunFolderError(f"cannot write {first}: {error.strerror or error}") from None


def file_order(tensors: Outgoing, max_shard_bytes: int) -> list[str]:
    """Return the names of the tensors in the order in which `write_safetensors` reads them."""
    return [name for shard in _shards(tensors, max_shard_bytes) for name in shard]


def _shards(tensors: Outgoing, max_shard_bytes: int) -> list[list[str]]:
    """Return the names in each file, ordered so that each tensor begins at a multiple of its element size."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in tensors.about:
        added = tensors.size_of(name)
        if shards[-1] and size + added > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    return [sorted(names, key=lambda name: -tensors.about[name][1].itemsize) for names in shards]


def _write_file(path: Path, tensors: Outgoing, names: list[str], about: Mapping[str, str]) -> int:
    """Write one file atomically: eight bytes with the length of the header, the header, the tensors in its order."""
    head: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name in names:
        shape, dtype = tensors.about[name]
        begin, end = end, end + tensors.size_of(name)
        head[name] = {"dtype": type_name(dtype, name), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors can be mapped into memory
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors.read(name)
            assert (tensor.shape, tensor.dtype) == tensors.about[name], name
            if tensor.numel():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return 8 + len(text) + end


def write_dcp(target: Path, state: dict[str, Any]) -> int:
    """Write a folder that torch.distributed.checkpoint reads; all ranks call it, and each writes its own part.

    Returns:
        Its size in bytes.

    Raises:
        RunFolderError: If it cannot be written.
        CheckpointError: If torch cannot write the state.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when called without a process group
            save(state, checkpoint_id=target, no_dist=not dist.is_initialized())
    except OSError as error:
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None
    except CheckpointException as error:
        raise CheckpointError(f"cannot write {target}: {error}") from None
    return size_of(target)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
