"""Time limits of trials and proofs, from the remaining budget and the duration of earlier ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from frameworm.config.schema import Config
from frameworm.tune.trials.outcomes import ProofRequest

# Largest fraction of the remaining budget for one trial, unless a trial needs more than that.
_MOST_OF_BUDGET = 0.25
_LEAST_S = 30.0
# A trial always gets this multiple of the longest earlier one of its kind (compiling, capturing, or neither),
_TIMES_LONGEST = 2.0
# and this much more than one that does neither, until the first one that compiles shows how long that takes;
_FIRST_COMPILE_S = 90.0
_FIRST_TIMED_COMPILE_S = 240.0  # or this, if the compiler times kernels.
# A proof always gets this multiple of its expected duration.
_TIMES_EXPECTED = 1.5
# Without anything to compile, a trial gets at most this multiple of an earlier one.
_MOST_TIMES = 5.0
_LEAST_TIMES_S = 15.0


class Limit(NamedTuple):
    """A time limit in seconds, and whether it is due to the budget."""

    seconds: float
    by_budget: bool


class Patience:
    """Decides how long to wait.

    Args:
        limit_s: Most seconds for a trial; twice that for a proof.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.usual_s: float | None = None  # duration of the first trial
        self._longest_s: dict[tuple[str, bool], float] = {}  # of trials, by how they compile and whether they capture

    def for_trial(self, config: Config, timeout_s: float | None) -> Limit:
        """The limit of a trial; `timeout_s` is the remaining budget."""
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
        """The limit of a proof; the last one of a search may use all the remaining time."""
        least_s = _TIMES_EXPECTED * request.expected_s
        if request.last and request.timeout_s is not None:
            least_s = request.timeout_s
        return self._limit(request.timeout_s, 2, least_s)

    def learn(self, config: Config, took_s: float) -> None:
        """Record the duration of a successful trial."""
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
    """Whether its first steps compile or capture."""
    return config.gpu.compile_model or config.gpu.capture != "off"


def _kind(config: Config) -> tuple[str, bool]:
    gpu = config.gpu
    return f"{gpu.compile_mode} {gpu.compile_scope}" if gpu.compile_model else "", gpu.capture != "off"
