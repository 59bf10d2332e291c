"""Count steps with non-finite losses or gradients; after too many in a row, stop training and say where.

The update skips a step with bad gradients. On a GPU, results are seen here some steps late, so that nothing waits for
them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from frameworm.engine.optim.update import Update
from frameworm.errors import BadNumbersError, RunFolderError
from frameworm.launch.stores import Store
from frameworm.records.atomic import write_atomic
from frameworm.records.schema import json_ready

log = logging.getLogger("frameworm")

# An initial loss scale that is far too large may be halved this often although nothing is wrong.
SCALER_STEPS = 20
WAIT_S = 5.0
MOST_NAMED = 10


class BadNumbers:
    """Counts bad steps.

    Args:
        limit: How many in a row stop the training; None for no limit.
        update: Knows which gradients were bad.
        parameters: Names and parameters of the model.
        sample_ids: Returns the samples of a step of the running epoch per micro-batch; None if unknown.
        rank: This process's rank.
        world_size: Number of ranks.
        store: Shared by the ranks, to find out whose loss was bad; None with one process.
        folder: Where the report on the stop is written; None for no report.
        scaled: Whether gradients are scaled, which allows for more bad steps.
    """

    def __init__(
        self,
        limit: int | None,
        update: Update,
        parameters: Iterable[tuple[str, nn.Parameter]],
        sample_ids: Callable[[int], list[list[Any]] | None],
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        folder: Path | None = None,
        scaled: bool = False,
    ) -> None:
        self._limit = limit
        self._update = update
        self._names = {id(item): name for name, item in parameters}
        self._sample_ids = sample_ids
        self._rank = rank
        self._world_size = world_size
        self._store = store if world_size > 1 else None
        self._folder = folder
        self._scaled = scaled
        self._in_a_row = 0
        self._bad_losses = 0

    def see(
        self, step: int, step_in_epoch: int, epoch: int, loss: float | None, skipped: bool, norm: float | None
    ) -> None:
        """Process one step; steps must come in order.

        Args:
            step: Number of the step in the run.
            step_in_epoch: Counted from 0.
            epoch: Counted from 1.
            loss: Loss of the step on this rank, if known.
            skipped: Whether the update was skipped.
            norm: Norm of the gradients, if known.

        Raises:
            BadNumbersError: If this step exceeds the limit.
        """
        bad_loss = loss is not None and not isfinite(loss)
        if not (bad_loss or skipped):
            if self._in_a_row:
                self._in_a_row = self._bad_losses = 0
                self._update.look = False
            return
        self._in_a_row += 1
        self._bad_losses += bad_loss
        if self._limit is None:
            return
        if self._in_a_row == 1 and self._rank == 0:
            what = f"the loss is {loss}" if bad_loss else "gradients are not finite"
            log.warning("step %d: %s%s", step, what, "; the update was skipped" if skipped else "")
        self._update.look = True
        allowed = self._limit if self._bad_losses or not self._scaled else self._limit + SCALER_STEPS
        if self._in_a_row >= allowed:
            self._stop(step, step_in_epoch, epoch, loss, norm)

    def _stop(self, step: int, step_in_epoch: int, epoch: int, loss: float | None, norm: float | None) -> None:
        parameters = self._bad_parameters()
        ranks = self._ranks_with_bad_losses(loss)
        ids = self._sample_ids(step_in_epoch)
        account = {
            "step": step,
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "rank": self._rank,
            "bad_steps_in_a_row": self._in_a_row,
            "loss": loss,
            "grad_norm": norm,
            "ranks_with_bad_loss": ranks,
            "parameters_with_bad_gradients": parameters,
            "sample_ids": ids,
        }
        where = ""
        if self._folder is not None:
            path = self._folder / f"bad-numbers-rank{self._rank}.json"
            with suppress(RunFolderError):
                write_atomic(path, json.dumps(json_ready(account), indent=2) + "\n")
                where = f" All of it: {path}."
        culprit = (
            f"the loss is not finite on rank {_listed(ranks)}" if ranks else "the losses are finite, gradients are not"
        )
        named = "" if not parameters else f" Bad gradients: {_listed(parameters)}."
        samples = "" if not ids else f" Samples of its last batch: {_listed([item for part in ids for item in part])}."
        raise BadNumbersError(
            f"step {step} was the {_ordinal(self._in_a_row)} bad one in a row: {culprit}.{named}{samples}{where} Look "
            "at these samples, lower training.lr, or use bf16 instead of fp16; training.max_bad_steps sets the limit."
        )

    def _bad_parameters(self) -> list[str] | None:
        """Names of the parameters whose gradients were bad in the last step; None if that was not checked."""
        finite, judged = self._update.finite, self._update.judged
        if finite is None or len(finite) != len(judged):
            return None
        names = [self._names.get(id(item), "a parameter that the model does not have") for item in judged]
        return [name for name, fine in zip(names, finite.tolist()) if not fine]

    def _ranks_with_bad_losses(self, loss: float | None) -> list[int]:
        bad = loss is not None and not isfinite(loss)
        if self._store is None:
            return [self._rank] if bad else []
        found = {self._rank: bad}
        with suppress(Exception):  # the store may be gone
            self._store.set(f"bad-{self._rank}", "1" if bad else "0")
            deadline = time.monotonic() + WAIT_S
            while len(found) < self._world_size and time.monotonic() < deadline:
                for rank in range(self._world_size):
                    if rank not in found and self._store.check([f"bad-{rank}"]):
                        found[rank] = self._store.get(f"bad-{rank}") == b"1"
                time.sleep(0.02)
        return sorted(rank for rank, was_bad in found.items() if was_bad)


def _listed(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:MOST_NAMED])
    return shown if len(items) <= MOST_NAMED else f"{shown} and {len(items) - MOST_NAMED} more"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"
