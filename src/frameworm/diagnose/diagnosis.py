"""The verdict on a stored run, as `frameworm diagnose` and `frameworm.api.diagnose` give it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from frameworm.records.schema import RunRecord

_TOLD = ("run_dir", "status", "steps", "unseen", "verdict", "findings", "notes", "roofline")


@dataclass(slots=True, repr=False)
class Diagnosis(RunRecord):
    """The record of a run, judged by the current rules: `verdict` costs the most, `findings` say what to do.

    `to_dict` gives the judgement alone; all other attributes are those of the run.
    """

    @classmethod
    def of(cls, record: RunRecord) -> Diagnosis:
        """A record that has been judged."""
        return cls(**{item.name: getattr(record, item.name) for item in dataclasses.fields(record)})

    def in_words(self) -> list[str]:
        """The verdict, then every finding with its first remedy."""
        lines = [f"Diagnosis: {self.name} ({self.status}, {self.steps:,} steps) is {self.why}"]
        for item in self.findings:
            share = "" if item.share is None else f" ({item.share:.0%} of the step)"
            remedy = f": {item.remedies[0].text}" if item.remedies else ""
            lines.append(f"{item.code}{share}{remedy}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Verdict and findings as JSON-ready data."""
        data = RunRecord.to_dict(self)
        return {name: data[name] for name in _TOLD}
