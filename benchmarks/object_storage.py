"""What uploading costs a training: the same run with and without a copy in object storage, in turn.

    python benchmarks/object_storage.py --rounds 5

Both write checkpoints to the local disk; one also uploads them to an S3 server on this machine (moto), which takes the
upload's bytes with the same cores that train. A real bucket costs less CPU and more time. With `--server-cpu N` the
server has a core to itself, and the training and the upload keep to the others. Times are of all steps after the
first ten: what is between steps counts too. Reported are the median over rounds of the ratio of mean step times, and of
the time to the end of training (`wall`), which includes waiting for the last upload.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, bootstrap_median, table, tell_progress, write_results
from object_server import BUCKET, ObjectServer
from torch import nn
from torch.utils.data import TensorDataset

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.records.events import Listener
from frameworm.records.objects.place import Place
from frameworm.records.objects.runs import whole_checkpoints
from frameworm.records.schema import StepRecord

SKIPPED = 10


class Clock(Listener):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, step: StepRecord) -> None:
        self.ends.append(perf_counter())

    def mean_step_s(self) -> float:
        """Of the steps after the first ones, with what lies between them."""
        return (self.ends[-1] - self.ends[SKIPPED - 1]) / (len(self.ends) - SKIPPED)


def train(out: str, given: argparse.Namespace) -> tuple[float, float, dict[str, Any]]:
    """One run: mean step, whole time, and what it says of its checkpoints and its copy."""
    torch.manual_seed(0)
    width = given.width
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    data = TensorDataset(
        torch.randn(given.steps * given.batch, width), torch.randint(0, 10, (given.steps * given.batch,))
    )
    clock = Clock()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        run_dir=out,
        every_steps=given.every,
        device="cpu",
        callbacks=[clock],
        progress=False,
    )
    began = perf_counter()
    record = trainer.train(OptimizedDataLoader.create(data, given.batch, num_workers=0), epochs=1)
    plain = record.to_dict()
    return clock.mean_step_s(), perf_counter() - began, {**plain["checkpoint"], "storage": plain["storage"]}


def main() -> int:
    """The benchmark as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=40, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="the state is about 24 MB at 1024")
    parser.add_argument(
        "--server-cpu", type=int, default=None, help="keep the server to this core, and the rest off it"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.getLogger("frameworm").setLevel(logging.ERROR)
    steps: dict[str, list[float]] = {"local": [], "uploaded": []}
    walls: dict[str, list[float]] = {"local": [], "uploaded": []}
    said: dict[str, Any] = {}
    cores = os.sched_getaffinity(0)
    if given.server_cpu is not None:
        os.sched_setaffinity(0, {given.server_cpu})
    with ObjectServer() as server, tempfile.TemporaryDirectory(prefix="objects-") as folder:
        if given.server_cpu is not None:
            os.sched_setaffinity(0, cores - {given.server_cpu})
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - (given.server_cpu is None)))
        os.environ.update(server.variables())
        os.chdir(folder)
        train(f"{folder}/warm", given)
        for number in range(given.rounds):
            order = ("local", "uploaded") if number % 2 else ("uploaded", "local")
            for name in order:
                url = f"s3://{BUCKET}/runs/{number}"
                step_s, wall_s, said[name] = train(f"{folder}/local{number}" if name == "local" else url, given)
                steps[name].append(step_s)
                walls[name].append(wall_s)
                if name == "uploaded":
                    assert said[name]["storage"]["uploaded"], said[name]
                    assert whole_checkpoints(Place(url))[-1] == f"step-{given.steps:08d}"
            tell_progress(f"round {number + 1} of {given.rounds}")
    step = bootstrap_median([one / other for one, other in zip(steps["uploaded"], steps["local"])])
    wall = bootstrap_median([one - other for one, other in zip(walls["uploaded"], walls["local"])])
    rows = [
        ("step, uploaded / local", f"{step.value:.3f}", f"{step.low:.3f} to {step.high:.3f}"),
        ("whole run, uploaded - local", f"{wall.value:.2f} s", f"{wall.low:.2f} to {wall.high:.2f} s"),
    ]
    print(table(("", "median", "95% interval"), rows))
    settings = {key: value for key, value in vars(given).items() if key != "out"}
    results = {
        "step_ratio": {"value": step.value, "low": step.low, "high": step.high},
        "wall_difference_s": {"value": wall.value, "low": wall.low, "high": wall.high},
        "mean_step_s": steps,
        "wall_s": walls,
        "last_run": said,
    }
    where = "" if given.server_cpu is None else "_server_apart"
    print(f"written: {write_results(f'object_storage{where}', torch.device('cpu'), settings, results, given.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
