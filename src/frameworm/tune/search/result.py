"""The result of a search: every attempt with its reason, the accepted changes, and their combined gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from frameworm.config.schema import Config
from frameworm.guard.gain import Speedup
from frameworm.guard.proof import Proof
from frameworm.guard.quality import Difference, LossVerdict, samples_to_same_loss
from frameworm.tune.knobs.base import Candidate, Knob
from frameworm.tune.knobs.context import Context, setting_of
from frameworm.tune.search.found import Found, finite
from frameworm.tune.trials.outcomes import Budget, FailureKind, TrialResult

# failed: the trial gave no result. skipped: no trial was made, for the reason given.
Status = Literal["accepted", "rejected", "inconclusive", "failed", "skipped"]


@dataclass
class Attempt:
    """One candidate and its outcome.

    Attributes:
        knob: Name of the knob, or names joined by `+`.
        label: The changes as users write them.
        changes: Dotted keys and new values.
        status: The outcome.
        reason: Why.
        why: The finding that led to it, or another keyword.
        screened: Speedup of its trial over the best config at that time; None if not measured.
        failure: Kind of failure.
        proof: The proof, if there was one.
        trial: Id of its trial.
        gain: Speedup of its trial, if that had to decide because a proof would have taken too long.
    """

    knob: str
    label: str
    changes: dict[str, Any]
    status: Status
    reason: str
    why: str = ""
    screened: float | None = None
    failure: FailureKind | None = None
    proof: Proof | None = None
    trial: str | None = None
    gain: Speedup | None = None


@dataclass
class Accepted:
    """An accepted change.

    Attributes:
        candidate: What was changed.
        before: The values it replaced, by dotted key.
        config: The whole config with it.
        trial: The trial of that config.
        trial_id: The trial's id.
        attempt: The attempt that led to it.
    """

    candidate: Candidate
    before: dict[str, Any]
    config: Config
    trial: TrialResult
    trial_id: str
    attempt: Attempt

    @property
    def speedup(self) -> Speedup:
        """The change's speedup over the best config at that time."""
        found = self.attempt.gain if self.attempt.proof is None else self.attempt.proof.speedup
        assert found is not None
        return found

    @property
    def proved_alone(self) -> bool:
        """Whether it has its own proof; if not, it is covered by the final proof."""
        return self.attempt.proof is not None

    @property
    def checked(self) -> dict[str, int] | None:
        """Seeds and steps of the quality check that supports it; None if there was none."""
        quality = None if self.attempt.proof is None else self.attempt.proof.quality
        return None if quality is None else {"seeds": len(quality.baseline), "steps": quality.steps}


@dataclass(frozen=True)
class TradeOff:
    """A faster setting that was not shown to learn equally well, which the user may choose.

    Attributes:
        label: The changes as users write them.
        changes: Dotted keys and new values.
        before: The values that these replace.
        speedup: The speedup over those.
        loss: Increase of the final validation loss at equal samples, with its interval and the allowed margin.
        accuracy: Decrease of the accuracy; None if there is none.
        seeds: Pairs of trainings.
        steps: Steps of each training.
        seeds_needed: About how many pairs would show that the loss is within the margin, if it is.
        same_loss_s: Seconds to the validation loss at which the config before the change ends: before and after the
            change; None: it is not reached within twice the samples.
    """

    label: str
    changes: dict[str, Any]
    before: dict[str, Any]
    speedup: Speedup
    loss: Difference
    accuracy: Difference | None
    seeds: int
    steps: int
    seeds_needed: int | None
    same_loss_s: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        differences = {"loss": self.loss._asdict(), "accuracy": self.accuracy and self.accuracy._asdict()}
        settings = [f"--set {key}={_written(value)}" for key, value in self.changes.items()]
        return {**asdict(self), **differences, "switch_on": " ".join(settings)}


def trade_off(attempt: Attempt, judged: LossVerdict, context: Context, sample_s: float) -> TradeOff | None:
    """The trade-off to offer after a quality check that did not pass.

    Args:
        attempt: Its gain is proved, and its quality was checked.
        judged: The result of the check.
        context: The config before the change.
        sample_s: Its seconds per sample.

    Returns:
        None if it is worse and does not reach the same validation loss sooner.
    """
    proof = attempt.proof
    if proof is None or proof.quality is None or proof.speedup is None or judged.loss is None:
        return None
    times = samples_to_same_loss(proof.quality)
    training_s = proof.quality.steps * context.global_batch * sample_s
    same_loss_s = None if times is None else (training_s, times * training_s / proof.speedup.value)
    if judged.passed is False and (same_loss_s is None or same_loss_s[1] >= same_loss_s[0]):
        return None
    seeds, steps = len(proof.quality.baseline), proof.quality.steps
    return TradeOff(
        attempt.label,
        dict(attempt.changes),
        {key: setting_of(context.config, key) for key in attempt.changes},
        proof.speedup,
        judged.loss,
        judged.accuracy,
        seeds,
        steps,
        judged.seeds_needed,
        same_loss_s,
    )


def _written(value: Any) -> str:
    return "off" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(repr=False)
class TuneResult(Found):
    """A whole search.

    Attributes:
        start: The initial config.
        best: The final config, with the same global batch.
        baseline: The trial of `start`.
        final: The trial of `best`.
        accepted: The changes between them, in order.
        attempts: Everything that was tried, or why it was not.
        trade_offs: Faster settings that were not shown to learn equally well, for the user to decide.
        total: The proof of `best` against `start`; None: there was no budget for it, or nothing to prove.
        run_samples: Samples of the whole run; None: unknown.
        global_batch: Samples of a step; None: unknown.
        spent_s: Seconds of all trials and proofs.
        trials: Number of trials and proofs.
        stopped: Why the search ended.
        folder: Folder of `best.yaml`, `tune.json` and `report.html`.
    """

    start: Config
    best: Config
    baseline: TrialResult
    final: TrialResult
    accepted: list[Accepted] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    trade_offs: list[TradeOff] = field(default_factory=list)
    total: Proof | None = None
    run_samples: int | None = None
    global_batch: int | None = None
    spent_s: float = 0.0
    trials: int = 0
    stopped: str = ""
    folder: Path | None = None

    @property
    def best_file(self) -> Path | None:
        """The file with the best config, for `frameworm train --config`."""
        return None if self.folder is None else self.folder / "best.yaml"

    def in_words(self) -> list[str]:
        """The speedup, the changes, and the path of the report."""
        failure = self.baseline.failure
        changes = [f"{key}: {before} -> {after}" for key, (before, after) in self.changes.items()]
        return self.told(self.speedup, None if failure is None else failure.reason, changes, self.attempts)

    def to_dict(self) -> dict[str, Any]:
        """The content of `tune.json`, with None for non-finite numbers."""
        found: dict[str, Any] = finite(self.to_json())
        return found

    @property
    def speedup(self) -> Speedup | None:
        """Speedup of `best` over `start`, from the final proof or the proof of the only change; else None."""
        if self.total is not None:
            return self.total.speedup
        alone = len(self.accepted) == 1 and self.accepted[0].proved_alone
        return self.accepted[0].speedup if alone else None

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Every key that differs, with its value before and after."""
        keys = dict.fromkeys(key for item in self.accepted for key in item.candidate.changes)
        pairs = {key: (setting_of(self.start, key), setting_of(self.best, key)) for key in keys}
        return {key: (before, after) for key, (before, after) in pairs.items() if before != after}

    def run_s(self, trial: TrialResult) -> float | None:
        """Seconds of the whole run at a trial's speed, including start-up."""
        if self.run_samples is None or not trial.seconds_per_sample:
            return None
        return self.run_samples * trial.sample_s + (trial.setup_s or 0.0)

    @property
    def run_s_after(self) -> float | None:
        """Seconds of the whole run with the best config, including start-up.

        Uses the proved speedup if there is one: trials are minutes apart, and the machine may have changed in between.
        """
        speedup = self.speedup
        if speedup is None or self.run_samples is None or not self.baseline.seconds_per_sample:
            return self.run_s(self.final)
        return self.run_samples * self.baseline.sample_s / speedup.value + (self.final.setup_s or 0.0)

    @property
    def pays_after_steps(self) -> int | None:
        """Steps after which the best config is ahead, including start-up; None: unknown, or nothing was changed."""
        speedup, starts_s = self.speedup, (self.baseline.setup_s, self.final.setup_s)
        if speedup is None or self.global_batch is None or None in starts_s or not self.baseline.seconds_per_sample:
            return None
        saved_s = self.global_batch * self.baseline.sample_s * (1 - 1 / speedup.value)
        more_s = (starts_s[1] or 0.0) - (starts_s[0] or 0.0)
        return max(0, math.ceil(more_s / saved_s)) if saved_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        """The content of `tune.json`."""
        speedup = self.speedup
        trials = [self.baseline, *(item.trial for item in self.accepted)]
        return {
            "name": self.start.name,
            "speedup": None if speedup is None else asdict(speedup),
            "changes": {key: {"before": before, "after": after} for key, (before, after) in self.changes.items()},
            "accepted": [_plain(item, before) for item, before in zip(self.accepted, trials)],
            "attempts": [asdict(item) for item in self.attempts],
            "trade_offs": [item.to_json() for item in self.trade_offs],
            "baseline": self.baseline.to_json(),
            "final": self.final.to_json(),
            "total": None if self.total is None else self.total.to_json(),
            "run_samples": self.run_samples,
            "run_s_before": self.run_s(self.baseline),
            "run_s_after": self.run_s_after,
            "pays_after_steps": self.pays_after_steps,
            "spent_s": self.spent_s,
            "trials": self.trials,
            "stopped": self.stopped,
            "start": self.start.model_dump(mode="json"),
            "best": self.best.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class Progress:
    """The progress of a search: what it is doing, and everything so far (`result.stopped` is empty until the end)."""

    doing: str
    result: TuneResult
    budget: Budget


Tell = Callable[[Progress], None]


def _plain(item: Accepted, before: TrialResult) -> dict[str, Any]:
    peaks = {"before": before.details.get("peak_bytes"), "after": item.trial.details.get("peak_bytes")}
    return {
        "knob": item.candidate.knob,
        "changes": dict(item.candidate.changes),
        "before": item.before,
        "mathematics": item.candidate.numerics_effect,
        "checked": item.checked,
        "proved_alone": item.proved_alone,
        "why": item.attempt.why,
        "speedup": asdict(item.speedup),
        "trial": item.trial_id,
        "setup_s": item.trial.setup_s,
        "peak_bytes": peaks,
    }


def figure_of(knob: Knob, context: Context, attempts: Sequence[Attempt]) -> float:
    """Speedup of a knob alone; its usual gain if it was not measured."""
    return max(figures_of(knob, attempts).values(), default=1 + knob.gain(context))


def figures_of(knob: Knob, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Best measured speedups of a knob's values, by their labels."""
    found: dict[str, float] = {}
    for item in attempts:
        if item.knob == knob.name and item.screened:
            found[item.label] = max(item.screened, found.get(item.label, 0.0))
    return found


def is_asked_for(knob: Knob, context: Context, best: TrialResult, attempts: Sequence[Attempt]) -> bool:
    """Whether a knob has a gain of its own, or is needed here for another reason, such as saving memory."""
    if knob.gain(context) > 0:
        return True
    codes = {str(finding.get("code")) for finding in best.findings}
    return bool(codes & set(knob.codes(context))) or any(item.failure == "oom" for item in attempts)


def only_gain_failed(attempt: Attempt) -> bool:
    """Whether a proof found nothing wrong except the missing gain."""
    assert attempt.proof is not None
    gain, *others = attempt.proof.checks
    return not gain.passed and all(check.passed is not False for check in others)


def was_checked(attempt: Attempt, candidate: Candidate) -> bool:
    """Whether a quality check of these changes, or of a part of them, failed."""
    if attempt.proof is None or attempt.proof.quality is None or attempt.status == "accepted":
        return False
    return attempt.changes.items() <= candidate.changes.items()
