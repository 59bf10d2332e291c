"""Train a cell with frameworm and with the plain loop, and say whether they are equal."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cells import Cell, refusal_of
from options import BATCH, SAMPLES
from plain_loop import Trained, train_plain, train_plain_ranks
from rank_pair import RankError, RankPair
from recipe import EPOCHS, SEED, Recipe, build, steps_per_epoch

from frameworm import Callback, Config, RunRecord, Trainer
from frameworm.distributed import DDPTrainer, DistributedTrainer
from frameworm.errors import FramewormError

EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
# Several micro-batches or ranks add the same numbers in another order. In float32 that is about 1e-7 of a gradient,
# which 16 steps of these optimizers make larger; a sample too many or of the wrong weight is at least 1e-3.
TOLERANCE = 5e-5


@dataclass(frozen=True)
class Verdict:
    """What came of a cell."""

    cell: Cell
    kind: str
    detail: str = ""


@dataclass
class Ours:
    """What came of a cell's training with frameworm on one rank; either `trained` or one of the texts is there."""

    trained: Trained | None = None
    refused: str = ""
    error: str = ""
    notes: str = ""  # what the run's record says


Make = Callable[[Cell, int], Recipe]


class Watch(Callback):
    """Keeps the rate of every step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_step(self, step: Any) -> None:
        self.rates[step.step] = step.lr


def judge(cell: Cell, pair: RankPair, deadline_s: float = 200.0) -> Verdict:
    """Run a cell and compare; the pair starts its processes when the first cell needs them."""
    with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
        if cell.ranks == 1:
            results = [train_ours(0, cell, folder)]
        else:
            try:
                results = pair.call(train_ours, cell, folder, deadline_s=deadline_s)
            except RankError as error:
                return Verdict(cell, WRONG, _last_line(str(error)))
    errors = [result.error for result in results if result.error]
    if errors:
        pair.stop()  # the ranks may no longer be in step
        return Verdict(cell, WRONG, _last_line(errors[0]))
    refusals = [result.refused for result in results if result.refused]
    if refusals:
        return _refused(cell, refusals)
    trained = [result.trained for result in results if result.trained is not None]
    differences = list(_alone(cell, trained[0], build) if cell.ranks == 1 else _together(cell, trained))
    return Verdict(cell, WRONG, "; ".join(differences)) if differences else Verdict(cell, EQUAL)


def judge_drawn(cell: Cell, make: Make, interrupt_in: int | None) -> Verdict:
    """Run something that is no option of the axes, in one process.

    Any refusal before the first step is right. Where a batch does not tell its samples, micro-batches may weigh the
    same if the run's record says so.
    """
    with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
        result = train_ours(0, cell, folder, make, interrupt_in)
    if result.error:
        return Verdict(cell, WRONG, result.error)
    if result.refused or result.trained is None:
        return Verdict(cell, REFUSED, result.refused)
    differences = list(_alone(cell, result.trained, make))
    if differences and "samples" in result.notes:
        differences = list(_alone(cell, result.trained, lambda *args: replace(make(*args), count=lambda batch: 1.0)))
    return Verdict(cell, WRONG, "; ".join(differences)) if differences else Verdict(cell, EQUAL)


def _refused(cell: Cell, refusals: list[str]) -> Verdict:
    allowed = refusal_of(cell)
    if len(refusals) < cell.ranks:
        return Verdict(cell, WRONG, f"only one rank refused: {refusals[0]}")
    if allowed is None or allowed.message not in refusals[0]:
        return Verdict(cell, WRONG, f"refused: {refusals[0]}")
    return Verdict(cell, REFUSED, refusals[0])


def train_ours(rank: int, cell: Cell, folder: str, make: Make = build, interrupt_in: int | None = None) -> Ours:
    """Train a cell with frameworm, with a Ctrl-C and a resume by a second trainer where the cell says so."""
    if interrupt_in is None:
        # In the second epoch. Ranks agree on a step to stop before, which with few steps takes most of them.
        interrupt_in = 12 if cell.ranks == 1 or cell.accumulation == 1 else 4
    watch = Watch()
    seen: list[list[int]] = []
    recipes: list[Recipe] = []
    try:
        if cell.resumed:
            recipes.append(make(cell, rank))
            recipes[0].model.interrupt_in = interrupt_in
            try:
                _train(recipes[0], cell, rank, watch, Path(folder) / "run")
            except KeyboardInterrupt:
                seen += recipes[0].model.seen
            else:
                return Ours(error="the run did not stop at Ctrl-C")
        recipes.append(make(cell, rank))
        record = _train(recipes[-1], cell, rank, watch, Path(folder) / "run" if cell.resumed else None, bool(seen))
        seen += recipes[-1].model.seen
        rates = [rate for _, rate in sorted(watch.rates.items())]
        epochs = record.epochs
        losses = [epoch.train_loss for epoch in epochs], [epoch.val_loss for epoch in epochs]
        return Ours(Trained(recipes[-1].state(), rates, *losses, [seen]), notes="\n".join(record.notes))
    except FramewormError as error:
        started = bool(watch.rates) or any(len(recipe.model.seen) > cell.accumulation for recipe in recipes)
        return Ours(error=f"after the first step: {error}") if started else Ours(refused=str(error))
    except Exception:
        return Ours(error=traceback.format_exc())
    finally:
        for recipe in recipes:
            recipe.close()


def _train(
    recipe: Recipe, cell: Cell, rank: int, watch: Watch, run_dir: Path | None, resume: bool = False
) -> RunRecord:
    settings: dict[str, Any] = {"run_dir": run_dir, "device": "cpu", "enable_automatic_gc": False}
    if recipe.per == "epoch":
        settings.update(dict.fromkeys(interval_settings(), "epoch"))
    settings.update(loss_fn=recipe.loss_fn, scheduler=recipe.scheduler, callbacks=[watch])
    model, optimizer = recipe.model, recipe.optimizer
    trainer: Trainer
    if cell.strategy == "single":
        trainer = Trainer(model, optimizer, accumulation=cell.accumulation, **settings)
    elif cell.strategy == "ddp":
        steps = cell.accumulation
        trainer = DDPTrainer(model, optimizer, rank, cell.ranks, gradient_accumulation_steps=steps, **settings)
    else:
        settings.update(strategy=cell.strategy, gradient_accumulation_steps=cell.accumulation)
        trainer = DistributedTrainer(model, optimizer, **settings)
    torch.manual_seed(_seed(rank))
    return trainer.train(recipe.train, recipe.validation, epochs=EPOCHS, resume=run_dir if resume else None)


def interval_settings() -> list[str]:
    """Settings of the config that choose between `step` and `epoch`."""
    definitions = Config.model_json_schema()["$defs"].values()
    fields = [item for definition in definitions for item in definition.get("properties", {}).items()]
    return [name for name, value in fields if {"step", "epoch"} <= set(value.get("enum", ()))]


def _seed(rank: int) -> int:
    """The seed of a rank's random numbers during training."""
    return SEED + 100 + rank


def _alone(cell: Cell, ours: Trained, make: Make) -> Iterator[str]:
    """What differs from the plain loop in one process."""
    recipe = make(cell, 0)
    torch.manual_seed(_seed(0))
    try:
        plain = train_plain(recipe, cell.accumulation)
    finally:
        recipe.close()
    if ours.seen != plain.seen:
        yield _other_samples(ours.seen[0], plain.seen[0])
    yield from compare(ours, plain, 0.0 if cell.bitwise else TOLERANCE)


def _together(cell: Cell, ours: list[Trained]) -> Iterator[str]:
    """What differs from the plain loop on ranks, given the samples that each rank trained on."""
    seen = [passes for result in ours for passes in result.seen]
    problem = uncovered(cell, seen)
    if problem:
        yield problem
        return
    for name, value in ours[0].state.items():
        if name.startswith(("model", "loss")) and not torch.equal(value, ours[1].state[name]):
            yield f"{name} differs between the ranks by {_distance(value, ours[1].state[name]):.1e}"
    plain = train_plain_ranks(build(cell), shares_of(cell, seen), [_seed(rank) for rank in range(cell.ranks)])
    yield from compare(ours[0], plain, TOLERANCE)


def compare(ours: Trained, plain: Trained, tolerance: float) -> Iterator[str]:
    """What differs between two trainings by more than a tolerance, relative to values above 1."""
    for name, expected in plain.state.items():
        found = ours.state.get(name)
        if found is None or found.shape != expected.shape:
            yield f"{name} is missing"
        elif not (distance := _distance(found, expected)) <= tolerance:
            yield f"{name} is {distance:.1e} off"
    for name in ("rates", "train_losses", "val_losses"):
        found, expected = getattr(ours, name), getattr(plain, name)
        if len(found) != len(expected) or None in found:
            yield f"{len(found)} {name} instead of {len(expected)}"
            continue
        distance = _distance(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
        if not distance <= tolerance:
            yield f"{name.replace('_', ' ')} are {distance:.1e} off"


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = (one.double() - other.double()).abs() / other.double().abs().clamp(min=1.0)
    return float(difference.max()) if difference.numel() else 0.0


def _other_samples(ours: list[list[int]], plain: list[list[int]]) -> str:
    place = next((step for step, pair in enumerate(zip(ours, plain)) if pair[0] != pair[1]), min(len(ours), len(plain)))
    return f"other samples from forward pass {place + 1} on ({len(ours)} instead of {len(plain)} passes)"


def uncovered(cell: Cell, seen: list[list[list[int]]]) -> str | None:
    """What is wrong with the samples of the ranks, by rank and forward pass: each belongs to every epoch once."""
    expected = EPOCHS * -(-SAMPLES // BATCH)
    if any(len(passes) != expected for passes in seen):
        return f"{' and '.join(str(len(passes)) for passes in seen)} forward passes on the ranks instead of {expected}"
    for epoch, steps in enumerate(shares_of(cell, seen)):
        trained = sorted(number for step in steps for share in step for micro in share for number in micro)
        if trained != list(range(SAMPLES)):
            return f"epoch {epoch + 1} trained {len(set(trained))} of {SAMPLES} samples and {len(trained)} in all"
        sizes = [sum(len(micro) for share in step for micro in share) for step in steps]
        if sizes[:-1] != [BATCH * cell.accumulation] * (steps_per_epoch(cell.accumulation) - 1):
            return f"the steps of epoch {epoch + 1} have {sizes} samples"
    return None


def shares_of(cell: Cell, seen: list[list[list[int]]]) -> list[list[list[list[list[int]]]]]:
    """Samples by epoch, step, rank and micro-batch, from samples by rank and forward pass."""
    size = len(seen[0]) // EPOCHS
    return [
        [
            [passes[begin : min(begin + cell.accumulation, (epoch + 1) * size)] for passes in seen]
            for begin in range(epoch * size, (epoch + 1) * size, cell.accumulation)
        ]
        for epoch in range(EPOCHS)
    ]


def _last_line(text: str) -> str:
    """The end of a traceback."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()
