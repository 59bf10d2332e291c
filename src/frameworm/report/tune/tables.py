"""A tuner search as rows: the time left after each change, every attempt, phases before and after.

Everything is read from `tune.json` as plain values. A missing value, or one of another type, is unknown, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from frameworm.records.estimate import Interval, OpenInterval
from frameworm.records.schema import PHASES
from frameworm.report.kit import tables

# Readable text for how a change affects numerics.
NUMERICS_EFFECTS = {
    "nothing": "the same numbers",
    "rounding": "rounding only",
    "precision": "another precision",
    "more": "approximate",
}
_TRIALS = ("baseline", "final")
_DISTURBED = 0.1  # fraction of a trial disturbed by other work above which its results are unreliable
STATUSES = ("accepted", "rejected", "inconclusive", "failed", "skipped")
FAILURES = {
    "oom": "out of memory",
    "capture_refused": "capture refused",
    "crash": "crashed",
    "hang": "out of time",
    "not_applicable": "does not apply",
}


def times(gain: OpenInterval) -> str:
    """Format a speedup without its interval."""
    return f"{gain.value:.2f}x"


def ends(gain: OpenInterval) -> str:
    """Format the interval of a speedup; empty where it is not known."""
    return "" if gain.low is None or gain.high is None else f"{gain.low:.2f} to {gain.high:.2f}"


def times_and_ends(gain: OpenInterval) -> str:
    """Format a speedup with its interval."""
    return f"{times(gain)} ({ends(gain)})" if ends(gain) else times(gain)


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the waterfall.

    Attributes:
        label: What was changed.
        before: Time per sample before the change, as a fraction of that of the first config.
        after: The same after the change.
        gain: The speedup; None for the first row and if unknown.
        kind: before, change or after.
    """

    label: str
    before: float
    after: float
    gain: OpenInterval | None
    kind: str


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt as tables show it."""

    label: str
    knob: str
    status: str
    told: str
    trial: str
    why: str


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One setting that differs, and the change that set it."""

    key: str
    before: str
    after: str
    gain: str
    numerics_effect: str
    memory: str
    why: str


@dataclass(frozen=True, slots=True)
class TradeOffRow:
    """A faster setting that was not shown to learn equally well, as tables show it."""

    label: str
    instead_of: str
    gain: str
    loss: str
    accuracy: str
    same_loss: str
    basis: str
    switch_on: str

    def text(self) -> str:
        """The row as a few sentences."""
        costs = ", ".join(part for part in (f"validation loss {self.loss}", self.accuracy) if part)
        told = (
            f"{self.label} instead of {self.instead_of}: {self.gain} as fast; at equal samples {costs} ({self.basis})"
        )
        return f"{told}; {self.same_loss}. Switch it on with {self.switch_on}"


@dataclass(frozen=True, slots=True)
class PhaseBeforeAfter:
    """A phase of the mean step under both configs; None: not measured."""

    name: str
    label: str
    before_s: float | None
    after_s: float | None


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, (list, tuple)) else ()


def figure(value: Any) -> float | None:
    """The value as a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def gain_of(value: Any) -> OpenInterval | None:
    """A speedup as stored in `tune.json`."""
    given = mapping(value)
    value = figure(given.get("value"))
    if value is None or value <= 0:
        return None
    low, high = (figure(given.get(name)) for name in ("low", "high"))
    known = low is not None and high is not None and low > 0
    return Interval(value, low if known else None, high if known else None)


def name_of(result: Mapping[str, Any]) -> str:
    """The name of the config."""
    return tables.plain(result.get("name") or "") or "config"


def accepted_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The accepted changes."""
    return [item for item in sequence(result.get("accepted")) if isinstance(item, Mapping)]


def change_label(changes: Mapping[str, Any]) -> str:
    """Changes as users write them."""
    return ", ".join(f"{tables.plain(key)}={setting(value)}" for key, value in changes.items())


def setting(value: Any) -> str:
    """A value of a setting as users write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "off" if value is None else tables.plain(value)


def numbers(numerics_effect: Any, checked: Any) -> str:
    """How a change affects numerics, and what supports it if that is more than rounding."""
    told = NUMERICS_EFFECTS.get(str(numerics_effect), tables.plain(numerics_effect or ""))
    seeds, steps = (figure(mapping(checked).get(name)) for name in ("seeds", "steps"))
    if seeds is None or steps is None:
        return told
    return f"{told}, learns as well in {seeds:.0f} paired trainings of {steps:.0f} steps"


def stages(result: Mapping[str, Any]) -> list[Stage]:
    """Before, every accepted change, after; each change relative to the config just before it."""
    found = [Stage("before", 1.0, 1.0, None, "before")]
    level = 1.0
    for item in accepted_of(result):
        gain = gain_of(item.get("speedup"))
        after = level if gain is None else level / gain.value
        label = change_label(mapping(item.get("changes"))) or tables.plain(item.get("knob") or "change")
        found.append(Stage(label, level, after, gain, "change"))
        level = after
    if len(found) > 1:
        whole = gain_of(result.get("speedup"))
        found.append(Stage("after", 1.0, level if whole is None else 1 / whole.value, whole, "after"))
    return found


def sample_s(trial: Any) -> float | None:
    """Median seconds per sample of a trial."""
    windows = [time_s for item in sequence(mapping(trial).get("seconds_per_sample")) if (time_s := figure(item))]
    return median(windows) if windows else None


def samples_per_s(result: Mapping[str, Any]) -> tuple[str, str]:
    """Samples per second before and after, using the proved gain, since trials are minutes apart."""
    before_s, after_s = sample_s(result.get("baseline")), sample_s(result.get("final"))
    gain = gain_of(result.get("speedup"))
    if before_s is not None and gain is not None:
        after_s = before_s / gain.value
    before, after = (tables.UNKNOWN if not time_s else f"{1 / time_s:,.0f}" for time_s in (before_s, after_s))
    return before, after


def setup_s(trial: Any) -> float | None:
    """Start-up time of a trial, including compilation."""
    return figure(mapping(trial).get("setup_s"))


def headline(result: Mapping[str, Any]) -> str:
    """The result of the search in one sentence."""
    changes = len(accepted_of(result))
    if not changes:
        failure = mapping(mapping(result.get("baseline")).get("failure"))
        if failure:
            return f"the {_subject(result)} itself fails: {tables.plain(failure.get('reason') or 'unknown')}"
        return f"nothing was found that is faster and learns the same; the {_subject(result)} stays as it is"
    whole = gain_of(result.get("speedup"))
    if whole is None:
        return "faster by the changes below; what they gain together is not proved"
    verdict = mapping(result.get("total")).get("verdict")
    proved = ", proved as a whole" if verdict == "accepted" else "" if changes == 1 else ", the whole is not proved"
    return f"{times_and_ends(whole)} as fast{proved}"


def _subject(result: Mapping[str, Any]) -> str:
    """What was tuned."""
    return "script" if result.get("script") else "config"


def whole_run(result: Mapping[str, Any]) -> str | None:
    """Expected time of the whole run before and after; None if its length is unknown."""
    before, after = figure(result.get("run_s_before")), figure(result.get("run_s_after"))
    if before is None or after is None:
        return None
    text = f"{tables.seconds(before)} → {tables.seconds(after)}"
    starts = setup_s(result.get("baseline")), setup_s(result.get("final"))
    if starts[0] is None or starts[1] is None:
        return text
    return f"{text}, of which start-up and compile {tables.seconds(starts[0])} → {tables.seconds(starts[1])}"


def break_even(result: Mapping[str, Any]) -> str | None:
    """After how many steps the best config is ahead; None if unknown."""
    steps = figure(result.get("pays_after_steps"))
    if steps is None:
        return None
    return "from the first step" if steps == 0 else f"after {steps:,.0f} steps, start-up included"


def peak_memory(result: Mapping[str, Any]) -> str | None:
    """Peak memory before and after, if measured."""
    peaks = [figure(mapping(mapping(result.get(name)).get("details")).get("peak_bytes")) for name in _TRIALS]
    return None if None in peaks else " → ".join(map(tables.data_size, peaks))


def left_for_longer(result: Mapping[str, Any]) -> list[str]:
    """Labels of what a longer budget would try."""
    rows = [row for row in attempt_rows(result) if row.status == "skipped" and "budget" in row.told]
    return list(dict.fromkeys(row.label for row in rows))


def attempt_rows(result: Mapping[str, Any]) -> list[AttemptRow]:
    """Every attempt in order; one that was later repeated with success says so."""
    rows = [_attempt_row(item) for item in sequence(result.get("attempts")) if isinstance(item, Mapping)]
    last = {row.label: number for number, row in enumerate(rows) if row.status == "accepted"}
    return [
        replace(row, told=f"accepted when tried again; at first {row.told}") if number < last.get(row.label, 0) else row
        for number, row in enumerate(rows)
    ]


def _attempt_row(item: Mapping[str, Any]) -> AttemptRow:
    status = tables.plain(item.get("status") or "unknown")
    told = tables.plain(" ".join(str(item.get("reason") or "").split()))
    gain = gain_of(mapping(item.get("proof")).get("speedup"))
    if status == "accepted" and gain is not None:
        told = times_and_ends(gain)
    kind = item.get("failure")
    if status == "failed" and kind:
        word = FAILURES.get(str(kind), tables.plain(kind))
        told = f"{word}: {told}" if told else word
    label = tables.plain(item.get("label") or "") or change_label(mapping(item.get("changes")))
    screened = figure(item.get("screened"))
    return AttemptRow(
        label or tables.plain(item.get("knob") or "unknown"),
        tables.plain(item.get("knob") or ""),
        status,
        told,
        "" if screened is None else f"{screened:.2f}x",
        tables.plain(item.get("why") or "").replace("_", " "),
    )


def change_rows(result: Mapping[str, Any]) -> list[ChangeRow]:
    """Every setting that differs between the first and the best config."""
    rows = []
    for key, pair in mapping(result.get("changes")).items():
        values = mapping(pair)
        sources = [item for item in accepted_of(result) if key in mapping(item.get("changes"))]
        source = sources[-1] if sources else mapping(None)
        gain = gain_of(source.get("speedup"))
        alone = "" if source.get("proved_alone", True) else ", in its trial"
        rows.append(
            ChangeRow(
                tables.plain(key),
                setting(values.get("before")),
                setting(values.get("after")),
                "" if gain is None else times_and_ends(gain) + alone,
                numbers(_precision(result, source) or source.get("mathematics"), source.get("checked")),
                _peaks(source),
                tables.plain(source.get("why") or "").replace("_", " "),
            )
        )
    return rows


def _peaks(accepted: Mapping[str, Any]) -> str:
    """Peak memory before and after a change."""
    peaks = [figure(mapping(accepted.get("peak_bytes")).get(name)) for name in ("before", "after")]
    return "" if None in peaks else " → ".join(map(tables.data_size, peaks))


def _precision(result: Mapping[str, Any], accepted: Mapping[str, Any]) -> str | None:
    """`precision` if the proof of an accepted change found that it computes in another precision."""
    attempts = [mapping(item) for item in sequence(result.get("attempts"))]
    proofs = [mapping(item.get("proof")) for item in attempts if item.get("changes") == accepted.get("changes")]
    return "precision" if any(proof.get("change") == "precision" for proof in proofs) else None


def trade_off_rows(result: Mapping[str, Any]) -> list[TradeOffRow]:
    """All trade-offs on offer."""
    return [_trade_off_row(item) for item in sequence(result.get("trade_offs")) if isinstance(item, Mapping)]


def _trade_off_row(item: Mapping[str, Any]) -> TradeOffRow:
    gain = gain_of(item.get("speedup"))
    seeds, steps, needed = (figure(item.get(name)) for name in ("seeds", "steps", "seeds_needed"))
    basis = tables.UNKNOWN if seeds is None or steps is None else f"{seeds:.0f} paired seeds of {steps:.0f} steps"
    if needed is not None:
        basis += f"; about {needed:,.0f} would be needed to show that it costs no more than allowed"
    before_s, after_s = (*(figure(value) for value in sequence(item.get("same_loss_s"))), None, None)[:2]
    same_loss = "it does not reach the same validation loss within twice the samples"
    if before_s is not None and after_s is not None:
        times = f"{tables.seconds(after_s)} instead of {tables.seconds(before_s)}"
        same_loss = f"it reaches the same validation loss in about {times}"
    accuracy = mapping(item.get("accuracy"))
    return TradeOffRow(
        tables.plain(item.get("label") or "") or change_label(mapping(item.get("changes"))),
        ", ".join(setting(value) for value in mapping(item.get("before")).values()) or "what was there",
        tables.UNKNOWN if gain is None else times_and_ends(gain),
        _interval(mapping(item.get("loss")), 1, ".2g", ""),
        f"accuracy {_interval(accuracy, -100, '.2f', ' points')}" if accuracy else "",
        same_loss,
        basis,
        tables.plain(item.get("switch_on") or ""),
    )


def _interval(difference: Mapping[str, Any], factor: float, form: str, unit: str) -> str:
    found = [figure(difference.get(name)) for name in ("worse", "low", "high")]
    known = [factor * value for value in found if value is not None]
    if len(known) < 3:
        return tables.UNKNOWN
    low, high = sorted(known[1:])
    return f"{known[0]:+{form}}{unit} ({low:+{form}} to {high:+{form}})"


def phases_before_after(result: Mapping[str, Any]) -> list[PhaseBeforeAfter]:
    """Phases of the mean step under both configs, in the order of a step; empty if one side has none."""
    sides = [_phases(result.get(name)) for name in ("baseline", "final")]
    if not all(sides):
        return []
    names = dict.fromkeys([*sides[0], *sides[1]])
    ordered = [*(name for name in PHASES if name in names), *(name for name in names if name not in PHASES)]
    return [
        PhaseBeforeAfter(
            name, tables.PHASE_LABELS.get(name, tables.plain(name)), sides[0].get(name), sides[1].get(name)
        )
        for name in ordered
    ]


def _phases(trial: Any) -> dict[str, float]:
    phases = mapping(mapping(mapping(trial).get("details")).get("phases"))
    found = {str(name): figure(mapping(item).get("mean_s")) for name, item in phases.items()}
    return {name: mean_s for name, mean_s in found.items() if mean_s is not None}


def spent(result: Mapping[str, Any]) -> str:
    """The cost of the search and why it ended."""
    parts = []
    count, time_s = figure(result.get("trials")), figure(result.get("spent_s"))
    if count is not None:
        parts.append(f"{count:,.0f} trials and proofs" + ("" if time_s is None else f" in {tables.seconds(time_s)}"))
    if result.get("stopped"):
        parts.append(tables.plain(result["stopped"]))
    disturbed = figure(mapping(result.get("baseline")).get("disturbed"))
    if disturbed is not None and disturbed > _DISTURBED:
        parts.append(
            f"other work on this machine took {disturbed:.0%} of the first trial: a search without it finds more"
        )
    return "; ".join(parts) or tables.UNKNOWN


def command_of(result: Mapping[str, Any], best: str) -> str:
    """The command that trains with the best config."""
    given = result.get("command")
    return tables.plain(given) if given else f"frameworm train --config {tables.plain(best)}"


def final_proof(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The proof of all changes together, or of the only change; empty if there is none."""
    whole = mapping(result.get("total"))
    if whole:
        return whole
    proofs = [proof for _, proof in proofs_of(result) if proof.get("verdict") == "accepted"]
    return proofs[0] if len(proofs) == 1 else {}


def proofs_of(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every attempt's proof with its label."""
    found = []
    for item in sequence(result.get("attempts")):
        proof = mapping(mapping(item).get("proof"))
        if proof:
            found.append((_attempt_row(item).label, proof))
    return found
