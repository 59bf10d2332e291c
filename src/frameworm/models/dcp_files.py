"""Read folders of torch.distributed.checkpoint as data.

Their index and the header of each tensor are pickles. Neither is loaded: we walk through the pickle instructions, and
where one would call or create something, record its name and arguments instead. So nothing in such a folder can
execute.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from frameworm.errors import CheckpointError
from frameworm.parallel.shards import StoredTensor
from frameworm.records.reading import open_plain, read_bytes
from frameworm.torch_private.names import PICKLED_TENSORS

INDEX = ".metadata"
_MOST_HEAD_BYTES = 2**20  # of a tensor's header
_PUSHED = {"BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"} | {
    f"{size}{kind}" for kind in ("BINUNICODE", "BINBYTES", "BINUNICODE8", "BINBYTES8") for size in ("", "SHORT_")
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False)
class Made:
    """What a pickle would call or create: its name, arguments and state."""

    kind: Any
    arguments: Any = ()
    state: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class Table:
    """A dict in a pickle; its keys may be anything."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def __getitem__(self, name: str) -> Any:
        return next(value for key, value in reversed(self.pairs) if key == name)


def outline(pickled: bytes) -> Any:
    """Parse a pickle without executing it.

    Raises:
        ValueError: If it is not a pickle, or uses instructions that a checkpoint does not need.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    marks: list[int] = []

    def taken(count: int) -> list[Any]:
        begin = len(stack) - count
        if begin < 0:
            raise ValueError("the stack is empty")
        items = stack[begin:]
        del stack[begin:]
        return items

    def since_mark() -> list[Any]:
        return taken(len(stack) - marks.pop())

    try:
        for instruction, value, _ in pickletools.genops(pickled):
            name = instruction.name
            if name in ("PROTO", "FRAME"):
                continue
            if name in _PUSHED:
                stack.append(value)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                stack.append(tuple(taken(_TUPLES[name])))
            elif name == "TUPLE":
                stack.append(tuple(since_mark()))
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "EMPTY_LIST":
                stack.append([])
            elif name == "EMPTY_DICT":
                stack.append(Table())
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name in ("APPEND", "APPENDS"):
                items = taken(1) if name == "APPEND" else since_mark()
                stack[-1].extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = taken(2) if name == "SETITEM" else since_mark()
                stack[-1].pairs.extend(zip(items[::2], items[1::2]))
            elif name == "GLOBAL":
                stack.append(value)
            elif name == "STACK_GLOBAL":
                stack.append(" ".join(taken(2)))
            elif name in ("REDUCE", "NEWOBJ"):
                stack.append(Made(*taken(2)))
            elif name == "BINPERSID":
                stack.append(Made("persistent", taken(1)[0]))
            elif name == "BUILD":
                state = taken(1)[0]
                stack[-1].state = state
            elif name == "STOP":
                return stack.pop()
            else:
                raise ValueError(f"it holds the instruction {name}")
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its instructions are inconsistent ({error})") from None
    raise ValueError("it has no end")


class _Chunk(NamedTuple):
    """A part of a tensor: its offsets, its sizes, and where it is stored."""

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class DcpTensor(StoredTensor):
    """A tensor in a folder of torch.distributed.checkpoint; only the needed parts are read."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[_Chunk]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._name = name
        self._chunks = chunks

    def read(self, first_row: int = 0, rows: int | None = None) -> torch.Tensor:
        """Read some rows into host memory."""
        if not self.shape:
            return self._read(self._chunks[0])
        rows = self.shape[0] - first_row if rows is None else rows
        whole = torch.empty((rows, *self.shape[1:]), dtype=self.dtype)
        for chunk in self._chunks:
            begin, end = max(chunk.begins[0], first_row), min(chunk.begins[0] + chunk.sizes[0], first_row + rows)
            if begin < end:
                part = self._read(chunk)[begin - chunk.begins[0] : end - chunk.begins[0]]
                columns = [slice(start, start + size) for start, size in zip(chunk.begins[1:], chunk.sizes[1:])]
                whole[(slice(begin - first_row, end - first_row), *columns)] = part
        return whole

    def _read(self, chunk: _Chunk) -> torch.Tensor:
        size = math.prod(chunk.sizes) * self.dtype.itemsize
        try:
            if not 0 < chunk.length <= size + _MOST_HEAD_BYTES:
                raise ValueError(f"it takes {chunk.length} bytes, where its content has {size}")
            with open_plain(chunk.file) as file:
                file.seek(chunk.offset)
                stored = file.read(chunk.length)
            with zipfile.ZipFile(io.BytesIO(stored)) as archive:
                members = {item.filename.partition("/")[2]: item for item in archive.infolist()}
                if any(item.compress_type != zipfile.ZIP_STORED for item in members.values()):
                    raise ValueError("it is compressed")
                made = outline(archive.read(members["data.pkl"]))
                if not isinstance(made, Made) or made.kind not in PICKLED_TENSORS:
                    raise ValueError("it is not a plain tensor")
                storage, begin, sizes, strides = made.arguments[:4]
                order = archive.read(members["byteorder"])
                content = bytearray(archive.read(members[f"data/{storage.arguments[2]}"]))
            if order != b"little" or tuple(sizes) != chunk.sizes:
                raise ValueError(f"it is {order.decode(errors='replace')}-endian and of shape {tuple(sizes)}")
            if not content:
                return torch.empty(chunk.sizes, dtype=self.dtype)
            return torch.frombuffer(content, dtype=self.dtype).as_strided(sizes, strides, begin)
        except (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{chunk.file}: {self._name} cannot be read: {error}") from None


def read_dcp(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a torch.distributed.checkpoint folder by name.

    Raises:
        CheckpointError: If it is not such a folder, or of an unknown format.
    """
    try:
        index = outline(read_bytes(folder / INDEX))
        stored: dict[str, dict[tuple[int, ...], tuple[Path, int, int]]] = {}
        for key, place in index["storage_data"].pairs:
            if _state(place, "transform_descriptors"):
                raise ValueError(f"{_state(key, 'fqn')} is stored in a changed form, such as compressed")
            file = str(_state(place, "relative_path"))
            if Path(file).name != file:
                raise ValueError(f"it leads to {file}, out of the folder")
            begins = _sizes(_state(key, "offset"))
            stored.setdefault(str(_state(key, "fqn")), {})[begins] = (
                folder / file,
                int(_state(place, "offset")),
                int(_state(place, "length")),
            )
        found: dict[str, StoredTensor] = {}
        for name, about in index["state_dict_metadata"].pairs:
            if "TensorStorageMetadata" not in about.kind:
                continue  # plain values of an optimizer or scheduler
            dtype = _dtype(about["properties"].state)
            parts = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in about["chunks"]]
            chunks = [_Chunk(begins, sizes, *stored[name][begins]) for begins, sizes in parts]
            shape = _sizes(about["size"])
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
                raise ValueError(f"{name} is not whole")
            found[str(name)] = DcpTensor(str(name), shape, dtype, chunks)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise CheckpointError(f"{folder} cannot be read as a torch.distributed.checkpoint folder: {error}") from None


def _state(made: Made, name: str) -> Any:
    """Return a field of a dataclass, or None if the version that wrote it did not have it."""
    return next((value for key, value in made.state.pairs if key == name), None)


def _sizes(made: Any) -> tuple[int, ...]:
    """Convert a torch.Size or a tuple."""
    if made is None:
        return ()
    numbers = made.arguments[0] if isinstance(made, Made) else made
    return tuple(int(number) for number in numbers)


def _dtype(properties: Any) -> torch.dtype:
    kind = (properties if isinstance(properties, tuple) else (properties["dtype"],))[0]
    module, _, name = str(kind).partition(" ")
    found = getattr(torch, name, None) if module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{kind} is not a tensor type")
    return found
