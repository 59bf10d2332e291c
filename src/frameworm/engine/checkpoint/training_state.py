"""Everything that a run must save in order to resume as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frameworm.data.samples.held import Held
from frameworm.data.samples.worker_state import PersistentWorkers
from frameworm.data.stateful import Place
from frameworm.engine.checkpoint.load import SavedState, check_same_model
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.snapshot import MoreState, Snapshot, check_state, take_snapshot
from frameworm.engine.checkpoint.staging import Staging
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import AnySchedule
from frameworm.errors import CheckpointError
from frameworm.numerics.randomness import random_state, restore_random_state, seed_everything
from frameworm.parallel.shards import HeldState, loaded
from frameworm.parallel.strategy import Strategy


@dataclass
class TrainingState:
    """The parts of a run that change, and how to capture and restore them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: AnySchedule
    precision: Precision
    strategy: Strategy
    progress: Progress
    seed: int
    held: Held  # generators of the loaders and of other objects that have their own
    workers: PersistentWorkers
    place: Place
    averages: AveragedWeights | None = None
    # State before the epoch's loader was created: on resume, a loader that shuffles draws the same order again.
    epoch_random: dict[str, Any] | None = None
    _resumed_random: dict[str, Any] | None = None
    _random_at_cut: dict[str, Any] | None = None
    _own_at_cut: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._began = self._trained()

    def _trained(self) -> dict[str, Any]:
        """Which parameters are frozen, and how many groups the optimizer has."""
        frozen = [name for name, item in self.strategy.named_parameters(self.model) if not item.requires_grad]
        return {"frozen": frozen, "groups": len(self.optimizer.param_groups)}

    def remember_epoch_start(self) -> None:
        """Call before the loader of an epoch is created."""
        self.epoch_random = self._random_state(with_workers=True)

    def forget_epoch_start(self) -> None:
        """Call when an epoch is over."""
        self.epoch_random = None

    def before_last_validation(self) -> None:
        """Call after the last step under `max_steps`: numbers drawn in validation are not the epoch's."""
        self._random_at_cut = self._random_state()

    def cut_epoch(self) -> None:
        """Call when `max_steps` ends the running epoch early, before closing it, as it may be finished later."""
        self.progress.cut_epoch()
        self._own_at_cut = self._own_state()
        if self._random_at_cut is not None:
            self._own_at_cut["random"] = self._random_at_cut

    def capture(self, staging: Staging | None, settle: Callable[[], None] = lambda: None) -> Snapshot:
        """Copy this rank's part of the state. All ranks must call it.

        Args:
            staging: Where tensors are copied to; None to copy nothing and only take part in the collectives.
            settle: Called after the tensors were copied on the training device; waits for the steps before.
        """
        copies = self._own_copies()
        self.strategy.sync_buffers(self.model)
        if staging is None:
            settle()
            snapshot = Snapshot(problem="left out")
        else:
            held = self._held()
            own = {"strategy": self.strategy.rank_state(), **copies}

            def late() -> MoreState:
                settle()
                return self._small_state()

            snapshot = take_snapshot(held, own, staging, self.strategy.rank, self.strategy.world_size, late)
        if copies:  # saving must not synchronize them
            self.model.load_state_dict(copies["model"])
            self.strategy.beside.load_state_dict(copies["loss"])
        return snapshot

    def check_savable(self) -> None:
        """Check, without saving anything, that a checkpoint can hold the state.

        Raises:
            CheckpointError: If it cannot; the message names the part.
        """
        what = "model, loss and optimizer"
        try:
            held, own = self._held(), self.strategy.rank_state()
            what = "scheduler"
            common, more = self._small_state()
            check_state(held, own, common, more)
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:
            reason = f"the state of the {what} cannot be taken ({type(error).__name__}: {error})"
        else:
            return
        raise CheckpointError(
            f"this training could not be saved: {reason}; change that, or train without a run folder (run_dir=None)"
        )

    def _held(self) -> HeldState:
        """Return this rank's part of model, loss, optimizer and averages."""
        held = self.strategy.held_state(self.model, self.optimizer)
        loss = self.strategy.beside.state_dict()
        averages = HeldState({}) if self.averages is None else self.averages.held_state()
        return HeldState(
            {**held.replicated, **({"loss": loss} if loss else {}), **averages.replicated},
            {**held.owned, **averages.owned},
        )

    def _small_state(self) -> MoreState:
        """Return the small state, common to all ranks and of this rank; reading parts of it waits for the device."""
        common = {
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
            "progress": self.progress.state_dict(),
        }
        trained = self._trained()
        if trained != self._began:  # so that a resumed run trains the same
            common["trained"] = {"began": self._began, "now": trained}
        return common, self._own_state() if self._own_at_cut is None else self._own_at_cut

    def _own_state(self) -> dict[str, Any]:
        """Return this rank's state other than model and optimizer tensors."""
        return {
            "random": self._random_state(with_workers=self.epoch_random is None),
            "epoch_random": self.epoch_random,
            "loader": None if self.epoch_random is None else self.place.capture(),
            "loss_sum": self.progress.loss_sum,
            "count_sum": self.progress.count_sum,
        }

    def _own_copies(self) -> dict[str, Any]:
        """Return copies of this rank's model, loss and optimizer if every rank has its own."""
        if not self.strategy.keeps_own_copy:
            return {}
        return {
            "model": _copied(self.model.state_dict()),
            "loss": _copied(self.strategy.beside.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, saved: SavedState, where: str) -> list[str]:
        """Continue from a checkpoint, reading only what this rank needs; return notes for the user.

        Raises:
            CheckpointError: If the checkpoint belongs to another model or optimizer.
        """
        shared = saved.shared
        check_same_model(shared["model"], self.model, where)
        notes = self.load_values(shared, where)
        self.schedule.load_state_dict(loaded(shared["schedule"]))
        self.precision.load_state_dict(loaded(shared["precision"]))
        restored = Progress.from_state(shared["progress"])
        for name in Progress.__slots__:
            setattr(self.progress, name, getattr(restored, name))
        return [*notes, *self._restore_ranks(saved.ranks)]

    def load_values(self, shared: dict[str, Any], where: str, *, optimizer: bool = True) -> list[str]:
        """Load a checkpoint's values into model, loss, optimizer and averages; return notes for the user.

        Args:
            shared: The checkpoint's state that is common to all ranks.
            where: Names the checkpoint in messages.
            optimizer: Whether to load the optimizer (and averages) too.

        Raises:
            CheckpointError: If the checkpoint belongs to another loss or optimizer.
        """
        self.strategy.load_model_state(self.model, shared["model"])
        notes = self._load_loss(shared.get("loss"), where)
        if not optimizer:
            return notes
        notes += self._follow(shared.get("trained"), shared["optimizer"])
        groups = self.optimizer.param_groups
        needed = [name for name in getattr(self.optimizer, "defaults", {}) if all(name in group for group in groups)]
        try:
            self.strategy.load_optimizer_state(self.model, self.optimizer, shared["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where} is of another optimizer: {error}") from None
        # torch accepts the settings of any optimizer and fails only in the next step.
        lacking = [name for name in needed for group in self.optimizer.param_groups if name not in group]
        if lacking:
            raise CheckpointError(f"{where} is of another optimizer: its groups have no {lacking[0]}")
        return [*notes, *self._load_averages(shared.get("ema"), where)]

    def _load_averages(self, saved: Any, where: str) -> list[str]:
        if self.averages is None:
            return ["training.ema is off: the averaged weights of the checkpoint are left behind"] if saved else []
        try:
            return self.averages.load_state(saved)
        except ValueError as error:
            raise CheckpointError(f"{where} is of another model: {error}") from None

    def _follow(self, saved: Any, optimizer: dict[str, Any]) -> list[str]:
        """Repeat the saved run's freezing, unfreezing and added groups, if this run began like it."""
        if saved is None or saved["began"] != self._trained():
            return []
        self._began = saved["began"]
        named = dict(self.strategy.named_parameters(self.model))
        frozen = set(saved["now"]["frozen"])
        for name, parameter in named.items():
            parameter.requires_grad_(name not in frozen)
        given = self.strategy.given(self.optimizer)
        for group in optimizer["param_groups"][len(given.param_groups) :]:
            given.add_param_group({**loaded(group), "params": [named[name] for name in group["params"]]})
        self.strategy.adopt_groups(self.optimizer)
        return ["parameters are frozen as they were when the run stopped, not as when it began"]

    def _load_loss(self, saved: Any, where: str) -> list[str]:
        beside = self.strategy.beside
        if saved is None or not beside.state_dict():
            if saved is not None:
                return ["the checkpoint holds the state of a loss_fn, and this one has none"]
            if beside.parameters:
                raise CheckpointError(f"{where} is of another loss_fn: it holds no {next(iter(beside.parameters))}")
            return []
        try:
            beside.load_state_dict(loaded(saved))
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is of another loss_fn: {error}") from None
        return []

    def _random_state(self, *, with_workers: bool = False) -> dict[str, Any]:
        state = {**random_state(self.strategy.device), "held": self.held.capture()}
        return {**state, "workers": self.workers.capture()} if with_workers else state

    def _restore_random(self, state: dict[str, Any]) -> list[str]:
        """Restore the random states that are present; return notes for the user."""
        if "torch" in state:
            restore_random_state(state, self.strategy.device)
        missing = self.held.restore(state["held"]) if "held" in state else []
        return [f"{name} no longer exists: its random numbers are not continued" for name in missing]

    def _restore_epoch(self, now: dict[str, Any], epoch_start: dict[str, Any] | None) -> list[str]:
        """Restore the random state of the epoch's start, to read its loader again; between epochs, the current one."""
        self._resumed_random = None if epoch_start is None else now
        begin = now if epoch_start is None else epoch_start
        self.workers.restore(begin.get("workers"))
        return self._restore_random(begin)

    def _restore_ranks(self, ranks: list[dict[str, Any]]) -> list[str]:
        rank, world_size = self.strategy.rank, len(ranks)
        if world_size == self.strategy.world_size:
            own = loaded(ranks[rank])
            if self.strategy.keeps_own_copy and own.get("model") is not None:
                self.model.load_state_dict(own["model"])
                self.strategy.beside.load_state_dict(own.get("loss") or {})
                self.optimizer.load_state_dict(own["optimizer"])
            self.progress.loss_sum, self.progress.count_sum = own["loss_sum"], own["count_sum"]
            self.place.restore(own.get("loader"))
            notes = self._restore_epoch(own["random"], own["epoch_random"])
            return [*notes, *self.strategy.load_rank_state(own.get("strategy"), world_size)]
        # The running epoch's sums are only ever summed over ranks, so one rank may hold them all.
        self.progress.loss_sum = sum(item["loss_sum"] for item in ranks) if rank == 0 else 0.0
        self.progress.count_sum = sum(item["count_sum"] for item in ranks) if rank == 0 else 0.0
        seed_everything(self.seed, rank + self.strategy.world_size * (self.progress.step + 1))
        now, begin = (loaded(ranks[0][name]) for name in ("random", "epoch_random"))
        notes = self._restore_epoch(_held_only(now), None if begin is None else _held_only(begin))
        return [
            *notes,
            f"resumed with {self.strategy.world_size} processes instead of {world_size}: the order of samples "
            "continues, random numbers (dropout) start over",
            *self.strategy.load_rank_state(ranks[0].get("strategy"), world_size),
        ]

    def continue_random_numbers(self) -> None:
        """Call after an epoch's loader is created: from here a resumed run continues its random numbers."""
        if self._resumed_random is not None:
            self._restore_random(self._resumed_random)
            self._resumed_random = None


def _held_only(state: dict[str, Any]) -> dict[str, Any]:
    """Keep only the loaders' part of a rank's random state, which is the same in all processes."""
    return {"held": state["held"]} if "held" in state else {}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in state.items()}
