"""What saving costs training: frameworm's checkpoints, torch.save and DCP's async_save in one loop, against no saving.

    python benchmarks/checkpoint_stall.py --device cuda --budget-s 130     GPT-2 124M, AdamW: 1.5 GB of state
    python benchmarks/checkpoint_stall.py --device cpu                     the quickstart's text classifier

The contenders take turns in one process, each with the same loop over the same model: forward, backward, fused AdamW,
and a save after every tenth step, in which only what is called to save differs.

- `frameworm`: what the engine does (a copy on the device behind the step, from there to a process that writes,
  checksummed and synced; the host waits for the step before, as the engine does to read its records).
- `torch.save`: model and optimizer into one file, then fsync of it.
- `dcp async_save`: torch.distributed.checkpoint, pinned and reused staging buffers; waits for the save before, as its
  documentation has it. It writes no checksums and syncs files.

Lost time is the sum of (step - median step) over a block, as a share of the block; a step on the GPU is the time
between two events at the ends of steps. `blocked` is the time in which the host could do nothing else, per save;
frameworm's wait for the step itself is not in it, since that work has to be done anyway (it is in the lost time, if
it costs any). `resume` is the time from a checkpoint on disk to the end of the first step after it, with model and
optimizer at hand. The final loss of all contenders must be the same; on a GPU, whose sums differ from run to run,
no further from those without saving than twice the range that these have among themselves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, as_data, bootstrap_median, names_among, table, tell_progress, write_results
from torch import nn

from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.checkpoint.load import load_newest
from frameworm.engine.checkpoint.snapshot import Snapshot, take_snapshot
from frameworm.engine.checkpoint.staging import Staging
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.parallel.strategy import Strategy

EVERY = 10
CONTENDERS = ("none", "frameworm", "torch.save", "dcp async_save")


class Work:
    """A model, its optimizer and batches."""

    def __init__(self, device: torch.device, micro_batch: int, accumulation: int, small: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.accumulation = accumulation
        generator = torch.Generator().manual_seed(1)
        model: nn.Module
        if small:
            model = TextClassifier(
                2048, 4, d_model=64, n_heads=4, num_layers=2, dim_feedforward=128, max_seq_len=64, dropout=0.0
            )
            tokens = torch.randint(0, 2048, (4, micro_batch, 32), generator=generator)
            lengths = torch.full((micro_batch,), 32)
            targets = torch.randint(0, 4, (4, micro_batch), generator=generator)
            self._loss = lambda n: nn.functional.cross_entropy(self.model(tokens[n], lengths), targets[n])
        else:
            model = GPT(50304, d_model=768, n_heads=12, num_layers=12, max_seq_len=1024, dropout=0.0)
            blocks = torch.randint(0, 50257, (4, micro_batch, 1025), generator=generator).to(device)
            self._loss = lambda n: self.model(blocks[n, :, :-1], blocks[n, :, 1:])
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._first = {name: item.detach().clone() for name, item in self.model.state_dict().items()}
        self.loss = torch.zeros(())

    def begin(self) -> None:
        """As it was at first, with an optimizer that has its state."""
        self.model.load_state_dict(self._first)
        for state in self.optimizer.state.values():
            for item in state.values():
                item.zero_()

    def step(self) -> None:
        """One step."""
        for number in range(self.accumulation):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self._loss(number % 4) / self.accumulation
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.loss = loss.detach() * self.accumulation

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Saver:
    """One way to save; `blocked_s` holds one figure per save."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.work = work
        self.folder = folder
        self.blocked_s: list[float] = []

    def save(self, step: int) -> None:
        """Save, or begin to."""

    def finish(self) -> None:
        """Until all is on disk."""


class Frameworm(Saver):
    """The engine's own store."""

    def __init__(self, work: Work, folder: Path) -> None:
        super().__init__(work, folder)
        self._strategy = Strategy(work.device)
        self._store = CheckpointStore(folder, retention=Retention(2), device=work.device)

    def save(self, step: int) -> None:
        before = self._store.stall_s

        def capture(staging: Staging | None, settle: Callable[[], None]) -> Snapshot:
            assert staging is not None

            def late() -> tuple[dict[str, Any], dict[str, Any]]:
                settle()
                return {"schedule": {}, "precision": {}, "progress": {"step": step}}, {"random": torch.get_rng_state()}

            held = self._strategy.held_state(self.work.model, self.work.optimizer)
            return take_snapshot(held, {}, staging, 0, 1, late)

        self._store.save(step, capture, self.work.wait)
        self.blocked_s.append(self._store.stall_s - before)

    def finish(self) -> None:
        self._store.wait()
        assert self._store.problem is None, self._store.problem

    def close(self) -> None:
        """End the writing process."""
        self._store.close()


class TorchSave(Saver):
    """One file, synced."""

    def save(self, step: int) -> None:
        begin = perf_counter()
        path = self.folder / f"{step % 2}.pt"
        with path.open("wb") as file:
            torch.save({"model": self.work.model.state_dict(), "optimizer": self.work.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        self.blocked_s.append(perf_counter() - begin)


class Distributed(Saver):
    """torch.distributed.checkpoint in the background, with the staging an expert would ask for."""

    def __init__(self, work: Work, folder: Path) -> None:
        super().__init__(work, folder)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        # The one whose pinned buffers live on: DefaultStager can be used once only (torch 2.11 to 2.13).
        self._stager = BlockingAsyncStager(cache_staged_state_dict=work.device.type == "cuda")
        self._running: Any = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        begin = perf_counter()
        self.finish()
        path = self.folder / f"{step % 2}"
        state = {"model": self.work.model.state_dict(), "optimizer": self.work.optimizer.state_dict()}
        writer = FileSystemWriter(path, sync_files=True, overwrite=True)
        self._running = async_save(state, storage_writer=writer, async_stager=self._stager)
        self.blocked_s.append(perf_counter() - begin)

    def finish(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


@dataclass
class Block:
    """One contender's turn."""

    steps_s: list[float]
    blocked_s: list[float]
    finish_s: float
    loss: float

    @property
    def lost_share(self) -> float:
        """Time lost to saving as a share of the block."""
        middle = statistics.median(self.steps_s)
        return sum(step - middle for step in self.steps_s) / sum(self.steps_s)


@dataclass
class Contender:
    """All turns of one."""

    saver: Saver
    blocks: list[Block] = field(default_factory=list)
    failure: str | None = None


def run_block(work: Work, saver: Saver, steps: int) -> Block:
    """Train with saves; the steps are timed on the device."""
    work.begin()
    work.step()
    work.wait()
    saver.blocked_s = []
    on_gpu = work.device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(perf_counter())

    mark()
    for number in range(1, steps + 1):
        work.step()
        if number % EVERY == 0 and number < steps:
            saver.save(number)  # before the mark: what it costs the device is in the step
        mark()
    work.wait()
    begin = perf_counter()
    saver.finish()
    finish_s = perf_counter() - begin
    times = [first.elapsed_time(second) / 1e3 if on_gpu else second - first for first, second in pairwise(marks)]
    return Block(times, saver.blocked_s, finish_s, float(work.loss))


def measure_resume(work: Work, folder: Path) -> dict[str, float]:
    """From the checkpoint on disk to the end of the first step."""
    strategy = Strategy(work.device)
    begin = perf_counter()
    found = load_newest(folder, print)
    assert found is not None
    checked = perf_counter()
    strategy.load_model_state(work.model, found[1].shared["model"])
    strategy.load_optimizer_state(work.model, work.optimizer, found[1].shared["optimizer"])
    work.wait()
    restored = perf_counter()
    work.step()
    work.wait()
    return {
        "check_s": checked - begin,
        "restore_s": restored - checked,
        "first_step_s": perf_counter() - restored,
        "total_s": perf_counter() - begin,
    }


def main() -> int:
    """The benchmark as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=("gpt", "quickstart"), help="gpt on a GPU, quickstart on a CPU")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--accumulation", type=int)
    parser.add_argument("--steps", type=int, help="of a block; a save after every tenth but the last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=600.0, help="no new round when it would go beyond")
    parser.add_argument("--contenders", type=names_among(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--dir", type=Path, help="where checkpoints go; a temporary folder unless given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = torch.device(given.device)
    gpu = device.type == "cuda"
    small = given.model == "quickstart" if given.model else not gpu
    micro_batch = given.micro_batch or (64 if small else 32)
    accumulation = given.accumulation or (1 if small else 2)
    steps = given.steps or (45 if small else 25)
    begin = perf_counter()
    torch.set_float32_matmul_precision("high")
    work = Work(device, micro_batch, accumulation, small)
    work.step()
    work.wait()
    size_bytes = sum(item.nbytes for item in work.model.state_dict().values())
    size_bytes += sum(item.nbytes for state in work.optimizer.state.values() for item in state.values())
    makers: dict[str, Any] = {
        "none": Saver,
        "frameworm": Frameworm,
        "torch.save": TorchSave,
        "dcp async_save": Distributed,
    }
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        contenders: dict[str, Contender] = {}
        for contender in given.contenders:
            folder = Path(name) / contender.replace(" ", "-")
            folder.mkdir()
            contenders[contender] = Contender(makers[contender](work, folder))
        for number in range(given.rounds + 1):
            round_begin = perf_counter()
            order = list(contenders)[number % len(contenders) :] + list(contenders)[: number % len(contenders)]
            for contender in order:
                item = contenders[contender]
                if item.failure is not None:
                    continue
                try:
                    block = run_block(work, item.saver, steps)
                except Exception as error:  # a peer that cannot is recorded, and the others go on
                    item.failure = f"{type(error).__name__}: {error}"
                    tell_progress(f"{contender} failed: {item.failure}")
                    continue
                if number:  # the first turn of each allocates its buffers and does not count
                    item.blocks.append(block)
            took_s = perf_counter() - round_begin
            tell_progress(f"round {number} of {given.rounds}: {took_s:.1f} s")
            if perf_counter() - begin + took_s + 10 > given.budget_s and number:
                break
        resume = None
        if "frameworm" in contenders:
            resume = measure_resume(work, Path(name) / "frameworm")
            contenders["frameworm"].saver.close()  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()
    rows, results = [], {}
    for contender, item in contenders.items():
        if item.failure is not None or not item.blocks:
            results[contender] = {"failure": item.failure or "no time for a round"}
            rows.append([contender, "failed", "", "", "", ""])
            continue
        lost = bootstrap_median([block.lost_share for block in item.blocks])
        blocked = [value for block in item.blocks for value in block.blocked_s]
        middle = statistics.median(block_step for block in item.blocks for block_step in block.steps_s)
        results[contender] = {
            "rounds": len(item.blocks),
            "median_step_s": middle,
            "lost_share": as_data(lost),
            "blocked_s": {"median": statistics.median(blocked), "max": max(blocked)} if blocked else None,
            "finish_s": statistics.median(block.finish_s for block in item.blocks),
            "loss": item.blocks[-1].loss,
            "losses": [block.loss for block in item.blocks],
        }
        rows.append(
            [
                contender,
                f"{middle * 1e3:.1f}",
                f"{lost.value:.2%} ({lost.low:.2%} to {lost.high:.2%})",
                f"{statistics.median(blocked) * 1e3:.1f}" if blocked else "",
                f"{max(blocked) * 1e3:.1f}" if blocked else "",
                f"{item.blocks[-1].loss:.6f}",
            ]
        )
    print(table(["", "step ms", "lost time", "blocked ms", "most ms", "loss"], rows))
    print(f"{size_bytes / 1e9:.2f} GB of state, a save every {EVERY} steps, {steps} steps in a block")
    if resume is not None:
        print(
            f"resume: {resume['total_s']:.2f} s (read and checked {resume['check_s']:.2f}, restored "
            f"{resume['restore_s']:.2f}, first step {resume['first_step_s']:.2f})"
        )
    settings = {
        "model": "quickstart" if small else "gpt2_124m",
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "steps": steps,
        "every": EVERY,
        "state_bytes": size_bytes,
    }
    path = write_results("checkpoint_stall", device, settings, {"contenders": results, "resume": resume}, given.out)
    print(f"written: {path}")
    return 0 if same_losses({name: item["losses"] for name, item in results.items() if "losses" in item}) else 1


def same_losses(losses: dict[str, list[float]]) -> bool:
    """Whether saving changed nothing in what was learnt."""
    plain = losses.get("none") or next(iter(losses.values()), [0.0])
    slack = 2 * (max(plain) - min(plain))
    return all(min(plain) - slack <= loss <= max(plain) + slack for some in losses.values() for loss in some)


if __name__ == "__main__":
    sys.exit(main())
