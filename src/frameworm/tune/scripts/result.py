"""The result of tuning a script, as reported and as written to files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from frameworm.attach.trial.switches import WORDS, Switches, in_words
from frameworm.guard.gain import Speedup
from frameworm.guard.proof import Proof
from frameworm.report.tune.page import render_tune
from frameworm.tune.scripts.by_hand import lines_by_hand
from frameworm.tune.search.found import REPORT_NAME, Found

Status = Literal["accepted", "rejected", "inconclusive", "failed", "skipped"]
TUNED_NAME, PATCH_NAME = "tuned.yaml", "tuned.patch"


@dataclass
class ScriptAttempt:
    """One change that was tried, or why it was not.

    Attributes:
        changes: Switches and their values.
        status: The outcome.
        reason: Why.
        proof: The proof; None if there was none.
        setup_s: Start-up time of the script with the change, up to its first steps.
    """

    changes: dict[str, Any]
    status: Status
    reason: str
    proof: Proof | None = None
    setup_s: float | None = None

    @property
    def label(self) -> str:
        """The change in a few words."""
        return in_words(self.changes)


@dataclass(repr=False)
class ScriptResult(Found):
    """The result of a search.

    Attributes:
        command: The script and its arguments.
        fingerprint: What the result is valid for.
        isolated: Whether trials were kept from writing anything permanent.
        facts: What is known about the script.
        sample_s: Seconds per sample before; None if no loader reports samples.
        setup_s: Start-up time of the script, up to its first steps.
        disturbed: Fraction of the first trial in which other work used cores that it was waiting for.
        step_s: Seconds per step before; None if unknown.
        total_steps: Steps of the whole script, if a trial has reached its end.
        switches: The accepted switches.
        attempts: Everything that was tried, or why it was not.
        total: The proof of all changes together.
        patch: The changes as a diff of the script, which was run.
        patch_without: Changes that are not in it, and why.
        patch_speedup: Speedup of the patch alone, if changes are missing from it.
        no_patch: Why there is no patch.
        problem: Why nothing could be tuned, if so.
        stopped: Why the search ended.
        trials: Processes of the script that were started.
        spent_s: Duration of the search.
        folder: Folder of `tuned.yaml`, `tuned.patch`, `tune.json` and `report.html`; None: nothing was written.
    """

    command: list[str]
    fingerprint: dict[str, Any]
    isolated: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    sample_s: float | None = None
    setup_s: float | None = None
    disturbed: float = 0.0
    step_s: float | None = None
    total_steps: int | None = None
    switches: Switches = field(default_factory=Switches)
    attempts: list[ScriptAttempt] = field(default_factory=list)
    total: Proof | None = None
    patch: str | None = None
    patch_without: dict[str, str] = field(default_factory=dict)
    patch_speedup: Speedup | None = None
    no_patch: str | None = None
    problem: str | None = None
    stopped: str = ""
    trials: int = 0
    spent_s: float = 0.0
    folder: Path | None = None

    @property
    def tuned_file(self) -> Path | None:
        """The file for `frameworm run --with`; None if nothing was found."""
        return None if self.folder is None or not self.changes else self.folder / TUNED_NAME

    @property
    def patch_file(self) -> Path | None:
        """The file with the changes as a diff of the script; None if there is none."""
        return None if self.folder is None or self.patch is None else self.folder / PATCH_NAME

    def in_words(self) -> list[str]:
        """The speedup, the changes, and the path of the report."""
        changes = [item.label for item in self.accepted]
        if self.tuned_file is not None:
            changes.append(f"to run it: {self.to_dict()['command']}")
        return self.told(self.speedup, self.problem, changes, self.attempts)

    def to_dict(self) -> dict[str, Any]:
        """The content of `tune.json`."""
        return self.to_json(TUNED_NAME if self.folder is None else str(self.folder / TUNED_NAME))

    @property
    def accepted(self) -> list[ScriptAttempt]:
        """The accepted changes."""
        return [item for item in self.attempts if item.status == "accepted"]

    @property
    def speedup(self) -> Speedup | None:
        """The speedup of all changes together."""
        if self.total is not None:
            return self.total.speedup
        return self.accepted[0].proof.speedup if len(self.accepted) == 1 and self.accepted[0].proof else None

    @property
    def changes(self) -> dict[str, Any]:
        """The switches that are on."""
        return self.switches.to_dict()

    @property
    def by_hand(self) -> list[str]:
        """What to write into the script for the same effect; if there is a patch, only for what is missing from it."""
        left = {name: value for name, value in self.changes.items() if name in self.patch_without}
        return lines_by_hand(left or self.changes, self.facts)

    def to_json(self, tuned: str = TUNED_NAME) -> dict[str, Any]:
        """Plain values, in the format of a config's search."""
        usual = asdict(Switches())
        failure = None if self.problem is None else {"kind": "not_applicable", "reason": self.problem}
        setup_s = self._setup_after_s()
        return {
            "name": self.fingerprint.get("name", ""),
            "command": f"frameworm run --with {tuned} {shlex.join(self.command)}",
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "changes": {key: {"before": usual[key], "after": value} for key, value in self.changes.items()},
            "accepted": [
                {
                    "knob": ", ".join(item.changes),
                    "changes": item.changes,
                    "before": {key: usual[key] for key in item.changes},
                    "mathematics": "rounding",
                    "proved_alone": True,
                    "why": "it may help here",
                    "speedup": None if item.proof is None else _speedup(item.proof),
                    "setup_s": item.setup_s,
                }
                for item in self.accepted
            ],
            "attempts": [
                {
                    "knob": ", ".join(item.changes),
                    "label": item.label,
                    "changes": item.changes,
                    "status": item.status,
                    "reason": item.reason,
                    "proof": None if item.proof is None else item.proof.to_json(),
                }
                for item in self.attempts
            ],
            "trade_offs": [],
            "baseline": {
                **self._trial(self.sample_s),
                "setup_s": self.setup_s,
                "failure": failure,
                "disturbed": self.disturbed,
            },
            "final": {**self._trial(self._after_s()), "setup_s": setup_s},
            **self._whole_run(setup_s),
            "total": None if self.total is None else self.total.to_json(),
            "by_hand": self.by_hand,
            "patch": self.patch,
            "patch_without": [
                {"change": in_words({name: self.changes[name]}), "reason": reason}
                for name, reason in self.patch_without.items()
            ],
            "patch_speedup": None if self.patch_speedup is None else asdict(self.patch_speedup),
            "no_patch": self.no_patch,
            "script": self.command,
            "fingerprint": self.fingerprint,
            "facts": self.facts,
            "isolated": self.isolated,
            "spent_s": self.spent_s,
            "trials": self.trials,
            "stopped": self.stopped,
        }

    def _setup_after_s(self) -> float | None:
        """Start-up time with all changes: that of the last accepted one, which included the others."""
        return next((item.setup_s for item in reversed(self.accepted) if item.setup_s is not None), self.setup_s)

    def _whole_run(self, setup_s: float | None) -> dict[str, float]:
        """The cost of compiling over the whole run, and the steps to regain it; other start-up changes are noise."""
        gain = self.speedup
        if not self.switches.compiles or gain is None or self.step_s is None or self.setup_s is None or setup_s is None:
            return {}
        after_s = self.step_s / gain.value
        if after_s >= self.step_s:
            return {}
        found: dict[str, float] = {
            "pays_after_steps": max(0, math.ceil((setup_s - self.setup_s) / (self.step_s - after_s)))
        }
        if self.total_steps is not None:
            found["run_s_before"] = self.setup_s + self.total_steps * self.step_s
            found["run_s_after"] = setup_s + self.total_steps * after_s
        return found

    def _after_s(self) -> float | None:
        return None if self.sample_s is None or self.speedup is None else self.sample_s / self.speedup.value

    def _trial(self, sample_s: float | None) -> dict[str, Any]:
        return {"seconds_per_sample": [] if sample_s is None else [sample_s]}


def _speedup(proof: Proof) -> dict[str, Any] | None:
    return None if proof.speedup is None else asdict(proof.speedup)


def tuned_yaml(result: ScriptResult) -> str:
    """The file for `frameworm run --with`."""
    gain = result.speedup
    told = "" if gain is None else f" {gain.value:.2f}x ({gain.low:.2f} to {gain.high:.2f}) as fast,"
    head = (
        f"# By frameworm tune:{told} and it learns the same. Bound to the script, its arguments, versions and device.\n"
    )
    body = {
        "version": 1,
        "switches": result.changes,
        "speedup": None if gain is None else {"value": gain.value, "low": gain.low, "high": gain.high},
        "fingerprint": result.fingerprint,
        "facts": result.facts,
    }
    return head + yaml.safe_dump(body, sort_keys=False)


def write_result(result: ScriptResult, folder: Path) -> None:
    """Write tune.json and report.html, and tuned.yaml and tuned.patch if something was found."""
    folder.mkdir(parents=True, exist_ok=True)
    tuned = folder / TUNED_NAME
    result.folder = folder
    plain = result.to_dict()
    (folder / "tune.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    (folder / REPORT_NAME).write_text(render_tune(plain, str(tuned)), encoding="utf-8")
    for path, text in ((tuned, tuned_yaml(result) if result.changes else None), (folder / PATCH_NAME, result.patch)):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text, encoding="utf-8")


def plan_in_words(script: Path, arguments: Sequence[str], folder: Path, budget_s: float, refused: str | None) -> str:
    """Describe what a search would do, without doing it."""
    apart = (
        "Each trial runs in namespaces of its own: what it writes or deletes is gone at its end, and it has no network."
        if refused is None
        else f"This machine cannot keep trials apart ({refused}): what they write and send would stay."
    )
    names = ", ".join(WORDS[name][0] for name in asdict(Switches()))
    return (
        f"would run {shlex.join([str(script), *arguments])} some ten times, each for as many steps as it takes to time "
        f"and to compare, within {budget_s:.0f} s, and kill it then. {apart}\n"
        f"would try, where it may help: {names}.\n"
        f"would write into {folder}: tuned.yaml, tune.json, report.html.\n"
    )
