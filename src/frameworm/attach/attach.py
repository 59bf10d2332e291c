"""Observes a training script that knows nothing of frameworm.

torch is made to report what the script does with it (`hooks`), a finder tells steps and phases apart
(`steps`), and what comes of it is written to a run folder while the script goes on. Results, output and exit
code are the script's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameworm.attach.ranks import SharedFolder, who_am_i
from frameworm.attach.record import Surroundings, judge_record, record_of
from frameworm.attach.script import AfterImport, Ending, check_script, run_script
from frameworm.errors import FramewormError, RunFolderError
from frameworm.records.schema import Memory, RunRecord
from frameworm.records.writer import JsonLinesWriter

if TYPE_CHECKING:
    from frameworm.attach.patches import Patches
    from frameworm.attach.watch import Watch
    from frameworm.observe.clocks.windows import TraceWindow
    from frameworm.observe.system.sampler import SystemSampler

SYSTEM_INTERVAL_S = 1.0


class Attachment:
    """One script under observation.

    Args:
        script: The Python file.
        out: Run folder; runs/profile-<script>-<time> unless given.
        steps: Observe no more than so many steps.
        nvtx: Name the phases for Nsight Systems.
        trace: Record a few steps with torch.profiler too.
        schedule: When to record: steps to wait, to warm up and to record, and how often; the usual ones unless given.
        operators: Operators in each list of the trace's summary.

    Raises:
        EnvironmentSetupError: There is no such script.
        RunFolderError: The folder cannot be used.
    """

    def __init__(
        self,
        script: Path,
        *,
        out: Path | None = None,
        steps: int | None = None,
        nvtx: bool = False,
        trace: bool = False,
        schedule: Sequence[int] = (),
        operators: int | None = None,
    ) -> None:
        check_script(script)
        self.process, note = who_am_i()
        self._name = f"profile-{script.stem}"
        self._script = str(script.absolute())
        self._shared = SharedFolder(self.process, out, self._name)
        self._steps = steps
        self._nvtx = nvtx
        self._trace = trace
        self._schedule = schedule
        self._operators = operators
        self._notes: list[str] = [] if note is None else [note]
        self._status = "failed"
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._begin_s = time.monotonic()
        self._wall_s: float | None = None
        self._pid = os.getpid()
        self._finder = AfterImport("torch", self._attach)
        self._later: list[AfterImport] = []
        self._watch: Watch | None = None
        self._patches: Patches | None = None
        self._writer: JsonLinesWriter | None = None
        self._sampler: SystemSampler | None = None
        self._window: TraceWindow | None = None

    def run(self, script: Path, arguments: Sequence[str]) -> Ending:
        """Run the script to its end; `finish` is to be called when the process has nothing more to do."""
        self._begin_s = time.monotonic()
        self._finder.arm()
        ending = run_script(script, arguments)
        self._wall_s = time.monotonic() - self._begin_s
        self._status = ending.status
        return ending

    def finish(self) -> RunRecord | None:
        """Stop observing and write the summary; the record on rank 0, None elsewhere and in forked children."""
        if os.getpid() != self._pid:
            return None
        for finder in (self._finder, *self._later):
            finder.disarm()
        self._detach()
        shared = self._shared
        if self.process.rank > 0:
            shared.done()
            return None
        missing = shared.wait_for_ranks(2.0 if self._status == "failed" else 10.0)
        if missing:
            self._notes.append(f"rank {', '.join(map(str, missing))} had not ended yet when the summary was written")
        folder = shared.find()
        record, series = record_of(folder, self._around())
        judge_record(record, folder)
        try:
            from frameworm.report.run.html import render_html
            from frameworm.report.run.text import render_text

            folder.write_report(render_html(record, series))
            folder.write_summary(record, render_text(record))
        except FramewormError as error:
            record.notes.append(str(error))
        return record

    def _attach(self) -> None:
        """The script has imported torch: begin to watch. Nothing that fails here may reach the script."""
        try:
            from frameworm.attach.hooks import install
            from frameworm.attach.libraries import watch_libraries
            from frameworm.attach.watch import Watch

            folder = self._shared.find()
            self._writer = JsonLinesWriter(folder.steps(self.process.rank))
            self._watch = Watch(self._writer.write, self._steps, self._nvtx, self._after_step)
            self._patches = install(self._watch)
            self._later = watch_libraries(self._patches, self._watch)
        except Exception as error:
            self._give_up(error)

    def _after_step(self, number: int) -> None:
        """Called by the watch, which takes care of errors."""
        assert self._watch is not None
        if number == 1:
            # Only now is it known which device the script uses, and that nobody else has to wake it.
            self._begin_sampling()
            self._begin_looking()
            if self._trace:
                self._prepare_window()
        if self._window is not None and self._window.after_step():
            self._watch.skip_time()
            if self._window.running:
                self._watch.left_out.add(number + 1)

    def _begin_sampling(self) -> None:
        from frameworm.observe.system.sampler import SystemSampler

        watch = self._watch
        assert watch is not None
        self._sampler = SystemSampler(
            watch.facts.get("device", "cpu"),
            SYSTEM_INTERVAL_S,
            self._shared.find().path / f"system-rank{self.process.rank}.jsonl",
            whole_machine=self.process.local_rank == 0,
            steps_done=lambda: watch.steps,
        )
        self._sampler.start()

    def _begin_looking(self) -> None:
        from frameworm.attach.samples import Looks

        watch = self._watch
        assert watch is not None
        # The record tells of one script, and rank 0 writes it.
        if self.process.rank == 0:
            watch.looks = Looks(self._script, lambda: watch.active, watch.is_between)
            watch.looks.start()

    def _prepare_window(self) -> None:
        import torch

        from frameworm.observe.clocks.windows import Schedule, TraceWindow
        from frameworm.observe.trace.host import TOP

        assert self._watch is not None
        device = torch.device(self._watch.facts.get("device", "cpu"))
        schedule = Schedule(*self._schedule)
        self._window = TraceWindow(device, self.process.rank, self._steps, schedule, self._operators or TOP)
        self._window.folder = self._shared.find().path

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
            if self._watch.looks is not None:
                self._watch.looks.stop()
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
            if "torch" not in sys.modules:
                self._notes.append("the script has not imported torch")
            return around
        around.facts = self._watch.facts
        with contextlib.suppress(Exception):
            if self._sampler is not None:
                around.system = self._sampler.stop()
        with contextlib.suppress(Exception):
            # Asking imports the compiler: only where the script has done so.
            if "torch._dynamo.utils" in sys.modules:
                from frameworm.observe.clocks.compiling import compilation_since

                compilation = compilation_since()
                around.compilation = compilation if compilation.time_s else None
        with contextlib.suppress(Exception):
            if self._watch.looks is not None:
                around.other_time = self._watch.looks.summary()
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
