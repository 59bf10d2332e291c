"""Report a run to Ray Train: the metrics of each epoch, and checkpoints that Ray keeps."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from frameworm.engine.checkpoint.load import StoredCheckpoint, list_checkpoints
from frameworm.errors import EnvironmentSetupError, MissingPackageError
from frameworm.records.events import Listener
from frameworm.records.schema import EpochRecord, RunRecord
from frameworm.records.store import RunFolder


def ray_module(name: str) -> Any:
    """Import a module of Ray's.

    Raises:
        MissingPackageError: If Ray Train is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"Ray Train is not installed: pip install 'frameworm[ray]' ({error})") from None


class RayReports(Listener):
    """A callback that reports a run to Ray Train; every worker of a `TorchTrainer` must have it.

    After each epoch Ray gets its metrics, together with the newest durable checkpoint that it does not have yet;
    `checkpoint_step` is the step of that checkpoint. At the end it gets the metrics of the last epoch with the last
    checkpoint. Ray keeps a run folder with only that checkpoint, for `evaluate`, `export` and `Trainer.load`. On a
    local file system its files are hard links, so nothing is copied.

    Raises:
        MissingPackageError: If Ray Train is not installed.
    """

    def __init__(self) -> None:
        self._train = ray_module("ray.train")
        self._folder: RunFolder | None = None
        self._reported: Path | None = None

    def on_run_start(self, record: RunRecord) -> None:
        """Check that this is a Ray Train worker; rank 0 reports the checkpoints."""
        try:
            context = self._train.get_context()
            rank = context.get_world_rank()
        except RuntimeError:
            raise EnvironmentSetupError(
                "RayReports is for the function that a TorchTrainer of ray.train runs; this is no worker of one"
            ) from None
        if rank == 0 and record.run_dir is not None:
            self._folder = RunFolder(record.run_dir)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Report the epoch."""
        self._report(_figures(epoch))

    def on_run_end(self, record: RunRecord) -> None:
        """Report the end unless the run failed: Ray waits for all ranks to report."""
        if record.status != "failed":
            last = _figures(record.epochs[-1]) if record.epochs else {}
            self._report({**last, "status": record.status, "steps": record.steps})

    def _report(self, figures: dict[str, Any]) -> None:
        """Report to Ray, which waits for all ranks: each must call this equally often."""
        if self._folder is None:
            self._train.report(figures)
            return
        with tempfile.TemporaryDirectory(prefix=".ray-", dir=self._folder.path) as draft:
            copy = Path(draft) / "run"
            newest = self._copy_newest(self._folder, copy)
            if newest is None:
                self._train.report(figures)
                return
            self._train.report(
                {**figures, "checkpoint_step": newest.step},
                checkpoint=self._train.Checkpoint.from_directory(str(copy)),
                checkpoint_upload_fn=self._mover(),
            )

    def _copy_newest(self, folder: RunFolder, target: Path) -> StoredCheckpoint | None:
        """Create a run folder with the newest checkpoint; None if Ray already has it."""
        while True:
            stored = list_checkpoints(folder.checkpoints)
            if not stored or stored[-1].path == self._reported:
                return None
            newest = stored[-1]
            try:
                shutil.copytree(newest.path, target / "checkpoints" / newest.path.name, copy_function=_link_or_copy)
            except (FileNotFoundError, shutil.Error):
                # A newer one may have been written meanwhile and this one removed.
                if list_checkpoints(folder.checkpoints)[-1:] == [newest]:
                    raise
                shutil.rmtree(target, ignore_errors=True)  # it may not exist yet
                continue
            shutil.copyfile(folder.config, target / folder.config.name)
            self._reported = newest.path
            return newest

    def _mover(self) -> Callable[[Any, str], Any] | None:
        """Return a function that moves a checkpoint to Ray's local storage; None if Ray has to upload it."""
        storage = self._train.get_context().get_storage()
        if not isinstance(storage.storage_filesystem, ray_module("pyarrow.fs").LocalFileSystem):
            return None

        def move(checkpoint: Any, name: str) -> Any:
            place = Path(storage.experiment_fs_path, name)
            shutil.move(checkpoint.path, place)
            return self._train.Checkpoint(str(place), filesystem=storage.storage_filesystem)

        return move


def _figures(epoch: EpochRecord) -> dict[str, Any]:
    """Return the numbers of an epoch by their names in the config and epochs.csv."""
    names = ("epoch", "train_loss", "val_loss", "val_accuracy", "samples_per_s", "epoch_time_s")
    values = {**{name: getattr(epoch, name) for name in names}, **epoch.metrics}
    return {name: value for name, value in values.items() if value is not None}


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
