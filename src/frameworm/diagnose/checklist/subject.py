"""What the checklist is about: a config on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from frameworm.config.schema import Config
from frameworm.records.machine import ChecklistItem, Intent, MachineFacts, PlanFacts


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        config: As the user wrote it.
        resolved: With every `auto` decided.
        facts: The machine.
        intent: How many processes.
        plan: The memory plan; None: nobody could make one.
    """

    config: Config
    resolved: Config
    facts: MachineFacts
    intent: Intent
    plan: PlanFacts | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether training runs on a GPU."""
        return self.resolved.gpu.device == "cuda"

    @property
    def capability(self) -> float | None:
        """Of the first GPU."""
        return self.facts.gpus[0].capability if self.facts.gpus else None


def no_matter(name: str, reason: str) -> ChecklistItem:
    """An item that does not apply, and why."""
    return ChecklistItem(name, "does not apply", reason)
