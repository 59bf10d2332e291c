"""Knobs: settings the tuner may change, declared as objects, and the candidates they produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from frameworm.guard.proof import NumericsEffect
from frameworm.tune.knobs.context import Changes, Context, setting_of

# Besides phases, what a knob may shorten; trials tell its fraction of the arithmetic, not of the time.
ATTENTION = "attention"
# True, or why the knob does not apply.
Applies = Callable[[Context], "bool | str"]


@dataclass(frozen=True)
class Candidate:
    """One value of a knob, as changes to the config.

    Attributes:
        knob: Name of the knob.
        changes: Dotted keys and their new values.
        numerics_effect: How this value can change numerics.
        reference: Changes to the baseline under which both sides take the same samples in each step, for the proof.
        position: Position on the knob's scale, for knobs with `ordered`.
        setup_s: Its usual start-up cost, if that differs from the knob's.
    """

    knob: str
    changes: Changes
    numerics_effect: NumericsEffect
    reference: Changes = field(default_factory=dict)
    position: float = 0.0
    setup_s: float | None = None

    @property
    def label(self) -> str:
        """The changes as users write them."""
        return ", ".join(f"{key}={_written(value)}" for key, value in self.changes.items())


def together(first: Candidate, second: Candidate) -> Candidate:
    """Both changes as one candidate; the second wins on conflicts."""
    order = ("nothing", "rounding", "more")
    coarser = max(first.numerics_effect, second.numerics_effect, key=order.index)
    changes = {**first.changes, **second.changes}
    return Candidate(f"{first.knob}+{second.knob}", changes, coarser, {**first.reference, **second.reference})


@dataclass(frozen=True)
class Knob:
    """A setting the tuner may change.

    Attributes:
        name: Unique among knobs.
        keys: The config keys that it sets; the first is the one that findings name.
        description: What it does, in one sentence.
        values: The candidate values for a context: values of the first key, or changes of several.
        applies: Whether it applies here: True, or why not.
        numerics_effect: How it can change numerics; a function of the value if values differ.
        suggested_by: Codes of the findings that it is a remedy for; a function of the context if that decides.
        expected_gain: Expected speedup minus one if it applies and no finding says more; decides the order. Zero: it is
            tried only if a finding suggests it, or with a partner.
        shortens: Phases of a step, or `attention`, that it can shorten, which bounds its gain; empty: unknown.
        setup_s: Usual start-up cost, such as compiling; it is not tried for runs shorter than that.
        value_setup_s: The start-up cost of a value, if values differ; None: the knob's.
        ordered: Whether values are on a scale, so that none beyond a clearly worse value is tried.
        partners: Knobs that it works together with: tried as one change if it fails alone, and tried again after one of
            them was accepted.
        reference: See `Candidate`.
        present: The current value if the config leaves it open; None if unknown.
    """

    name: str
    keys: tuple[str, ...]
    description: str
    values: Callable[[Context], Iterable[Any]]
    applies: Applies = lambda context: True
    numerics_effect: NumericsEffect | Callable[[Any], NumericsEffect] = "nothing"
    suggested_by: tuple[str, ...] | Callable[[Context], tuple[str, ...]] = ()
    expected_gain: float | Callable[[Context], float] = 0.02
    shortens: tuple[str, ...] = ()
    setup_s: float = 0.0
    value_setup_s: Callable[[Any], float | None] = lambda value: None
    ordered: bool = False
    partners: tuple[str, ...] = ()
    reference: Changes = field(default_factory=dict)
    present: Callable[[Context], float | None] | None = None

    def why_not(self, context: Context) -> str | None:
        """Why the knob does not apply here; None if it does."""
        told = self.applies(context)
        if told is True:
            return None
        return told if isinstance(told, str) else "does not apply here"

    def candidates(self, context: Context) -> list[Candidate]:
        """The values worth a trial, without the current one; includes values that the config may reject."""
        found = []
        for value in self.values(context):
            changes = dict(value) if isinstance(value, dict) else {self.keys[0]: value}
            if all(setting_of(context.config, key) == new for key, new in changes.items()):
                continue
            numerics_effect = self.numerics_effect(value) if callable(self.numerics_effect) else self.numerics_effect
            main = changes.get(self.keys[0])
            position = float(main) if self.ordered and isinstance(main, (int, float)) else 0.0
            setup_s = self.value_setup_s(value)
            found.append(Candidate(self.name, changes, numerics_effect, self.reference, position, setup_s))
        return found

    def gain(self, context: Context) -> float:
        """The expected gain without a finding."""
        return self.expected_gain(context) if callable(self.expected_gain) else self.expected_gain

    def codes(self, context: Context) -> tuple[str, ...]:
        """The codes of findings that it is a remedy for here."""
        return self.suggested_by(context) if callable(self.suggested_by) else self.suggested_by

    def position_of(self, context: Context) -> float | None:
        """The position of the current value on the knob's scale."""
        if self.present is not None:
            return self.present(context)
        value = setting_of(context.resolved, self.keys[0])
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_registered: dict[str, Knob] = {}


def register_knob(knob: Knob) -> None:
    """Add a knob to the tuner in this process; it replaces one of the same name.

    Args:
        knob: The knob.
    """
    _registered[knob.name] = knob


def registered_knobs() -> dict[str, Knob]:
    """The knobs passed to `register_knob`, by name."""
    return dict(_registered)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "off" if value is None else str(value)
