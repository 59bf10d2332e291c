"""A model and its optimizer outside training: placed on a device, to evaluate, predict, save and load.

After training they are used as it left them, under its strategy. Before training they are put on this process's device,
with the same values on all ranks; nothing is wrapped or sharded yet.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.data.places import unshuffled
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.samples.held import Held
from frameworm.data.samples.worker_state import PersistentWorkers
from frameworm.data.stateful import Place
from frameworm.data.steps import close_loader
from frameworm.engine.checkpoint.commit import Retention, stored_folders
from frameworm.engine.checkpoint.load import (
    SavedState,
    StoredCheckpoint,
    check_same_model,
    list_checkpoints,
    load_newest,
)
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.engine.export import PICKLED, choose_checkpoint
from frameworm.engine.job import adopt, device_of, join_group, set_backend
from frameworm.engine.model.loss_parts import find_beside
from frameworm.engine.model.precision import Precision, backend_flags_kept
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import NoSchedule
from frameworm.engine.optim.schedule_free import make_averages
from frameworm.engine.pretrained import saves_itself, write_pretrained
from frameworm.engine.step.evaluation import Evaluation, evaluate, predict
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.metrics import Metrics
from frameworm.engine.weight_formats import (
    FORMATS,
    Outgoing,
    file_order,
    parse_size,
    refuse_url,
    write_dcp,
    write_safetensors,
)
from frameworm.errors import CheckpointError, ConfigError, FramewormError, ModelError, RunFolderError, StateError
from frameworm.launch.process_group import broadcast_object, shared_store
from frameworm.launch.reports import RankReports
from frameworm.models.weight_files import fitted, holds_weights, open_weights, storage_of
from frameworm.parallel.beside import send_values
from frameworm.parallel.replicated import DDPStrategy
from frameworm.parallel.shards import is_part
from frameworm.parallel.strategy import Strategy
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")
WEIGHTS = ".safetensors"
_saves = itertools.count()


class Trained(NamedTuple):
    """What a training leaves behind: its settings, and the parts that hold what it trained."""

    config: Config
    strategy: Strategy
    precision: Precision
    state: TrainingState


class Inference:
    """What a `Trainer` does with its model outside of `train`. All ranks must make the same calls.

    Args:
        config: The trainer's settings; replaced by those of the last training, if any.
        model: The model.
        optimizer: Its optimizer.
        loss_fn: As for `Trainer`.
        trained: What the last training left, if any.
        averages: Averaged weights from a checkpoint, if there was no training.
        sets_backend: Whether to set torch's global switches by the config meanwhile.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None,
        trained: Trained | None,
        averages: AveragedWeights | None = None,
        *,
        sets_backend: bool,
    ) -> None:
        self._config = config = config if trained is None else trained.config
        self._loss_fn = loss_fn
        self._sets_backend = sets_backend
        self._process = process = join_group(config)
        if trained is not None and trained.strategy.world_size != process.world_size:
            if trained.strategy.shards_parameters:
                raise StateError(
                    f"the model is divided among the {trained.strategy.world_size} ranks that trained it, which have "
                    "left their process group; call this before cleanup()"
                )
            trained = None
        self._trained = trained
        self._strategy = self._place(model, optimizer) if trained is None else trained.strategy
        device = self._strategy.device
        self._precision = Precision(config.gpu.mixed_precision, device) if trained is None else trained.precision
        self._state = (
            trained.state
            if trained is not None
            else TrainingState(
                model,
                optimizer,
                NoSchedule(),
                self._precision,
                self._strategy,
                Progress(),
                config.seed,
                Held({}),
                PersistentWorkers(None),
                Place(None),
                averages,
            )
        )

    @property
    def averages(self) -> AveragedWeights | None:
        """The model's averaged weights, if any."""
        return self._state.averages

    def _place(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Strategy:
        process = self._process
        device = device_of(self._config, process)
        strategy = Strategy(device)
        if process.world_size > 1:
            settings = self._config.parallel.model_copy(update={"compression": "off", "check_replicas": None})
            strategy = DDPStrategy(device, process.rank, process.world_size, settings)
        strategy.place_beside(find_beside(model, self._loss_fn, optimizer))
        model.to(device)
        if process.world_size > 1:
            send_values([*(item.data for item in model.parameters()), *model.buffers()])
        return strategy

    @contextlib.contextmanager
    def _reading(self, loader: Any) -> Iterator[CudaDataLoader]:
        """Read this rank's part of a loader, with torch's switches as in training."""
        adopted, _ = adopt(loader, self._process, 1, self._config.seed, evaluation=True)
        with contextlib.ExitStack() as around:
            if self._sets_backend:
                around.enter_context(backend_flags_kept())
                set_backend(self._config, self._strategy.device)
            if self._trained is not None and self._config.gpu.compile_model:
                around.enter_context(torch.compiler.set_stance("force_eager"))  # as validation in training does
            try:
                yield CudaDataLoader(adopted, self._strategy.device)
            finally:
                close_loader(adopted)

    def evaluate(self, loader: Any, metrics: Mapping[str, Any]) -> Evaluation:
        """Evaluate the model on a loader."""
        model, strategy = self._state.model, self._strategy
        loss_function = LossFunction(model, self._loss_fn, self._config.training.accuracy)
        with self._reading(loader) as batches:
            found = evaluate(model, batches, loss_function, self._precision, strategy, Metrics(metrics, strategy))
        if found.note is not None and strategy.rank == 0:
            log.warning("%s", found.note)
        return found

    def predict(self, loader: Any) -> Any:
        """Return the model's outputs for a loader."""
        loss_function = LossFunction(self._state.model, self._loss_fn)
        with self._reading(unshuffled(loader)) as batches:
            return predict(self._state.model, batches, loss_function, self._precision, self._strategy)

    def save(self, path: Path) -> None:
        """Write weights and optimizer into a folder, or the weights alone into a .safetensors file.

        Raises:
            RunFolderError: If this would overwrite something else, or cannot be written.
            CheckpointError: If the state cannot be saved.
        """
        refuse_url(path)
        if path.suffix == WEIGHTS:
            self._save_weights(path)
            return
        self._on_first_rank(lambda: _check_free(path))
        state, strategy = self._state, self._strategy
        state.check_savable()
        reports = RankReports(shared_store(f"saves{next(_saves)}"), strategy.rank, strategy.world_size)
        store = CheckpointStore(
            path, retention=Retention(keep=1), asynchronous=False, reports=reports, device=strategy.device
        )
        before = {folder for _, _, folder in stored_folders(path)} if strategy.rank == 0 and path.exists() else set()
        store.save(state.progress.step, state.capture, last=True)
        store.close()
        if store.failed:
            raise CheckpointError(f"{path}: the {store.problem}")
        for folder in before:  # from earlier calls: the highest step need not be the last one saved
            shutil.rmtree(folder, ignore_errors=True)
        self._on_first_rank(lambda: None)

    def _save_weights(self, path: Path) -> None:
        self._write(path, self._tensors(), 2**63)

    def export(
        self, path: Path, form: str, dtype: torch.dtype | None, processing_class: Any, max_shard_size: str | int
    ) -> None:
        """Export the model's weights in one of the forms of `weight_formats`.

        Raises:
            RunFolderError: If the target exists or cannot be written.
            ModelError: If the model cannot write itself.
        """
        refuse_url(path)
        shard_bytes = parse_size(max_shard_size)
        if form not in FORMATS:
            raise ConfigError(f"export takes the formats {', '.join(FORMATS)}, not {form}")
        self._on_first_rank(lambda: _check_absent(path))
        model = self._state.model
        if form == "auto":
            form = "pretrained" if saves_itself(model) and path.suffix != WEIGHTS else "safetensors"
        if form == "pretrained" and not saves_itself(model):
            raise ModelError(f"{type(model).__name__} has no method save_pretrained; use the format safetensors")
        state = self._tensors()
        kinds = {name: dtype if dtype and item.is_floating_point() else item.dtype for name, item in state.items()}
        if form == "dcp":
            written = {name: item.to(kinds[name]) for name, item in state.items()}
            write_dcp(path, written)  # called by all ranks: each writes its part
        elif form == "pretrained":
            whole = {name: self._whole(item, kinds[name]) for name, item in state.items()}
            is_own = not any(is_part(item) or kinds[name] != item.dtype for name, item in state.items())
            tied = _tied(state, whole)
            self._on_first_rank(
                lambda: write_pretrained(path, model, tied, processing_class, max_shard_size, is_own_state=is_own)
            )
        else:
            self._write(path, state, shard_bytes, kinds)

    def _tensors(self) -> dict[str, torch.Tensor]:
        self._strategy.sync_buffers(self._state.model)
        state = self._state.model.state_dict()
        return {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}

    def _whole(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gather a whole tensor on rank 0's host; all ranks must take part if it is sharded."""
        found = tensor.full_tensor() if is_part(tensor) else tensor
        return found.detach().to("cpu", dtype) if self._strategy.rank == 0 else found[:0] if found.ndim else found

    def _write(
        self,
        path: Path,
        state: dict[str, torch.Tensor],
        shard_bytes: int,
        kinds: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Write safetensors; rank 0 holds one whole tensor at a time."""
        kinds = kinds or {name: item.dtype for name, item in state.items()}
        about = {name: (item.shape, kinds[name]) for name, item in state.items()}
        divided = any(is_part(item) for item in state.values())
        facts = {"format": "pt", "step": str(self._state.progress.step)}
        # All ranks gather sharded tensors in the order in which rank 0 writes them.
        outgoing = Outgoing(about, lambda name: self._whole(state[name], kinds[name]))
        if not divided:
            self._on_first_rank(lambda: write_safetensors(path, outgoing, facts, shard_bytes))
            return
        problem: FramewormError | None = None
        left = file_order(outgoing, shard_bytes)
        if self._strategy.rank == 0:
            try:
                write_safetensors(
                    path, Outgoing(about, lambda name: self._next(left, state, kinds, name)), facts, shard_bytes
                )
            except FramewormError as error:
                problem = error
        for name in left:  # on rank 0, those that an error left over
            self._whole(state[name], kinds[name])
        problem = broadcast_object(problem)
        if problem is not None:
            raise problem

    def _next(
        self, left: list[str], state: Mapping[str, torch.Tensor], kinds: Mapping[str, torch.dtype], name: str
    ) -> torch.Tensor:
        assert left.pop(0) == name, "ranks put the same tensor together"
        return self._whole(state[name], kinds[name])

    def _on_first_rank(self, act: Callable[[], Any]) -> None:
        """Run something on rank 0 while the others wait; an error is raised on all ranks."""
        problem: FramewormError | None = None
        if self._strategy.rank == 0:
            try:
                act()
            except FramewormError as error:
                problem = error
        problem = broadcast_object(problem)
        if problem is not None:
            raise problem

    def load(self, path: Path) -> int | None:
        """Load what `save` or a run has written; return its step, or None if unknown.

        Raises:
            CheckpointError: If there is nothing to load, or it belongs to another model or optimizer.
        """
        if path.suffix in PICKLED:
            raise CheckpointError(
                f"{path.name} is taken for a pickle, which may run code: load it into the model yourself, with "
                "weights_only=True, or give what Trainer.save wrote"
            )
        if holds_weights(path):
            self._load_weights(path)
            return None
        return self._load(*_find_checkpoint(path))

    def load_best(self, folder: RunFolder, which: str) -> int | None:
        """Load the `best` or the `latest` checkpoint of a run, by the metric of its config."""
        settings = self._config.checkpoint
        if which == "latest":
            return self.load(folder.path)
        found: StoredCheckpoint | FramewormError | None = None
        if self._strategy.rank == 0:
            try:
                found = choose_checkpoint(folder, which, settings.metric, settings.prefers_higher)
            except FramewormError as error:
                found = error
        found = broadcast_object(found)
        if isinstance(found, FramewormError):
            raise found
        assert found is not None
        return self._load(found, found.read())

    def _load(self, stored: StoredCheckpoint, saved: SavedState) -> int:
        where, shared = str(stored.path), saved.shared
        check_same_model(shared["model"], self._state.model, where)
        divides = self._trained is None and self._config.parallel.strategy.startswith("zero")
        if divides and self._strategy.rank == 0:
            log.warning(
                "%s: only the weights are loaded, because strategy %s divides an optimizer that holds nothing yet; "
                "train(resume=...) resumes a run as a whole",
                where,
                self._config.parallel.strategy,
            )
        if self._trained is None and self._state.averages is None and shared.get("ema") and not divides:
            self._state.averages = self._new_averages()
        for note in self._state.load_values(shared, where, optimizer=not divides):
            log.info("%s", note)
        return stored.step

    def _load_weights(self, path: Path) -> None:
        own = self._state.model.state_dict()
        found = fitted(open_weights(path), own, str(path), complete=True)
        check_same_model(found, self._state.model, str(path))
        self._strategy.load_model_state(self._state.model, found)
        if self._state.averages is not None:
            self._state.averages.restart()

    def _new_averages(self) -> AveragedWeights | None:
        state, strategy = self._state, self._strategy
        found = make_averages(self._config, state.model, state.optimizer, strategy)
        if found is not None:
            found.follow(item for _, item in strategy.named_parameters(state.model))
        return found


def _tied(state: Mapping[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the whole tensors, with one object for all names of a tied weight, so that libraries write it once."""
    first: dict[tuple[object, ...], str] = {}
    return {name: whole[first.setdefault(storage_of(item), name)] for name, item in state.items()}


def _check_absent(path: Path) -> None:
    if path.suffix in PICKLED:
        raise RunFolderError(f"a {path.suffix} file is taken for a pickle: give a folder, or a name with {WEIGHTS}")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunFolderError(f"{path} exists; give a new folder, or remove it")


def _check_free(path: Path) -> None:
    """Check that a folder holds nothing but what an earlier `save` wrote."""
    if path.suffix in PICKLED:
        raise RunFolderError(
            f"a {path.suffix} file is taken for a pickle, and states are saved as safetensors: give a folder for "
            f"weights and optimizer ({path.with_suffix('')}), or {path.with_suffix(WEIGHTS)} for the weights alone"
        )
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; give a folder, or a name that ends in {WEIGHTS} for the weights alone")
    if path.name == "checkpoints" and RunFolder(path.parent).holds_run():
        raise RunFolderError(f"{path} holds the checkpoints of a run, which keeps them itself; give another folder")
    ours = {folder.name for _, _, folder in stored_folders(path)} | {"latest"} if path.exists() else set()
    strange = [item.name for item in path.iterdir() if item.name not in ours] if path.exists() else []
    if strange:
        raise RunFolderError(f"{path} holds something else ({strange[0]}); give a new folder")


def _find_checkpoint(path: Path) -> tuple[StoredCheckpoint, SavedState]:
    """Find the newest checkpoint in a saved folder or a run folder, or the checkpoint that the folder itself is."""
    own = [item for item in list_checkpoints(path.parent) if item.path.name == path.name] if path.name else []
    if broadcast_object(bool(own)) and own:
        return own[0], own[0].read()
    folder = RunFolder(path).checkpoints
    found = load_newest(folder if broadcast_object(folder.is_dir()) else path, log.warning)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a folder that Trainer.save wrote, or that of a run")
    return found
