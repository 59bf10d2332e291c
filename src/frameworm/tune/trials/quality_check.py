"""The quality check of a change of numerics: its length, its cost, and its trainings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from frameworm.config.schema import Config
from frameworm.guard.quality import CURVE, Margin, Quality, SeedEnd, judge_quality, seed_end
from frameworm.tune.knobs.context import Context
from frameworm.tune.trials.live import Live, LiveError
from frameworm.tune.trials.outcomes import QualityCheckRequest, QualityCheckResult, TrialResult

# Cost of a sample in validation relative to training, where the backward pass is two thirds.
_VALIDATION_COST = 1 / 3
_MARGIN = 1.2
# The check ends undecided after this multiple of its expected duration, but at least a minute: machines may be shared.
_MOST_TIMES = 2.5
_LEAST_S = 60.0
# Start-up time without compilation, if no trial has measured it.
_START_S = 1.0

Start = Callable[[Config, str, tuple[int, ...], float], Live]


@dataclass(frozen=True, slots=True)
class QualityChecker:
    """How a quality check is run.

    Attributes:
        share: Length of each training as a fraction of the whole run,
        least_steps: but at least this many steps, unless the run is shorter.
        looks: Numbers of seeds after which it is judged. It starts if there is time for the second; the others are for
            cases that are still undecided then.
        margin: How much quality a change may cost and still be accepted.
    """

    share: float = 0.1
    least_steps: int = 100
    looks: tuple[int, ...] = (4, 8, 12)
    margin: Margin = Margin()  # noqa: RUF009

    def steps(self, context: Context) -> int:
        """Steps of each training."""
        if context.run_samples is None:
            return self.least_steps
        whole = max(1, context.run_samples // context.global_batch)
        return min(whole, max(self.least_steps, math.ceil(self.share * whole)))

    def seconds(self, context: Context, before: TrialResult, after: TrialResult | None = None) -> float:
        """Expected seconds until the second judgement.

        Args:
            context: The config before the change.
            before: Its trial.
            after: The trial of the config after the change; None: assume the same speed.
        """
        samples = self.steps(context) * context.global_batch
        validated = context.workload.validation_samples or 0
        epoch = context.workload.samples_per_epoch
        validated *= (math.ceil(samples / epoch) if epoch else 1) + len(CURVE) - 1
        sides = (before, before if after is None else after)
        pair_s = sum((samples + _VALIDATION_COST * validated) * side.sample_s for side in sides)
        start_s = sum(_START_S if side.setup_s is None else side.setup_s for side in sides)
        return _MARGIN * self.looks[:2][-1] * (pair_s + start_s)


def train_both(request: QualityCheckRequest, start: Start, *, together: bool) -> QualityCheckResult:
    """Train both sides from one group of seeds after another, until the result is clear or time is up.

    Args:
        request: What to train.
        start: Starts the trainings of one side: its config, a name, the seeds and the deadline.
        together: Train both sides at once.
    """
    limit_s = max(_LEAST_S, _MOST_TIMES * request.expected_s)
    if request.timeout_s is not None:
        limit_s = min(limit_s, request.timeout_s)
    began = time.monotonic()
    deadline = began + limit_s
    ends: tuple[list[SeedEnd], list[SeedEnd]] = ([], [])
    details: dict[str, Any] = {}
    for look in request.looks:
        done = len(ends[0])
        spent_s = time.monotonic() - began
        if done and spent_s * look / done > limit_s:
            details["stopped"] = f"no time for {look} seeds"
            break
        seeds = tuple(request.baseline.seed + number for number in range(done, look))
        try:
            for side, told in zip(ends, _group(request, start, seeds, deadline, together)):
                side.extend(seed_end(item) for item in told)
        except LiveError as error:
            if error.failure.kind == "hang" and done:
                details["stopped"] = f"time was up during seed {done + 1} to {look}"
                break
            return QualityCheckResult(failure=error.failure, details=details)
        if not judge_quality(Quality(*ends, request.steps, request.looks), request.margin).open:
            break
    return QualityCheckResult(Quality(*ends, request.steps, request.looks), details=details)


def _group(
    request: QualityCheckRequest, start: Start, seeds: tuple[int, ...], deadline: float, together: bool
) -> list[list[dict[str, Any]]]:
    """The result of each side, seed by seed, from its first rank: validation covers all ranks."""
    sides = ((request.baseline, "before"), (request.candidate, "after"))
    told: list[list[dict[str, Any]]] = []
    with ExitStack() as stack:
        lives: list[Live] = []
        for config, name in sides:
            lives.append(stack.enter_context(start(config, f"{name}-{seeds[0]}", seeds, deadline)))
            if not together:
                told.append(lives.pop().finish()[0])
        told += [live.finish()[0] for live in lives]
    return told
