"""Observe a training script that knows nothing of frameworm.

torch is hooked to report what the script does with it (`hooks`), a finder identifies steps and phases (`steps`), and
the result is written to a run folder while the script runs. Results, output and exit code are the script's own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameworm.attach.children import Children, around_bootstrap
from frameworm.attach.ranks import SharedFolder, who_am_i
from frameworm.attach.record import Surroundings, judge_record, leave_surroundings, record_of, take_surroundings
from frameworm.attach.script import AfterImport, Ending, check_script, run_script
from frameworm.errors import FramewormError, RunFolderError
from frameworm.launch.environment import ProcessInfo
from frameworm.records.schema import Memory, RunRecord, StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import JsonLinesWriter
from frameworm.torch_private.names import COMPILER_STATISTICS

if TYPE_CHECKING:
    from frameworm.attach.patches import Patches
    from frameworm.attach.watch import Watch
    from frameworm.observe.clocks.windows import TraceWindow
    from frameworm.observe.system.sampler import SystemSampler

SYSTEM_INTERVAL_S = 1.0


class Observer(ABC):
    """Observes the training in one process.

    Args:
        script: The Python file.
        process: This process's place among the ranks.
        steps: The most steps to observe; None for no limit.
        nvtx: Whether to emit NVTX ranges for the phases (Nsight Systems).
        trace: Whether to record a few steps with torch.profiler.
        schedule: When to record: steps to wait, warm up and record, and how often; empty for the defaults.
        operators: Number of operators in each list of the trace's summary.
    """

    def __init__(
        self,
        script: Path,
        process: ProcessInfo,
        *,
        steps: int | None = None,
        nvtx: bool = False,
        trace: bool = False,
        schedule: Sequence[int] = (),
        operators: int | None = None,
    ) -> None:
        self.process = process
        self._name = f"profile-{script.stem}"
        self._script = str(script.absolute())
        self._steps = steps
        self._nvtx = nvtx
        self._trace = trace
        self._schedule = schedule
        self._operators = operators
        self._notes: list[str] = []
        self._status = "failed"
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._wall_s: float | None = None
        self._pid = os.getpid()
        self._finder = AfterImport("torch", self._attach)
        self._later: list[AfterImport] = []
        self._children: Children | None = None
        self._watch: Watch | None = None
        self._patches: Patches | None = None
        self._writer: JsonLinesWriter | None = None
        self._sampler: SystemSampler | None = None
        self._window: TraceWindow | None = None

    @abstractmethod
    def folder(self) -> RunFolder:
        """Return the run folder, waiting for it if needed."""

    def follow_children(self) -> None:
        """Observe the processes that this one starts, unless it has trained itself."""
        settings = {
            "script": self._script,
            "folder": str(self.folder().path),
            "steps": self._steps,
            "nvtx": self._nvtx,
            "trace": self._trace,
            "schedule": list(self._schedule),
            "operators": self._operators,
        }

        def may_train() -> bool:
            return self._watch is None or (self._watch.steps == 0 and not self._watch.is_loading)

        def begin() -> Callable[[int], None]:
            self._disarm()
            child = Child.begin(settings)
            return lambda code: child.finish()

        self._children = Children(__name__, settings, may_train, begin)
        self._children.arm()

    def _disarm(self) -> None:
        for finder in (self._finder, *self._later):
            finder.disarm()

    def _attach(self) -> None:
        """Begin to watch once the script has imported torch; errors must not reach the script."""
        try:
            from frameworm.attach.framework import Loops
            from frameworm.attach.hooks import install
            from frameworm.attach.libraries import watch_libraries
            from frameworm.attach.watch import Watch

            self.folder()
            self._watch = Watch(self._write, self._steps, self._nvtx, self._after_step)
            self._patches = install(self._watch)
            self._watch.loops = Loops(self._script)
            self._later = watch_libraries(self._patches, self._watch)
            self._later += self._watch.loops.watch(self._patches, self._watch.notes.append)
        except Exception as error:
            self._give_up(error)

    def _after_step(self, number: int) -> None:
        """Called by the watch after each step; the watch handles errors."""
        assert self._watch is not None
        if number == 1:
            self._claim_rank()
        if number == 1 and self._watch.active:
            # Only now is the script's device known and certain to be initialized.
            self._begin_sampling()
            self._begin_looking()
            if self._trace:
                self._prepare_window()
        if self._window is not None and self._window.after_step():
            self._watch.skip_time()
            if self._window.running:
                self._watch.left_out.add(number + 1)

    def _claim_rank(self) -> None:
        """Create this rank's file; stop observing if another process already has it."""
        assert self._watch is not None
        path = self.folder().steps(self.process.rank)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            self._watch.stop()
            (path.parent / f".left-out-{self._pid}").touch()
            return
        self._writer = JsonLinesWriter(path)

    def _write(self, step: StepRecord) -> None:
        if self._writer is not None:
            self._writer.write(step)

    def _begin_sampling(self) -> None:
        from frameworm.observe.system.sampler import SystemSampler

        watch = self._watch
        assert watch is not None
        self._sampler = SystemSampler(
            watch.facts.get("device", "cpu"),
            SYSTEM_INTERVAL_S,
            self.folder().path / f"system-rank{self.process.rank}.jsonl",
            whole_machine=self.process.local_rank == 0,
            steps_done=lambda: watch.steps,
        )
        self._sampler.start()

    def _begin_looking(self) -> None:
        from frameworm.attach.samples import StackSamples

        watch = self._watch
        assert watch is not None
        # Rank 0 writes the record, so only it samples.
        if self.process.rank == 0:
            watch.stack_samples = StackSamples(self._script, lambda: watch.active, watch.is_between)
            watch.stack_samples.start()

    def _prepare_window(self) -> None:
        import torch

        from frameworm.observe.clocks.windows import Schedule, TraceWindow
        from frameworm.observe.trace.host import TOP

        assert self._watch is not None
        device = torch.device(self._watch.facts.get("device", "cpu"))
        schedule = Schedule(*self._schedule)
        self._window = TraceWindow(device, self.process.rank, self._steps, schedule, self._operators or TOP)
        self._window.folder = self.folder().path

    def _give_up(self, error: Exception) -> None:
        self._notes.append(f"the script was not observed: {type(error).__name__}: {error}")
        if self._watch is not None:
            self._watch.stop()
        if self.process.rank > 0 or isinstance(error, RunFolderError):
            print(f"frameworm: rank {self.process.rank}: {self._notes[-1]}", file=sys.stderr)

    def _detach(self) -> None:
        if self._window is not None:
            self._window.close()
        if self._watch is not None:
            if self._watch.stack_samples is not None:
                self._watch.stack_samples.stop()
            self._watch.finish()
            self._watch.facts["steps"] = self._watch.steps
            self._notes += self._watch.notes
        if self._patches is not None:
            self._patches.remove()
        if self._writer is not None:
            self._writer.close()
            if self._writer.lost:
                lost = f"{self._writer.lost} step records of rank {self.process.rank} were lost"
                self._notes.append(f"{lost}: {self._writer.problem or 'queue full'}")

    def _around(self) -> Surroundings:
        around = Surroundings(
            name=self._name,
            status=self._status,
            world_size=self.process.world_size,
            started=self._started,
            wall_s=self._wall_s,
            notes=self._notes,
        )
        if self._window is not None and self._window.note is not None:
            self._notes.append(f"{self._window.note}; the figures here leave them out")
        if self._watch is None:
            return around
        around.facts = self._watch.facts
        with contextlib.suppress(Exception):
            if self._sampler is not None:
                around.system = self._sampler.stop()
        with contextlib.suppress(Exception):
            # This imports the compiler, so only if the script has done so.
            if COMPILER_STATISTICS in sys.modules:
                from frameworm.observe.clocks.compiling import compilation_since

                compilation = compilation_since()
                around.compilation = compilation if compilation.time_s else None
        with contextlib.suppress(Exception):
            if self._watch.stack_samples is not None:
                around.other_time = self._watch.stack_samples.summary()
        self._measure(around, self._watch.facts)
        return around

    def _measure(self, around: Surroundings, facts: dict[str, Any]) -> None:
        import torch

        from frameworm.hardware.fingerprint import environment_fingerprint
        from frameworm.hardware.host import host_peak_bytes, memory_total_bytes

        device = torch.device(facts.get("device", "cpu"))
        on_gpu = device.type == "cuda"
        facts["device_name"] = torch.cuda.get_device_name(device) if on_gpu else "CPU"
        around.environment = environment_fingerprint(device)
        if "num_workers" in facts:
            around.environment["num_workers"] = facts["num_workers"]
        host_bytes = host_peak_bytes()
        around.memory = Memory(host_bytes, None, memory_total_bytes(), host_bytes)
        if on_gpu:
            around.memory = Memory(
                peak_bytes=torch.cuda.max_memory_allocated(device),
                reserved_bytes=torch.cuda.max_memory_reserved(device),
                total_bytes=torch.cuda.get_device_properties(device).total_memory,
                host_peak_bytes=host_bytes,
            )


class Attachment(Observer):
    """One script under observation, in the process that runs it.

    Args:
        script: The Python file.
        out: Run folder; None for runs/profile-<script>-<time>.
        settings: As for `Observer`.

    Raises:
        EnvironmentSetupError: If there is no such script.
        RunFolderError: If the folder cannot be used.
    """

    def __init__(self, script: Path, *, out: Path | None = None, **settings: Any) -> None:
        check_script(script)
        process, note = who_am_i()
        super().__init__(script, process, **settings)
        self._shared = SharedFolder(process, out, self._name)
        self._notes += [] if note is None else [note]
        self._command = f"frameworm profile {script}"
        self._begin_s = time.monotonic()

    def folder(self) -> RunFolder:
        """Return the run folder, which rank 0 creates."""
        return self._shared.find()

    def run(self, script: Path, arguments: Sequence[str]) -> Ending:
        """Run the script to its end; call `finish` when the process has nothing more to do."""
        self._begin_s = time.monotonic()
        self._command = shlex.join(["frameworm", "profile", str(script), *arguments])
        self._finder.arm()
        if self.process.world_size == 1:
            self.follow_children()
        ending = run_script(script, arguments)
        self._status = ending.status
        return ending

    def finish(self) -> RunRecord | None:
        """Stop observing and write the summary; return the record on rank 0, None elsewhere and in forked children."""
        if os.getpid() != self._pid:
            return None
        self._disarm()
        if self._children is not None:
            self._children.disarm()
            self._children.join()
        self._wall_s = time.monotonic() - self._begin_s
        self._detach()
        shared = self._shared
        if self.process.rank > 0:
            shared.done()
            return None
        missing = shared.wait_for_ranks(2.0 if self._status == "failed" else 10.0)
        if missing:
            self._notes.append(f"rank {', '.join(map(str, missing))} had not ended yet when the summary was written")
        folder = shared.find()
        record, series = record_of(folder, self._around_all(folder))
        judge_record(record, folder)
        try:
            from frameworm.report.run.html import render_html
            from frameworm.report.run.text import render_text

            folder.write_report(render_html(record, series))
            folder.write_summary(record, render_text(record))
        except FramewormError as error:
            record.notes.append(str(error))
        return record

    def _around_all(self, folder: RunFolder) -> Surroundings:
        """Return the surroundings of the process that trained, which may be a child of this one."""
        around = self._around()
        left = take_surroundings(folder)
        left_out = list(folder.path.glob(".left-out-*"))
        if left_out:
            self._notes.append(
                f"{len(left_out)} more process{'es' * (len(left_out) > 1)} trained, apart from those observed; the "
                "figures leave them out"
            )
        for path in left_out:
            path.unlink(missing_ok=True)
        if self._watch is not None and self._watch.steps:
            return around
        if left is not None:
            notes = [*self._notes, *left.notes]
            return replace(left, status=self._status, started=self._started, wall_s=self._wall_s, notes=notes)
        if not folder.step_files():
            if "torch" not in sys.modules:
                self._notes.append("the script has not imported torch")
            self._notes.append(
                "no training step was seen, here or in processes started with multiprocessing; if the script starts "
                "its ranks in another way, let torchrun start them: torchrun --nproc-per-node N --no-python "
                + self._command
            )
        return around


class Child(Observer):
    """A process that the observed script started with multiprocessing.

    Its rank, that of its process group, is known once it trains. Without a group, the first child to train is observed.
    """

    def __init__(self, folder: RunFolder, script: Path, **settings: Any) -> None:
        super().__init__(script, ProcessInfo(), **settings)
        self._folder = folder

    @classmethod
    def begin(cls, settings: Mapping[str, Any]) -> Child:
        """Start observing this process with its parent's settings."""
        given = dict(settings)
        child = cls(RunFolder(given.pop("folder")), Path(given.pop("script")), **given)
        child._finder.arm()
        child.follow_children()
        return child

    def folder(self) -> RunFolder:
        """Return the parent's run folder."""
        return self._folder

    def end_with_process(self) -> None:
        """Finish when multiprocessing has run this process's target."""
        around_bootstrap(lambda process: (lambda code: self.finish()) if os.getpid() == self._pid else None)

    def finish(self) -> None:
        """Stop observing, and store for the parent what it cannot see from outside."""
        self._disarm()
        if self._children is not None:
            self._children.disarm()
        self._detach()
        if self._watch is not None and self._writer is not None:
            leave_surroundings(self._folder, self.process.rank, self._around())

    def _claim_rank(self) -> None:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self.process = ProcessInfo(rank, rank, world_size, world_size, launcher="spawn")
        super()._claim_rank()


def begin_child(settings: Mapping[str, Any], files: Sequence[int]) -> None:
    """Observe this process, which the script has started, until it ends."""
    Child.begin(settings).end_with_process()
