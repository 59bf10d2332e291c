"""Load weights from files of common formats into a model, tensor by tensor.

The formats are a safetensors file, several with an index, a folder written by `save_pretrained`, and a
torch.distributed.checkpoint folder. None is loaded as a pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from frameworm.errors import CheckpointError, ConfigError
from frameworm.models.dcp_files import INDEX as DCP_INDEX
from frameworm.models.dcp_files import read_dcp
from frameworm.parallel.shards import SAFETENSORS_TYPES, StoredTensor, own_part
from frameworm.records.reading import read_json
from frameworm.torch_private.tensors import storage_id

log = logging.getLogger("frameworm")
SAFETENSORS, SAFETENSORS_INDEX = ".safetensors", ".safetensors.index.json"
_MANIFEST = "manifest.json"  # of our checkpoints, whose files are not standalone weights
_NAMED = 3  # most names in an error


class SafetensorsTensor(StoredTensor):
    """A tensor in a safetensors file."""

    def __init__(self, path: Path, name: str, shape: Iterable[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._path = path
        self._name = name

    def read(self, first_row: int = 0, rows: int | None = None) -> torch.Tensor:
        """Read some rows into host memory."""
        with _opened(self._path) as file:
            if not self.shape or (first_row == 0 and rows in (None, self.shape[0])):
                return file.get_tensor(self._name)  # type: ignore[no-any-return]
            last = self.shape[0] if rows is None else first_row + rows
            return file.get_slice(self._name)[first_row:last]  # type: ignore[no-any-return]


def holds_weights(path: Path) -> bool:
    """Whether a path holds weights alone, rather than a run or a checkpoint."""
    if path.is_dir():
        return not (path / _MANIFEST).exists() and _weights_in(path) is not None
    return path.name.endswith((SAFETENSORS, SAFETENSORS_INDEX))


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a file or folder by name, to be read on demand.

    Raises:
        CheckpointError: If there is none, or it is damaged or of an unknown format.
    """
    if path.is_dir():
        within = _weights_in(path)
        if within is None:
            raise CheckpointError(
                f"{path} holds no weights that can be read: there is no .safetensors file, no index of several and no "
                "torch.distributed.checkpoint in it (pickles, such as pytorch_model.bin, are not loaded)"
            )
        path = within
    if path.name == DCP_INDEX:
        return read_dcp(path.parent)
    if not path.is_file():
        raise CheckpointError(
            f"{path} cannot be read: there is no such file; name a safetensors file, or a folder with weights"
        )
    if not path.name.endswith(SAFETENSORS_INDEX):
        return _in_file(path)
    try:
        places = read_json(path)["weight_map"]
        files = dict.fromkeys(str(name) for name in places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from None
    outside = next((name for name in files if Path(name).name != name), None)
    if outside is not None:
        raise CheckpointError(f"{path} leads to {outside}, out of its folder")
    found = {name: tensor for file in files for name, tensor in _in_file(path.parent / file).items()}
    missing = [name for name in places if name not in found]
    if missing:
        raise CheckpointError(f"{path} names {_some(missing)}, which its files do not hold")
    return found


def load_weights(model: nn.Module, path: str | Path, padded: Mapping[str, int] | None = None) -> None:
    """Load weights into a model; names and shapes must agree, except for a prefix.

    Args:
        model: The model. For a weight shared between modules, one name in the file is enough.
        path: `model.init_from`.
        padded: The number of rows in use of weights that have more; the file may hold only these, and the other rows
            stay as they are.

    Raises:
        ConfigError: If there is no such file.
        CheckpointError: If it cannot be read, or belongs to another model.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"model.init_from: {path} does not exist; name a safetensors file, or a folder with weights")
    try:
        own = model.state_dict()
        weights = fitted(open_weights(path), own, str(path))
        for name, weight in weights.items():
            rows = (padded or {}).get(name)
            may_be_fewer = rows is not None and len(weight.shape) > 0 and rows <= weight.shape[0] < own[name].shape[0]
            shape = (weight.shape[0], *own[name].shape[1:]) if may_be_fewer else own[name].shape
            if weight.shape != torch.Size(shape):
                raise CheckpointError(
                    f"{name} has the shape {list(weight.shape)} in {path} and {list(own[name].shape)} in this model; "
                    "check the sizes under model and the tokenizer"
                )
        for name, weight in weights.items():
            tensor = weight.read()
            target = own[name] if tensor.shape == own[name].shape else own[name][: len(tensor)]
            target.copy_(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"model.init_from: {error}") from error.__cause__


def fitted(
    found: Mapping[str, StoredTensor], own: Mapping[str, object], where: str, *, complete: bool = False
) -> dict[str, StoredTensor]:
    """Match the weights of a file to the names of a model.

    If no name matches, the prefix that makes most names match is removed from them, or added: DDP, torch.compile or an
    enclosing model add such prefixes. Tensors without the prefix, such as an optimizer's, are ignored.

    Args:
        found: The weights, by their names in the file.
        own: The model's state.
        where: The file, for messages.
        complete: Whether to include all names of shared weights, even those that the file lacks.

    Raises:
        CheckpointError: If a name of the model is missing, or the file has an unknown one.
    """
    names = {name for name, item in own.items() if isinstance(item, Tensor)}
    kept = dict(found)
    if not names & kept.keys():
        taken, put = _prefixes(found, names)
        if taken or put:
            kept = {put + name[len(taken) :]: item for name, item in found.items() if name.startswith(taken)}
            what = f"without their prefix {taken}" if taken else f"with the prefix {put} before them"
            aside = len(found) - len(kept)
            log.info("%s: its names are taken %s%s", where, what, f"; {aside} others are ignored" if aside else "")
    present = {storage_of(own[name]) for name in names & kept.keys()}
    missing = [name for name in own if name in names - kept.keys() and storage_of(own[name]) not in present]
    unexpected = [name for name in kept if name not in names]
    problems = [f"lacks {_some(missing)}, which this model has"] if missing else []
    problems += [f"holds {_some(unexpected)}, which this model does not have"] if unexpected else []
    if problems:
        raise CheckpointError(f"{where} {' and '.join(problems)}")
    if complete:
        at = {storage_of(own[name]): item for name, item in kept.items()}
        kept |= {name: at[storage_of(own[name])] for name in names - kept.keys()}
    return kept


def _prefixes(found: Iterable[str], names: set[str]) -> tuple[str, str]:
    """Find the prefix to remove from a file's names, or to add, so that most are names of a model."""
    found = list(found)
    own = next(iter(sorted(names, key=len, reverse=True)), "")
    taken = {name[: -len(own)] for name in found if own and name.endswith(f".{own}")}
    put = {own[: -len(name)] for name in found if own.endswith(f".{name}")}
    choices = [(prefix, "") for prefix in taken] + [("", prefix) for prefix in put]

    def fits(choice: tuple[str, str]) -> int:
        return sum(choice[1] + name[len(choice[0]) :] in names for name in found if name.startswith(choice[0]))

    return max(choices, key=fits, default=("", ""))


def _weights_in(folder: Path) -> Path | None:
    """Find the main file of a folder: an index of several, or the only one."""
    if (folder / DCP_INDEX).is_file():
        return folder / DCP_INDEX
    for ending in (SAFETENSORS_INDEX, SAFETENSORS):
        files = [path for path in sorted(folder.iterdir()) if path.name.endswith(ending) and path.is_file()]
        usual = [path for path in files if path.name == f"model{ending}"]
        if len(usual or files) == 1:
            return (usual or files)[0]
    return None


def _in_file(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:
        found: dict[str, StoredTensor] = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            found[name] = SafetensorsTensor(path, name, part.get_shape(), SAFETENSORS_TYPES[part.get_dtype()])
        return found


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error})") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def storage_of(tensor: object) -> tuple[object, ...]:
    """Return an ID that is equal for two names of one weight, even if this rank holds nothing of it."""
    assert isinstance(tensor, Tensor)
    part = own_part(tensor)
    return storage_id(part), part.storage_offset(), part.shape
