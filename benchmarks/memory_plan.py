"""The memory planner against the truth: planned and measured peaks of real training steps on one device.

    PYTHONPATH=src python benchmarks/memory_plan.py                    # one GPU
    PYTHONPATH=src python benchmarks/memory_plan.py --device cpu       # small sizes, to see that it runs

Every setting is planned by `MemoryPlanner` (dry run on fake tensors, nothing measured) and then trained for a few steps
and one validation batch by `Trainer` in a process of its own, on random tokens of the greatest length. Measured is
`torch.cuda.max_memory_allocated` over the whole process; the CPU's stand-in are the allocator's events in the profiler.
The error is planned / measured - 1. `reserved` shows what the plan's `allocator` stands for. Compared with: the memory
of the same settings counted by weights alone (16 bytes per parameter).

Plans are made side by side on the CPU. Trainings run side by side where their plans together take less than 60% of the
device: torch counts each process by itself. One that is out of memory beside others is run again alone. Results are
written after every case; `--keep` goes on with those of an earlier call, so that it may be cut short at any time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.connection
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from children import Job
from harness import RESULTS, device_word, end_on_term, table, tell_progress, write_results
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.engine.memory.dry_workload import dry_workload
from frameworm.engine.memory.planner import MemoryPlanner
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.engine.trainer import Trainer

CONFIGS = Path(__file__).parents[1] / "configs"
DEADLINE_S = 180.0
STEPS = 4
MEDIAN_GOAL, WORST_GOAL = 0.05, 0.12
TOGETHER = 0.6  # of the device, for trainings that run side by side
BESIDE_BYTES = 2**30  # of each process, outside of torch's count
MOST_AT_ONCE = 4
FILLED = 0.9  # of the device, for cases that fill it
GPT, TEXTS, XL = "gpt2_124m.yaml", "ag_news_single_gpu_optimized.yaml", "gpt2_1p5b.yaml"
SIZES = {
    "124M": (),
    "350M": ("model.d_model=1024", "model.n_heads=16", "model.num_layers=24"),
    "774M": ("model.d_model=1280", "model.n_heads=20", "model.num_layers=36"),
}
FP32, SELECTIVE, FULL = (
    "gpu.mixed_precision=off",
    "memory.activation_checkpointing=selective",
    "memory.activation_checkpointing=full",
)


@dataclass(frozen=True)
class Case:
    """One setting.

    Attributes:
        tokens: Length of packed texts.
        fills: The micro-batch is the largest that the planner finds room for.
        judged: Counts for the goals; what the planner only estimates does not.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    tokens: float | None = None
    fills: bool = False
    judged: bool = True


def _case(kind: str, config: str, micro_batch: int | None, more: tuple[str, ...], sizes: tuple[str, ...] = ()) -> Case:
    words = [_WORDS.get(item.split("=")[0], item.split("=")[1]) for item in more]
    name = " ".join([kind, "filled" if micro_batch is None else f"b{micro_batch}", *words])
    return Case(name, config, (*sizes, *_batch(micro_batch or 1), *more), fills=micro_batch is None)


_WORDS = {
    "gpu.mixed_precision": "fp32",
    "training.global_batch": "accumulated",
    "gpu.compile_model": "compiled",
}


def _batch(micro_batch: int) -> tuple[str, str]:
    return f"training.micro_batch={micro_batch}", f"training.global_batch={micro_batch}"


def gpt(size: str, micro_batch: int | None, *more: str) -> Case:
    """A decoder; without a micro-batch it fills the device."""
    return _case(f"gpt {size}", GPT, micro_batch, more, SIZES[size])


def texts(micro_batch: int | None, *more: str, tokens: float | None = None) -> Case:
    """The classifier."""
    return replace(_case("texts", TEXTS, micro_batch, more), tokens=tokens)


CASES = (
    texts(1),
    texts(128),
    texts(1024),
    texts(4096),
    texts(1024, FP32),
    texts(1024, FULL),
    texts(4096, "data.batching=packed", tokens=64.0),
    gpt("124M", 1),
    gpt("124M", 16),
    gpt("124M", 64),
    gpt("124M", 16, FP32),
    gpt("124M", 64, SELECTIVE),
    gpt("124M", 64, FULL),
    gpt("124M", 8, "training.global_batch=32"),
    gpt("350M", 16),
    gpt("350M", 8, FP32),
    gpt("350M", 32, SELECTIVE),
    gpt("774M", 8),
    gpt("774M", 32, FULL),
    replace(gpt("124M", 32, "gpu.compile_model=true"), judged=False),
    texts(None),
    gpt("124M", None),
    gpt("774M", None, SELECTIVE),
    Case("gpt 1.5B as shipped", XL, ("training.global_batch=32",)),
)
_TINY = ("model.d_model=64", "model.n_heads=4", "model.num_layers=2", "model.max_seq_len=64")
SMALL = (
    Case("texts b32", TEXTS, (*_TINY, *_batch(32), "data.eval_batch=32")),
    Case("texts b32 full", TEXTS, (*_TINY, *_batch(32), "data.eval_batch=32", FULL)),
    Case("gpt b16", GPT, (*_TINY, *_batch(16), "model.vocab_size=1024")),
)


def load(case: Case, device: str) -> Config:
    """The case's config for a device, with the whole of it to use."""
    fixed = ("gpu.memory_fraction=1.0", "observe.progress=false", "data.num_workers=0", "training.epochs=1")
    return load_config(CONFIGS / case.config, [*case.overrides, f"gpu.device={device}", *fixed])


def planner_of(case: Case, device: str) -> MemoryPlanner:
    """What plans the case."""
    return MemoryPlanner(load(case, device), tokens_per_sample=case.tokens)


def plan(case: Case, device: str, memory_bytes: int) -> dict[str, Any]:
    """In a process of its own: the plan, and the case with its micro-batch settled."""
    torch.set_num_threads(1)
    begun = monotonic()
    planner = planner_of(case, device)
    if case.fills:
        size = planner.largest(planner.setting, memory_bytes, FILLED)
        case = replace(case, overrides=(*case.overrides, *_batch(size)))
        planner = planner_of(case, device)
    made = planner.plan()
    step = planner.profile(planner.setting).at(planner.setting.micro_batch)
    return {
        "case": case,
        "planned_bytes": made.allocated,
        "plan": made.to_dict(),
        "dry_run": asdict(step),
        "weights_only_bytes": 16 * planner.shapes.parameters,
        "planning_s": monotonic() - begun,
    }


class Meter:
    """Peaks of torch's allocator by part of the step, and what was held at the borders; nobody waits for the device."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        self.peaks: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.reserved = 0
        if model is not None:
            model.register_forward_pre_hook(lambda *_: self._border("before forward"))
            model.register_forward_hook(lambda module, *_: self._border("forward" if module.training else "validation"))
        optimizer.register_step_pre_hook(lambda *_: self._border("backward"))
        optimizer.register_step_post_hook(lambda *_: self._border("update"))

    def _border(self, ended: str) -> None:
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self.peaks[ended] = max(self.peaks.get(ended, 0), torch.cuda.max_memory_allocated())
        self.held[ended] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, Any]:
        """After training."""
        self._border("end")
        return {
            "measured_bytes": max(self.peaks.values()),
            "reserved_bytes": self.reserved,
            "peak_bytes_by_part": self.peaks,
            "held_bytes_after_part": self.held,
        }


def train(case: Case, device: str, alone: bool) -> dict[str, Any]:
    """In a process of its own: a few real steps and a validation batch; the memory they took."""
    torch.set_num_threads(1 if device == "cpu" else 2)
    planner = planner_of(case, device)
    config = planner.config
    work = dry_workload(config, case.tokens)
    micro_batch, accumulation, eval_batch = (
        config.training.micro_batch,
        config.training.accumulation,
        config.data.eval_batch,
    )
    assert isinstance(micro_batch, int)
    assert isinstance(accumulation, int)
    assert isinstance(eval_batch, int)
    assert work.make_validation is not None
    torch.manual_seed(0)
    length = config.model.max_seq_len  # type: ignore[union-attr]
    batches = [filled(work.make_batch(micro_batch), length, case.tokens)] * (STEPS * accumulation)
    validation = [filled(work.make_validation(eval_batch), length, None)]
    model = with_weights(work.model, device)
    optimizer = build_optimizer(model, config)
    trainer = Trainer(model, optimizer, config=config, run_dir=None)
    parameters = sum(item.numel() * item.element_size() for item in model.parameters())
    if device == "cuda":
        meter = Meter(None if config.gpu.compile_model else model, optimizer)  # hooks would be compiled too
        begun = monotonic()
        record = trainer.train(batches, validation)
        assert record.skipped_steps in (None, 0), f"{record.skipped_steps} steps were left out"
        found = meter.read()
        # The optimizer's own tensors, rounded as the allocator rounds them.
        state = [item for values in optimizer.state.values() for item in values.values() if isinstance(item, Tensor)]
        found["optimizer_bytes"] = sum(-(-item.nbytes // 512) * 512 for item in state if item.is_cuda)
        found["parameter_bytes"] = sum(-(-item.nbytes // 512) * 512 for item in model.parameters())
        found["library_bytes"] = _library_bytes()
        found["training_s"] = monotonic() - begun
        statistics_ = torch.cuda.memory_stats()
        found["retries"] = statistics_.get("num_alloc_retries")
        free, total = torch.cuda.mem_get_info()
        found["beside_torch_bytes"] = total - free - torch.cuda.memory_reserved() if alone else None
        return found
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train(batches, validation)
    return {"measured_bytes": parameters + most_allocated(profiler), "reserved_bytes": None}


def _library_bytes() -> int | None:
    """What cuBLAS holds of torch's memory."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    clear()
    return before - torch.cuda.memory_allocated()


def with_weights(model: nn.Module, device: str) -> nn.Module:
    """A model that was planned without memory, with some numbers in it."""
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def filled(batch: dict[str, Tensor], length: int, tokens: float | None) -> dict[str, Tensor]:
    """Values for a batch that has only shapes: small tokens, texts of full or of the given length."""
    values = {name: torch.randint(0, 2, item.shape, dtype=item.dtype) for name, item in batch.items()}
    if "lengths" in values:
        values["lengths"].fill_(length)
    if "offsets" in values:
        samples, capacity = len(values["labels"]), len(values["input_ids"])
        each = min(length, int(tokens or length), capacity // samples)
        borders = torch.arange(samples + 1) * each
        tail = borders[-1] + length * torch.arange(1, len(values["offsets"]) - samples)
        values["offsets"] = torch.cat([borders, tail.clamp(max=capacity)]).int()
        values["positions"] = torch.arange(capacity) % each
    return values


def most_allocated(profiler: Any) -> int:
    """The largest sum of allocations less releases, from the profiler's events."""
    found: list[tuple[int, int]] = []

    def walk(events: Any) -> None:
        for event in events:
            if event.tag.name == "Allocation":
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    held = most = 0
    for _, size in sorted(found, key=lambda item: item[0]):
        held += size
        most = max(most, held)
    return most


def may_start(needs: int, running: list[int], memory_bytes: int, most: int = MOST_AT_ONCE) -> bool:
    """Whether a training that needs so much may begin beside those that run; whoever needs much runs alone."""
    return not running or (len(running) < most and sum(running) + needs <= TOGETHER * memory_bytes)


class Bench:
    """Plans and measures the cases; the rows are complete at any time.

    Args:
        cases: What is asked for.
        device: cuda or cpu.
        memory_bytes: Of the device.
        budget_s: When it is spent, what has not begun is left out and what runs is stopped.
        save: Called with all rows whenever one is added.
    """

    def __init__(self, cases: tuple[Case, ...], device: str, memory_bytes: int, budget_s: float, save: Any) -> None:
        self._cases = cases
        self._device = device
        self._memory_bytes = memory_bytes
        self._until = monotonic() + budget_s
        self._save = save
        self._to_plan = list(cases)
        self._planning: list[tuple[Case, Job]] = []
        self._ready: list[tuple[dict[str, Any], bool]] = []  # the plan, and whether it must run alone
        self._running: list[tuple[dict[str, Any], bool, int, Job]] = []
        self.rows: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Until all is done or the time is up; leaves no process behind."""
        try:
            while (self._to_plan or self._planning or self._ready or self._running) and monotonic() < self._until:
                self._start()
                links = [job.link for _, job in self._planning] + [item[-1].link for item in self._running]
                multiprocessing.connection.wait(links, timeout=0.2)
                self._collect()
        finally:
            for job in [job for _, job in self._planning] + [item[-1] for item in self._running]:
                job.end()
            for case in self._cases:
                if case.name not in self.rows:
                    self._add(case, {"failed": "there was no time left for it"})

    def _start(self) -> None:
        while self._to_plan and len(self._planning) < max(1, (os.cpu_count() or 2) // 2):
            case = self._to_plan.pop(0)
            job = Job(case.name, plan, (case, self._device, self._memory_bytes), DEADLINE_S)
            self._planning.append((case, job))
        # Large ones later: while they run alone, nothing else can.
        self._ready.sort(key=lambda item: (item[1], item[0]["plan"]["total"]))
        for item in list(self._ready):
            planned, alone = item
            needs = planned["plan"]["total"] + BESIDE_BYTES
            running = [other[2] for other in self._running]
            if (alone and running) or any(other[1] for other in self._running):
                continue
            # CPU cases are counted by the profiler of each process too, but the processors are few.
            if may_start(needs, running, self._memory_bytes, MOST_AT_ONCE if self._device == "cuda" else 1):
                self._ready.remove(item)
                left_s = min(DEADLINE_S, self._until - monotonic())
                tell_progress(f"{planned['case'].name}: {needs / 2**30:.1f} GiB planned, beside {len(running)}")
                alone = alone or needs > TOGETHER * self._memory_bytes
                job = Job(planned["case"].name, train, (planned["case"], self._device, alone), left_s)
                self._running.append((planned, alone, needs, job))

    def _collect(self) -> None:
        for case, job in list(self._planning):
            outcome = job.poll()
            if outcome is not None:
                self._planning.remove((case, job))
                if outcome[0]:
                    self._ready.append((outcome[1], False))
                else:
                    self._add(case, {"failed": f"not planned: {outcome[1]}"})
        for item in list(self._running):
            planned, alone, _, job = item
            outcome = job.poll()
            if outcome is None:
                continue
            beside = len(self._running) - 1
            self._running.remove(item)
            if not outcome[0] and "OutOfMemory" in str(outcome[1]) and not alone:
                tell_progress(f"{planned['case'].name}: out of memory, once more alone")
                self._ready.append((planned, True))
                continue
            known = {name: value for name, value in planned.items() if name != "case"}
            result = dict(outcome[1]) if outcome[0] else {"failed": outcome[1]}
            self._add(planned["case"], {**known, **result, "ran_alone": alone or not beside})

    def _add(self, case: Case, found: dict[str, Any]) -> None:
        row = {"name": case.name, "config": case.config, "overrides": list(case.overrides), "judged": case.judged}
        row.update(found)
        if "measured_bytes" in row:
            row["error"] = row["planned_bytes"] / row["measured_bytes"] - 1
            tell_progress(f"{case.name}: {row['error']:+.1%}")
        elif "failed" in row:
            tell_progress(f"{case.name}: {row['failed']}")
        self.rows[case.name] = row
        self._save(self.rows)


def in_order(rows: dict[str, dict[str, Any]], cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Rows as the cases stand above, others behind."""
    names = [case.name for case in cases]
    return sorted(rows.values(), key=lambda row: names.index(row["name"]) if row["name"] in names else len(names))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the rows that count."""
    errors = [abs(row["error"]) for row in rows if "error" in row and row.get("judged", True)]
    return {
        "cases": rows,
        "measured": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": max(errors, default=None),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and how the goals were met."""
    cells = []
    for row in rows:
        if "error" not in row:
            cells.append((row["name"], _gib(row.get("planned_bytes")), row["failed"][:100], "", "", "", ""))
            continue
        parts = row.get("peak_bytes_by_part") or {}
        cells.append(
            (
                row["name"] if row.get("judged", True) else f"({row['name']})",
                _gib(row["planned_bytes"]),
                _gib(row["measured_bytes"]),
                f"{row['error']:+.1%}",
                _gib(row["reserved_bytes"]),
                max(parts, key=parts.__getitem__) if parts else "-",
                _gib(row["weights_only_bytes"]),
            )
        )
    print(table(("setting", "planned", "measured", "error", "reserved", "peak in", "weights only"), cells))
    found = summary(rows)
    if found["measured"]:
        print(
            f"\n{found['measured']} settings: median error {found['median_error']:.1%} (goal {MEDIAN_GOAL:.0%}), "
            f"largest {found['largest_error']:.1%} (goal {WORST_GOAL:.0%}); names in brackets are not counted"
        )


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", help="cases whose name holds one of these words, comma between")
    parser.add_argument("--budget-s", type=float, default=540.0, help="longest it may take (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave what an earlier call has measured as it is")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs small sizes")
    device = torch.device(arguments.device)
    cases = all_cases = CASES if arguments.device == "cuda" else SMALL
    if arguments.only:
        cases = tuple(item for item in cases if any(word in item.name for word in arguments.only.split(",")))
    earlier: dict[str, dict[str, Any]] = {}
    path = arguments.out / f"memory_plan-{device_word(device)}.json"
    if arguments.keep and path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))["results"]["cases"]
        earlier = {row["name"]: row for row in stored if "error" in row}
        cases = tuple(item for item in cases if item.name not in earlier)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if arguments.device == "cuda" else 2**34
    goals = {"median": MEDIAN_GOAL, "largest": WORST_GOAL}
    settings = {"steps": STEPS, "deadline_s": DEADLINE_S, "goals": goals, "memory_bytes": memory_bytes}

    def save(rows: dict[str, dict[str, Any]]) -> None:
        write_results("memory_plan", device, settings, summary(in_order({**earlier, **rows}, all_cases)), arguments.out)

    bench = Bench(cases, arguments.device, memory_bytes, arguments.budget_s, save)
    end_on_term()
    try:
        bench.run()
    except KeyboardInterrupt:
        tell_progress("stopped")
    show(in_order({**earlier, **bench.rows}, all_cases))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
