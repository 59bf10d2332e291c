"""How long trials and proofs may take, from what is left of a budget and what others of their kind took."""

from __future__ import annotations

import math
from typing import NamedTuple

from frameworm.config.schema import Config
from frameworm.tune.trials.outcomes import ProofRequest

# No trial takes more than this share of what is left of a budget, unless that is less than a trial needs.
_MOST_OF_BUDGET = 0.25
_LEAST_S = 30.0
# But it may always take so many times what one of its kind took before: what compiles, captures, or neither.
_TIMES_LONGEST = 2.0
# And so much longer than one that does neither, until the first that compiles has shown what that takes.
_FIRST_COMPILE_S = 90.0
_FIRST_TIMED_COMPILE_S = 240.0  # where kernels are timed
# A proof may always take so many times what it should.
_TIMES_EXPECTED = 1.5
# Nor may a trial take more than so many times what one took before, where it has nothing to compile.
_MOST_TIMES = 5.0
_LEAST_TIMES_S = 15.0


class Limit(NamedTuple):
    """Seconds that something may take, and whether it is the budget that says so."""

    seconds: float
    by_budget: bool


class Patience:
    """Says how long to wait.

    Args:
        limit_s: Longest a trial may take; twice that for a proof.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.usual_s: float | None = None  # what the first trial took
        self._longest_s: dict[tuple[str, bool], float] = {}  # of trials, by how they compile and whether they capture

    def for_trial(self, config: Config, timeout_s: float | None) -> Limit:
        """The limit of a trial; `timeout_s` is what the budget has left for it."""
        kind = _kind(config)
        known_s = self._longest_s.get(kind)
        least_s = _TIMES_LONGEST * (known_s or 0.0)
        if known_s is None and config.gpu.compile_model:
            timed = config.gpu.compile_mode.startswith("max-autotune")
            least_s = (self.usual_s or 0.0) + (_FIRST_TIMED_COMPILE_S if timed else _FIRST_COMPILE_S)
        limit = self._limit(timeout_s, 1, least_s)
        if self.usual_s is not None and not prepares(config):
            limit = min(limit, Limit(max(_LEAST_TIMES_S, _MOST_TIMES * self.usual_s), False))
        return limit

    def for_proof(self, request: ProofRequest) -> Limit:
        """The limit of a proof; the last one of a search may take all that is left."""
        least_s = _TIMES_EXPECTED * request.expected_s
        if request.last and request.timeout_s is not None:
            least_s = request.timeout_s
        return self._limit(request.timeout_s, 2, least_s)

    def learn(self, config: Config, took_s: float) -> None:
        """A trial that went well took so long."""
        kind = _kind(config)
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), took_s)
        if self.usual_s is None:
            self.usual_s = took_s

    def _limit(self, timeout_s: float | None, parts: int, least_s: float) -> Limit:
        limit_s = parts * self._limit_s
        left_s = math.inf
        if timeout_s is not None:
            share_s = max(_LEAST_S, parts * _MOST_OF_BUDGET * timeout_s, least_s)
            left_s = min(share_s, max(timeout_s, 1.0))
        return Limit(min(limit_s, left_s), left_s < limit_s)


def prepares(config: Config) -> bool:
    """Whether its first steps do more than train."""
    return config.gpu.compile_model or config.gpu.capture != "off"


def _kind(config: Config) -> tuple[str, bool]:
    gpu = config.gpu
    return f"{gpu.compile_mode} {gpu.compile_scope}" if gpu.compile_model else "", gpu.capture != "off"
