"""Knobs that were judged while steps were unsteady, and come up again once they are not."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from frameworm.tune.knobs.base import Candidate, Knob
from frameworm.tune.search.result import Attempt, figures_of
from frameworm.tune.trials.outcomes import TrialResult

# From the fastest to the slowest window, as a share of the median.
_UNSTEADY, _STEADY = 0.05, 0.02
_FEWEST_WINDOWS = 3
# Of the values of a knob, those come up again that were nearly as fast as its fastest.
_NEARLY = 0.97


class Noise:
    """How steady the config was beside which each knob was judged."""

    def __init__(self) -> None:
        self._spreads: dict[str, float] = {}

    def note(self, knob: Knob, best: TrialResult) -> None:
        """The knob is judged now, beside this."""
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
    """How far its windows differ; 0 where there are too few to tell."""
    windows = trial.seconds_per_sample
    return (max(windows) - min(windows)) / median(windows) if len(windows) >= _FEWEST_WINDOWS else 0.0
