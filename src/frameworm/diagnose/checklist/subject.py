"""The subject of the checklist: a config on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from frameworm.config.schema import Config
from frameworm.records.machine import ChecklistItem, Intent, MachineFacts, PlanFacts


@dataclass(frozen=True)
class Subject:
    """What the checklist is applied to.

    Attributes:
        config: The config as the user wrote it.
        resolved: The config with every `auto` decided.
        facts: The machine.
        intent: The number of processes.
        plan: The memory plan; None if it could not be made.
    """

    config: Config
    resolved: Config
    facts: MachineFacts
    intent: Intent
    plan: PlanFacts | None = None

    @property
    def on_gpu(self) -> bool:
        """True if training runs on a GPU."""
        return self.resolved.gpu.device == "cuda"

    @property
    def capability(self) -> float | None:
        """Compute capability of the first GPU; None if unknown."""
        return self.facts.gpus[0].capability if self.facts.gpus else None


def no_matter(name: str, reason: str) -> ChecklistItem:
    """Return an item that does not apply, with the reason."""
    return ChecklistItem(name, "does not apply", reason)
