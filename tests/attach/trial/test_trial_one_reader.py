"""A loader process draws for its samples what the script's own process would have drawn."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from frameworm.attach.patches import Patches
from frameworm.attach.trial.interception import intercept
from frameworm.attach.trial.switches import Switches


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.remove()


class Augmented(Dataset[Any]):
    """Draws from everything that there is, or from what it is given."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        self.own, self.other = random.Random(1), np.random.default_rng(2)
        self.count, self.draw = 0, draw

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> tuple[float, float]:
        self.count += 1
        return float(place), self.draw(self)


DRAWS: dict[str, Callable[[Any], float]] = {
    "python": lambda data: random.random(),
    "numpy": lambda data: float(np.random.rand()),
    "torch": lambda data: float(torch.rand(())),
    "own": lambda data: data.own.random(),
    "own of numpy": lambda data: float(data.other.random()),
    "counted": lambda data: float(data.count),
    "all": lambda data: random.random() + float(np.random.rand() + torch.rand(()) + data.own.random()) + data.count,
    "nothing": lambda data: 0.0,
}


def _trained(
    draw: Callable[[Any], float], stop: int | None = None, between: Callable[[], Any] = lambda: None, **loading: Any
) -> list[Any]:
    """The batches of three epochs, and what the process draws after each."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    data = Augmented(draw)
    loader = DataLoader(data, **(loading or {"batch_size": 3, "shuffle": True}))
    found: list[Any] = []
    for _ in range(3):
        for step, (places, values) in enumerate(loader):
            found.append((places.tolist(), values.tolist()))
            between()
            if step == stop:
                break
        found.append((random.random(), float(np.random.rand()), float(torch.rand(())), data.own.random(), data.count))
    return found


@pytest.mark.parametrize("kind", list(DRAWS))
@pytest.mark.parametrize("stop", [None, 1])
def test_samples_are_those_of_the_script_itself(kind: str, stop: int | None, patches: Patches) -> None:
    expected = _trained(DRAWS[kind], stop)
    intercept(Switches(workers=1), patches)
    assert _trained(DRAWS[kind], stop) == expected


def test_training_may_draw_from_other_generators(patches: Patches, capfd: pytest.CaptureFixture[str]) -> None:
    expected = _trained(DRAWS["python"], between=lambda: torch.rand(5))
    intercept(Switches(workers=1), patches)
    assert _trained(DRAWS["python"], between=lambda: torch.rand(5)) == expected
    assert capfd.readouterr().err == ""


def test_where_both_draw_it_is_told(patches: Patches, capfd: pytest.CaptureFixture[str]) -> None:
    intercept(Switches(workers=1), patches)
    _trained(DRAWS["torch"], between=lambda: torch.rand(5))
    assert capfd.readouterr().err.count("draw from the same random numbers") == 3  # once in each pass


def test_a_sampler_of_the_scripts_own(patches: Patches) -> None:
    def batches() -> Any:
        return BatchSampler(RandomSampler(range(10)), 4, drop_last=True)

    expected = _trained(DRAWS["all"], batch_sampler=batches())
    intercept(Switches(workers=1), patches)
    assert _trained(DRAWS["all"], batch_sampler=batches()) == expected


def test_a_copy_that_a_library_makes_of_the_loader(patches: Patches) -> None:
    intercept(Switches(workers=1), patches)
    data = Augmented(DRAWS["python"])
    loader = DataLoader(data, 3, shuffle=True)
    copied = DataLoader(data, batch_sampler=loader.batch_sampler, num_workers=loader.num_workers)
    random.seed(3), torch.manual_seed(3)
    found = [values.tolist() for _, values in copied]
    patches.remove()
    random.seed(3), torch.manual_seed(3)
    assert found == [values.tolist() for _, values in DataLoader(data, 3, shuffle=True)]


def test_a_loader_with_a_process_of_its_own_is_left_alone(patches: Patches) -> None:
    intercept(Switches(workers=1), patches)
    data = Augmented(DRAWS["python"])
    iterator: Any = iter(DataLoader(data, 3, shuffle=True, num_workers=1))
    assert not hasattr(iterator, "_frameworm_draws")
    del iterator


@pytest.mark.slow  # torch takes five seconds to end a loader process whose data set has failed
def test_what_a_data_set_raises_comes_through(patches: Patches) -> None:
    def broken(data: Any) -> float:
        raise ValueError("no such file")

    intercept(Switches(workers=1), patches)
    with pytest.raises(ValueError, match="no such file"):
        _trained(broken)
    gc.collect()  # the error holds the loader, and so its process
