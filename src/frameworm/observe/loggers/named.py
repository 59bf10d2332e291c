"""The loggers that a config names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from frameworm.config.observe_section import ObserveConfig
from frameworm.errors import ConfigError, MissingPackageError
from frameworm.observe.loggers.csv_file import CsvLogger
from frameworm.observe.loggers.mlflow import MlflowLogger
from frameworm.observe.loggers.protocol import Logger
from frameworm.observe.loggers.run_loggers import NamedLogger
from frameworm.observe.loggers.tensorboard import TensorBoardLogger
from frameworm.observe.loggers.trackio import TrackioLogger
from frameworm.observe.loggers.wandb import WandbLogger

_MAKERS: dict[str, Callable[[ObserveConfig], Logger]] = {
    "csv": lambda observe: CsvLogger(**observe.csv.model_dump()),
    "mlflow": lambda observe: MlflowLogger(**observe.mlflow.model_dump()),
    "tensorboard": lambda observe: TensorBoardLogger(**observe.tensorboard.model_dump()),
    "trackio": lambda observe: TrackioLogger(**observe.trackio.model_dump()),
    "wandb": lambda observe: WandbLogger(**observe.wandb.model_dump()),
}
_PLACES = {"csv": "file", "tensorboard": "folder"}  # without these settings, they write to the run folder
_EXTRAS = {"tensorboard": "tensorboard"}


def make_loggers(observe: ObserveConfig, given: Sequence[Logger] = (), *, has_folder: bool) -> list[NamedLogger]:
    """Create the loggers of a run: those that its config names, and the caller's own. Nothing is opened yet.

    Args:
        observe: The section that names them.
        given: Objects that follow `Logger`.
        has_folder: Whether there will be a run folder.

    Raises:
        MissingPackageError: The package of a logger is not installed.
        ConfigError: A logger writes to the run folder, and there is none.
    """
    found = [NamedLogger(name, _make(name, "loggers", observe, has_folder)) for name in dict.fromkeys(observe.loggers)]
    if "tensorboard" in observe.sinks and "tensorboard" not in observe.loggers and has_folder:
        found.append(NamedLogger("tensorboard", _make("tensorboard", "sinks", observe, has_folder)))
    names = {item.name for item in found}
    for logger in given:
        name = _unused(type(logger).__name__, names)
        names.add(name)
        found.append(NamedLogger(name, logger))
    return found


def _make(name: str, setting: str, observe: ObserveConfig, has_folder: bool) -> Logger:
    place = _PLACES.get(name)
    if place is not None and not has_folder and getattr(getattr(observe, name), place) is None:
        raise ConfigError(
            f"observe.loggers: {name} writes to the run folder, and this run has none; set observe.{name}.{place}"
        )
    try:
        return _MAKERS[name](observe)
    except ImportError as error:
        extra = _EXTRAS.get(name, "loggers")
        raise MissingPackageError(
            f"observe.{setting}: {name} needs its package: pip install 'frameworm[{extra}]' ({error})"
        ) from None


def _unused(name: str, names: Iterable[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in names:
        number += 1
    return candidate
