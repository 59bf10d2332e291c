"""How much a search measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        window_s: Length of a window; at least two steps.
        windows: Windows of a trial.
        pairs: Pairs of windows of a proof.
        more_pairs: Once so many more where the first leave a gain open.
        warm_s: How long it may take until it gets no faster any more and single steps look warm; not counted.
        warm_windows: So many windows may be needed for the former even if they take longer, as compiling does.
        learn_s: How long one learning should take, of the config before the change.
        learn_steps: Fewest and most steps of it.
        references: Learnings from moved weights.
        limit_s: Longest a trial may take; twice that for a proof.
    """

    window_s: float = 0.3
    windows: int = 5
    pairs: int = 10
    more_pairs: int = 15
    warm_s: float = 12.0
    warm_windows: int = 8
    learn_s: float = 2.0
    learn_steps: tuple[int, int] = (16, 48)
    references: int = 2
    limit_s: float = 300.0
