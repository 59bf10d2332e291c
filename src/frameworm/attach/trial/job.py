"""What a trial is to do, as plain data that crosses to its process. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["time", "lead", "follow"]


@dataclass(frozen=True)
class TrialJob:
    """One run of a script.

    Attributes:
        script: The Python file.
        arguments: What follows it.
        module: The name that it has as a module, where it runs as with `python -m`.
        source: What to run in its place, under its name; None: what it holds.
        switches: What is set, as `Switches.to_dict` gives it.
        options: By class of a framework, the options that its objects get, as `through_options` divides them.
        role: time: stand and go by the step, as told. lead: write down states and what steps give from there. follow:
            take these over and write down what one's own steps give.
        folder: Where states lie, and where a process writes what it computed.
        name: Of what it writes.
        steps: At which steps states are compared.
        perturbed: follow: move the parameters by at most one unit of rounding, drawn by this number; 0: do not.
        draws: follow: at the first of the steps call the model so often, with random draws as in training; 0: compare
            steps without dropout.
        unit: That unit, of the precision that the script computes in.
        isolated: In namespaces of its own, where nothing that is written stays.
        ranks: Variables in which each of several processes differs from the tuner; empty: it is one process.
        spawned: The script itself starts that many processes; they are known by their rank in its process group.
        port: Where these meet.
        commands: Numbers of the files that tell each process what to do.
        reports: Numbers of the files to report to.
        logs: Numbers of the files that take what each of several processes prints.
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
        """Where one of its processes writes."""
        return Path(self.folder, f"rank{rank}") if self.ranks else Path(self.folder)

    def write(self, path: Path) -> None:
        """For the process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrialJob:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
