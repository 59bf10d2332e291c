"""What a knob is: a setting the tuner may change, as one declared object, and the candidates it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from frameworm.guard.proof import Mathematics
from frameworm.tune.knobs.context import Changes, Context, setting_of

# What a knob may shorten beside phases; trials tell its share of the arithmetic, not of the time.
ATTENTION = "attention"
# True, or why it does not apply.
Applies = Callable[[Context], "bool | str"]


@dataclass(frozen=True)
class Candidate:
    """One value of a knob, as the changes to the config that bring it about.

    Attributes:
        knob: Name of the knob.
        changes: Dotted keys and their new values.
        mathematics: What this value can change in the numbers.
        reference: Changes to the baseline under which both sides take the same samples in each step, for the proof.
        position: Place on the knob's scale, for knobs with `ordered`.
        setup_s: Its usual start-up cost where that is not the knob's.
    """

    knob: str
    changes: Changes
    mathematics: Mathematics
    reference: Changes = field(default_factory=dict)
    position: float = 0.0
    setup_s: float | None = None

    @property
    def label(self) -> str:
        """The changes as users write them."""
        return ", ".join(f"{key}={_written(value)}" for key, value in self.changes.items())


def together(first: Candidate, second: Candidate) -> Candidate:
    """Both changes as one; where they meet the second wins."""
    order = ("nothing", "rounding", "more")
    coarser = max(first.mathematics, second.mathematics, key=order.index)
    changes = {**first.changes, **second.changes}
    return Candidate(f"{first.knob}+{second.knob}", changes, coarser, {**first.reference, **second.reference})


@dataclass(frozen=True)
class Knob:
    """A setting the tuner may change.

    Attributes:
        name: Unique among knobs.
        keys: The config's keys that it sets; the first is the one that findings name.
        description: What it does, in one sentence.
        values: The candidate values here, given the context: values of the first key, or changes of several.
        applies: Whether it means anything here: True, or why not.
        mathematics: What it can change in the numbers; a function of the value where values differ.
        suggested_by: Codes of the findings that it is a remedy for; a function of the context where that decides.
        expected_gain: Speedup less one that it brings where it applies and no finding says more; decides the order.
            Zero: tried only where a finding suggests it, or with a partner.
        shortens: Phases of a step, or `attention`, that it can make shorter, and so the most that it can gain; empty:
            nobody knows.
        setup_s: Usual start-up cost, such as compiling; a run that is shorter is not given it.
        value_setup_s: The start-up cost of a value, where values differ; None: the knob's.
        ordered: Values lie on a scale, so that beyond a value that is clearly worse none is tried.
        partners: Knobs that it works together with: tried as one change when it fails alone, and tried again after one
            of them was accepted.
        reference: See `Candidate`.
        present: The present value where the config leaves it open; None where nobody knows.
    """

    name: str
    keys: tuple[str, ...]
    description: str
    values: Callable[[Context], Iterable[Any]]
    applies: Applies = lambda context: True
    mathematics: Mathematics | Callable[[Any], Mathematics] = "nothing"
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
        """Why the knob means nothing here; None: it may be turned."""
        told = self.applies(context)
        if told is True:
            return None
        return told if isinstance(told, str) else "does not apply here"

    def candidates(self, context: Context) -> list[Candidate]:
        """The values worth a trial, less the present one; which of them the config refuses is not looked at."""
        found = []
        for value in self.values(context):
            changes = dict(value) if isinstance(value, dict) else {self.keys[0]: value}
            if all(setting_of(context.config, key) == new for key, new in changes.items()):
                continue
            mathematics = self.mathematics(value) if callable(self.mathematics) else self.mathematics
            main = changes.get(self.keys[0])
            position = float(main) if self.ordered and isinstance(main, (int, float)) else 0.0
            setup_s = self.value_setup_s(value)
            found.append(Candidate(self.name, changes, mathematics, self.reference, position, setup_s))
        return found

    def gain(self, context: Context) -> float:
        """The gain to expect without a finding."""
        return self.expected_gain(context) if callable(self.expected_gain) else self.expected_gain

    def codes(self, context: Context) -> tuple[str, ...]:
        """The findings that it is a remedy for here."""
        return self.suggested_by(context) if callable(self.suggested_by) else self.suggested_by

    def position_of(self, context: Context) -> float | None:
        """Where the present value lies on the knob's scale."""
        if self.present is not None:
            return self.present(context)
        value = setting_of(context.resolved, self.keys[0])
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_registered: dict[str, Knob] = {}


def register_knob(knob: Knob) -> None:
    """Let the tuner turn one more knob in this process; one of the same name is replaced.

    Args:
        knob: The knob.
    """
    _registered[knob.name] = knob


def registered_knobs() -> dict[str, Knob]:
    """The knobs that `register_knob` was given, by name."""
    return dict(_registered)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "off" if value is None else str(value)
