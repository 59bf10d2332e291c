"""Starts processes of one script, and knows how many of them fit side by side."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

from frameworm.attach.trial.job import Role, ScriptJob
from frameworm.attach.trial.switches import Switches, through_options
from frameworm.guard.agreement import ROUNDING_UNITS
from frameworm.hardware.host import usable_cpus
from frameworm.tune.processes.process_tree import free_port
from frameworm.tune.scripts.process import ScriptProcess
from frameworm.tune.scripts.result import ScriptResult

# Processes run side by side if they need less than these fractions of memory. Each has parameters, gradients and two
# optimizer states, and as much again for copies.
_COPIES_BYTES, _HOST_SHARE, _DEVICE_SHARE = 32, 0.5, 0.8
_CONTEXT_SHARE = 0.01
_PORT = 29400


class ScriptTrials:
    """The processes of a search.

    Args:
        script: The Python file.
        arguments: The script's arguments.
        place: Folder for what they write; its content is deleted first.
        ends: Time of `time.monotonic` at which a process counts as hung.
        result: Holds the facts about the script, and counts the trials.
        module: Module name, if it runs as with `python -m`.
        ranks: See `ScriptJob`.

    Attributes:
        folders: Where processes write, one folder per rank.
        total: Steps of the script, once it has reached its end.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        place: Path,
        ends: float,
        result: ScriptResult,
        *,
        module: str | None = None,
        ranks: Sequence[dict[str, str | None]] = (),
    ) -> None:
        self._script, self._arguments, self._module = script, list(arguments), module
        self._place, self._ends, self._ranks = place, ends, list(ranks)
        self._spawned = 0
        self._result = result
        self.total: int | None = None
        self.folders = [place]
        self.remove()
        self._make_folders()

    def follow_spawned(self, world_size: int) -> None:
        """The script itself starts `world_size` processes, which train together."""
        self._ranks, self._spawned = [{}] * world_size, world_size
        self._make_folders()

    def run_as_module(self, name: str | None) -> None:
        """Run the script under this module name, as with `python -m`; None: as a file."""
        self._module = name

    def _make_folders(self) -> None:
        self.folders = [self._place / f"rank{rank}" for rank in range(len(self._ranks))] or [self._place]
        for path in self.folders:
            path.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        switches: Switches,
        name: str,
        role: Role = "time",
        steps: Sequence[int] = (),
        perturbed: int = 0,
        source: str | None = None,
        draws: int = 0,
    ) -> ScriptProcess:
        """Start one process; see `ScriptJob`."""
        facts = self._result.facts
        self._result.trials += 1
        in_torch, options = through_options(switches, facts)
        job = ScriptJob(
            str(self._script.absolute()),
            self._arguments,
            module=self._module,
            source=source,
            switches=in_torch.to_dict(),
            options=options,
            role=role,
            folder=str(self._place.absolute()),
            name=name,
            steps=list(steps),
            perturbed=perturbed,
            draws=draws,
            unit=self.unit(Switches()) if facts else ROUNDING_UNITS["fp32"],
            isolated=self._result.isolated,
            ranks=self._ranks,
            spawned=self._spawned > 0,
            # Isolated trials have their own network, in which every port is free.
            port=(_PORT if self._result.isolated else free_port()) if self._ranks else 0,
        )
        return ScriptProcess(job, self._place / "processes", self._ends)

    def unit(self, switches: Switches) -> float:
        """Rounding unit of the precision in which the script computes."""
        facts = self._result.facts
        if facts["half"] or switches.autocast != "off":
            return ROUNDING_UNITS["bf16"]
        return ROUNDING_UNITS["tf32" if facts["device"] == "cuda" and (facts["tf32"] or switches.tf32) else "fp32"]

    def draws_differently(self, switches: Switches) -> bool:
        """Whether other kernels than the script's may draw its random numbers; not checked for several processes."""
        return switches.compiles and bool(self._result.facts["draws"]) and not self._ranks

    def options_of(self, switches: Switches) -> str:
        """The switches that are set through the script's framework, as text to compare."""
        return repr(through_options(switches, self._result.facts))

    def fit_together(self, count: int) -> bool:
        """Whether `count` processes of the script fit into memory."""
        facts = self._result.facts
        host_bytes = _COPIES_BYTES * facts["parameters"] * count * len(self.folders)
        device_share = count * ((facts.get("device_memory_share") or 0.0) + _CONTEXT_SHARE)
        return host_bytes < _HOST_SHARE * psutil.virtual_memory().available and device_share < _DEVICE_SHARE

    def can_overlap(self, count: int) -> bool:
        """Whether `count` processes start side by side as quickly as one alone."""
        return count * len(self.folders) <= usable_cpus() and self.fit_together(count)

    def remove(self) -> None:
        """Delete what the processes wrote."""
        shutil.rmtree(self._place, ignore_errors=True)
