"""The layout of the folder that a model's own `save_pretrained` writes: its files, and which weight goes where.

A run stores it at its start, so that it can be exported later without the model's code. The model is asked to save
itself while its `state_dict` returns, in place of each tensor, a tensor with a unique number. The files show which
weights it would write, under which names and into which files. This needs no knowledge of any library; a model that
changes its weights, rather than only renaming them, has no such layout.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import math
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.engine.weight_formats import SAFETENSORS, Outgoing, parse_size, size_of, write_safetensors
from frameworm.errors import ModelError, RunFolderError
from frameworm.models.weight_files import open_weights, storage_of
from frameworm.records.atomic import replacing, write_atomic
from frameworm.records.reading import parse_json
from frameworm.torch_private.modules import without_compiler

log = logging.getLogger("frameworm")
PRETRAINED = "pretrained.zip"  # in the run folder
_PLACES = "weights.json"
_FILES = "files/"
_MOST_BYTES = 2**30
_DAMAGED = (OSError, ValueError, KeyError, AttributeError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile)
_APART = 2**40  # distance between the numbers of two weights
_MOST_ROWS = 2**20
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npy", ".npz", ".h5", ".msgpack")  # may contain numbers


class Shape(NamedTuple):
    """What `save_pretrained` writes.

    Attributes:
        files: All files except weights, by their path in the folder.
        weights: For each file of weights, maps names in the file to names in the model's state.
    """

    files: dict[str, bytes]
    weights: dict[str, dict[str, str]]

    def take(self, tensors: Outgoing) -> Outgoing:
        """Select those of a model's weights that are written.

        Raises:
            ModelError: If the weights belong to another model.
        """
        used = dict.fromkeys(name for of in self.weights.values() for name in of.values())
        missing = [name for name in used if name not in tensors.about]
        if missing:
            raise ModelError(f"the weights have no {missing[0]}, which the model would write as its training began")
        return Outgoing({name: tensors.about[name] for name in used}, tensors.read)


def saves_itself(model: object) -> bool:
    """Whether a model can write a folder from which its library loads it."""
    return callable(getattr(model, "save_pretrained", None))


def shape_of(model: nn.Module, processing_class: Any = None) -> Shape | None:
    """Find the layout of what a model writes, with its tokenizer or processor; None if it cannot be determined."""
    inner: nn.Module = without_compiler(model)
    if not saves_itself(inner):
        return None
    try:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as around:
            folder = Path(name)
            around.enter_context(warnings.catch_warnings(action="ignore"))  # deprecation warnings of libraries
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):  # and their progress bars
                around.enter_context(redirect(io.StringIO()))
            names = list(model.state_dict())
            numbers = around.enter_context(_numbers_for_weights(inner))
            inner.save_pretrained(folder)  # type: ignore[operator]
            if processing_class is not None:
                processing_class.save_pretrained(folder)
            return _read_shape(folder, numbers, names)
    except Exception as error:  # raised by the user's code or a library
        log.debug("what %s writes is not known before it is exported: %s", type(model).__name__, error)
        return None


def _numbered(number: int, shape: torch.Size) -> torch.Tensor:
    """Create a tensor that encodes a number, with as many rows as a weight; any change of the weight is visible."""
    sizes = [min(max(size, 1), 2 if place else _MOST_ROWS) for place, size in enumerate(shape)]
    return (number * _APART + torch.arange(math.prod(sizes))).reshape(sizes)


@contextlib.contextmanager
def _numbers_for_weights(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Make the state dicts of the model and its submodules return numbers instead of weights; yield the model's."""
    first: dict[tuple[object, ...], torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for number, (name, item) in enumerate(model.state_dict().items()):
        if isinstance(item, torch.Tensor):  # tied weights stay tied
            numbers[name] = first.setdefault(storage_of(item), _numbered(number, item.shape))
    parts = dict(model.named_modules())
    before = {name: part.__dict__["state_dict"] for name, part in parts.items() if "state_dict" in part.__dict__}
    for name, part in parts.items():
        part.__dict__["state_dict"] = _state_dict_of(numbers, f"{name}." if name else "")
    try:
        yield numbers
    finally:
        for part in parts.values():
            del part.__dict__["state_dict"]
        for name, own in before.items():
            parts[name].__dict__["state_dict"] = own


def _state_dict_of(numbers: Mapping[str, torch.Tensor], own: str) -> Callable[..., dict[str, torch.Tensor]]:
    def state_dict(
        *_: Any, destination: dict[str, torch.Tensor] | None = None, prefix: str = "", **__: Any
    ) -> dict[str, torch.Tensor]:
        found = {} if destination is None else destination
        found.update((prefix + name.removeprefix(own), item) for name, item in numbers.items() if name.startswith(own))
        return found

    return state_dict


def _read_shape(folder: Path, numbers: Mapping[str, torch.Tensor], names: Sequence[str]) -> Shape | None:
    """Read a written folder; None unless every tensor in it is one of the numbers, no more often than its names.

    Args:
        folder: The folder that the model wrote.
        numbers: The tensors that replaced the weights; a number is the index of the weight's first name.
        names: All names of the model's state.
    """
    known = {_number_of(item): item for item in numbers.values()}
    shape = Shape({}, {})
    seen: Counter[str] = Counter()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        place = path.relative_to(folder).as_posix()
        if path.suffix in _OTHER_WEIGHTS:
            return None
        if path.suffix != SAFETENSORS:
            shape.files[place] = path.read_bytes()
            continue
        written = {key: item.read() for key, item in open_weights(path).items()}
        found = {key: known.get(_number_of(item)) for key, item in written.items()}
        if any(item is None or not torch.equal(item, written[key]) for key, item in found.items()):
            return None
        shape.weights[place] = {key: names[_number_of(item)] for key, item in written.items()}
        seen.update(shape.weights[place].values())
    often = Counter(names[_number_of(item)] for item in numbers.values())
    return shape if seen and all(count <= often[name] for name, count in seen.items()) else None


def _number_of(tensor: torch.Tensor) -> int:
    """Return the number that a tensor encodes; -1 if it encodes none."""
    is_one = tensor.dtype == torch.int64 and tensor.numel() > 0
    return int(tensor.reshape(-1)[0]) // _APART if is_one else -1


def keep_shape(run: Path, model: nn.Module, processing_class: Any) -> None:
    """Store the layout of what a model writes in its run folder, if it has one and none is stored yet.

    Raises:
        RunFolderError: If it cannot be written.
    """
    target = run / PRETRAINED
    if target.exists() or not saves_itself(model):
        return
    shape = shape_of(model, processing_class)
    if shape is None:
        log.info(
            "%s.save_pretrained does more than write weights by name, so this run cannot be exported in that form "
            "without the model's code: use trainer.export, or frameworm export with --set workload=...",
            type(model).__name__,
        )
        return
    try:
        with replacing(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_PLACES, json.dumps(shape.weights))
            for place, content in shape.files.items():
                archive.writestr(_FILES + place, content)
    except OSError as error:
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None


def kept_shape(run: Path) -> Shape | None:
    """Read the layout stored in a run folder, which may be untrusted; None if there is none.

    Raises:
        RunFolderError: If it is damaged, too large, or names files outside its folder.
    """
    path = run / PRETRAINED
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > _MOST_BYTES:
                raise ValueError(f"it holds more than {_MOST_BYTES // 2**20} MiB")
            weights = parse_json(archive.read(_PLACES))
            inside = [name for name in archive.namelist() if name.startswith(_FILES) and not name.endswith("/")]
            shape = Shape({name.removeprefix(_FILES): archive.read(name) for name in inside}, weights)
        for place in (*shape.files, *shape.weights):
            pure = PurePosixPath(place)
            if pure.is_absolute() or ".." in pure.parts or not pure.name:
                raise ValueError(f"{place} leads out of its folder")
        for of in shape.weights.values():
            if not all(isinstance(key, str) and isinstance(name, str) for key, name in of.items()):
                raise ValueError(f"{_PLACES} names no weights")
        return shape
    except _DAMAGED as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}; name the workload instead (--set workload=...)"
        ) from None


def write_shaped(target: Path, shape: Shape, tensors: Outgoing, max_shard_bytes: int) -> int:
    """Write a folder in this layout, one tensor at a time; return the bytes of the weights.

    Raises:
        RunFolderError: If it cannot be written.
    """
    written = 0
    kinds: Counter[torch.dtype] = Counter()
    try:
        for place, content in shape.files.items():
            path = target / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for place, of in shape.weights.items():
            about = {key: tensors.about[name] for key, name in of.items()}
            kinds.update(dtype for _, dtype in about.values() if dtype.is_floating_point)
            outgoing = Outgoing(about, lambda key, of=of: tensors.read(of[key]))  # type: ignore[misc]
            written += write_safetensors(target / place, outgoing, {"format": "pt"}, max_shard_bytes)
    except OSError as error:
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None
    if kinds:
        _say_type(target / "config.json", kinds.most_common(1)[0][0])
    return written


def write_pretrained(
    target: Path,
    model: nn.Module,
    state: dict[str, torch.Tensor],
    processing_class: Any,
    max_shard_size: str | int,
    *,
    is_own_state: bool,
) -> int:
    """Have a model write itself and its config, and its tokenizer or processor beside it; return the bytes written.

    Args:
        target: The folder.
        model: A model with a method `save_pretrained`.
        state: The weights to write.
        processing_class: Tokenizer or processor with such a method too; None if there is none.
        max_shard_size: Largest size of one file.
        is_own_state: Whether the model itself holds these weights, in this dtype.

    Raises:
        ModelError: If it cannot write weights that are passed to it.
        RunFolderError: If the folder cannot be written.
    """
    inner: nn.Module = without_compiler(model)  # the compiler's wrapper renames weights
    write: Callable[..., Any] = inner.save_pretrained  # type: ignore[assignment]
    parameters = inspect.signature(write).parameters
    if not is_own_state and "state_dict" not in parameters:
        shape = shape_of(model, processing_class)
        if shape is None:
            raise ModelError(
                f"{type(model).__name__}.save_pretrained takes no state_dict, so it only writes the weights that the "
                "model holds: not averaged ones, another dtype or parts on several ranks; use the format safetensors"
            )
        about = {name: (item.shape, item.dtype) for name, item in state.items()}
        write_shaped(target, shape, shape.take(Outgoing(about, state.__getitem__)), parse_size(max_shard_size))
        return size_of(target)
    own = state if inner is model else {name.removeprefix("_orig_mod."): item for name, item in state.items()}
    given = {"max_shard_size": max_shard_size, "state_dict": own}
    kinds = [item.dtype for item in state.values() if item.is_floating_point()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings of libraries
            write(target, **{name: value for name, value in given.items() if name in parameters})
            if processing_class is not None:
                processing_class.save_pretrained(target)
    except OSError as error:
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None
    if kinds:
        _say_type(target / "config.json", max(set(kinds), key=kinds.count))
    return size_of(target)


def _say_type(config: Path, kind: torch.dtype) -> None:
    """Set the dtype in a written config to that of most weights, if the config names one: loaders use it."""
    if not config.is_file():
        return
    dtype = str(kind).removeprefix("torch.")
    settings = json.loads(config.read_text(encoding="utf-8"))
    named = [key for key in ("dtype", "torch_dtype") if isinstance(settings.get(key), str)]
    if any(settings[key] != dtype for key in named):
        write_atomic(config, json.dumps({**settings, **dict.fromkeys(named, dtype)}, indent=2) + "\n")
