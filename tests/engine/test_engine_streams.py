"""Training on streams: killed in mid-epoch and resumed, the same samples and the same parameters, bit for bit.

`CAMPAIGN=1` tries all kinds of them (`make campaign`).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from frameworm.errors import DataError
from stream_sets import SETS, SIZE, Counting, Endless, collate, steps_of, train, write_shards

KILLED = 11  # of the steps; every third is saved
SAVED = 9


def _torch(kind: str, workers: int) -> Callable[[Path], Any]:
    return lambda folder: DataLoader(SETS[kind](folder), 4, num_workers=workers, collate_fn=collate)


def _stateful(kind: str, workers: int) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind == "map":
            numbers = list(range(SIZE))
            return StatefulDataLoader(numbers, 4, shuffle=True, num_workers=workers, collate_fn=collate)
        return StatefulDataLoader(SETS[kind](folder), 4, num_workers=workers, collate_fn=collate)

    return make


class Queue:
    """A loader of somebody's own that says where it is."""

    def __init__(self) -> None:
        self.numbers = list(range(SIZE))
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Any:
        while self.next < SIZE:
            self.next += 5
            yield collate(self.numbers[self.next - 5 : self.next])
        self.next = 0


LOADERS: dict[str, Callable[[Path], Any]] = {
    "plain": _torch("plain", 0),
    "plain, workers": _torch("plain", 2),
    "by worker": _torch("by worker", 2),
    "a state": _torch("a state", 0),
    "a state, workers": _torch("a state", 2),
    "shards": _torch("shards", 2),
    "hugging face": _torch("hugging face", 0),
    "hugging face, workers": _torch("hugging face", 3),
    "hugging face, few shards": _torch("hugging face, few shards", 4),
    "hugging face, shuffled": _torch("hugging face, shuffled", 2),
    "tars": _torch("tars", 2),
    "stateful, map": _stateful("map", 0),
    "stateful, map, workers": _stateful("map", 2),
    "stateful, a state": _stateful("a state", 0),
    "stateful, hugging face": _stateful("hugging face", 0),
    "stateful, hugging face, workers": _stateful("hugging face", 2),
    "stateful, hugging face, shuffled": _stateful("hugging face, shuffled", 0),
    "own loader": lambda folder: Queue(),
    "a state that fails": lambda folder: DataLoader(LateBuffer(), 4, collate_fn=collate),
}
CAMPAIGN = bool(os.environ.get("CAMPAIGN"))
SAMPLE = ["plain, workers", "a state, workers", "hugging face, few shards", "tars", "stateful, map", "own loader"]
SAMPLE += ["a state that fails"]
SAMPLES_ONLY = {"stateful, map, workers"}  # what its workers draw is not in its state
PACKAGES = {"stateful": "torchdata", "hugging": "datasets", "tars": "webdataset"}


def needs(kind: str) -> None:
    for word, package in PACKAGES.items():
        if word in kind:
            pytest.importorskip(package)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for count in (3, 8):
        write_shards(folder, count)
    return folder


def _killed(folder: str, kind: str, more: dict[str, Any]) -> None:
    os.setsid()
    train(0, 1, folder, LOADERS[kind], kill_after=KILLED, **more)


def _wait_for_its_end(process: Any) -> None:
    """It kills itself; what it has started goes with it."""
    process.start()
    process.join(120)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == -signal.SIGKILL


def _kill_and_resume(folder: Path, kind: str, **more: Any) -> tuple[Any, Any]:
    """What an uninterrupted run gives, and one that was killed and went on."""
    for name in ("whole", "parts"):
        (folder / name).mkdir(exist_ok=True)
    whole = train(0, 1, str(folder / "whole"), LOADERS[kind], **more)
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(str(folder / "parts"), kind, more))
    _wait_for_its_end(process)
    return whole, train(0, 1, str(folder / "parts"), LOADERS[kind], resume=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(LOADERS) if CAMPAIGN else SAMPLE)
def test_a_killed_run_goes_on_with_the_same_samples(kind: str, folder: Path, tmp_path: Path) -> None:
    needs(kind)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (expected, seen, _), (found, again, _) = _kill_and_resume(tmp_path, kind)
    assert again[-1] == seen[-1]
    left = seen[SAVED:]
    assert again[-len(left) :] == left
    assert torch.equal(found, expected) or kind in SAMPLES_ONLY
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts/run/steps-rank0.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(seen) + 1))


@pytest.mark.slow
def test_an_endless_stream_trains_by_steps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _, seen, _ = train(
        0, 1, str(tmp_path / "run"), lambda folder: DataLoader(Endless(), 4, collate_fn=collate), max_steps=7
    )
    assert seen == [list(range(step * 4, step * 4 + 4)) for step in range(7)]


def _ranks(rank: int, world_size: int, folder: str, kind: str, kill: bool, resume: bool) -> Any:
    return train(
        rank,
        world_size,
        folder,
        LOADERS[kind],
        kill_after=KILLED if kill else None,
        resume=resume,
        accumulation=2,
        epochs=3,
    )


RANK_KINDS = ["a state, workers", "hugging face, workers", *(["plain", "hugging face", "tars"] if CAMPAIGN else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANK_KINDS)
def test_killed_ranks_go_on_with_the_same_samples(
    kind: str, folder: Path, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    needs(kind)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_ranks(_ranks, 2, (str(tmp_path / "whole"), kind, False, False), timeout_s=120)
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(_ranks, 2, (str(tmp_path / "parts"), kind, True, False), timeout_s=120)
    parts = run_ranks(_ranks, 2, (str(tmp_path / "parts"), kind, False, True), timeout_s=120)
    for (expected, seen, _), (found, again, _) in zip(whole, parts):
        assert again == seen[-len(again) :]
        assert len(again) < len(seen)
        assert torch.equal(found, expected)


def _other_world(rank: int, world_size: int, folder: str, kind: str) -> str:
    with pytest.raises(DataError, match="in the middle of an epoch") as error:
        train(rank, world_size, folder, LOADERS[kind], resume=True)
    return str(error.value)


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_where_readers_have_their_own(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    (tmp_path / "parts").mkdir()
    process = multiprocessing.get_context("fork").Process(
        target=_killed, args=(str(tmp_path / "parts"), "shards", {"max_steps": None})
    )
    _wait_for_its_end(process)
    for text in run_ranks(_other_world, 2, (str(tmp_path / "parts"), "shards")):
        assert "6 shards, 1 rank x 2 readers" in text
        assert "6 shards, 2 ranks x 2 readers" in text


def test_the_place_is_that_of_the_batch_trained_on() -> None:
    """Not that of batches which loader processes have prepared."""
    source = steps_of(0, 1, DataLoader(Counting(), 4, num_workers=2, collate_fn=collate, prefetch_factor=4))
    steps = source.epoch(0)
    first = [next(steps) for _ in range(5)]
    place = source.place.capture()
    assert place is not None
    assert place["batches"] == len(first)
    rest = [batch[1].flatten().tolist() for step in steps for batch in step.batches]
    again = steps_of(0, 1, DataLoader(Counting(), 4, num_workers=2, collate_fn=collate))
    again.place.restore(place)
    assert [batch[1].flatten().tolist() for step in again.epoch(0, 5, 20) for batch in step.batches] == rest


@pytest.mark.slow
def test_a_state_is_not_read_up_to() -> None:
    far, size = 2000, 10_000
    source = steps_of(0, 1, DataLoader(Counting(size), 4, collate_fn=collate))
    steps = source.epoch(0)
    for _ in range(far):
        next(steps)
    place = source.place.capture()
    expected = [batch[1].flatten().tolist() for batch in next(steps).batches]
    dataset = Counting(size)
    again = steps_of(0, 1, DataLoader(dataset, 4, collate_fn=collate))
    again.place.restore(place)
    found = next(again.epoch(0, far, far * 4))
    assert [batch[1].flatten().tolist() for batch in found.batches] == expected
    assert dataset.yielded <= 12, "two batches, not all of them"


def test_a_state_that_fails_is_found_by_the_last_batch(caplog: pytest.LogCaptureFixture) -> None:
    """It passes for the first samples, and fails once the buffer was filled again."""

    def make() -> Any:
        return DataLoader(LateBuffer(), 4, collate_fn=collate)

    source = steps_of(0, 1, make())
    steps = source.epoch(0)
    for _ in range(5):
        next(steps)
    place = source.place.capture()
    assert place is not None
    rest = [batch[1].flatten().tolist() for step in steps for batch in step.batches]
    again = steps_of(0, 1, make())
    again.place.restore(place)
    with caplog.at_level("WARNING", "frameworm"):
        found = [batch[1].flatten().tolist() for step in again.epoch(0, 5, 20) for batch in step.batches]
    assert found == rest
    assert "was read again up to where the run had stopped" in caplog.text


@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.parametrize("kind", [0, 1])
def test_the_beginning_is_found_whatever_the_data_set_counts(kind: int, stop: int) -> None:
    """A resumed run restores counters after the epoch was begun. The next epoch is whole, too."""
    make = (Counting, LateBuffer)[kind]
    source = steps_of(0, 1, DataLoader(make(), 4, collate_fn=collate))
    steps = source.epoch(0)
    for _ in range(stop):
        next(steps)
    place = source.place.capture()
    rest = [batch[1].flatten().tolist() for step in steps for batch in step.batches]
    dataset = make()
    again = steps_of(0, 1, DataLoader(dataset, 4, collate_fn=collate))
    again.place.restore(place)
    steps = again.epoch(0, stop, stop * 4)
    dataset.next = stop * 4
    assert [batch[1].flatten().tolist() for step in steps for batch in step.batches] == rest
    later = [number for step in again.epoch(1) for batch in step.batches for number in batch[1].flatten().tolist()]
    assert sorted(later) == list(range(SIZE))


class LateBuffer(Counting):
    """Goes through a buffer, after some samples, which its state does not hold."""

    def __iter__(self) -> Any:
        held: list[Any] = []
        for number, item in enumerate(super().__iter__()):
            if number < 10:
                yield item
                continue
            held.append(item)
            if len(held) == 8:
                yield from reversed(held[4:])
                del held[4:]
        yield from held
