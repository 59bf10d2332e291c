"""How long a resumed run waits for its first batch, a million samples into a stream.

    python benchmarks/streams.py --samples 1000000

Each case reads a stream from its beginning, in batches of 1,000, as a training's steps do (without a model), and takes
its place there as a checkpoint would hold it. Then a new loader over a new data set is put at that place, as a resumed
run does it, and the clock runs from there to the first batch; the median of some rounds. The next batches must be
those that the first loader goes on with. The files are written beforehand: Parquet of 16 shards with an id and a label
a row. The plain stream has neither a state nor shards, so what was read is read again: that is what a
state is for. The Python stream yields the same numbers without any file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from harness import table, tell_progress, write_results
from torch.utils.data import DataLoader, IterableDataset

from frameworm.data.adopt import adopt_loader
from frameworm.data.steps import StepSource

BATCH = 1000
SHARDS = 16
AFTER = 4  # batches that are compared


def write_parquet(folder: Path, samples: int) -> None:
    """Rows with an id and a label."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    per_shard = -(-samples // SHARDS)
    for shard in range(SHARDS):
        numbers = np.arange(shard * per_shard, (shard + 1) * per_shard)
        rows = pyarrow.table({"id": numbers, "label": numbers % 10})
        pyarrow.parquet.write_table(rows, folder / f"{shard:02d}.parquet", row_group_size=min(10_000, per_shard))


def hugging_face(folder: Path, buffer: int | None = None) -> Any:
    """The files as a streamed data set, shuffled in a buffer if one is given."""
    import datasets

    files = sorted(str(file) for file in folder.glob("*.parquet"))
    cache = str(folder / "cache")
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
    return dataset if buffer is None else dataset.shuffle(seed=0, buffer_size=buffer)


def stateful(count: int, workers: int) -> Any:
    """torchdata's loader over a shuffled map-style data set."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    numbers = torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    return StatefulDataLoader(numbers, BATCH, shuffle=True, num_workers=workers, generator=generator)


class Plain(IterableDataset[dict[str, int]]):
    """Rows of a generator, without a state and without shards."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"id": number, "label": number % 10} for number in range(self.count))


def cases(folder: Path, count: int) -> dict[str, Callable[[], Any]]:
    """Each way to read, as a function that makes the loader."""
    return {
        "Hugging Face, Parquet": lambda: DataLoader(hugging_face(folder), BATCH),
        "StatefulDataLoader, map-style": lambda: stateful(count, 0),
        "StatefulDataLoader, map-style, 2 workers": lambda: stateful(count, 2),
        "plain Python stream, by count": lambda: DataLoader(Plain(count), BATCH),
        "Hugging Face, Parquet, 2 workers": lambda: DataLoader(hugging_face(folder), BATCH, num_workers=2),
        "Hugging Face, shuffle buffer of 1,000": lambda: DataLoader(hugging_face(folder, 1000), BATCH),
    }


def opened(loader: Any) -> StepSource:
    """The loader as a training on one process reads it."""
    adopted, _ = adopt_loader(loader, rank=0, world_size=1)
    return StepSource(adopted, accumulation=1)


def ids(step: Any) -> list[int]:
    """The samples of a step."""
    batch = step.batches[0]
    return (batch["id"] if isinstance(batch, dict) else batch).tolist()


def measure(make: Callable[[], Any], steps: int, rounds: int) -> dict[str, Any]:
    """Read so many steps, then resume there a few times."""
    torch.manual_seed(0)
    source = opened(make())
    begun = perf_counter()
    reading = source.epoch(0)
    for _ in range(steps):
        next(reading)
    read_s = perf_counter() - begun
    place = source.place.capture()
    expected = [ids(step) for _, step in zip(range(AFTER), reading)]
    resumed_s, computed_s, exact = [], [], True
    for _ in range(rounds):
        torch.manual_seed(0)
        loader = make()
        begun, computed = perf_counter(), process_time()
        again = opened(loader)
        again.place.restore(place)
        resumed = again.epoch(0, steps, steps * BATCH)
        first = next(resumed)
        resumed_s.append(perf_counter() - begun)
        computed_s.append(process_time() - computed)
        found = [ids(first), *(ids(step) for _, step in zip(range(AFTER - 1), resumed))]
        exact = exact and found == expected
    return {
        "samples": steps * BATCH,
        "read_s": read_s,
        "resume_s": statistics.median(resumed_s),
        "resume_most_s": max(resumed_s),
        "resume_cpu_s": statistics.median(computed_s),
        "rounds": rounds,
        "by_state": place is not None,
        "same_samples": exact,
    }


def main() -> None:
    """Measure every case and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="how far into the stream a run stops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    steps = max(1, arguments.samples // BATCH)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), (steps + 2 * AFTER) * BATCH
        write_parquet(folder, count)
        for case, make in cases(folder, count).items():
            if arguments.only in case:
                tell_progress(case)
                by_state = not case.endswith("by count") and "buffer" not in case
                found[case] = measure(make, steps, arguments.rounds if by_state else 1)
                if not arguments.only:
                    settings = {"samples": steps * BATCH, "batch": BATCH, "shards": SHARDS}
                    tell_progress(f"wrote {write_results('streams', torch.device('cpu'), settings, found)}")
    rows = [
        [
            case,
            f"{item['resume_s']:.2f} s",
            f"{item['resume_most_s']:.2f} s",
            f"{item['resume_cpu_s']:.2f} s",
            f"{item['read_s']:.1f} s",
            "state" if item["by_state"] else "reading",
            "yes" if item["same_samples"] else "NO",
        ]
        for case, item in found.items()
    ]
    print(table(("case", "to first batch", "at most", "processor", "first reading", "found by", "same samples"), rows))


if __name__ == "__main__":
    main()
