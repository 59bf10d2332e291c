"""What a trial is to do, as plain data that is passed to its process. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["time", "lead", "follow"]


@dataclass(frozen=True)
class ScriptJob:
    """One run of a script.

    Attributes:
        script: The Python file.
        arguments: Its command-line arguments.
        module: Its module name, to run it as with `python -m`.
        source: Source code to run in place of the file's; None for the file's own.
        switches: The switches to set, from `Switches.to_dict`.
        options: Options to set by framework class, from `through_options`.
        role: time: pause and continue between steps on command. lead: save states and the results of steps from them.
            follow: load these states and save the results of its own steps.
        folder: Where states are, and where a process writes its results.
        name: Name of its results.
        steps: Steps at which states are compared.
        perturbed: follow: seed for moving the parameters by at most one unit roundoff; 0 for not moving them.
        draws: follow: number of calls of the model, with random draws as in training, at the first of the steps; 0 to
            compare steps without dropout.
        unit: Unit roundoff of the script's precision.
        isolated: Whether to run in separate namespaces, where no write persists.
        ranks: Per process, the environment variables that differ from the tuner's; empty for one process.
        spawned: Whether the script itself starts that many processes; they are identified by their rank in its process
            group.
        port: Port of their rendezvous.
        commands: File descriptors from which each process reads commands.
        reports: File descriptors for reports.
        logs: File descriptors for the output of each of several processes.
    """

    script: str
    arguments: list[str]
    module: str | None = None
    source: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    role: Role = "time"
    folder: str = ""
    name: str = ""
    steps: list[int] = field(default_factory=list)
    perturbed: int = 0
    draws: int = 0
    unit: float = 2.0**-24
    isolated: bool = True
    ranks: list[dict[str, str | None]] = field(default_factory=list)
    spawned: bool = False
    port: int = 0
    commands: list[int] = field(default_factory=list)
    reports: list[int] = field(default_factory=list)
    logs: list[int] = field(default_factory=list)

    def folder_of(self, rank: int) -> Path:
        """Return the folder where one of its processes writes."""
        return Path(self.folder, f"rank{rank}") if self.ranks else Path(self.folder)

    def write(self, path: Path) -> None:
        """Write it for the process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptJob:
        """Read it back."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
