"""Everything a run must remember to go on as if it had never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frameworm.engine.checkpoint import check_same_model, snapshot
from frameworm.engine.precision import Precision
from frameworm.engine.progress import Progress
from frameworm.engine.randomness import random_state, restore_random_state, seed_everything
from frameworm.engine.schedule import AnySchedule
from frameworm.errors import CheckpointError
from frameworm.launch.process_group import gather_objects
from frameworm.parallel.strategy import Strategy


@dataclass
class TrainingState:
    """The parts of a run that change, and how to take and give back a snapshot of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: AnySchedule
    precision: Precision
    strategy: Strategy
    progress: Progress
    seed: int
    # Taken when an epoch's loader stood ready to be made: a loader that draws its order at random draws it again.
    epoch_random: dict[str, Any] | None = None
    _resumed_random: dict[str, Any] | None = None

    def remember_epoch_start(self) -> None:
        """Call before the loader of an epoch is made."""
        self.epoch_random = random_state(self.strategy.device)

    def forget_epoch_start(self) -> None:
        """Call when an epoch is over."""
        self.epoch_random = None

    def capture(self) -> dict[str, Any] | None:
        """A snapshot on rank 0; None on the others, which only contribute their part. All ranks must call it."""
        copies = self._own_copies()
        self.strategy.sync_buffers(self.model)
        own = {
            "random": random_state(self.strategy.device),
            "epoch_random": self.epoch_random,
            "loss_sum": self.progress.loss_sum,
            "count_sum": self.progress.count_sum,
            "strategy": snapshot(self.strategy.rank_state()),
            **copies,
        }
        ranks = gather_objects(own)
        tensors = self.strategy.full_state(self.model, self.optimizer)
        if tensors is not None and not self.strategy.shards_parameters:
            tensors = snapshot(tensors)
        if copies:
            self.model.load_state_dict(copies["model"])  # to save is not to meet
        if ranks is None or tensors is None:
            return None
        return {
            **tensors,
            "schedule": snapshot(self.schedule.state_dict()),
            "precision": snapshot(self.precision.state_dict()),
            "progress": self.progress.state_dict(),
            "ranks": ranks,
            "world_size": self.strategy.world_size,
        }

    def _own_copies(self) -> dict[str, Any]:
        """Model and optimizer of this rank, where each has its own."""
        if not self.strategy.keeps_own_copy:
            return {}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return dict(snapshot(states))

    def restore(self, saved: dict[str, Any], where: str) -> list[str]:
        """Continue from a snapshot; returns what the user should know about it.

        Raises:
            CheckpointError: The snapshot is of another model or optimizer.
        """
        check_same_model(saved["model"], self.model, where)
        self.strategy.load_model_state(self.model, saved["model"])
        try:
            self.strategy.load_optimizer_state(self.model, self.optimizer, saved["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where} is of another optimizer: {error}") from None
        self.schedule.load_state_dict(saved["schedule"])
        self.precision.load_state_dict(saved["precision"])
        restored = Progress.from_state(saved["progress"])
        for name in Progress.__slots__:
            setattr(self.progress, name, getattr(restored, name))
        return self._restore_ranks(saved)

    def _restore_ranks(self, saved: dict[str, Any]) -> list[str]:
        ranks, rank = saved["ranks"], self.strategy.rank
        device = self.strategy.device
        self._resumed_random = None
        if saved["world_size"] == self.strategy.world_size:
            own = ranks[rank]
            if self.strategy.keeps_own_copy and own.get("model") is not None:
                self.model.load_state_dict(own["model"])
                self.optimizer.load_state_dict(own["optimizer"])
            self.progress.loss_sum, self.progress.count_sum = own["loss_sum"], own["count_sum"]
            if own["epoch_random"] is None:  # saved between two epochs
                restore_random_state(own["random"], device)
            else:
                restore_random_state(own["epoch_random"], device)
                self._resumed_random = own["random"]
            return self.strategy.load_rank_state(own.get("strategy"), saved["world_size"])
        # The sums of the running epoch are only ever added up, so one rank may hold them all.
        self.progress.loss_sum = sum(item["loss_sum"] for item in ranks) if rank == 0 else 0.0
        self.progress.count_sum = sum(item["count_sum"] for item in ranks) if rank == 0 else 0.0
        seed_everything(self.seed, rank + self.strategy.world_size * (self.progress.step + 1))
        return [
            f"resumed with {self.strategy.world_size} processes instead of {saved['world_size']}: the order of samples "
            "goes on, random numbers (dropout) start anew",
            *self.strategy.load_rank_state(ranks[0].get("strategy"), saved["world_size"]),
        ]

    def continue_random_numbers(self) -> None:
        """Call when the loader of an epoch has been made: from here on a resumed run draws what was left to draw."""
        if self._resumed_random is not None:
            restore_random_state(self._resumed_random, self.strategy.device)
            self._resumed_random = None
