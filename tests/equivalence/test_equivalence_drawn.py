"""Habits that nobody listed, drawn by Hypothesis: trained as a plain loop does, or refused before the first step.

`CAMPAIGN=1` tries many times as often (`make campaign`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cells import Cell
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from options import LAYERS, OUTPUTS, VALIDATION, Network, Sample, Samples
from recipe import EPOCHS, SEED, Recipe
from torch import nn
from torch.utils.data import DataLoader
from verdicts import EQUAL, REFUSED, Verdict, judge_drawn

TIMES = 20 if os.environ.get("CAMPAIGN") else 1
# Each example is a training or two, so a smaller one is looked for in the campaign only.
phases = [Phase.generate, Phase.shrink] if TIMES > 1 else [Phase.generate]
some = settings(
    max_examples=20 * TIMES,
    derandomize=TIMES == 1,
    phases=phases,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# Trees: tensors among other things, in containers of any kind. A tree is a name, which stands for a tensor, a `Thing`,
# or (kind of container, parts).


@dataclasses.dataclass(frozen=True)
class Thing:
    """Something in a tree that is no tensor."""

    value: Any


@functools.cache
def fields_of(count: int) -> type[Any]:
    return dataclasses.make_dataclass("Fields", [f"field{number}" for number in range(count)])


@functools.cache
def named_of(count: int) -> type[Any]:
    return collections.namedtuple("Named", [f"field{number}" for number in range(count)])  # type: ignore[misc]


CONTAINERS: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any, int], Any]]] = {
    "tuple": (tuple, lambda box, place: box[place]),
    "list": (list, lambda box, place: box[place]),
    "dict": (
        lambda parts: {f"key{place}": part for place, part in enumerate(parts)},
        lambda box, place: box[f"key{place}"],
    ),
    "dataclass": (lambda parts: fields_of(len(parts))(*parts), lambda box, place: getattr(box, f"field{place}")),
    "namedtuple": (lambda parts: named_of(len(parts))(*parts), lambda box, place: box[place]),
}


@st.composite
def trees(draw: st.DrawFn, names: tuple[str, ...], deepest: int = 3) -> Any:
    """A tree with each of the names once, and other things beside them."""
    things = st.sampled_from([None, "text", 3, 2.5, True]).map(Thing)
    leaves = draw(st.permutations([*names, *draw(st.lists(things, max_size=3))]))

    def grow(part: list[Any], depth: int) -> Any:
        if len(part) == 1 and (depth == deepest or draw(st.booleans())):
            return part[0]
        if depth == deepest:
            return draw(st.sampled_from(sorted(CONTAINERS))), [*part]
        borders = sorted(draw(st.sets(st.integers(1, max(1, len(part) - 1)), max_size=2)) & set(range(1, len(part))))
        cuts = [0, *borders, len(part)]
        return draw(st.sampled_from(sorted(CONTAINERS))), [
            grow(part[one:other], depth + 1) for one, other in itertools.pairwise(cuts)
        ]

    return grow(leaves, 0)


def planted(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree with real containers, tensors and things."""
    if isinstance(tree, str):
        return tensors[tree]
    if isinstance(tree, Thing):
        return tree.value
    kind, parts = tree
    return CONTAINERS[kind][0]([planted(part, tensors) for part in parts])


def harvest(tree: Any, value: Any) -> dict[str, torch.Tensor]:
    """The tensors in a planted tree by name."""
    if isinstance(tree, str):
        return {tree: value}
    if isinstance(tree, Thing):
        return {}
    kind, parts = tree
    take = CONTAINERS[kind][1]
    found: dict[str, torch.Tensor] = {}
    for place, part in enumerate(parts):
        found.update(harvest(part, take(value, place)))
    return found


# Trainings of such batches and outputs


@dataclasses.dataclass
class Way:
    """How a drawn batch meets model and loss."""

    collate: Callable[[torch.Tensor, torch.Tensor], Any]
    forward: Callable[[Network, Any], Any]
    call: Callable[[nn.Module, Any], Any]  # how a plain loop calls the model with a batch
    loss: Callable[[Any, Any], torch.Tensor]  # of what that returned, and the batch
    loss_fn: Callable[..., Any] | None
    labels: Callable[[Any], torch.Tensor]


def make_of(way: Way, samples: int = 23, batch_size: int = 5) -> Callable[[Cell, int], Recipe]:
    """What builds a recipe of the way; 23 samples in batches of 5 leave a short last one."""

    def make(cell: Cell, rank: int) -> Recipe:
        torch.manual_seed(SEED)
        data = Samples(samples, SEED)

        def collate(items: list[Sample]) -> Any:
            return way.collate(torch.stack([inputs for inputs, _ in items]), torch.stack([label for _, label in items]))

        class Model(Network):
            def forward(self, batch: Any) -> Any:
                return way.forward(self, batch)

        model = Model(LAYERS["plain"], OUTPUTS["tensor"], tied=False)
        return Recipe(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            None,
            "step",
            DataLoader(data, batch_size, collate_fn=collate),
            DataLoader(Samples(VALIDATION, SEED + 1), 4, collate_fn=collate),
            way.loss_fn,
            None,
            lambda called, batch: way.loss(way.call(called, batch), batch),
            lambda batch: float(len(way.labels(batch))),
            lambda indices: collate([data[index] for index in indices]),
        )

    return make


def check(verdict: Verdict) -> None:
    assert verdict.kind in (EQUAL, REFUSED), verdict.detail


def split(inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"inputs": inputs[:, :5], "more": inputs[:, 5:], "labels": labels}


def features(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([found["inputs"], found["more"]], dim=1)


@pytest.mark.slow
@some
@given(trees(("inputs", "more", "labels")), st.sampled_from([1, 3]))
def test_a_loss_of_model_and_batch_takes_batches_of_any_structure(tree: Any, accumulation: int) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        found = harvest(tree, batch)
        return F.cross_entropy(model(features(found)), found["labels"])

    way = Way(
        lambda inputs, labels: planted(tree, split(inputs, labels)),
        lambda network, inputs: network.answer(inputs),
        lambda model, batch: model(features(harvest(tree, batch))),
        lambda output, batch: F.cross_entropy(output, harvest(tree, batch)["labels"]),
        loss_fn,
        lambda batch: harvest(tree, batch)["labels"],
    )
    check(judge_drawn(Cell(accumulation=accumulation), make_of(way), None))


@some
@given(trees(("inputs", "more")), st.sampled_from([tuple, list]), st.booleans(), st.sampled_from([1, 3]))
@pytest.mark.slow
def test_inputs_of_any_structure_reach_the_model_as_they_were_collated(
    tree: Any, pair: type[Any], gives_loss: bool, accumulation: int
) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)

    way = Way(
        lambda inputs, labels: pair([planted(tree, split(inputs, labels)), labels]),
        lambda network, batch: network.answer(features(harvest(tree, batch))),
        lambda model, batch: model(batch[0]),
        lambda output, batch: F.cross_entropy(output, batch[1]),
        loss_fn if gives_loss else None,
        lambda batch: batch[1],
    )
    check(judge_drawn(Cell(accumulation=accumulation), make_of(way), None))


@pytest.mark.slow
@some
@given(trees(("inputs", "more", "labels")), trees(("loss", "logits")), st.booleans())
def test_a_model_that_takes_the_batch_whole_trains_by_its_own_loss(tree: Any, output: Any, plain: bool) -> None:
    def forward(network: Network, batch: Any) -> Any:
        found = harvest(tree, batch)
        scores = network.answer(features(found))
        loss = F.cross_entropy(scores, found["labels"], label_smoothing=0.3)
        return loss if plain else planted(output, {"loss": loss, "logits": scores})

    way = Way(
        lambda inputs, labels: planted(tree, split(inputs, labels)),
        forward,
        lambda model, batch: model(batch),
        lambda result, batch: result if plain else harvest(output, result)["loss"],
        None,
        lambda batch: harvest(tree, batch)["labels"],
    )
    check(judge_drawn(Cell(), make_of(way), None))


@pytest.mark.slow
@some
@given(trees(("logits", "hidden")), st.sampled_from([1, 3]))
def test_a_loss_function_gets_what_the_model_returned(tree: Any, accumulation: int) -> None:
    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        found = harvest(tree, output)
        return F.cross_entropy(found["logits"], target) + 0.01 * found["hidden"].square().mean()

    def forward(network: Network, batch: Any) -> Any:
        scores = network.answer(batch)
        return planted(tree, {"logits": scores, "hidden": scores * 2})

    way = Way(
        lambda inputs, labels: (inputs, labels),
        forward,
        lambda model, batch: model(batch[0]),
        lambda output, batch: loss_fn(output, batch[1]),
        loss_fn,
        lambda batch: batch[1],
    )
    check(judge_drawn(Cell(accumulation=accumulation), make_of(way), None))


# Sizes, parameter groups and interruptions


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of a training."""

    samples: int
    batch_size: int
    accumulation: int
    groups: tuple[int, ...]  # for each parameter its group; -1: frozen, and held by none; -2: frozen in group 0
    adamw: bool
    shuffle: bool
    generator: bool
    drop_last: bool
    layer: str
    rates: str
    interrupted: float | None  # where Ctrl-C comes, from 0 to 1; not in the last step, after which nothing is left


PARAMETERS = len(list(Network(LAYERS["plain"], OUTPUTS["tensor"], tied=False).parameters()))
numbers = st.builds(
    Numbers,
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    groups=st.tuples(*[st.integers(-2, 2)] * PARAMETERS),
    adamw=st.booleans(),
    shuffle=st.booleans(),
    generator=st.booleans(),
    drop_last=st.booleans(),
    layer=st.sampled_from(["plain", "dropout"]),
    rates=st.sampled_from(["none", "cosine", "plateau"]),
    interrupted=st.none() | st.floats(0, 1),
)


def optimizer_of(model: nn.Module, drawn: Numbers) -> torch.optim.Optimizer:
    members: dict[int, list[nn.Parameter]] = {}
    for parameter, group in zip(model.parameters(), drawn.groups):
        parameter.requires_grad_(group >= 0)
        if group != -1:
            members.setdefault(max(group, 0), []).append(parameter)
    groups = [{"params": items, "lr": 0.02 * (number + 1)} for number, items in members.items()]
    if not groups:
        groups = [{"params": list(model.parameters()), "lr": 0.02}]
    return torch.optim.AdamW(groups, eps=1e-4) if drawn.adamw else torch.optim.SGD(groups, momentum=0.8)


def scheduler_of(optimizer: torch.optim.Optimizer, drawn: Numbers) -> Any:
    if drawn.rates == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if drawn.rates == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return None


@pytest.mark.slow
@some
@given(numbers)
def test_any_sizes_groups_and_interruptions(drawn: Numbers) -> None:
    def make(cell: Cell, rank: int) -> Recipe:
        torch.manual_seed(SEED)
        data = Samples(drawn.samples, SEED)

        class Model(Network):
            def forward(self, inputs: torch.Tensor) -> Any:
                return self.answer(inputs)

        model = Model(LAYERS[drawn.layer], OUTPUTS["tensor"], tied=False)
        optimizer = optimizer_of(model, drawn)
        generator = torch.Generator().manual_seed(3) if drawn.generator else None
        train = DataLoader(
            data, drawn.batch_size, shuffle=drawn.shuffle, generator=generator, drop_last=drawn.drop_last
        )
        return Recipe(
            model,
            optimizer,
            scheduler_of(optimizer, drawn),
            "metric" if drawn.rates == "plateau" else "step",
            train,
            DataLoader(Samples(VALIDATION, SEED + 1), 4),
            F.cross_entropy,
            None,
            lambda called, batch: F.cross_entropy(called(batch[0]), batch[1]),
            lambda batch: float(len(batch[1])),
            lambda indices: (data.inputs[indices], data.targets[indices]),
        )

    passes = drawn.samples // drawn.batch_size if drawn.drop_last else -(-drawn.samples // drawn.batch_size)
    before_last = EPOCHS * passes - (passes % drawn.accumulation or drawn.accumulation)
    interrupt_in = None
    if drawn.interrupted is not None and before_last > 0:
        interrupt_in = 1 + round(drawn.interrupted * (before_last - 1))
    cell = Cell(accumulation=drawn.accumulation, resumed=interrupt_in is not None)
    verdict = judge_drawn(cell, make, interrupt_in)
    check(verdict)
    nothing = passes == 0 or all(group < 0 for group in drawn.groups)
    assert (verdict.kind == REFUSED) == nothing, verdict.detail
