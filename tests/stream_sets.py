"""Iterable data sets of several makes over local files, a reader of all their samples, and a training on them."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from frameworm import Trainer
from frameworm.data.adopt import adopt_loader
from frameworm.data.steps import StepSource
from frameworm.launch.process_group import all_reduce_max, all_reduce_sums
from frameworm.records.events import Listener
from frameworm.records.schema import StepRecord

SIZE = 103


def place() -> tuple[int, int, int, int]:
    """Rank, ranks, worker and workers, as a data set finds them out by itself."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    info = get_worker_info()
    return (rank, ranks, 0, 1) if info is None else (rank, ranks, info.id, info.num_workers)


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class ByWorker(Plain):
    def __iter__(self) -> Iterator[int]:
        _, _, worker, workers = place()
        return iter(range(worker, SIZE, workers))


class ByRank(Plain):
    def __iter__(self) -> Iterator[int]:
        rank, ranks, _, _ = place()
        return iter(range(rank, SIZE, ranks))


class ByBoth(Plain):
    def __iter__(self) -> Iterator[int]:
        rank, ranks, worker, workers = place()
        return iter(range(rank * workers + worker, SIZE, ranks * workers))


class ByRankAtBirth(Plain):
    """Takes its part when it is made, as a user writes it who passes the rank along."""

    def __init__(self) -> None:
        self.rank, self.ranks, _, _ = place()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SIZE, self.ranks))


class Files(Plain):
    """Hands out shards, and shuffles them by the process's random state."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for number in torch.randperm(len(self.files)).tolist():
            yield from self.files[number]


class ShuffledFilesByWorker(Files):
    """Shuffles all its files by the process's random state, and only then takes a worker's part."""

    shard = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        _, _, worker, workers = place()
        for number in torch.randperm(len(self.files)).tolist()[worker::workers]:
            yield from self.files[number]


class Counting(Plain):
    """Says where it is and goes on from there; draws something at random for each sample."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.next = 0
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        number, self.next = self.next, 0
        while number < self.size:
            number += 1
            self.next = number
            self.yielded += 1
            random.random(), np.random.rand(), torch.rand(1)
            yield number - 1
        self.next = 0


class Endless(Plain):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def parts(count: int) -> list[list[int]]:
    return [list(range(number, SIZE, count)) for number in range(count)]


def write_shards(folder: Path, count: int) -> None:
    """The numbers below `SIZE` as jsonl files and as tar files."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, numbers in enumerate(parts(count)):
        (folder / f"{count}-{shard}.jsonl").write_text("".join(json.dumps({"x": item}) + "\n" for item in numbers))
        with tarfile.open(folder / f"{count}-{shard}.tar", "w") as tar:
            for item in numbers:
                content = str(item).encode()
                member = tarfile.TarInfo(f"{item:06d}.txt")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def hugging_face(folder: Path, count: int) -> Any:
    import datasets

    files = sorted(str(file) for file in folder.glob(f"{count}-*.jsonl"))
    return datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )


def split_by_hand(folder: Path, count: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    rank, ranks, _, _ = place()
    return split_dataset_by_node(hugging_face(folder, count), rank, ranks)


def tars(folder: Path, count: int, **settings: Any) -> Any:
    import webdataset

    files = sorted(str(file) for file in folder.glob(f"{count}-*.tar"))
    settings = {"shardshuffle": False, "nodesplitter": webdataset.split_by_node, **settings}
    return webdataset.WebDataset(files, **settings).map(number_of)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


SETS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda folder: Plain(),
    "by worker": lambda folder: ByWorker(),
    "by rank": lambda folder: ByRank(),
    "by rank at birth": lambda folder: ByRankAtBirth(),
    "by both": lambda folder: ByBoth(),
    "shards": lambda folder: Files(parts(6)),
    "shuffled, then by worker": lambda folder: ShuffledFilesByWorker(parts(16)),
    "fewer files than readers": lambda folder: ShuffledFilesByWorker(parts(2)),
    "a state": lambda folder: Counting(),
    "hugging face": lambda folder: hugging_face(folder, 8),
    "hugging face, few shards": lambda folder: hugging_face(folder, 3),
    "hugging face, split by hand": lambda folder: split_by_hand(folder, 8),
    "hugging face, shuffled": lambda folder: hugging_face(folder, 8).shuffle(seed=3, buffer_size=20),
    "tars": lambda folder: tars(folder, 8),
    "tars, no node splitter": lambda folder: tars(folder, 8, nodesplitter=None),
    "tars, shuffled": lambda folder: tars(folder, 8, shardshuffle=8, seed=5),
}
PACKAGES = {"hugging": "datasets", "tars": "webdataset"}


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers, and the same with some noise."""
    numbers = torch.tensor([float(item["x"] if isinstance(item, dict) else item) for item in samples]).unsqueeze(1)
    return numbers / SIZE + 0.1 * torch.rand_like(numbers), numbers


def numbers_in(batch: Any) -> list[int]:
    return [int(item) for item in batch[1].flatten().tolist()]


def read(rank: int, world_size: int, kind: str, folder: str, workers: int, epochs: int) -> list[list[int]]:
    """The samples of each epoch that the steps of this rank hold."""
    source = steps_of(
        rank, world_size, DataLoader(SETS[kind](Path(folder)), 4, num_workers=workers, collate_fn=collate)
    )
    return [
        [number for step in source.epoch(epoch) for batch in _real(step) for number in numbers_in(batch)]
        for epoch in range(epochs)
    ]


def _real(step: Any) -> list[Any]:
    return [batch for batch, size in zip(step.batches, step.samples) if size]


def steps_of(rank: int, world_size: int, given: Any) -> StepSource:
    _as_in_a_script(world_size)
    cpu = torch.device("cpu")
    loader, _ = adopt_loader(given, rank=rank, world_size=world_size)
    return StepSource(
        loader,
        accumulation=1,
        rank=rank,
        world_size=world_size,
        sum_over_ranks=lambda value: all_reduce_sums([value], cpu)[0],
        max_over_ranks=lambda value: all_reduce_max(value, cpu),
    )


def read_all(rank: int, world_size: int, kind: str, folder: str, counts: tuple[int, ...]) -> list[list[list[int]]]:
    """`read` for several numbers of workers."""
    return [read(rank, world_size, kind, folder, workers, 1 if workers else 2) for workers in counts]


def _as_in_a_script(world_size: int) -> None:
    """Loader processes fork, as by default; the ranks of a test come from a server, which they would ask too."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # a fork of a process with threads
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if world_size > 1:
        multiprocessing.set_start_method("fork", force=True)


class KillAfter(Listener):
    """Ends this process without a word after a step."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step(self, step: StepRecord) -> None:
        if step.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    rank: int,
    world_size: int,
    folder: str,
    make: Callable[[Path], Any],
    *,
    kill_after: int | None = None,
    resume: bool = False,
    epochs: int = 2,
    max_steps: int | None = None,
    accumulation: int = 1,
) -> tuple[torch.Tensor, list[list[int]], list[str]]:
    """Train on a loader; returns parameters, samples per micro-batch, and the notes of the run.

    Args:
        make: Makes the loader; gets the folder with the shards.
        kill_after: The step after which this process ends; the checkpoint of every third step is left.
    """
    _as_in_a_script(world_size)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    seen: list[list[int]] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(numbers_in(batch))
        return nn.functional.mse_loss(model(batch[0]), batch[1] / SIZE)

    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn=loss,
        callbacks=[KillAfter(kill_after)],
        seed=11,
        run_dir=Path(folder) / "run",
        every_steps=3,
        mode="sync",
        max_steps=max_steps,
        accumulation=accumulation,
        device="cpu",
    )
    record = trainer.train(make(Path(folder).parent), epochs=epochs, resume="auto" if resume else None)
    return torch.cat([item.detach().flatten() for item in model.parameters()]), seen, record.notes
