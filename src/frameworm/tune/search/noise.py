"""Knobs that were judged while step times were unsteady, and are retried when they are steady."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from frameworm.tune.knobs.base import Candidate, Knob
from frameworm.tune.search.result import Attempt, figures_of
from frameworm.tune.trials.outcomes import TrialResult

# Difference between fastest and slowest window, as a fraction of the median.
_UNSTEADY, _STEADY = 0.05, 0.02
_FEWEST_WINDOWS = 3
# Values of a knob at least this fast relative to its fastest are retried.
_NEARLY = 0.97


class Noise:
    """How steady the best config was when each knob was judged."""

    def __init__(self) -> None:
        self._spreads: dict[str, float] = {}

    def note(self, knob: Knob, best: TrialResult) -> None:
        """Record that the knob is judged now, against this trial."""
        self._spreads[knob.name] = spread_of(best)

    def in_doubt(self, best: TrialResult) -> list[str]:
        """Knobs that were judged in noise, if there is none now."""
        if spread_of(best) > _STEADY:
            return []
        return [name for name, spread in self._spreads.items() if spread >= _UNSTEADY]

    def worth_another_look(
        self, knob: Knob, candidates: Sequence[Candidate], attempts: Sequence[Attempt]
    ) -> list[Candidate]:
        """All values of a knob the first time, later those that were fastest in the noise."""
        figures = figures_of(knob, attempts)
        if self._spreads.get(knob.name, 0.0) < _UNSTEADY or not figures:
            return list(candidates)
        enough = _NEARLY * max(figures.values())
        return [item for item in candidates if figures.get(item.label, 0.0) >= enough]


def spread_of(trial: TrialResult) -> float:
    """The spread of its windows; 0 if there are too few."""
    windows = trial.seconds_per_sample
    return (max(windows) - min(windows)) / median(windows) if len(windows) >= _FEWEST_WINDOWS else 0.0
